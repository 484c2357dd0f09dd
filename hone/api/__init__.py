"""The Python API: the commands as functions, for scripts and notebooks.

    train, sft, prefer, train_reward_model    a run; each returns a Run
    evaluate, generate, serve, push           a trained or pretrained model
    Run                                       metrics, samples, curves and model of a run

The package ``hone`` offers these names itself: ``hone.train(...)``. Each function is the same program as the command.
"""

from hone.api.models import Answer, evaluate, generate, push, serve
from hone.api.runs import Run
from hone.api.training import prefer, sft, train, train_reward_model

__all__ = ["Answer", "Run", "evaluate", "generate", "prefer", "push", "serve", "sft", "train", "train_reward_model"]
