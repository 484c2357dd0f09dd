"""Checks of the part Reward design."""
