"""How weights change: model loading, packing, LoRA, optimizer and checkpoints."""
