"""Checks of the part Data."""
