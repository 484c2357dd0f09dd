"""Hone trains language models with reinforcement learning, from a laptop CPU to a cluster of GPUs.

    run = hone.train(model="Qwen/Qwen3-0.6B", dataset=rows, reward=my_function, steps=50)
    run.metrics, run.plot(), run.samples(worst=5), run.model_path

Importing this package is cheap: it loads neither torch nor transformers; the functions of the API load when they are first
used. For the parts, import the package you need, for example ``from hone.algorithms import advantage_estimators``.
"""

from typing import TYPE_CHECKING, Any

from hone.errors import NoVerdict
from hone.threads import spin_briefly

__version__ = "0.1.0"

spin_briefly()

if TYPE_CHECKING:
    from hone.api import Run, evaluate, generate, prefer, push, serve, sft, train, train_reward_model

__all__ = ["NoVerdict", "Run", "evaluate", "generate", "prefer", "push", "serve", "sft", "train", "train_reward_model"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("hone.api"), name)
    raise AttributeError(f"module 'hone' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
