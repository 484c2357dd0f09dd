"""Checks of the part Agents."""
