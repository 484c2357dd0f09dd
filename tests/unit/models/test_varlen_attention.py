"""One variable-length attention call for packed sequences, against float64 attention of each sequence alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from gpu_simulation.kernels import Kernel, Work
from gpu_simulation.simulation import META, simulated_gpu
from hypothesis import given
from hypothesis import strategies as st
from support import varlen_reference
from support.examples import examples
from support.prefix_trees import context_of_groups, contexts, tokens_of
from torch import Tensor

from hone.models.attention import varlen
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.attention.varlen import VarlenPlan

HEADS, KV_HEADS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")


class Case(NamedTuple):
    """Packed sequences that share prefixes, and an attention window."""

    context: PackedContext
    window: int | None


def packed(groups: list[tuple[int, list[int]]], device: torch.device = CPU) -> PackedContext:
    return context_of_groups([prefix for prefix, _ in groups], [suffixes for _, suffixes in groups], device)


trees = contexts(longest=9)
cases = st.builds(Case, trees, st.none() | st.integers(1, 12))


@pytest.fixture(autouse=True)
def varlen_on_the_cpu() -> None:
    varlen_reference.register()


def heads_of(context: PackedContext, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = context.position_ids.shape[1]
    counts = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(tokens, count, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for count in counts]


def expected(context: PackedContext, states: list[Tensor], window: int | None) -> Tensor:
    """Attention of every token by the definition, in float64."""
    query, key, value = (part.double() for part in states)
    out = torch.zeros_like(query)
    for tokens, count in zip(tokens_of(context.sequences), context.sequences.prefix_length.tolist(), strict=True):
        for place in range(count, len(tokens)):
            visible = tokens[max(0, place + 1 - (window or place + 1)) : place + 1]
            for head in range(HEADS):
                near = head // (HEADS // KV_HEADS)
                weights = (key[visible, near] @ query[tokens[place], head] * 0.3).softmax(0)
                out[tokens[place], head] = weights @ value[visible, near]
    return out


def outcome(attend: Any, states: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    leaves = [part.clone().requires_grad_() for part in states]
    out = attend(*leaves)
    incoming = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, incoming)]


@given(cases)
@examples(30)
def test_output_and_gradients_are_those_of_float64(case: Case) -> None:
    context, scoring = case.context, Scoring(0.3, case.window)
    plan = VarlenPlan.from_sequences(context.sequences, CPU)
    states = heads_of(context, torch.float32)
    found = outcome(lambda *parts: varlen.causal_attention(*parts, scoring, plan), states)
    wanted = outcome(lambda *parts: expected(context, list(parts), case.window), [part.double() for part in states])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@given(cases)
@examples(15)
def test_it_agrees_with_padded_tiles(case: Case) -> None:
    context, scoring = case.context, Scoring(0.3, case.window)
    plan = VarlenPlan.from_sequences(context.sequences, CPU)
    states = heads_of(context, torch.float64)

    def in_tiles(*parts: Tensor) -> Tensor:
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        return context.attend(0, query, key, value, scoring)[0]

    found = outcome(lambda *parts: varlen.causal_attention(*parts, scoring, plan), states)
    for one, other in zip(found, outcome(in_tiles, states), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@given(trees)
@examples(30)
def test_no_query_is_computed_twice_and_keys_are_prefix_and_suffix(context: PackedContext) -> None:
    tokens = context.position_ids.shape[1]
    plan = VarlenPlan.from_sequences(context.sequences, CPU)
    assert plan.query_ends[-1] == tokens
    assert (plan.gather is None) == (int(context.sequences.prefix_length.max()) == 0)
    source = torch.arange(tokens) if plan.gather is None else plan.gather.source
    gathered = source.split(plan.key_ends.diff().tolist())
    assert [keys.tolist() for keys in gathered] == tokens_of(context.sequences)


def test_sequences_without_prefixes_need_no_gather() -> None:
    assert VarlenPlan.from_sequences(PackedContext.from_lengths([3, 1, 5]).sequences, CPU).gather is None


def attention_on_a_gpu(
    context: PackedContext, scoring: Scoring, *, width: int = WIDTH, dtype: torch.dtype = torch.bfloat16
) -> list[Kernel]:
    """Kernels of the forward and backward passes on tensors without storage."""
    tokens = context.position_ids.shape[1]
    with simulated_gpu() as gpu:
        query, key, value = (
            torch.empty(1, count, tokens, width, device=META, dtype=dtype, requires_grad=True)
            for count in (HEADS, KV_HEADS, KV_HEADS)
        )
        out = context.attend(0, query, key, value, scoring)
        assert out.shape == (1, tokens, HEADS, width)
        out.sum().backward()
    return gpu.kernels


def calls(kernels: list[Kernel]) -> list[Work]:
    return [kernel.work for kernel in kernels if kernel.work in (Work.ATTENTION, Work.ATTENTION_BACKWARD)]


@pytest.mark.parametrize("window", [None, 4])
def test_a_gpu_gets_one_call_whatever_the_lengths(window: int | None) -> None:
    groups = [(5, [100, 3, 1]), (40, [7, 60])]
    kernels = attention_on_a_gpu(packed(groups, META), Scoring(0.3, window))
    assert calls(kernels) == [Work.ATTENTION, Work.ATTENTION_BACKWARD]
    limit = window or 1000
    pairs = sum(min(place + 1, limit) for prefix, _ in groups for place in range(prefix))
    pairs += sum(min(prefix + place + 1, limit) for prefix, own in groups for n in own for place in range(n))
    (forward,) = (kernel for kernel in kernels if kernel.work is Work.ATTENTION)
    assert forward.operations == 4 * pairs * HEADS * WIDTH
    assert not any(kernel.name.startswith("index_add") for kernel in kernels), "atomics add in any order"


@pytest.mark.parametrize(
    ("scoring", "change"),
    [
        (Scoring(0.3, softcap=5.0), {}),
        (Scoring(0.3, sinks=torch.zeros(HEADS, device=META)), {}),
        (Scoring(0.3, dropout=0.1), {}),
        (Scoring(0.3), {"dtype": torch.float32}),
        (Scoring(0.3), {"width": 12}),
        (Scoring(0.3), {"width": 264}),
    ],
    ids=["softcap", "sinks", "dropout", "float32", "width 12", "width 264"],
)
def test_what_the_kernel_cannot_do_is_padded_and_said(
    scoring: Scoring, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    varlen.report_padding.cache_clear()
    for _ in range(2):
        attention_on_a_gpu(packed([(5, [9, 3])], META), scoring, **change)
    assert len(caplog.records) == 1, "once for each reason"
    query = torch.empty(1, HEADS, 1, change.get("width", WIDTH), dtype=change.get("dtype", torch.bfloat16))
    assert varlen.obstacle(query, query, scoring) in caplog.text


def test_the_kernel_needs_an_ampere_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAGpu:
        shape, dtype, device = (1, HEADS, 1, WIDTH), torch.bfloat16, torch.device("cuda:0")

    capability = {"value": (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability["value"])
    query: Any = OnAGpu()
    assert varlen.obstacle(query, query, Scoring(0.3)) is not None
    capability["value"] = (8, 0)
    assert varlen.obstacle(query, query, Scoring(0.3)) is None
