"""Rows that share prefixes at random depths, for tests of packing, attention and training."""

from __future__ import annotations

import random

import torch
from hypothesis import strategies as st
from support.models import VOCABULARY

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.attention.packed import PackedContext
from hone.models.attention.tiles import Sequences


def random_rows(seed: int, rows: int, longest: int = 12, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Rows of at least two tokens. Most continue an earlier row from some point on; some repeat one, or are its beginning."""
    draw = random.Random(seed)
    result: list[list[int]] = []
    for _ in range(rows):
        stem: list[int] = []
        if result and draw.random() < 0.8:
            parent = draw.choice(result)
            stem = parent[: draw.choice([draw.randint(0, len(parent)), len(parent)])]
        new = draw.randint(max(0, 2 - len(stem)), longest) if draw.random() < 0.85 else max(0, 2 - len(stem))
        result.append(stem + [draw.randrange(vocabulary) for _ in range(new)])
    return result


def tree_batch(seed: int, rows: int, longest: int = 12) -> Batch:
    """Batch of :func:`random_rows` whose prompts end anywhere, so that rows share sampled and given tokens.

    The columns are those that losses read, drawn anew for every token of every row.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens = random_rows(seed, rows, longest)
    cuts = [draw.randint(1, len(row) - 1) for row in tokens]
    responses = Ragged.from_rows([row[cut:] for row, cut in zip(tokens, cuts, strict=True)])
    count = len(responses.values)
    mask = (torch.rand(count, generator=generator) < 0.7).long()
    mask[responses.offsets[:-1]] = 1
    names = ("advantages", "returns", "values", "noise")
    noise = {name: responses.with_values(torch.randn(count, generator=generator)) for name in names}
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([row[:cut] for row, cut in zip(tokens, cuts, strict=True)]),
            "response_ids": responses,
            "response_mask": responses.with_values(mask),
            "uid": [f"p{row // 2}" for row in range(rows)],
            **noise,
        }
    )


def context_of_groups(
    prefixes: list[int], suffixes: list[list[int]], device: torch.device | str = "cpu"
) -> PackedContext:
    """Sequences that share nothing but the prompt of their group: prompt ``i``, then each suffix of ``suffixes[i]``."""
    lengths = [prefix + suffix for prefix, of_group in zip(prefixes, suffixes, strict=True) for suffix in of_group]
    shared = [
        prefix if place else 0
        for prefix, of_group in zip(prefixes, suffixes, strict=True)
        for place in range(len(of_group))
    ]
    return PackedContext.from_lengths(lengths, device, shared=shared)


@st.composite
def contexts(draw: st.DrawFn, longest: int = 50, most: int = 8) -> PackedContext:
    """Sequences of any tree: each shares any number of tokens with the one before it."""
    lengths: list[int] = []
    shared: list[int] = []
    for number in range(draw(st.integers(1, most))):
        common = draw(st.integers(0, lengths[-1])) if number else 0
        shared.append(common)
        lengths.append(common + draw(st.integers(1, longest)))
    return PackedContext.from_lengths(lengths, shared=shared)


def tokens_of(sequences: Sequences) -> list[list[int]]:
    """Packed tokens of every sequence, its prefix included, by the definition: the first ones are those of the one before."""
    result: list[list[int]] = []
    for shared, start, length in zip(
        sequences.prefix_length.tolist(), sequences.suffix_start.tolist(), sequences.suffix_length.tolist(), strict=True
    ):
        before = result[-1][:shared] if result else []
        result.append(before + list(range(start, start + length)))
    return result
