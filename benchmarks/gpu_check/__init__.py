"""Checks of Hone on one GPU, in parts; `scripts/gpu_check` runs them."""
