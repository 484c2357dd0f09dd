"""Replacement for torchvision, whose builds on PyPI cannot be loaded with a torch for CPUs.

SGLang imports its names for images; a text model uses none. `hone engines install sglang --cpu` copies this file.
"""

__version__ = "0.28.0"
