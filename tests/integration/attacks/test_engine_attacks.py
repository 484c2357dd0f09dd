"""One bad request in the native engine ends alone: its neighbours keep decoding, and get the tokens that they get without it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import torch
from support.families import Letters, make_engine, tiny_model
from torch import nn

from hone.agents.episode import EngineClient
from hone.errors import GenerationError, RequestError
from hone.generation.protocol import Completion, GenerationRequest, Progress, SamplingParams

TOKENS = 24
POISON = 60
"""A token whose embedding raises in :func:`poisoned`, or is not a number in :func:`without_numbers`."""
Answer = Completion | BaseException


def request(name: str, prompt: list[int], **changes: Any) -> GenerationRequest:
    beside = {key: changes.pop(key) for key in ("seed", "progress") if key in changes}
    return GenerationRequest(name, prompt, SamplingParams(**{"max_tokens": TOKENS, **changes}), **{"seed": 7, **beside})


def neighbours(**changes: Any) -> list[GenerationRequest]:
    return [request(f"good {i}", [5 + i, 9, 11 + i % 2], seed=i, **changes) for i in range(4)]


def answers(engine: Any, *waves: list[GenerationRequest]) -> dict[str, Answer]:
    """Serve waves of requests that begin a few steps after one another; an error is the answer of its request."""
    client = EngineClient(engine)

    async def one(asked: GenerationRequest, wave: int) -> Answer:
        for _ in range(3 * wave):
            await asyncio.sleep(0)
        return await client.complete(asked)

    async def all_of_them() -> dict[str, Answer]:
        asked = [(one_request, wave) for wave, requests in enumerate(waves) for one_request in requests]
        async with asyncio.timeout(60):
            done = await asyncio.gather(*(one(*each) for each in asked), return_exceptions=True)
        return {asked_request.request_id: answer for (asked_request, _), answer in zip(asked, done, strict=True)}

    return asyncio.run(all_of_them())


def assert_unharmed(done: dict[str, Answer], good: list[GenerationRequest], engine: Any = None) -> None:
    """Check that the good requests got the tokens that a fresh engine gives them alone."""
    alone = answers(engine or make_engine(tiny_model("qwen3")), good)
    for each in good:
        got, expected = done[each.request_id], alone[each.request_id]
        assert isinstance(got, Completion), got
        assert isinstance(expected, Completion)
        assert (got.token_ids, got.stop_reason) == (expected.token_ids, expected.stop_reason)


REFUSED = {
    "beyond the vocabulary": ("prompt", {"prompt": [5, 1_000_000, 6]}),
    "last token beyond the vocabulary": ("prompt", {"prompt": [5, 61]}),
    "negative token": ("prompt", {"prompt": [-1, 5]}),
    "huge token": ("prompt", {"prompt": [2**70, 5]}),
    "no integer": ("prompt", {"prompt": [1.5, 2]}),
    "top_k": ("top_k", {"top_k": 2**70}),
    "seed": ("seed", {"seed": 2**90}),
    "surrogate": ("stop", {"stop": ("\ud800",)}),
    "empty stop": ("stop", {"stop": ("",)}),
    "many stops": ("stop", {"stop": tuple(map(str, range(1000)))}),
    "infinite temperature": ("temperature", {"temperature": float("inf")}),
    "tiny temperature": ("temperature", {"temperature": 1e-300}),
    "no probability": ("top_p", {"top_p": float("nan")}),
    "penalty": ("repetition_penalty", {"repetition_penalty": 1e-200}),
    "stop token": ("stop_token_ids", {"stop_token_ids": (2**70,)}),
    "endless": ("max_tokens", {"max_tokens": 2**70}),
}


@pytest.mark.parametrize("attack", REFUSED)
@pytest.mark.parametrize("later", [False, True], ids=["together", "later"])
def test_a_request_that_cannot_be_served_is_refused_alone(attack: str, later: bool) -> None:
    field, changes = REFUSED[attack]
    bad, good = request("bad", **{"prompt": [5, 6], **changes}), neighbours()
    waves = (good, [bad]) if later else ([*good[:2], bad, *good[2:]],)
    done = answers(make_engine(tiny_model("qwen3")), *waves)
    error = done["bad"]
    assert isinstance(error, RequestError) and error.field == field
    assert_unharmed(done, good)


def poisoned(model: nn.Module) -> nn.Module:
    """Let a prompt with one token raise in its prefill."""

    def check(_: nn.Module, arguments: tuple[torch.Tensor]) -> None:
        if arguments[0].shape[1] > 1 and bool((arguments[0] == POISON).any()):
            raise RuntimeError("not enough memory")

    model.get_input_embeddings().register_forward_pre_hook(check)
    return model


@pytest.mark.parametrize("company", ["alone", "same prompt", "with a prefix"])
def test_a_prompt_that_cannot_be_prefilled_fails_alone(company: str) -> None:
    good = neighbours() if company != "with a prefix" else [*neighbours(), request("twin", [5, 9, 11], seed=9)]
    bad = [request("bad", [8, POISON, 9])]
    if company == "same prompt":
        bad.append(request("worse", [8, POISON, 9], seed=3))
    engine = make_engine(poisoned(tiny_model("qwen3")), max_num_seqs=16)
    late = [dataclasses.replace(one, request_id=f"late {one.request_id}") for one in good]
    done = answers(engine, [*good[:2], *bad, *good[2:]], late)
    for one in bad:
        assert isinstance(done[one.request_id], GenerationError)
        assert not isinstance(done[one.request_id], RequestError)
    assert_unharmed(done, [*good, *late])
    assert not engine._runner.rows.prefixes.count and not engine._runner.running
    assert_unharmed(answers(engine, good), good)


def test_logits_without_a_number_end_one_request() -> None:
    model = tiny_model("qwen3")
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[POISON] = float("nan")
    good, bad = neighbours(), request("bad", [8, POISON])
    done = answers(make_engine(model), [*good, bad])
    assert isinstance(done["bad"], GenerationError)
    assert_unharmed(done, [one for one in good if POISON not in tokens_of(done[one.request_id])])


def tokens_of(answer: Answer) -> list[int]:
    assert isinstance(answer, Completion), answer
    return answer.token_ids


class Fragile(Letters):
    """A tokenizer that cannot decode after some calls."""

    calls = 0

    def decode(self, ids: list[int], **options: object) -> str:
        self.calls += 1
        if self.calls > 4:
            raise ValueError("no such token")
        return super().decode(ids, **options)


def broken_progress(count: int) -> Progress:
    def progress(ids: list[int], *_: object) -> None:
        if len(ids) >= count:
            raise RuntimeError("the caller's event loop is closed")

    return progress


def test_a_stop_string_that_cannot_be_searched_ends_one_request() -> None:
    good, bad = neighbours(), request("bad", [8, 9], stop=("no such text",))
    done = answers(make_engine(tiny_model("qwen3"), tokenizer=Fragile()), [*good, bad])
    assert isinstance(done["bad"], GenerationError)
    assert_unharmed(done, good)


def test_a_progress_callback_that_raises_ends_one_request() -> None:
    good, bad = neighbours(), request("bad", [8, 9], progress=broken_progress(4))
    done = answers(make_engine(tiny_model("qwen3")), [*good, bad])
    assert isinstance(done["bad"], GenerationError)
    assert_unharmed(done, good)


def test_a_cache_that_cannot_grow_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of one layer is missing when a long prompt enters; the rows of the others stay as they are."""
    from hone.models.attention import cache

    whole = cache._resized

    def scarce(kv: torch.Tensor, rows: int, capacity: int, used: int) -> torch.Tensor:
        calls.append(capacity)
        if capacity > 90 and len(calls) % 3 == 0:
            raise RuntimeError("not enough memory")
        return whole(kv, rows, capacity, used)

    calls: list[int] = []
    good, bad = neighbours(), request("bad", [8] * 100, max_tokens=4)
    engine = make_engine(tiny_model("qwen3"))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_resized", scarce)
        done = answers(engine, good, [bad])
    assert isinstance(done["bad"], GenerationError)
    assert_unharmed(done, good)
    assert_unharmed(answers(engine, [bad, *good]), [bad, *good])
