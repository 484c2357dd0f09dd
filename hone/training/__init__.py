"""Training: packing, objectives, optimizer, backends and checkpoints."""
