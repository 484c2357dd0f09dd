"""The mathematics: advantages, policy losses, value loss, KL and aggregation, as pure functions of tensors and plain numbers."""
