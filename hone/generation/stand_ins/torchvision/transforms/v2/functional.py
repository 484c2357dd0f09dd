"""Absent, except for the names of interpolations: see :mod:`torchvision`."""

from torchvision._absent import names_of
from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]

__getattr__ = names_of("transforms.v2.functional")
