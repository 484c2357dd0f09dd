"""Rows that only fill up the batch of a CUDA graph: whatever time passes, they leave the scratch page alone and end nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.paged import PAGE, paged_engine

from hone.generation.native.paged import rows as paged_rows
from hone.generation.native.paged.rows import StepGraphs, size_of_graph
from hone.generation.protocol import GenerationRequest, SamplingParams

LONGEST = 16


class Eager(StepGraphs):
    """Computes each step as a replay of its graph would, at the size of the graph."""

    def run(self, key: Any, step: Any, table: Any) -> torch.Tensor:
        return step()


@pytest.mark.parametrize("most", [1, 24, 60, 512])
def test_the_size_of_a_graph_is_the_next_power_of_two_or_three_quarters_of_one(most):
    sizes = [2**exponent for exponent in range(12)] + [3 * 2**exponent for exponent in range(3, 10)]
    for rows in range(1, most + 1):
        assert size_of_graph(rows, most) == min(most, min(size for size in sizes if size >= rows))


@pytest.mark.parametrize("session", [None, "turns"])
@pytest.mark.parametrize("count", [3, 5, 7])
def test_fillers_do_not_grow_however_many_steps_pass(make_model, make_engine, serve, monkeypatch, count, session):
    """More steps than a row has room for, with a batch that is never the size of a graph; also with turns of agents."""
    assert size_of_graph(count, 8) > count
    model = make_model("qwen3")
    monkeypatch.setattr(paged_rows, "StepGraphs", Eager)
    engine = paged_engine(monkeypatch, model, max_num_seqs=8, max_model_len=LONGEST)
    rows, plain = engine._runner.rows, make_engine(model, max_num_seqs=8, max_model_len=LONGEST)
    rows._no_graphs = None

    seen = []
    step = rows.step

    def watched(work: Any) -> Any:
        ends, table = step(work), rows._memory.table
        seen.append((len(rows.running), table.lengths(8).tolist(), table.pages(8).tolist()))
        return ends

    rows.step = watched
    for number in range(4 * LONGEST // 7):
        requests = [
            GenerationRequest(
                f"{number}.{i}", [3 + i, 4, 5, 6], SamplingParams(max_tokens=4 + i, ignore_eos=True), seed=i,
                session=session and f"{session}.{number}.{i}",
            )
            for i in range(count)
        ]  # fmt: skip
        answers, expected = serve(engine, requests), serve(plain, requests)
        assert {name: a.token_ids for name, a in answers.items()} == {n: a.token_ids for n, a in expected.items()}
    assert rows.steps > LONGEST
    for used, lengths, pages in seen:
        assert lengths[used:] == [0] * (8 - used)
        assert pages[used:] == [[0] * -(-LONGEST // PAGE)] * (8 - used)
