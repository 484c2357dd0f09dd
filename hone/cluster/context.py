"""What a role finds in the process that it lives in."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hone.config.run import RunConfig
from hone.config.tree import RLConfig
from hone.data.tokenizer import load_tokenizer
from hone.errors import ConfigError
from hone.startup import collect_as_usual
from hone.threads import compute_here
from hone.training.layout import Layout, Meshes


@dataclass
class WorkerContext:
    """The process of a role.

    Attributes:
        config: of the run.
        device: of this process.
        rank: of this process in its pool.
        world: processes of the pool.
        layout: how the pool's processes share a model.
        meshes: the process groups of the layout; None where there is one process.
        total_steps: horizon of the schedules.
        resume: location of the checkpoint to go on from, or None.
        roles: the roles that this process holds already, by name.
    """

    config: RLConfig
    device: torch.device
    rank: int = 0
    world: int = field(default=1, kw_only=True)
    layout: Layout = field(default_factory=Layout)
    meshes: Meshes | None = None
    total_steps: int = 1
    resume: str | None = None
    roles: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the run."""
        return run_tokenizer(self.config)


@dataclass(frozen=True)
class RoleSpec:
    """A role that a run needs.

    Attributes:
        name: of the role.
        cls: its class; it is made as ``cls(context, **arguments)``.
        arguments: for that.
        whole: whether each process can answer for its rows alone, so that rows are split over all of them; otherwise the
            processes share a model as the layout says.
    """

    name: str
    cls: type
    arguments: dict[str, Any] = field(default_factory=dict)
    whole: bool = False


def run_tokenizer(config: RLConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the run."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )


def prepare_torch(trainer: RunConfig, *, threads: int | None = None) -> torch.device:
    """Let this thread compute with the cores, let garbage be collected as usual again, and return the device asked for.

    Args:
        trainer: the block ``trainer``.
        threads: when ``trainer.num_threads`` is null; None means the cores this process may use.

    Raises:
        ConfigError: trainer.device=cuda and there is no CUDA GPU.
    """
    collect_as_usual()
    compute_here(trainer.num_threads or threads)
    if trainer.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no CUDA GPU", fix="trainer.device=auto", code="R02")
    use_cuda = trainer.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if use_cuda else "cpu")
