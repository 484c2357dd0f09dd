"""Checks of the part Algorithms."""
