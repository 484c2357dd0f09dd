"""Stands in for torchvision, whose builds on PyPI do not load beside a torch for CPUs.

SGLang imports its names for pictures; a model of text uses none. `hone engines install sglang --cpu` puts this file there.
"""

__version__ = "0.28.0"
