"""Session KV cache: cached turns are not computed again, and nothing else changes."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.examples import examples

from hone.generation.native.sessions import CachedTurn, SessionCache
from hone.generation.protocol import Completion, Engine, GenerationRequest, SamplingParams

SAMPLING = SamplingParams(max_tokens=7, ignore_eos=True)
ADDED = {1: [5, 9, 14, 3], 2: [21], 3: [8, 8, 30, 40, 50, 6, 7]}


def opening(episode: int) -> list[int]:
    return [3 + (7 * episode + place) % 50 for place in range(2 + 3 * episode)]


def play(engine: Engine, *, sessions: bool, episodes: int = 4, turns: int = 4) -> dict[str, list[Completion]]:
    """Every episode asks, adds a few tokens, asks again; episodes run at the same time."""

    async def episode(number: int) -> list[Completion]:
        ids, answers = opening(number), []
        for turn in range(turns):
            request = GenerationRequest(
                f"{number}.{turn}", ids, SAMPLING, 31 * number + turn, f"episode {number}" if sessions else None
            )
            answer = [completion async for completion in engine.generate([request])][0]
            answers.append(answer)
            ids = ids + answer.token_ids + ADDED.get(turn + 1, [])
        return answers

    async def all_of_them() -> dict[str, list[Completion]]:
        played = await asyncio.gather(*(episode(number) for number in range(episodes)))
        return {str(number): answers for number, answers in enumerate(played)}

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gpt_oss"])
def test_a_turn_costs_its_new_tokens_and_draws_the_same(make_model, make_engine, name):
    model = make_model(name)
    kept, fresh = make_engine(model), make_engine(model)
    with_sessions, without = play(kept, sessions=True), play(fresh, sessions=False)
    for number, answers in without.items():
        for expected, actual in zip(answers, with_sessions[number], strict=True):
            assert actual.token_ids == expected.token_ids
            torch.testing.assert_close(actual.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    # computed at a turn's start: its last sampled token, which was not fed, and what was added but for the last token
    added = [len(ids) for ids in ADDED.values()]
    first = sum(len(opening(number)) - 1 for number in range(4))
    stats = kept.describe().stats
    assert stats["prefill_tokens"] == first + 4 * sum(added)
    assert stats["session_hits"] == 4 * 3
    again = sum(len(opening(n)) - 1 + turn * 7 + sum(added[:turn]) for n in range(4) for turn in range(4))
    assert fresh.describe().stats["prefill_tokens"] == again


def test_new_weights_and_ended_sessions_are_forgotten(make_model, make_engine):
    engine = make_engine(make_model("qwen3"))

    def turn(ids: list[int]) -> Completion:
        async def ask() -> Completion:
            request = GenerationRequest("r", ids, SAMPLING, 3, "episode")
            return [completion async for completion in engine.generate([request])][0]

        return asyncio.run(ask())

    def hits() -> int:
        return engine.describe().stats["session_hits"]

    ids = opening(2)
    ids = ids + turn(ids).token_ids + [4, 4]
    turn(ids)
    assert hits() == 1
    turn([*ids[:5], 60, *ids[5:]])  # begins alike: what is common is not computed again
    assert hits() == 2 and engine.describe().stats["session_tokens"] == len(ids) - 3 + 5
    asyncio.run(engine.load_weights([], 1))
    turn(ids)
    assert hits() == 2
    asyncio.run(engine.end_sessions(["episode", "never seen"]))
    turn(ids)
    assert hits() == 2


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30), st.booleans()), max_size=30))
def test_cached_turns_stay_within_their_limit_and_the_longest_unused_goes_first(steps):
    cached, model = SessionCache(limit=50), {}
    for name, length, lookup in steps:
        session = str(name)
        if lookup:
            got = cached.find(session, [*range(length), 0], 0)
            kept = model.get(session)
            assert (got is None) == (kept is None)
            if got is not None and kept is not None:
                assert got[1] == min(kept, length)
                model[session] = model.pop(session)
        else:
            model.pop(session, None)
            model[session] = length
            cached.put(session, CachedTurn(list(range(length)), 0, {}))
            while sum(model.values()) > 50:
                model.pop(next(iter(model)))
        assert cached.tokens == sum(model.values()) <= 50 and len(cached) == len(model)


def test_a_turn_of_other_weights_is_not_reused():
    cached = SessionCache(limit=50)
    turn = CachedTurn([1, 2, 3], 4, {})
    cached.put("a", turn)
    assert cached.find("a", [1, 2, 3, 9], 4) == (turn, 3)
    assert cached.find("a", [1, 2, 3], 4) == (turn, 2)
    for other in (dataclasses.replace(turn, version=5), turn):
        assert cached.find("a", [7, 2, 3], other.version) is None
    assert cached.find("a", [1, 2, 3, 9], 5) is None and cached.find(None, [1, 2, 3], 4) is None
