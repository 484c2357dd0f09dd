"""Absent, except for the names of interpolations, which are values: see :mod:`torchvision`."""

from enum import Enum

from torchvision._absent import names_of


class InterpolationMode(Enum):
    """Interpolations."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = names_of("transforms")
