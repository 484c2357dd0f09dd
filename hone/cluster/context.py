"""Context of a role: the process that it runs in."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from hone.config.parallel import Layout
from hone.config.run import RunConfig
from hone.config.trees import AnyConfig, model_block
from hone.data.image_processor import ImageProcessor, load_image_processor
from hone.data.tokenizer import load_tokenizer
from hone.errors import ConfigError
from hone.startup import collect_as_usual
from hone.threads import compute_here

if TYPE_CHECKING:
    from hone.training.layout import Meshes

ConfigT = TypeVar("ConfigT", bound=AnyConfig)


@dataclass
class WorkerContext(Generic[ConfigT]):
    """Process of a role.

    Attributes:
        rank: rank of this process in its pool.
        world: number of processes of the pool.
        meshes: process groups of the layout; None with one process.
        resume: location of the checkpoint to resume from, or None.
        roles: roles that this process has already, by name.
        engine_devices: GPUs, as in CUDA_VISIBLE_DEVICES, of the engine that this process starts; empty without GPUs, and if
            another process starts it. None: engines of this process see the GPUs that it sees.
        host: address at which other processes of the run reach this machine.
    """

    config: ConfigT
    device: torch.device
    rank: int = 0
    world: int = field(default=1, kw_only=True)
    layout: Layout = field(default_factory=Layout)
    meshes: Meshes | None = None
    total_steps: int = 1
    resume: str | None = None
    roles: dict[str, Any] = field(default_factory=dict)
    engine_devices: tuple[str, ...] | None = None
    host: str = "127.0.0.1"

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the run."""
        return run_tokenizer(self.config)

    @functools.cached_property
    def image_processor(self) -> ImageProcessor | None:
        """Return the image processor of the trained model; None for a model of text."""
        return run_image_processor(self.config, self.tokenizer)

    def close_roles(self) -> None:
        """Close the roles, the last one first, and forget them."""
        for role in reversed(list(self.roles.values())):
            if hasattr(role, "close"):
                role.close()
        self.roles.clear()


@dataclass(frozen=True)
class RoleSpec:
    """A role that a run needs.

    Attributes:
        cls: its class; it is built as ``cls(context, **arguments)``.
        arguments: further arguments of its class.
        replicated: whether each process works on its rows alone, so that rows are split over all processes; otherwise
            the processes share a model as the layout says.
        group: processes that work as one, if replicated: the first of each group is called, the others lend it their devices.
    """

    name: str
    cls: type
    arguments: dict[str, Any] = field(default_factory=dict)
    replicated: bool = False
    group: int = 1


def run_tokenizer(config: AnyConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the run."""
    _, model = model_block(config)
    return load_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )


def run_image_processor(config: AnyConfig, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
    """Return the image processor of the trained model; None for a model of text."""
    return load_image_processor(model_block(config)[1].path or "", tokenizer)


def prepare_torch(trainer: RunConfig, *, threads: int | None = None) -> torch.device:
    """Set CPU threads and CUDA's allocator, enable garbage collection again, and return the configured device.

    Args:
        trainer: configuration block ``trainer``.
        threads: number of threads if ``trainer.num_threads`` is null; None: see :func:`~hone.threads.compute_here`.

    Raises:
        ConfigError: trainer.device=cuda, and there is no CUDA GPU.
    """
    from hone.models.devices import run_device, use_expandable_segments  # the driver of a cluster has no device

    collect_as_usual()
    compute_here(trainer.num_threads or threads)
    if trainer.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch finds 0 CUDA GPUs", fix="trainer.device=auto", code="R02")
    device = run_device(trainer.device)
    use_expandable_segments(device)
    return device
