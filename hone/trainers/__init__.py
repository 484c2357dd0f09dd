"""Trainers: RL, imitation (SFT), preferences and reward models."""
