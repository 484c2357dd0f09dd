"""What every engine promises, whichever it is. External engines run here in their own environment: `scripts/conformance NAME`.

The oracle is a forward pass without cache by transformers, in float32.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import os
import random
import re
import signal
from collections.abc import Iterator
from typing import cast

import psutil
import pytest
import torch
import transformers
from support.engine_cases import (
    EOS,
    MAX_MODEL_LEN,
    SHAPE,
    VOCABULARY,
    Subject,
    assert_greedy,
    byte_tokenizer,
    collect,
    decided,
    expected_log_probs,
    make_model,
    requests,
    save,
    serve,
    start,
)
from support.messages import check_message, raises
from support.patience import SOON

from hone.config.rollout import SpeculativeConfig
from hone.data.types import StopReason
from hone.errors import ConfigError, GenerationError, RequestError
from hone.generation.environments import interpreter_of
from hone.generation.native.speculative.build import speculation_from_config
from hone.generation.protocol import Constraint, ConstraintKind, GenerationRequest, SamplingParams
from hone.generation.remote import EngineLost, ServedEngine
from hone.generation.remote.delta import Differences
from hone.generation.remote.engine import TOKEN_VARIABLE
from hone.generation.remote.transports import make_sender

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SAMPLINGS = {
    "plain": SamplingParams(max_tokens=16, temperature=0.8),
    "top-k": SamplingParams(max_tokens=16, top_k=7),
    "top-p": SamplingParams(max_tokens=16, temperature=1.3, top_p=0.7),
    "min-p": SamplingParams(max_tokens=16, min_p=0.2),
    "penalty": SamplingParams(max_tokens=16, repetition_penalty=1.4),
    "counts": SamplingParams(max_tokens=16, presence_penalty=1.5, frequency_penalty=0.5, temperature=0.7),
    "bias": SamplingParams(max_tokens=16, logit_bias=((70, 6.0), (71, -100.0)), top_k=20),
    "all": SamplingParams(max_tokens=16, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
}
EXTERNAL = ("vllm", "sglang", "trtllm")
ADJUSTED = ("presence_penalty", "frequency_penalty", "logit_bias")
REFUSED = {
    "sglang": ("repetition_penalty", *ADJUSTED),
    "trtllm": ("top_k", "top_p", "min_p", "repetition_penalty", *ADJUSTED),
}
"""Sampling that an engine has another meaning for, or cannot report the log-probs of: it says so."""
KINDS = [
    "native",
    pytest.param("hf", marks=pytest.mark.long("hone/generation/hf.py", "hone/generation/protocol.py")),
    pytest.param(
        "served", marks=[pytest.mark.slow, pytest.mark.application("hone/generation", "hone/models", "hone/cluster")]
    ),
    *(pytest.param(name, marks=pytest.mark.engines) for name in EXTERNAL),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two policies of one architecture, and where the first is written; tied and untied."""
    root = tmp_path_factory.mktemp("conformance")
    return {
        kind: (make_model(kind), make_model(kind, seed=1), save(make_model(kind), root / kind))
        for kind in ("tied", "untied")
    }


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    if request.param in EXTERNAL:
        try:
            interpreter_of(request.param)
        except ConfigError as missing:
            pytest.skip(missing.what)
    return request.param


@pytest.fixture(scope="module")
def running(kind, models, tmp_path_factory) -> Iterator[Subject]:
    subject = start(kind, models["tied"][2], tmp_path_factory.mktemp("logs") / f"{kind}.log")
    yield subject
    subject.engine.close()


@pytest.fixture
def subject(running, models) -> Subject:
    """The engine with the first policy's weights."""
    asyncio.run(running.take(models["tied"][0], 1))
    return running


@pytest.fixture
def model(models):
    return models["tied"][0]


def long_running(count: int, tokens: int = MAX_MODEL_LEN - 60) -> list[GenerationRequest]:
    return requests(SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True), count)


# tokens and log-probs ------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_a_full_forward_pass(subject, model):
    asked = requests(GREEDY)
    done = serve(subject.engine, asked)
    assert done.keys() == {one.request_id for one in asked}
    for one in asked:
        got = done[one.request_id]
        assert (len(got.token_ids), got.stop_reason, got.weight_versions) == (24, StopReason.LENGTH, (1, 1))
        assert got.sampling_log_probs == got.log_probs
        assert_greedy(model, one, got)


def test_constrained_responses_and_alternatives_have_the_log_probs_of_the_policy(subject, model):
    expression, tokenizer = "(ab|c){2,6}", byte_tokenizer()
    asked = requests(
        SamplingParams(
            max_tokens=20,
            temperature=0.8,
            stop_token_ids=(EOS,),
            constraint=Constraint(ConstraintKind.REGEX, expression),
            top_log_probs=4,
        ),
        4,
    )
    if subject.kind in ("sglang", "trtllm"):
        with raises(RequestError, "constraint"):
            serve(subject.engine, asked)
        return
    broken = SamplingParams(stop_token_ids=(EOS,), constraint=Constraint(ConstraintKind.REGEX, "(a"))
    with pytest.raises(RequestError):
        serve(subject.engine, requests(broken, 1))
    free = requests(SamplingParams(max_tokens=12, temperature=0.8), 2)
    free = [dataclasses.replace(one, request_id=f"free {one.request_id}") for one in free]
    done = serve(subject.engine, [*asked, *free])
    for one in free:
        raw, _ = expected_log_probs(model, one, done[one.request_id].token_ids)
        torch.testing.assert_close(torch.tensor(done[one.request_id].log_probs), raw, atol=1e-4, rtol=0)
    for one in asked:
        got = done[one.request_id]
        assert got.stop_reason is StopReason.STOP and re.fullmatch(expression, tokenizer.decode(got.token_ids[:-1]))
        raw, _ = expected_log_probs(model, one, got.token_ids)
        torch.testing.assert_close(torch.tensor(got.log_probs), raw, atol=1e-4, rtol=0)
        ids, start = torch.tensor([one.prompt_ids + got.token_ids]), len(one.prompt_ids)
        with torch.no_grad():
            policy = (model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float() / 0.8).log_softmax(-1)
        for place, (token, alternatives) in enumerate(zip(got.token_ids, got.alternatives, strict=True)):
            likeliest = policy[place].topk(4)
            assert [other for other, _ in alternatives] == likeliest.indices.tolist()
            torch.testing.assert_close(torch.tensor([p for _, p in alternatives]), likeliest.values, atol=1e-4, rtol=0)
            before = tokenizer.decode(got.token_ids[:place])
            allowed = [
                number
                for number in range(256)
                if re.fullmatch("((ab|c){0,5}(a|ab|c)|)", before + tokenizer.decode([number]))
            ]
            allowed += [EOS] * bool(re.fullmatch(expression, before))
            expected = policy[place, token] - policy[place, allowed].logsumexp(0)
            assert got.sampling_log_probs[place] == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_log_probs_are_those_of_the_policy_and_of_what_was_sampled_from(subject, model, name):
    sampling = SAMPLINGS[name]
    usual = {key: getattr(SamplingParams(), key) for key in REFUSED.get(subject.kind, ())}
    refused = [key for key, value in usual.items() if getattr(sampling, key) != value]
    if refused:
        with raises(GenerationError, f"{refused[0]}"):
            serve(subject.engine, requests(sampling, 2))
        sampling = dataclasses.replace(sampling, **usual)
    asked = requests(sampling, 5)
    done = serve(subject.engine, asked)
    for one in asked:
        got = done[one.request_id]
        raw, drawn = expected_log_probs(model, one, got.token_ids, min_p_first=subject.kind == "vllm")
        torch.testing.assert_close(torch.tensor(got.log_probs), raw, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(got.sampling_log_probs), drawn, atol=1e-4, rtol=0)
        assert torch.isfinite(drawn).all(), "nothing that was cut away is sampled"


def test_tokens_depend_on_the_seed_and_not_on_what_else_is_served(subject):
    sampling = SamplingParams(max_tokens=16)
    prompt = list(range(40, 90))
    group = [GenerationRequest(f"seed {seed}", prompt, sampling, seed=seed) for seed in range(8)]
    long = [GenerationRequest(f"long {place}", (prompt * 4)[place:], sampling, seed=place) for place in range(24)]
    crowd = serve(subject.engine, [*long, *group, *requests(sampling, 3)])  # more than an engine takes in one pass
    alone = [serve(subject.engine, [one])[one.request_id].token_ids for one in group[:3]]
    assert alone == [crowd[one.request_id].token_ids for one in group[:3]]
    for one in long[8:12]:
        assert serve(subject.engine, [one])[one.request_id].token_ids == crowd[one.request_id].token_ids
    assert len({tuple(crowd[one.request_id].token_ids) for one in group}) == 8, "samples of a group differ"


def test_samples_follow_the_distribution(subject, model):
    prompt = [65, 66, 67]
    count = 300 if subject.interrupts() else 60
    asked = [GenerationRequest(str(s), prompt, SamplingParams(max_tokens=1), seed=s) for s in range(count)]
    found = torch.zeros(model.config.vocab_size)
    for got in serve(subject.engine, asked).values():
        found[got.token_ids[0]] += 1 / len(asked)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([prompt])).logits[0, -1].float().softmax(-1)
    likely = wanted > 0.03
    assert likely.any()
    spread = (wanted * (1 - wanted) / len(asked)).sqrt()
    assert ((found - wanted).abs()[likely] < 4.5 * spread[likely]).all()


# endings -------------------------------------------------------------------------------------------------------------


def test_stop_tokens_end_a_response_and_stay_in_it(subject):
    free = serve(subject.engine, requests(GREEDY, 4))
    for key, whole in free.items():
        stop = whole.token_ids[5]
        first = whole.token_ids.index(stop)
        asked = [
            one
            for one in requests(SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(stop, EOS)), 4)
            if one.request_id == key
        ]
        got = serve(subject.engine, asked)[key]
        assert (got.token_ids, got.stop_reason) == (whole.token_ids[: first + 1], StopReason.STOP)
        ignoring = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(stop, EOS), ignore_eos=True)
        got = serve(subject.engine, [GenerationRequest(key, asked[0].prompt_ids, ignoring)])[key]
        assert (got.token_ids, got.stop_reason) == (whole.token_ids, StopReason.LENGTH)


def test_the_models_end_of_sequence_is_a_stop_token_only_if_requested(subject, model):
    """Stopping tokens are named by the request alone, not by files of the model."""
    prompts = torch.randint(0, 256, (4000, 3), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ending = prompts[model(input_ids=prompts).logits[:, -1].argmax(-1) == EOS]
    prompt = ending[0].tolist()
    asked = [
        GenerationRequest("named", prompt, SamplingParams(max_tokens=5, temperature=0.0, stop_token_ids=(EOS,))),
        GenerationRequest("not named", prompt, SamplingParams(max_tokens=5, temperature=0.0)),
    ]
    done = serve(subject.engine, asked)
    assert (done["named"].token_ids, done["named"].stop_reason) == ([EOS], StopReason.STOP)
    assert (len(done["not named"].token_ids), done["not named"].stop_reason) == (5, StopReason.LENGTH)
    assert done["not named"].token_ids[0] == EOS


def test_stop_strings_of_several_tokens_end_a_response_and_stay_in_it(subject):
    """Random bytes now and then make a character of two bytes; it ends the response with its second one."""
    tokenizer, found = byte_tokenizer(), 0
    asked = [
        GenerationRequest(str(s), [70, 71], SamplingParams(max_tokens=60, temperature=2.0), seed=s) for s in range(24)
    ]
    free = serve(subject.engine, asked)
    for one in asked:
        tokens = free[one.request_id].token_ids
        where = next((i for i in range(1, len(tokens)) if _two_byte_letter(tokenizer, tokens[i - 1 : i + 1])), None)
        if where is None or found == 2:
            continue
        letter = tokenizer.decode(tokens[where - 1 : where + 1])
        found += 1
        stopping = SamplingParams(max_tokens=60, temperature=2.0, stop=(letter, "never said"))
        got = serve(subject.engine, [GenerationRequest("s", one.prompt_ids, stopping, seed=one.seed)])["s"]
        assert (got.token_ids, got.stop_reason) == (tokens[: where + 1], StopReason.STOP)
    assert found == 2


def _two_byte_letter(tokenizer, pair: list[int]) -> bool:
    text = tokenizer.decode(pair)
    return len(text) == 1 and ord(text) > 0x7F and text != "\ufffd"


def test_the_longest_sequence_fits_and_one_token_is_enough(subject):
    whole = GenerationRequest(
        "whole", [7] * 200, SamplingParams(max_tokens=MAX_MODEL_LEN - 200, temperature=0.0, ignore_eos=True)
    )
    one = GenerationRequest("one", [7], SamplingParams(max_tokens=1))
    done = serve(subject.engine, [whole, one])
    assert len(done["whole"].token_ids) == MAX_MODEL_LEN - 200 and len(done["one"].token_ids) == 1


@pytest.mark.parametrize(("prompt", "tokens"), [(200, MAX_MODEL_LEN - 199), (0, 4), (3, 0)])
def test_a_request_beyond_the_limits_is_refused_without_effect_on_others(subject, model, prompt, tokens):
    impossible = GenerationRequest("impossible", [5] * prompt, SamplingParams(max_tokens=tokens))
    fine = requests(GREEDY, 3)

    async def both():
        async with asyncio.TaskGroup() as group:
            good = group.create_task(collect(subject.engine, fine))
            await asyncio.sleep(0)
            with raises(GenerationError, "'impossible'"):
                await collect(subject.engine, [*requests(GREEDY, 2), impossible])
        return good.result()

    done = asyncio.run(both())
    for one in fine:
        assert_greedy(model, one, done[one.request_id])


# control -------------------------------------------------------------------------------------------------------------


def test_an_aborted_request_keeps_its_tokens_and_can_be_continued(subject):
    asked = long_running(3)
    free = serve(subject.engine, asked)

    async def abort():
        async def stop():
            await asyncio.sleep(0.02)
            await subject.engine.abort(["0", "2"])

        done, _ = await asyncio.gather(collect(subject.engine, asked), stop())
        return done

    done = asyncio.run(abort())
    if not subject.interrupts():
        assert {got.stop_reason for got in done.values()} <= {StopReason.LENGTH, StopReason.ABORTED}
        return
    assert done["1"].token_ids == free["1"].token_ids and done["1"].stop_reason is StopReason.LENGTH
    for one in (asked[0], asked[2]):
        got, whole = done[one.request_id], free[one.request_id]
        assert got.stop_reason is StopReason.ABORTED and len(got.token_ids) < len(whole.token_ids)
        assert got.token_ids == whole.token_ids[: len(got.token_ids)]
        assert len(got.log_probs) == len(got.sampling_log_probs) == len(got.token_ids)
        left = SamplingParams(max_tokens=one.sampling.max_tokens - len(got.token_ids), temperature=0.0, ignore_eos=True)
        rest = serve(subject.engine, [GenerationRequest("rest", one.prompt_ids + got.token_ids, left)])["rest"]
        assert got.token_ids + rest.token_ids == whole.token_ids


def test_a_caller_that_goes_away_ends_its_requests(subject):
    async def leave():
        stream = subject.engine.generate(
            [*long_running(6), GenerationRequest("first", [1], SamplingParams(max_tokens=1))]
        )
        async for _ in stream:
            break
        await stream.aclose()
        return await collect(subject.engine, requests(GREEDY, 1))

    assert len(asyncio.run(leave())["0"].token_ids) == 24


def test_nothing_is_decoded_during_a_pause(subject):
    if not subject.interrupts():
        return
    asked = long_running(4, 60)
    free = serve(subject.engine, asked)

    async def paused():
        await subject.engine.pause()
        task = asyncio.create_task(collect(subject.engine, asked))
        await asyncio.sleep(0.5)
        still = not task.done()
        await subject.engine.resume()
        return still, await asyncio.wait_for(task, SOON)

    still, done = asyncio.run(paused())
    assert still
    assert {key: got.token_ids for key, got in done.items()} == {key: got.token_ids for key, got in free.items()}


def test_after_sleep_and_wake_the_answers_are_the_same(subject):
    asked = requests(GREEDY, 3)
    before = serve(subject.engine, asked)

    async def sleep():
        await _sleep_and_wake(subject.engine)
        return await collect(subject.engine, asked)

    after = asyncio.run(sleep())
    assert {key: got.token_ids for key, got in after.items()} == {key: got.token_ids for key, got in before.items()}


def test_dropped_weights_come_back_with_the_next_version_only(subject, models):
    """As in a step of training: the engine sleeps during the update, and takes its cache back after the new weights."""
    if subject.kind == "hf":  # it has no weights of its own
        return
    _, new, _ = models["tied"]
    asked = requests(GREEDY, 3, shortest=40)
    serve(subject.engine, asked)

    async def step():
        engine = subject.engine
        await engine.sleep(keep_weights=False)
        await engine.pause()
        await engine.wake(cache=False)
        with pytest.raises(GenerationError):
            await collect(engine, asked[:1])
        await subject.take(new, 2)
        await engine.wake()
        await engine.resume()
        await engine.wake()  # an engine that is awake stays so
        return await collect(engine, asked)

    for name, answer in asyncio.run(step()).items():
        assert_greedy(new, next(one for one in asked if one.request_id == name), answer)
        assert answer.weight_versions == (2, 2)


def test_a_thousand_concurrent_callers_get_their_answers(subject):
    if not subject.interrupts():
        return
    asked = [
        GenerationRequest("same name", [3, seed % 250, 9], SamplingParams(max_tokens=2 + seed % 5), seed=seed)
        for seed in range(1000)
    ]

    async def crowd():
        return await asyncio.gather(*(collect(subject.engine, [one]) for one in asked))

    answers = asyncio.run(crowd())
    assert [len(done["same name"].token_ids) for done in answers] == [one.sampling.max_tokens for one in asked]
    again = serve(subject.engine, [asked[123]])
    assert again["same name"].token_ids == answers[123]["same name"].token_ids


# weights -------------------------------------------------------------------------------------------------------------


def test_new_weights_answer_as_the_new_policy_and_nothing_of_the_old_is_left(subject, models):
    """Long prompts, asked before and after: what was cached of the old weights must be gone."""
    old, new, _ = models["tied"]
    asked = requests(GREEDY, 5, shortest=100)
    before = serve(subject.engine, asked)
    asyncio.run(subject.take(new, 2))
    after = serve(subject.engine, asked)
    for one in asked:
        assert_greedy(old, one, before[one.request_id])
        assert_greedy(new, one, after[one.request_id])
        assert after[one.request_id].weight_versions == (2, 2)
    asyncio.run(subject.take(old, 3))
    assert_greedy(old, asked[0], serve(subject.engine, asked)["0"])


def test_weights_that_change_in_mid_flight_show_in_the_versions(subject, models):
    if not subject.interrupts():
        return

    async def change(wait: float, version: int):
        task = asyncio.create_task(collect(subject.engine, long_running(2, 150)))
        for _ in range(3):  # the native engine makes 32 tokens in each turn of the loop, others take their time
            await asyncio.sleep(wait)
        await subject.engine.pause()
        await subject.take(models["tied"][1], version)
        await subject.engine.resume()
        return await asyncio.wait_for(task, SOON)

    before = 1
    for wait in (0, *(0.005 * 2**n for n in range(7))):  # until the change meets them between first and last token
        found = asyncio.run(change(wait, before + 1)).values()
        assert all(len(got.token_ids) == 150 for got in found)
        if all(got.weight_versions == (before, before + 1) for got in found):
            return
        before += 1
    raise AssertionError("no change of weights showed in the versions of what was under way")


def test_an_abort_between_an_update_and_resuming_keeps_tokens(subject, models):
    """The weights are the same ones again, so that whoever goes on says the same."""
    if not subject.interrupts():
        return
    asked = long_running(2)
    free = serve(subject.engine, asked)

    async def abort(wait: float, version: int):
        task = asyncio.create_task(collect(subject.engine, asked))
        for _ in range(3):
            await asyncio.sleep(wait)
        await subject.engine.pause()
        await subject.take(models["tied"][0], version)
        await subject.engine.abort(["0"])
        await subject.engine.resume()
        return await asyncio.wait_for(task, SOON)

    for version, wait in enumerate(
        (0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32), start=2
    ):  # until the update meets it on its way
        done = asyncio.run(abort(wait, version))
        assert done["1"].token_ids == free["1"].token_ids
        assert done["0"].token_ids == free["0"].token_ids[: len(done["0"].token_ids)]
        if done["0"].token_ids and done["0"].stop_reason is StopReason.ABORTED:
            return
    raise AssertionError("no abort met a request that had tokens")


def test_a_partial_update_never_serves(subject, models):
    if subject.kind == "hf":
        return
    _, new, _ = models["tied"]
    parameters = list(new.named_parameters())
    asked = requests(GREEDY, 2)

    async def partial():
        await subject.engine.load_weights(parameters[:4], 2, last=False)
        with raises(GenerationError, "version 2"):
            await collect(subject.engine, asked)
        await subject.engine.load_weights(parameters[4:], 2)
        whole = await collect(subject.engine, asked)
        with raises(GenerationError, "have not arrived"):
            await subject.engine.load_weights(parameters[:-2], 3)
        with raises(GenerationError, "version 3"):
            await collect(subject.engine, asked)
        await subject.engine.load_weights(parameters, 3)
        return whole, await collect(subject.engine, asked)

    for done in asyncio.run(partial()):
        for one in asked:
            assert_greedy(new, one, done[one.request_id])


class Damaging:
    """A transport that damages a bit of some chunks.

    Attributes:
        damaged: number of next chunks to damage.
    """

    def __init__(self) -> None:
        self._sender, self.damaged = make_sender("socket", same_machine=True), 0

    def pack(self, tensors):
        chunk = self._sender.pack(tensors)
        if self.damaged:
            self.damaged -= 1
            data = bytearray(base64.b64decode(chunk["data"]))
            data[chunk["places"][0]["offset"]] ^= 1
            chunk["data"] = base64.b64encode(data).decode()
        return chunk

    def close(self) -> None:
        self._sender.close()


def test_only_changes_are_sent_and_a_damaged_delta_never_serves(subject, models, monkeypatch):
    """A second client of the same server, with ``checkpoint_engine.delta``."""
    process = getattr(subject.engine, "process", None)
    if process is None:
        return
    monkeypatch.setenv(TOKEN_VARIABLE, process.token)
    engine = ServedEngine.attach(f"tcp://127.0.0.1:{process.port}", delta=True, bucket_bytes=60_000)
    transport = engine._transfer._route.host = Damaging()
    old = models["tied"][0]
    new = copy.deepcopy(old)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.view(-1)[::50] = -parameter.view(-1)[::50]
    former, parameters = dict(old.named_parameters()), list(new.named_parameters())
    asked, size = requests(GREEDY, 2), sum(parameter.nbytes for parameter in old.parameters())

    def sent(since, version) -> int:
        before = engine.describe().stats["weights_sent_bytes"]
        asyncio.run(engine.load_weights(parameters, version, since=since))
        done = serve(engine, asked)
        for one in asked:
            assert_greedy(new, one, done[one.request_id])
            assert done[one.request_id].weight_versions == (version, version)
        return engine.describe().stats["weights_sent_bytes"] - before

    try:
        assert sent(Differences(former.get), 2) > size, "the server had nothing: all deltas are refused"
        assert engine.describe().stats["weights_refused"] == len(parameters)
        asyncio.run(engine.load_weights(old.named_parameters(), 3))
        assert_greedy(old, asked[0], serve(engine, asked)["0"])
        assert sent(Differences(former.get), 4) < size / 25
        assert sent(Differences(dict(parameters).get), 5) == 0, "nothing changed"
        refused = engine.describe().stats["weights_refused"]
        transport.damaged = 1
        assert 0 < sent(None, 6) - size < size / 4, "one chunk is sent again"
        assert engine.describe().stats["weights_refused"] > refused
        transport.damaged = 1000
        with raises(GenerationError, "checkpoint_engine.backend=file"):
            sent(Differences(former.get), 7)
        transport.damaged = 0
        with raises(GenerationError, "version 7"):
            serve(engine, asked)
        with raises(GenerationError, "version 7"):
            serve(subject.engine, asked)
        assert sent(None, 7) == size
    finally:
        engine.close()


def test_weights_come_in_any_order_and_none_may_be_missing(subject, models):
    """Some engines join weights: one of those that are joined may come long after the others, or be the only one that does not."""
    if subject.kind == "hf":
        return
    _, new, _ = models["tied"]
    shuffled = random.Random(0).sample(list(new.named_parameters()), k=len(list(new.parameters())))
    asked = requests(GREEDY, 2)

    async def update():
        await subject.engine.load_weights(shuffled[: len(shuffled) // 2], 2, last=False)  # breaks off
        for number, weight in enumerate(shuffled):
            await subject.engine.load_weights([weight], 3, last=number == len(shuffled) - 1)
        found = await collect(subject.engine, asked)
        for left_out in ("layers.0.self_attn.v_proj", "layers.1.mlp.gate_proj", "layers.1.self_attn.q_norm"):
            some = [(name, tensor) for name, tensor in new.named_parameters() if left_out not in name]
            with raises(GenerationError, 1, "have not arrived"):
                await subject.engine.load_weights(some, 4)
        return found

    found = asyncio.run(update())
    for one in asked:
        assert_greedy(new, one, found[one.request_id])


def assert_takes_new_weights(subject, old, new, asked):
    """The engine answers as the old policy, and after an update as the new one; returns those answers."""
    before = serve(subject.engine, asked)
    asyncio.run(subject.take(new, 1))
    after = serve(subject.engine, asked)
    for one in asked:
        assert_greedy(old, one, before[one.request_id])
        assert_greedy(new, one, after[one.request_id])
    return after


def test_ids_that_the_tokenizer_lacks_are_never_sampled(kind, tmp_path):
    if kind in ("sglang", "trtllm"):
        pytest.skip("has no bias whose log-probs are the policy's")
    model = decided(transformers.Qwen3Config(**{**SHAPE, "vocab_size": VOCABULARY + 64}), 0)
    subject = start(kind, save(model, tmp_path / "padded"), tmp_path / "padded.log")
    try:
        asked = requests(SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True), 8)
        sampled = [token for answer in serve(subject.engine, asked).values() for token in answer.token_ids]
    finally:
        subject.engine.close()
    assert len(sampled) == 8 * 24 and max(sampled) < VOCABULARY  # a fifth of the ids are beyond


def test_an_untied_head_takes_new_weights_too(kind, models, tmp_path):
    old, new, path = models["untied"]
    subject = start(kind, path, tmp_path / "untied.log")
    try:
        assert_takes_new_weights(subject, old, new, requests(GREEDY, 3))
    finally:
        subject.engine.close()


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_a_model_divided_over_two_processes_takes_new_weights(kind, which, models, tmp_path):
    if kind != "vllm":  # the others were never divided
        return
    old, new, path = models[which]
    subject = start(kind, path, tmp_path / "divided.log", tensor_parallel_size=2)
    try:
        assert_takes_new_weights(subject, old, new, requests(GREEDY, 3))
        with raises(GenerationError, "have not arrived"):
            asyncio.run(subject.engine.load_weights(list(old.named_parameters())[:-1], 2))
    finally:
        subject.engine.close()


def test_two_copies_in_one_engine_take_new_weights_and_share_the_requests(kind, models, tmp_path):
    if kind != "vllm":
        return
    old, new, path = models["tied"]
    subject = start(kind, path, tmp_path / "copies.log", data_parallel_size=2)
    try:
        asked = requests(GREEDY, 6)
        after = assert_takes_new_weights(subject, old, new, asked)
        asyncio.run(_sleep_and_wake(subject.engine))
        again = serve(subject.engine, asked)
        assert {name: answer.token_ids for name, answer in again.items()} == {
            name: answer.token_ids for name, answer in after.items()
        }
    finally:
        subject.engine.close()


async def _sleep_and_wake(engine):
    await engine.sleep()
    await engine.wake()


def test_drafted_tokens_are_the_policys_and_have_both_log_probs(kind, models, tmp_path):
    """Speculative decoding: drafts are looked up in the sequence so far, which repeats itself here, and some are wrong."""
    if kind not in ("vllm", "native", "served"):
        return
    old, new, path = models["tied"]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if kind == "native":
        settings = SpeculativeConfig(**drafts)
        speculation = speculation_from_config(settings, device=torch.device("cpu"), dtype="float32")
        options = {"speculation": speculation}
    else:
        options = {"speculative_config" if kind == "vllm" else "speculative": drafts}
    subject = start(kind, path, tmp_path / "drafts.log", **options)
    samplings = [SAMPLINGS[name] for name in ("plain", "top-k", "top-p", "penalty")]

    def ask(sampling):
        return [
            dataclasses.replace(one, request_id=f"{sampling} {one.request_id}", prompt_ids=one.prompt_ids * 3)
            for one in requests(dataclasses.replace(sampling, max_tokens=40), 3, shortest=4)
        ]

    def check(model):
        asked = [one for sampling in (GREEDY, *samplings) for one in ask(sampling)]
        done = serve(subject.engine, asked)
        for one in asked:
            got = done[one.request_id]
            if one.sampling.temperature == 0:
                assert_greedy(model, one, got)
                continue
            raw, drawn = expected_log_probs(model, one, got.token_ids)
            torch.testing.assert_close(torch.tensor(got.log_probs), raw, atol=1e-4, rtol=0)
            torch.testing.assert_close(torch.tensor(got.sampling_log_probs), drawn, atol=1e-4, rtol=0)
        return [done[one.request_id].token_ids for one in asked], asked

    try:
        nothing_drafted = GenerationRequest(
            "new", list(range(40, 60)), dataclasses.replace(SAMPLINGS["top-k"], max_tokens=3), seed=1
        )
        assert len(serve(subject.engine, [nothing_drafted])["new"].token_ids) == 3
        crowd, asked = check(old)
        assert [serve(subject.engine, [one])[one.request_id].token_ids for one in asked[-2:]] == crowd[-2:]
        stats = subject.engine.describe().stats
        assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
        if kind == "vllm":
            with raises(GenerationError, "actor_rollout_ref.rollout.min_p=0"):
                serve(subject.engine, requests(SAMPLINGS["min-p"], 1))
        asyncio.run(subject.take(new, 1))
        check(new)
        assert_drafts_do_not_bend_the_distribution(subject, new)
    finally:
        subject.engine.close()


def assert_drafts_do_not_bend_the_distribution(subject, model):
    """The second token, behind a prompt in which every pair of tokens has a follower to look up."""
    prompt = [*range(256), *range(250)][-240:]
    sampling = SamplingParams(max_tokens=2, temperature=1.0, ignore_eos=True)
    asked = [GenerationRequest(str(seed), prompt, sampling, seed=seed) for seed in range(600)]
    done = serve(subject.engine, asked).values()
    found = torch.bincount(torch.tensor([got.token_ids[1] for got in done]), minlength=VOCABULARY) / len(asked)
    with torch.no_grad():
        first = model(input_ids=torch.tensor([prompt])).logits[0, -1].float().softmax(-1)
        pairs = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
        second = torch.cat([model(input_ids=rows).logits[:, -1].float().softmax(-1) for rows in pairs.split(68)])
    wanted = first @ second
    spread = (wanted * (1 - wanted) / len(asked)).sqrt()
    likely = wanted > 0.015
    assert likely.any() and ((found - wanted).abs()[likely] < 4.5 * spread[likely]).all()


# the end -------------------------------------------------------------------------------------------------------------


def worker_among(family: list[psutil.Process]) -> psutil.Process:
    """The process that computes: SGLang and TensorRT-LLM (an actor of Ray) name it, vLLM's is the last one."""
    names = ("sglang::scheduler", "RayWorkerWrapper")
    named = (process for process in family if any(name in " ".join(process.cmdline()) for name in names))
    return next(named, family[-1])


@pytest.mark.parametrize("victim", ["its server", "its own worker"])
def test_a_crash_in_mid_flight_is_reported_to_everyone_who_waits(kind, victim, models, tmp_path):
    if kind in ("native", "hf") or (kind == "served" and victim == "its own worker"):
        return
    subject = start(kind, models["tied"][2], tmp_path / "crash.log")
    server = psutil.Process(subject.engine.process.pid)
    family = [server, *server.children(recursive=True)]
    killed = server if victim == "its server" else worker_among(family)

    async def crash():
        waiting = [asyncio.create_task(collect(subject.engine, long_running(2))) for _ in range(4)]
        await asyncio.sleep(0.1)
        os.kill(killed.pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), SOON)

    outcomes = asyncio.run(crash())
    assert all(isinstance(found, EngineLost) for found in outcomes), outcomes
    check_message(cast(EngineLost, outcomes[0]), "signal 9" if killed is server else "code 70")
    with pytest.raises(EngineLost):
        serve(subject.engine, requests(GREEDY, 1))
    subject.engine.close()
    _, left = psutil.wait_procs(family, timeout=SOON)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
