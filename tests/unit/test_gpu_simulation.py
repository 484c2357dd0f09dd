"""Kernels of the simulated GPU against closed forms and torch's own counter of operations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_simulation.kernels import (
    Kernel,
    Work,
    host_launches_of,
    launches_of,
    moved_of,
    operations_of,
    waits_of,
)
from gpu_simulation.passes import (
    Group,
    batch_of,
    decode_kernels,
    log_prob_kernels,
    model_without_storage,
    needed_operations,
    optimizer_kernels,
    update_kernels,
)
from gpu_simulation.simulation import META, simulated_gpu
from gpu_simulation.timing import SHORTEST, WAIT, duration, most_expensive, timeline
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, Qwen3Config

from hone.config.actor import ActorConfig
from hone.models.heads import PolicyHead
from hone.preflight.plan.devices import device_named
from hone.training.packing import pack

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
}
GROUPS = [Group(40, (100, 100, 100, 100)), Group(40, (100, 100, 100, 100))]
TOKENS, RESPONSES = 880, 800
MATRICES = 256 * (2 * 512 + 2 * 128 + 3 * 704)
HEAD = 256 * 1000
MATMULS = (Work.MATMUL, Work.MATMUL_FLOAT32, Work.OWN_MATMUL)


def qwen3(layers: int = 2, *, checkpointing: bool = False, keeps: str = "nothing") -> Any:
    config = Qwen3Config(**SIZES, num_hidden_layers=layers)
    return model_without_storage(config, checkpointing=checkpointing, keeps=keeps)


def matmuls(kernels: list[Kernel]) -> float:
    """Operations of matmuls with weights."""
    return operations_of(k for k in kernels if k.work in MATMULS and "Rotary" not in k.where)


def attention(kernels: list[Kernel]) -> list[float]:
    return [operations_of(k for k in kernels if k.work is work) for work in (Work.ATTENTION, Work.ATTENTION_BACKWARD)]


@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("layers", [1, 3])
def test_operations_of_a_forward_pass(kind: Any, layers: int) -> None:
    model = model_without_storage(kind(**SIZES, num_hidden_layers=layers))
    kernels = log_prob_kernels(model, batch_of(GROUPS), bf16=True)
    assert matmuls(kernels) == 2 * (layers * MATRICES * TOKENS + HEAD * RESPONSES)
    pairs = 8 * (100 * 40 + 100 * 101 / 2) + 2 * 40 * 41 / 2  # a prompt's own pairs count once
    assert attention(kernels) == [layers * 4 * pairs * 8 * 64, 0]


def test_checkpointing_that_keeps_attention_recomputes_all_but_attention() -> None:
    """One launch of attention a layer, as without checkpointing; the other kernels are those of full recomputation."""
    batch, counts = batch_of(GROUPS), {}
    ways = {"stored": {}, "full": {"checkpointing": True}, "kept": {"checkpointing": True, "keeps": "attention"}}
    for name, settings in ways.items():
        kernels = update_kernels(qwen3(layers=3, **settings), batch, bf16=True)
        counts[name] = Counter((kernel.name, kernel.work) for kernel in kernels)
    forward = ("attention", Work.ATTENTION)
    micro_batches = counts["stored"][forward] // 3
    assert [counts[name][forward] // micro_batches for name in ways] == [3, 6, 3]
    assert (
        counts["full"] - counts["kept"] == Counter({forward: 3 * micro_batches}) and not counts["kept"] - counts["full"]
    )


def test_operations_of_an_update_and_of_checkpointing() -> None:
    batch = batch_of(GROUPS)
    plain, again = (
        update_kernels(qwen3(checkpointing=checkpointing), batch, bf16=True) for checkpointing in (False, True)
    )
    layers, head = 2 * 2 * MATRICES * TOKENS, 2 * HEAD * RESPONSES
    assert matmuls(plain) == 3 * layers + 4 * head, "the head's logits are computed again in the backward pass"
    down = 2 * 2 * 256 * 704 * TOKENS
    assert matmuls(again) == 4 * layers - down + 4 * head, "nothing needs the layer's own output again"
    forward, backward = attention(plain)
    assert backward == 2.5 * forward and attention(again) == [2 * forward, backward]
    assert not any(k.work is Work.MATMUL_FLOAT32 and "Rotary" not in k.where for k in (*plain, *again))


def test_operations_are_those_of_torchs_counter() -> None:
    model, batch = qwen3(), batch_of(GROUPS)
    with simulated_gpu() as gpu, FlopCounterMode(display=False) as counter, torch.autocast("meta"):
        packed = pack(batch, META)
        outputs = PolicyHead(learns_entropy=False)(model, packed, with_entropy=False)
        outputs["log_probs"].sum().backward()
    counted = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    of_matmuls = sum(flops for operator, flops in counted.items() if operator.startswith("aten."))
    own = ("matmul_wide", "add_matmul_wide", "vocabulary_statistics", "vocabulary_gradient")
    of_own = sum(k.operations for k in gpu.kernels if k.name in own)
    assert of_own == 2 * 2 * MATRICES * TOKENS + 3 * 2 * HEAD * RESPONSES, "operators that the counter does not know"
    assert of_matmuls == sum(k.operations for k in gpu.kernels if k.work in MATMULS) - of_own


def test_float32_without_autocast() -> None:
    kernels = log_prob_kernels(qwen3(), batch_of(GROUPS), bf16=False)
    assert not any(k.work is Work.MATMUL for k in kernels)
    assert matmuls(kernels) == 2 * (2 * MATRICES * TOKENS + HEAD * RESPONSES)


def test_a_decode_step_reads_every_weight_once_in_bfloat16() -> None:
    kernels = decode_kernels(qwen3(), [Group(9, (5,))], bf16=True)
    weights = 2 * (2 * MATRICES + HEAD)
    products = [k for k in kernels if k.name in ("mm", "matmul_wide")]  # the last gives float32 logits
    activations = moved_of(products) - weights
    assert 0 < activations < 0.01 * weights and len(products) == 2 * 4 + 1
    assert operations_of(products) == weights, "two operations for each weight of two bytes"


@pytest.mark.parametrize("groups", [[Group(9, (5,))], [Group(9, (5, 3, 8, 2))] * 4])
def test_launches_of_a_decode_step(groups: list[Group]) -> None:
    """A kernel takes 2 us of the GPU at least, in each layer and step: one more needs a reason. The host launches one graph."""
    steps = [decode_kernels(qwen3(layers), groups, bf16=True) for layers in (1, 2, 3)]
    one, two, three = map(launches_of, steps)
    assert three - two == two - one <= 32
    assert [host_launches_of(step) for step in steps] == [1, 1, 1]
    assert host_launches_of(decode_kernels(qwen3(1), groups, bf16=False)) == 1, "float32 too"


def test_the_host_waits_a_fixed_number_of_times() -> None:
    groups = [Group(9, (5, 3, 8, 2))] * 4
    assert waits_of(decode_kernels(qwen3(), groups, bf16=True)) == 1, "whether a row has ended"
    one, three = (waits_of(update_kernels(qwen3(layers), batch_of(GROUPS), bf16=True)) for layers in (1, 3))
    assert one == three, "none in a layer"


def test_lengths_decide_what_a_decode_step_reads() -> None:
    short, long = (decode_kernels(qwen3(), [Group(9, (length, length))] * 4, bf16=True) for length in (64, 640))
    cached = 2 * 2 * 8 * 2 * 64 * 2  # layers, keys and values, rows, heads, width, bytes: a token of all rows
    assert moved_of(long) - moved_of(short) > 576 * cached
    sizes = [64 + 9, 640 + 9]  # the new token is one of them, and the prompt's last is not cached before the first step
    assert [sum(attention(step)) for step in (short, long)] == [2 * 4 * 8 * 64 * 8 * size for size in sizes]


def test_the_optimizer_moves_ten_numbers_a_parameter() -> None:
    model = qwen3()
    assert moved_of(optimizer_kernels(model)) == 40 * sum(p.numel() for p in model.parameters())
    assert waits_of(optimizer_kernels(model)) == 1


def test_small_integers_keep_their_values() -> None:
    with simulated_gpu() as gpu:
        lengths = torch.tensor([3, 1, 2], device=META)
        longest = int(lengths.max())
        mask = torch.arange(longest, device=META) < lengths[:, None]
        chosen = torch.empty(3, longest, device=META)[mask]
        lengths += 4
        unknown = float(chosen.sum())
    assert longest == 3 and chosen.shape == (6,) and unknown == 1.0
    assert waits_of(gpu.kernels) == 3


def test_autocast_is_left_as_it_was() -> None:
    names = "autocast", "is_autocast_enabled", "get_autocast_dtype"
    before = [getattr(torch, name) for name in names]
    with pytest.raises(ZeroDivisionError), simulated_gpu():
        assert not torch.is_autocast_enabled("meta")
        with torch.autocast("meta"), torch.autocast("cpu"):
            assert torch.is_autocast_enabled("meta") and torch.is_autocast_enabled("cpu")
            left = torch.empty(2, 2, device=META)
            assert (left @ left).dtype == torch.bfloat16
        _ = 1 / 0
    assert [getattr(torch, name) for name in names] == before


def test_seconds_of_kernels() -> None:
    device = replace(device_named("H100"), bandwidth=1e12, narrow_rate=1e14, launch=5e-6)
    copy, product = Kernel("copy_", "", moved=1e9), Kernel("mm", "", 1e6, 1e12, Work.MATMUL)
    assert duration(copy, device) == pytest.approx(1e-3) and duration(product, device) == pytest.approx(1e-2)
    small = Kernel("add", "", moved=8.0)
    assert duration(small, device) == SHORTEST
    assert timeline([small] * 1000, device).total == pytest.approx(1000 * 5e-6 + SHORTEST), "launches do not hide"
    assert timeline([copy, *[small] * 100], device).total == pytest.approx(5e-6 + 1e-3 + 100 * SHORTEST), "they do"
    wait = Kernel("item", "", launches=0, waits=True)
    waited = timeline([copy, wait, *[small] * 100], device).total
    assert waited == pytest.approx(5e-6 + 1e-3 + WAIT + 100 * 5e-6 + SHORTEST)
    first, second = most_expensive([copy, product, copy], device)
    assert (first.name, second.name, second.calls) == ("mm", "copy_", 2)


def test_needed_operations_are_those_without_repeated_prompts() -> None:
    config = Qwen3Config(**SIZES, num_hidden_layers=2)
    pairs = 2 * 40 * 40 / 2 + 8 * 100 * (40 + 50)
    expected = 2 * (2 * MATRICES * TOKENS + HEAD * RESPONSES) + 2 * 4 * pairs * 512
    assert needed_operations(config, GROUPS) == expected
    assert ActorConfig().entropy_coeff == 0, "the recorded update reports entropy, and does not learn from it"
