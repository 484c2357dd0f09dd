"""Configurations of other libraries: launch scripts are followed, settings translated."""
