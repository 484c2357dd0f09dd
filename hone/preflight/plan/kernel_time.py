"""Seconds of passes on a GPU, from the kernels that Hone's own code launches (:mod:`hone.preflight.plan.roofline`).

Models of one and of two layers are recorded; the second layer's kernels, times the number of layers, and the rest make the whole.
The layers are those of Llama, or of Qwen 3 where the family has QK norm, in the widths of the model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hone.config.pools import Pool
from hone.models.registry import family_of
from hone.preflight.plan.devices import Device
from hone.preflight.plan.model import ModelShape
from hone.preflight.plan.work import TrainedModel, Work

if TYPE_CHECKING:
    from hone.preflight.plan.roofline.kernels import Kernel
    from hone.preflight.plan.roofline.passes import Group
    from hone.preflight.plan.roofline.timing import Recording


_RECORDED_TOKENS = 16384
"""Most response tokens of a recorded micro-batch."""


class _Layer(NamedTuple):
    """Widths and settings that decide about the kernels of a model."""

    qk_norm: bool
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    width: int
    vocabulary: int
    bf16: bool
    checkpointing: bool = False
    keeps: str = "nothing"


def update_seconds(work: Work, model: TrainedModel, pool: Pool, device: Device) -> float:
    """Return the seconds of one rank's forward and backward passes over the batch, once."""
    layer = _layer(model.shape, model.bf16, pool.layout.tensor, model)
    count, groups = _micro_batches(work, model, pool)
    seconds = _update(layer, groups).seconds(_shared(device, pool), model.shape.layers, head=not model.value)
    # a frozen matrix has no gradient: one matmul of three, or of four with a second forward pass
    passes = 3 + model.checkpointing
    return count * seconds * (passes - bool(model.lora_rank)) / passes


def forward_seconds(work: Work, model: TrainedModel, pool: Pool, device: Device) -> float:
    """Return the seconds of one rank's pass over the batch without gradient."""
    count, groups = _micro_batches(work, model, pool)
    recorded = _log_probs(_layer(model.shape, model.bf16, pool.layout.tensor), groups)
    return count * recorded.seconds(_shared(device, pool), model.shape.layers, head=not model.value)


def decode_seconds(work: Work, rows: int, device: Device) -> float:
    """Return the seconds of a decode step of the native engine, with ``rows`` rows in the middle of their responses.

    Steps with the powers of two around that number are recorded; the seconds are interpolated.
    """
    layer, fewer = _layer(work.actor.shape, work.rollout_bf16, 1), _power_of_two(rows)

    def seconds(count: int) -> float:
        groups = _groups(count, work.samples, work.prompt, max(1, work.response // 2))
        return _decode(layer, groups).seconds(device, work.actor.shape.layers)

    least = seconds(fewer)
    return least if rows == fewer else least + (rows / fewer - 1) * (seconds(2 * fewer) - least)


def _layer(shape: ModelShape, bf16: bool, tensor: int, trained: TrainedModel | None = None) -> _Layer:
    checkpointing = trained is not None and trained.checkpointing
    keeps = "attention" if trained is not None and checkpointing and trained.keeps_attention else "nothing"
    return _Layer(
        qk_norm=bool(family_of(shape.kind).qk_norm),
        hidden=shape.hidden,
        heads=max(1, shape.heads // tensor),
        key_value_heads=max(1, shape.key_value_heads // tensor),
        head_dim=shape.head_dim,
        width=max(1, shape.width * max(1, shape.chosen) // tensor),
        vocabulary=shape.vocabulary // tensor,
        bf16=bf16,
        checkpointing=checkpointing,
        keeps=keeps,
    )


def _micro_batches(work: Work, model: TrainedModel, pool: Pool) -> tuple[float, tuple[Group, ...]]:
    """Return how many micro-batches a rank's share of the batch makes, and the prompts and responses of one.

    The rows of one are rounded down to a power of two, and limited: larger ones are not faster. So placements share recordings.
    """
    most = max(1, _RECORDED_TOKENS // work.response)
    recorded = _power_of_two(min(work.micro_batch(model, pool).rows, most))
    rows = math.ceil(work.batch * work.samples / pool.layout.dp_size)
    return rows / recorded, _groups(recorded, work.samples, work.prompt, work.response)


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above ``number``."""
    return 1 << (number.bit_length() - 1)


def _groups(rows: int, samples: int, prompt: int, response: int) -> tuple[Group, ...]:
    from hone.preflight.plan.roofline.passes import Group

    sizes = [samples] * (rows // samples) + ([rows % samples] if rows % samples else [])
    return tuple(Group(prompt, (response,) * size) for size in sizes)


def _shared(device: Device, pool: Pool) -> Device:
    """Return a device as fast as the ranks together that share a row's tokens; launches take as long as before."""
    ranks = pool.layout.ranks_a_row
    rates = {name: getattr(device, name) * ranks for name in ("wide_rate", "narrow_rate", "bandwidth")}
    return dataclasses.replace(device, **rates)


@functools.lru_cache(maxsize=256)
def _update(layer: _Layer, groups: tuple[Group, ...]) -> Recording:
    from hone.preflight.plan.roofline import passes

    batch = passes.batch_of(groups)
    return _record(layer, lambda model: passes.update_kernels(model, batch, bf16=layer.bf16, max_tokens=1 << 40))


@functools.lru_cache(maxsize=256)
def _log_probs(layer: _Layer, groups: tuple[Group, ...]) -> Recording:
    from hone.preflight.plan.roofline import passes

    batch = passes.batch_of(groups)
    return _record(layer, lambda model: passes.log_prob_kernels(model, batch, bf16=layer.bf16, max_tokens=1 << 40))


@functools.lru_cache(maxsize=256)
def _decode(layer: _Layer, groups: tuple[Group, ...]) -> Recording:
    from hone.preflight.plan.roofline import passes

    return _record(layer, lambda model: passes.decode_kernels(model, groups, bf16=layer.bf16))


def _record(layer: _Layer, kernels_of: Callable[[Any], Sequence[Kernel]]) -> Recording:
    from transformers import LlamaConfig, Qwen3Config

    from hone.preflight.plan.roofline.passes import model_without_storage
    from hone.preflight.plan.roofline.timing import Recording

    kind: Any = Qwen3Config if layer.qk_norm else LlamaConfig
    recorded = []
    for layers in (1, 2):
        config = kind(
            hidden_size=layer.hidden,
            intermediate_size=layer.width,
            num_hidden_layers=layers,
            num_attention_heads=layer.heads,
            num_key_value_heads=layer.key_value_heads,
            head_dim=layer.head_dim,
            vocab_size=layer.vocabulary,
        )
        settings = {"checkpointing": layer.checkpointing, "keeps": layer.keeps}
        recorded.append(kernels_of(model_without_storage(config, **settings)))
    return Recording(*recorded)
