"""Replacement for torchvision, whose builds on PyPI cannot be loaded with a torch for CPUs.

SGLang and vLLM import its names for images, and call none of them: pixels come from Hone. `hone engines install sglang` copies this
file; vLLM's process has it on its path for a model that reads images.
"""

__version__ = "0.28.0"
