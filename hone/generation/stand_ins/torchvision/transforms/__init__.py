"""Absent: see :mod:`torchvision`."""

from torchvision._absent import names_of

__getattr__ = names_of("transforms")
