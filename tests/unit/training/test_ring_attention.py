"""Ring attention of any number of ranks is attention of the whole row: outputs and gradients, against float64 by the definition."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import varlen_reference
from support.examples import examples
from support.messages import raises
from support.prefix_trees import contexts, tokens_of
from support.thread_ring import ThreadRing, on_ring
from torch import Tensor

from hone.errors import ModelError
from hone.models.attention import partial
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.training.backends.fsdp2 import ring
from hone.training.backends.fsdp2.ring import NONE, RingContext, divide_row, ring_attention

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 6, 3, 8, 5


class Case(NamedTuple):
    """A packed row, the ranks that share it, and what its attention scores are."""

    context: PackedContext
    ranks: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


rows, ring_sizes = contexts(longest=24, most=6), st.integers(1, 5)
cases = st.builds(Case, rows, ring_sizes, st.none() | st.integers(1, 30), st.none() | st.just(2.0), st.booleans())


def states_of(context: PackedContext, value_width: int = VALUE_WIDTH) -> list[Tensor]:
    """Queries, keys, values, sinks, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    tokens = context.position_ids.shape[1]
    shapes = [(tokens, HEADS, WIDTH), (tokens, KV_HEADS, WIDTH), (tokens, KV_HEADS, value_width), (HEADS,)]
    shapes.append((tokens, HEADS, value_width))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def by_definition(case: Case, states: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks: every token alone."""
    *leaves, incoming = states
    leaves = [part.clone().requires_grad_() for part in leaves]
    query, key, value, sinks = leaves
    rows: dict[int, Tensor] = {}
    sequences = case.context.sequences
    for tokens, shared in zip(tokens_of(sequences), sequences.prefix_length.tolist(), strict=True):
        for place in range(shared, len(tokens)):
            seen = tokens[max(0, place + 1 - (case.window or place + 1)) : place + 1]
            near = [key[seen].repeat_interleave(2, 1), value[seen].repeat_interleave(2, 1)]
            scores = 0.3 * torch.einsum("hd,khd->hk", query[tokens[place]], near[0])
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if case.sinks:
                scores = torch.cat([scores, sinks[:, None]], 1)
            weights = scores.softmax(1)[:, : len(seen)]
            rows[tokens[place]] = torch.einsum("hk,khd->hd", weights, near[1])
    out = torch.stack([rows[token] for token in range(len(rows))])
    grads = torch.autograd.grad(out, leaves, incoming, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True))]


def on_ranks(case: Case, states: list[Tensor], *, fused: bool = False) -> list[Tensor]:
    """The same of a ring, gathered from all ranks."""
    sequences, positions = case.context.sequences, case.context.position_ids
    tokens = divide_row(sequences, case.ranks)

    def rank(ring: ThreadRing) -> list[Tensor]:
        context = RingContext.from_row(positions, sequences, ring)
        mine = tokens[ring.rank]
        *leaves, incoming = (part if part.dim() == 1 else part[mine.clamp(min=0)] for part in states)
        incoming = incoming * (mine != NONE)[:, None, None]
        query, key, value, sinks = (part.clone().requires_grad_() for part in leaves)
        scoring = Scoring(0.3, case.window, case.softcap, sinks if case.sinks else None)
        if fused:
            out = ring_attention(query, key, value, scoring, context.plan, ring, fused=True)
        else:
            heads = [part.transpose(0, 1)[None] for part in (query, key, value)]
            out = context.attend(0, heads[0], heads[1], heads[2], scoring)[0]
        found = torch.autograd.grad(out, [query, key, value, sinks], incoming, allow_unused=True)
        return [out.detach(), *(torch.zeros(HEADS) if part is None else part for part in found)]

    everyone = on_ring(case.ranks, rank)
    real = tokens.flatten() != NONE
    order = tokens.flatten()[real].argsort()
    whole = [torch.cat(parts)[real][order] for parts in list(zip(*everyone, strict=True))[:-1]]
    return [*whole, torch.stack([parts[-1] for parts in everyone]).sum(0).to(torch.float64)]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@given(case=cases, longest=st.sampled_from([3, 128]), most_keys=st.sampled_from([4, 4096]))
@examples(60)
def test_any_ranks_compute_attention_of_the_whole_row(case: Case, longest: int, most_keys: int) -> None:
    states = states_of(case.context)
    with patch.object(ring, "LONGEST_TILE", longest), patch.object(partial, "MOST_KEYS", most_keys):
        found = on_ranks(case, states)
    assert_equal(found, by_definition(case, states), 1e-10)


@given(case=st.builds(Case, rows, ring_sizes, st.none(), st.none(), st.booleans()))
@examples(30)
def test_blocks_by_variable_length_calls(case: Case) -> None:
    """On CUDA; here the calls are those of the reference, in float64 but for log-sum-exps in float32."""
    varlen_reference.register()
    states = states_of(case.context, WIDTH)
    assert_equal(on_ranks(case, states, fused=True), by_definition(case, states), 1e-5)


@given(contexts(longest=300), st.integers(1, 8))
@examples(60)
def test_every_token_is_on_one_rank_in_order(context: PackedContext, ranks: int) -> None:
    tokens = divide_row(context.sequences, ranks)
    real = tokens != NONE
    assert sorted(tokens[real].tolist()) == list(range(context.position_ids.shape[1]))
    for mine in tokens:
        assert (mine[mine != NONE].diff() > 0).all()


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_sequence_is_divided_in_a_zig_zag(ranks: int) -> None:
    tokens = divide_row(PackedContext.from_lengths([20 * ranks]).sequences, ranks)
    blocks = sorted(mine[::10].tolist() for mine in tokens)
    assert blocks == [[10 * place, 10 * (2 * ranks - 1 - place)] for place in range(ranks)]


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=12), st.integers(2, 4))
@examples(60)
def test_ranks_have_nearly_equal_work(lengths: list[int], ranks: int) -> None:
    context = PackedContext.from_lengths([*lengths, 4096])
    tokens = divide_row(context.sequences, ranks)
    work = torch.nn.functional.pad(context.position_ids[0] + 1, (0, 1))  # index -1 is no token
    shares = work[tokens].sum(1).double()
    assert shares.max() / shares.mean() < 1.2
    assert tokens.numel() - int(work.count_nonzero()) < 8 * ranks


def test_each_block_travels_once_round_the_ring() -> None:
    context = PackedContext.from_lengths([64])
    states = states_of(context)

    def rank(ring: ThreadRing) -> int:
        made = RingContext.from_row(context.position_ids, context.sequences, ring)
        mine = made.tokens
        query, key, value = (part[mine].requires_grad_() for part in states[:3])
        ring_attention(query, key, value, Scoring(0.3), made.plan, ring, fused=False).sum().backward()
        return ring.sent

    block = 16 * KV_HEADS * (WIDTH + VALUE_WIDTH)
    assert on_ring(4, rank) == [block * (3 + 3 + 4)] * 4, "forward, backward, and gradients that go home"


def test_dropout_and_other_mixers_are_refused() -> None:
    context = PackedContext.from_lengths([5])
    key = "actor_rollout_ref.actor.context_parallel_size"

    def rank(ring: ThreadRing) -> Any:
        made = RingContext.from_row(context.position_ids, context.sequences, ring)
        states = torch.zeros(1, 1, 5, 8)
        with raises(ModelError, "attention_dropout=0.5", f"{key}=1", where=key):
            made.attend(0, states, states, states, Scoring(1.0, dropout=0.5))
        with raises(ModelError, "without softmax", f"{key}=1", where=key):
            made.mix(0, lambda part: part, states)

    on_ring(1, rank)
