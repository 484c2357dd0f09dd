"""Checks of the boxes, a module for each part."""
