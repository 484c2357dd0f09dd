"""Roles of a run, the runtimes that hold them, and supervision of their processes."""
