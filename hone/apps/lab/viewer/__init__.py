"""Viewer of RL runs: a local web page over the rollout archive (`hone view`)."""
