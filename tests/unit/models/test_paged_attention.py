"""Attention over pages against attention by its definition, one token at a time in float64, and what a GPU is said to do for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpu_simulation.kernels import Kernel, Work
from gpu_simulation.simulation import META, simulated_gpu
from hypothesis import given
from hypothesis import strategies as st
from support import varlen_reference
from support.examples import examples
from torch import Tensor

from hone.generation.native.paged.pool import PagePool, PageShape
from hone.generation.native.paged.rows import PagedContext
from hone.models.attention import varlen
from hone.models.attention.context import Scoring
from hone.models.attention.paged import CachedPrompts, RowPages
from hone.models.kernels.cuda.pages import attend_pages

HEADS, KEY_HEADS, WIDTH, PAGE = 4, 2, 8, 4
CPU = torch.device("cpu")
WIDE = torch.float64

scorings = st.builds(
    Scoring,
    st.just(0.3),
    st.none() | st.integers(1, 9),
    st.none() | st.just(2.0),
    st.none() | st.just(torch.linspace(-1, 1, HEADS, dtype=WIDE)),
)
rows = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=4)
"""Tokens that rows have, and their new ones."""


def expected(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """Attention of one token ``[heads, d]`` over a row ``[length, kv_heads, d]`` that ends with it."""
    out = torch.zeros_like(query)
    first = max(0, len(keys) - (scoring.window or len(keys)))
    for head in range(HEADS):
        near = head // (HEADS // KEY_HEADS)
        scores = [float(query[head] @ key) * scoring.scale for key in keys[first:, near]]
        if scoring.softcap is not None:
            scores = [scoring.softcap * math.tanh(score / scoring.softcap) for score in scores]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (0.0 if scoring.sinks is None else math.exp(scoring.sinks[head]))
        out[head] = sum(weight / total * value for weight, value in zip(weights, values[first:, near], strict=True))
    return out


class Rows:
    """Rows in pages of a pool, and what is in them."""

    def __init__(self, tokens: list[tuple[int, int]], dtype: torch.dtype = WIDE) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = PageShape(1, KEY_HEADS, WIDTH, dtype, PAGE)
        self.pool, self.past, self.new = PagePool(shape, 20, CPU), [n for n, _ in tokens], [n for _, n in tokens]
        order = (torch.randperm(19, generator=generator) + 1).tolist()
        self.tables = [[order.pop() for _ in range(-(-(past + new) // PAGE))] for past, new in tokens]

        def drawn(count: int) -> Tensor:
            return torch.randn(sum(self.new), count, WIDTH, generator=generator, dtype=WIDE)

        for pages in self.pool.layer(0):
            pages[1:].copy_(torch.randn(pages[1:].shape, generator=generator, dtype=WIDE))
        self.query, self.key, self.value = drawn(HEADS), drawn(KEY_HEADS), drawn(KEY_HEADS)

    def attend(self, scoring: Scoring) -> Tensor:
        context = PagedContext.of_chunks(self.pool, self.tables, self.past, self.new)
        states = (part.transpose(0, 1)[None] for part in (self.query, self.key, self.value))
        return context.attend(0, *states, scoring)[0]

    def wanted(self, scoring: Scoring) -> Tensor:
        """What the new tokens see is in the pool after :meth:`attend`."""
        out, number = [], 0
        for table, past, new in zip(self.tables, self.past, self.new, strict=True):
            keys, values = (pages[torch.tensor(table)].flatten(0, 1) for pages in self.pool.layer(0))
            assert torch.equal(keys[past : past + new], self.key[number : number + new])
            for end in range(past + 1, past + new + 1):
                out.append(expected(self.query[number], keys[:end], values[:end], scoring))
                number += 1
        return torch.stack(out)


@given(rows, scorings)
@examples(40)
def test_prompts_that_continue_pages(tokens: list[tuple[int, int]], scoring: Scoring) -> None:
    pages = Rows(tokens)
    torch.testing.assert_close(pages.attend(scoring), pages.wanted(scoring), rtol=1e-6, atol=1e-6)


@given(rows, st.none() | st.integers(1, 9))
@examples(20)
def test_prompts_by_one_variable_length_call(tokens: list[tuple[int, int]], window: int | None) -> None:
    """As :class:`CachedPrompts` calls it on CUDA."""
    varlen_reference.register()
    past, new = (torch.tensor(part) for part in zip(*tokens, strict=True))
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(count, heads, WIDTH, generator=generator, dtype=WIDE)
        for count, heads in ((int(new.sum()), HEADS), *[(int((past + new).sum()), KEY_HEADS)] * 2)
    )
    prompts = CachedPrompts(torch.arange(len(keys)), new, past + new)
    scoring = Scoring(0.3, window)
    found = varlen.causal_attention(query, keys, values, scoring, prompts._plan)
    whole = prompts.attend(query, keys[None], values[None], scoring)
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), scorings)
@examples(40)
def test_one_new_token_for_each_row(past: list[int], scoring: Scoring) -> None:
    """A decode step, and a chunk of it: equal bits."""
    pages = Rows([(count, 1) for count in past])
    found = pages.attend(scoring)
    torch.testing.assert_close(found, pages.wanted(scoring), rtol=1e-6, atol=1e-6)
    widest = max(map(len, pages.tables))
    tables = torch.tensor([[*row, *[0] * (widest - len(row))] for row in pages.tables], dtype=torch.int32)
    context = PagedContext.of_step(pages.pool, tables, torch.tensor(past))
    states = (part[:, :, None] for part in (pages.query, pages.key, pages.value))
    assert torch.equal(context.attend(0, *states, scoring)[:, 0], found)


def test_rows_that_fill_up_a_batch() -> None:
    """One without tokens gets zeros; one that is longer than its table sees the table, and writes into its last page."""
    pages = Rows([(5, 1)])
    tables, lengths = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([0, 999], dtype=torch.int32)
    query = pages.query.expand(2, -1, -1)
    zeros, rest = attend_pages(query, *pages.pool.layer(0), tables, lengths, scale=0.3)
    assert not zeros.any()
    scratch = (part[torch.zeros(2, dtype=torch.int64)].flatten(0, 1) for part in pages.pool.layer(0))
    torch.testing.assert_close(rest, expected(query[1], *scratch, Scoring(0.3)))
    context = PagedContext.of_step(pages.pool, tables, lengths.long())
    states = (part[:, :, None].expand(2, -1, -1, -1) for part in (pages.query, pages.key, pages.value))
    assert context.attend(0, *states, Scoring(0.3)).isfinite().all()


def kernels_of(pages: Any, tokens: int, dtype: torch.dtype, scoring: Scoring) -> list[Kernel]:
    sizes = ((tokens, HEADS), (3, PAGE, KEY_HEADS), (3, PAGE, KEY_HEADS))
    with simulated_gpu() as gpu:
        states = [torch.empty(*size, WIDTH, device=META, dtype=dtype) for size in sizes]
        assert pages().attend(*states, scoring).shape == states[0].shape
    return [kernel for kernel in gpu.kernels if kernel.name.startswith("attention")]


def test_a_gpu_reads_the_keys_and_values_that_are_seen() -> None:
    def pages() -> RowPages:
        table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([10, 3], dtype=torch.int32)
        return RowPages(table.to(META), lengths.to(META))

    for window, read, parts in ((None, 13, 3 + 1), (3, 6, 2 + 1)):
        first, second = kernels_of(pages, 2, torch.bfloat16, Scoring(0.3, window))
        between, queries, table = 4 * parts * HEADS * (WIDTH + 1), 2 * 2 * HEADS * WIDTH, 4 * 2 * 3
        assert first.moved == 2 * 2 * read * KEY_HEADS * WIDTH + queries + table + between
        assert second.moved == between + queries and first.launches == second.launches == 1
        assert first.operations == 4 * read * HEADS * WIDTH and first.work is Work.ATTENTION


def test_what_the_variable_length_call_cannot_do_is_computed_whole() -> None:
    def pages() -> CachedPrompts:
        return CachedPrompts(torch.arange(9).to(META), torch.tensor([2, 3]), torch.tensor([5, 4]))

    (call,) = kernels_of(pages, 5, torch.bfloat16, Scoring(0.3))
    (padded,) = kernels_of(pages, 5, torch.float32, Scoring(0.3))
    pair = 4 * HEADS * WIDTH
    assert call.operations == (4 + 5 + 2 + 3 + 4) * pair and padded.operations == 2 * (1 + 2 + 3 + 4 + 5) * pair
    assert not kernels_of(pages, 5, torch.bfloat16, Scoring(0.3, softcap=5.0)), "matmuls and a softmax"
