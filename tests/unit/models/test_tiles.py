"""The packer of padded tiles: nothing lost, order kept, little padding, and as few tiles as the rule allows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.prefix_trees import contexts, tokens_of

from hone.models.attention.packed import PackedContext
from hone.models.attention.tiles import pack_tiles, score_count, token_count

LENGTHS = st.lists(st.tuples(st.integers(1, 600), st.one_of(st.just(0), st.integers(1, 400))), min_size=1, max_size=60)


def fill(tile: list[int], suffixes: list[int], prefixes: list[int], measure) -> float:
    slot = measure(max(suffixes[row] for row in tile), max(prefixes[row] for row in tile))
    return sum(measure(suffixes[row], prefixes[row]) for row in tile) / (len(tile) * slot)


@examples(100)
@given(LENGTHS, st.sampled_from([token_count, score_count]))
def test_every_row_is_in_one_tile_that_is_mostly_full(lengths, measure):
    suffixes, prefixes = [suffix for suffix, _ in lengths], [prefix for _, prefix in lengths]
    tiles = pack_tiles(suffixes, prefixes, measure)
    order = [row for tile in tiles for row in tile]
    assert sorted(order) == list(range(len(lengths)))
    assert order == sorted(order, key=lambda row: (not prefixes[row], -suffixes[row], -prefixes[row], row))
    for tile in tiles:
        assert fill(tile, suffixes, prefixes, measure) >= 0.85
        assert len({prefixes[row] > 0 for row in tile}) == 1
    for tile, following in zip(tiles, tiles[1:], strict=False):
        joined = [*tile, following[0]]
        mixed = (prefixes[tile[0]] > 0) != (prefixes[following[0]] > 0)
        assert mixed or fill(joined, suffixes, prefixes, measure) < 0.85, "a row opens a tile only if it has to"


def test_known_groups():
    assert pack_tiles([10, 10, 9, 3, 10]) == [[0, 1, 4, 2], [3]]
    assert pack_tiles([10, 10], [4, 0], score_count) == [[0], [1]]
    assert pack_tiles([100, 85], measure=token_count) == [[0, 1]] and pack_tiles([100, 69]) == [[0], [1]]
    assert pack_tiles([100, 83], measure=score_count) == [[0], [1]]  # 0.84 of the scores, 0.91 of the tokens


@examples(40)
@given(contexts(longest=300, most=20))
def test_tiles_of_whole_sequences_gather_each_token_and_scatter_it_back(context):
    tokens, position = torch.arange(context.position_ids.shape[1]), context.position_ids[0]
    gathered = [tile.gather(position) for tile in context.tiles.tiles]
    assert torch.equal(context.tiles.scatter([tile.gather(tokens) for tile in context.tiles.tiles]), tokens)
    assert all(bool((rows.diff(dim=1) >= 0).all()) and bool((rows[:, 0] == 0).all()) for rows in gathered)


@examples(40)
@given(contexts())
def test_the_packed_index_of_a_token_is_where_the_tree_has_it(context):
    sequences = context.sequences
    for number, tokens in enumerate(tokens_of(sequences)):
        index = sequences.packed_index(torch.tensor(number), torch.arange(len(tokens)))
        assert index.tolist() == tokens
        assert context.position_ids[0, tokens].tolist() == list(range(len(tokens)))


@pytest.mark.parametrize(
    ("lengths", "shared"), [([], []), ([3, 0], [0, 0]), ([3, 2], [0, 2]), ([2, 5], [0, 3]), ([2, 2], [1, 0])]
)
def test_a_sequence_has_tokens_of_its_own_and_shares_only_what_there_is(lengths, shared):
    with pytest.raises(ValueError):
        PackedContext.from_lengths(lengths, shared=shared)
