"""The stand-in of torchvision, for vLLM on a CPU with a model that reads images.

torchvision's builds on PyPI cannot be loaded with a torch for CPUs. vLLM and transformers only import its names for these models, because
pixels come from Hone (:mod:`hone.generation.server.vllm_images`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

_STAND_INS = Path(__file__).parents[1] / "stand_ins"


def provide_torchvision(model: str) -> None:
    """Let this process and its children import the stand-in of torchvision, if a model has images and there is no torchvision.

    transformers must not be imported yet: it looks for torchvision once.

    Args:
        model: directory.
    """
    file = Path(model) / "config.json"
    if not file.is_file() or "vision_config" not in json.loads(file.read_text()):
        return
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(_STAND_INS))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*([before] if before else []), str(_STAND_INS)])
