"""Rewards: scorers, and the manager that runs them in parallel with timeouts."""
