"""Kernels and memory handling for one kind of device each."""
