"""The native engine: equal to the model's own forward pass, indifferent to company, bounded, cancellable."""

from __future__ import annotations

import asyncio
import copy
import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from support.examples import examples
from support.messages import raises
from torch import Tensor, nn

from hone.data.types import StopReason
from hone.errors import GenerationError
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.models.attention.packed import PackedContext
from hone.models.llama import decode
from hone.models.llama.decode import FusedLinear
from hone.models.routing import attention_of

ARCHITECTURES = ("qwen3", "llama", "mistral", "gemma2", "gemma3", "gpt_oss")


def request(name: str, prompt: list[int], seed: int = 0, **sampling: object) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(**{"max_tokens": 12, **sampling}), seed)  # type: ignore[arg-type]


def prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (1 + 5 * i % 23,), generator=generator).tolist() for i in range(count)]


def crowd(count: int = 13, **sampling: object) -> list[GenerationRequest]:
    return [
        request(f"r{i}", ids, seed=100 + i, **{"max_tokens": 3 + 7 * i % 19, **sampling})
        for i, ids in enumerate(prompts(count))
    ]


def forward_log_probs(model: nn.Module, asked: GenerationRequest, tokens: list[int]) -> Tensor:
    """Log-probs of the response under a full forward pass with transformers' own attention."""
    ids = torch.tensor([asked.prompt_ids + tokens])
    with attention_of(model, "eager"), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(asked.prompt_ids) - 1 : -1].float()
    temperature = asked.sampling.temperature or 1.0
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def same(first: Completion, second: Completion) -> bool:
    return (first.token_ids, first.log_probs, first.sampling_log_probs, first.stop_reason) == (
        second.token_ids,
        second.log_probs,
        second.sampling_log_probs,
        second.stop_reason,
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_equal_a_full_forward_pass(make_model, make_engine, serve, name):
    model = make_model(name)
    asked = crowd(temperature=0.7, ignore_eos=True)
    done = serve(make_engine(model, max_num_seqs=5), asked)
    for one in asked:
        got = done[one.request_id]
        assert len(got.token_ids) == one.sampling.max_tokens and got.stop_reason is StopReason.LENGTH
        expected = forward_log_probs(model, one, got.token_ids)
        torch.testing.assert_close(torch.tensor(got.log_probs), expected, atol=1e-4, rtol=0)
        assert got.sampling_log_probs == got.log_probs


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss"])
def test_a_request_draws_the_same_tokens_alone_and_in_a_crowd(make_model, make_engine, serve, name):
    model = make_model(name)
    asked = crowd(top_p=0.95)
    wide = serve(make_engine(model, max_num_seqs=16), asked)
    for size in (1, 3):
        narrow = serve(make_engine(model, max_num_seqs=size), list(reversed(asked)))
        assert {key: c.token_ids for key, c in narrow.items()} == {key: c.token_ids for key, c in wide.items()}
    alone = serve(make_engine(model), asked[4:5])
    assert alone["r4"].token_ids == wide["r4"].token_ids


def test_the_same_requests_twice_are_identical_to_the_bit(make_model, make_engine, serve):
    engine = make_engine(make_model("qwen3"), max_num_seqs=4)
    first, second = serve(engine, crowd()), serve(engine, crowd())
    assert all(same(first[key], second[key]) for key in first)


def test_other_seeds_draw_other_tokens(make_model, make_engine, serve):
    done = serve(make_engine(make_model("qwen3")), [request(str(i), [5, 6], seed=i) for i in range(8)])
    assert len({tuple(c.token_ids) for c in done.values()}) > 6


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    max_num_seqs=st.integers(1, 5),
    max_cache_tokens=st.sampled_from([18, 31, 64, None]),
)
def test_any_mixture_is_served_within_its_limits(
    make_model, make_engine, serve, lengths, max_num_seqs, max_cache_tokens
):
    engine = make_engine(make_model("llama"), max_num_seqs=max_num_seqs, max_cache_tokens=max_cache_tokens)
    asked = [request(str(i), [3 + i] * p, seed=i, max_tokens=n) for i, (p, n) in enumerate(lengths)]
    done = serve(engine, asked)
    stats = engine.describe().stats
    assert [len(done[a.request_id].token_ids) for a in asked] == [n for _, n in lengths]
    assert stats["peak_sequences"] <= max_num_seqs
    assert stats["peak_cache_tokens"] <= (max_cache_tokens or max_num_seqs * 128)
    assert stats["decode_tokens"] == sum(n for _, n in lengths)


def test_a_prompt_is_prefilled_once_for_its_group(make_model, make_engine, serve):
    model = make_model("qwen3")
    engine = make_engine(model, max_num_seqs=6)
    groups = [[7, 8, 9, 10], [11, 12, 13, 14, 15, 16]]
    asked = [request(f"{g}.{i}", ids, seed=i, max_tokens=4 + i) for g, ids in enumerate(groups) for i in range(8)]
    done = serve(engine, asked)
    stats = engine.describe().stats
    assert stats["prefill_tokens"] == 3 + 5
    assert stats["prefix_hits"] == 14
    for one in asked:
        expected = forward_log_probs(model, one, done[one.request_id].token_ids)
        torch.testing.assert_close(torch.tensor(done[one.request_id].log_probs), expected, atol=1e-4, rtol=0)


def test_finished_sequences_cost_nothing(make_model, make_engine, serve):
    engine = make_engine(make_model("qwen3"), max_num_seqs=4)
    serve(engine, [request(str(i), [5, 6], seed=i, max_tokens=n) for i, n in enumerate([2, 2, 2, 30, 20, 20])])
    stats = engine.describe().stats
    assert stats["decode_tokens"] == 76
    assert stats["steps"] == 30


def test_stop_tokens_and_stop_strings_end_a_response(make_model, make_engine, serve):
    engine = make_engine(make_model("qwen3"))
    free = serve(engine, [request("free", [5, 6, 7], seed=3, max_tokens=30)])["free"].token_ids
    text = engine._runner.tokenizer.decode(free)
    cases = {
        "token": ({"stop_token_ids": (free[4], 60)}, free.index(free[4]) + 1, StopReason.STOP),
        "ignored": ({"stop_token_ids": (free[4],), "ignore_eos": True}, 30, StopReason.LENGTH),
        "string": ({"stop": (text[6:9],)}, text.index(text[6:9]) + 3, StopReason.STOP),
        "at the limit": ({"stop": (text[6:9],), "max_tokens": 9}, 9, StopReason.STOP),
        "before the limit": ({"stop": (text[6:9],), "max_tokens": 8}, 8, StopReason.LENGTH),
        "absent": ({"stop": ("!!",)}, 30, StopReason.LENGTH),
    }
    done = serve(engine, [request(k, [5, 6, 7], seed=3, **{"max_tokens": 30, **c[0]}) for k, c in cases.items()])
    for key, (_, length, reason) in cases.items():
        assert (done[key].token_ids, done[key].stop_reason) == (free[:length], reason), key


def test_completions_stream_as_they_finish(make_model, make_engine):
    engine = make_engine(make_model("qwen3"), max_num_seqs=3)

    async def order() -> list[str]:
        asked = [request(str(n), [5, n], max_tokens=n) for n in (40, 3, 9, 5)]
        return [completion.request_id async for completion in engine.generate(asked)]

    assert asyncio.run(order()) == ["3", "5", "9", "40"]


def test_callers_share_a_batch(make_model, make_engine):
    engine = make_engine(make_model("qwen3"))

    async def call(start: int) -> list[Completion]:
        return [c async for c in engine.generate([request(str(i), [5, i], i) for i in range(start, start + 3)])]

    async def both() -> list[list[Completion]]:
        return await asyncio.gather(call(0), call(3))

    first, second = asyncio.run(both())
    assert {c.request_id for c in first} == {"0", "1", "2"} and {c.request_id for c in second} == {"3", "4", "5"}
    assert engine.describe().stats["peak_sequences"] == 6


def test_abort_keeps_sampled_tokens_and_leaves_other_requests_alone(make_model, make_engine, serve):
    model = make_model("qwen3")
    asked = [request(str(i), [5, i], i, max_tokens=100) for i in range(6)]
    whole = serve(make_engine(model), asked)
    engine = make_engine(model, max_num_seqs=4)

    async def partly() -> dict[str, Completion]:
        async def collect() -> dict[str, Completion]:
            return {c.request_id: c async for c in engine.generate(asked)}

        task = asyncio.create_task(collect())
        await asyncio.sleep(0)
        while engine.describe().stats["steps"] == 0:
            await asyncio.sleep(0)
        await engine.abort(["1", "5"])
        return await task

    done = asyncio.run(partly())
    for key, completion in done.items():
        count = len(completion.token_ids)
        assert completion.token_ids == whole[key].token_ids[:count]
        assert len(completion.log_probs) == count
        assert (completion.stop_reason is StopReason.ABORTED) == (key in "15")
    assert 0 < len(done["1"].token_ids) < 100 and done["5"].token_ids == []


def test_pause_holds_and_new_weights_are_recorded(make_model, make_engine):
    engine = make_engine(make_model("qwen3"))

    async def paused() -> Completion:
        async def one() -> Completion:
            return [c async for c in engine.generate([request("a", [5, 6], max_tokens=90)])][0]

        await engine.load_weights([], 4)
        task = asyncio.create_task(one())
        while engine.describe().stats["steps"] == 0:
            await asyncio.sleep(0)
        await engine.pause()
        held = engine.describe().stats["steps"]
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.describe().stats["steps"] == held < 90
        await engine.load_weights([], 5)
        await engine.resume()
        return await task

    completion = asyncio.run(paused())
    assert completion.weight_versions == (4, 5)
    assert len(completion.token_ids) == 90


@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared prompt"])
def test_responses_keep_their_cache_under_new_weights(make_model, make_engine, shared):
    """Tokens after the pause are those of the new weights over the cache of the old ones, and each token names its version."""
    model = make_model("qwen3")
    engine = make_engine(model)
    asked = [request(str(i), [5, 6, 7] if shared else [5, 6 + i, 7], seed=i, max_tokens=40) for i in range(2)]
    old = {name: value.clone() for name, value in model.state_dict().items()}
    new = {
        name: value + 0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        for name, value in old.items()
    }

    async def one(asked: GenerationRequest) -> Completion:
        return [c async for c in engine.generate([asked])][0]

    async def updated() -> list[Completion]:
        tasks = [asyncio.create_task(one(r)) for r in asked]
        while engine.describe().stats["steps"] == 0:
            await asyncio.sleep(0)
        await engine.pause()
        tasks.append(asyncio.create_task(one(request("late", [5, 9], max_tokens=3))))
        await asyncio.sleep(0)
        model.load_state_dict(new)
        await engine.load_weights([], 1)
        await engine.resume()
        return list(await asyncio.gather(*tasks))

    *kept, late = asyncio.run(updated())
    assert late.token_versions == [1] * 3
    for request_, completion in zip(asked, kept, strict=True):
        cut = completion.token_versions.index(1)
        assert 0 < cut < 40 and completion.token_versions == [0] * cut + [1] * (40 - cut)
        ids, start = torch.tensor([request_.prompt_ids + completion.token_ids]), len(request_.prompt_ids) + cut - 1
        with attention_of(model, "eager"), torch.no_grad():
            model.load_state_dict(old)
            before = model(input_ids=ids[:, :start], use_cache=True)
            model.load_state_dict(new)
            after = model(input_ids=ids[:, start:-1], past_key_values=before.past_key_values)
        logits = torch.cat([before.logits[0, len(request_.prompt_ids) - 1 :], after.logits[0]]).log_softmax(-1)
        expected = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=2e-5, rtol=1e-4)
    again = asyncio.run(one(request("new", [5, 6, 7], max_tokens=20)))
    torch.testing.assert_close(
        torch.tensor(again.log_probs),
        forward_log_probs(model, request("new", [5, 6, 7]), again.token_ids),
        atol=2e-5,
        rtol=1e-4,
    )  # nothing of the old cache is used again


def test_a_caller_that_leaves_ends_its_requests(make_model, make_engine, serve):
    engine = make_engine(make_model("qwen3"), max_num_seqs=2)

    async def leave() -> None:
        stream = engine.generate([request(str(i), [5, i], max_tokens=100 if i else 2) for i in range(5)])
        async for _ in stream:
            break
        await stream.aclose()
        await asyncio.sleep(0.05)

    asyncio.run(leave())
    assert engine._runner.running == [] and not engine._scheduler.waiting
    assert len(serve(engine, [request("next", [9])])["next"].token_ids) == 12


def test_sleep_frees_the_cache_and_requests_work_afterwards(make_model, make_engine, serve):
    engine = make_engine(make_model("qwen3"))
    before = serve(engine, crowd(4))
    asyncio.run(engine.sleep())
    assert engine._runner.rows.cache.tokens == 0
    asyncio.run(engine.wake())
    after = serve(engine, crowd(4))
    assert all(same(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("refused", "mentions"),
    [
        (request("long", [5] * 20, max_tokens=50), ("long", 70, 60, "actor_rollout_ref.rollout.max_cache_tokens=70")),
        (request("longer", [5] * 100, max_tokens=50), (150, 128, "data.max_response_length=28")),
        (request("empty", []), ("empty", 0)),
        (request("nothing", [5], max_tokens=0), ("nothing", "max_tokens=0")),
    ],
)
def test_requests_beyond_the_limits_are_refused_with_the_fix(make_model, make_engine, serve, refused, mentions):
    engine = make_engine(make_model("qwen3"), max_cache_tokens=60)
    with raises(GenerationError, *mentions):
        serve(engine, [request("fine", [5]), refused])
    assert engine.describe().stats["steps"] == 0


@pytest.mark.parametrize("clears", [True, False])
def test_an_error_in_a_step_reaches_every_caller(make_model, make_engine, serve, monkeypatch, clears):
    """Also where rows cannot be dropped after it, as on a device that computes no more."""
    engine = make_engine(make_model("qwen3"))

    def broken(*_: object) -> None:
        raise IndexError("no such row")

    async def within_seconds() -> list[object]:
        async def one(name: str) -> None:
            async for _ in engine.generate([request(name, [5])]):
                pass

        async with asyncio.timeout(20):
            return await asyncio.gather(one("a"), one("b"), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner._forward, "logits", broken)
        if not clears:
            patch.setattr(engine._runner, "clear", broken)
        assert [type(error) for error in asyncio.run(within_seconds())] == [IndexError] * 2
    if clears:
        assert len(serve(engine, [request("next", [9])])["next"].token_ids) == 12
    else:
        assert isinstance(engine._task.exception(), IndexError)


def test_shared_weights_are_read_in_place_and_others_are_copied(make_model, make_engine, serve):
    trained, other = make_model("qwen3"), make_model("qwen3", seed=1)
    wanted = serve(make_engine(other), crowd(3))
    engine = make_engine(make_model("qwen3"), shares_weights=False)
    assert not engine.describe().shares_weights
    asyncio.run(engine.load_weights(other.named_parameters(), 7))
    copied = serve(engine, crowd(3))
    assert all(same(copied[key], wanted[key]) for key in wanted)
    with raises(GenerationError, "nonsense", "(1,)"):
        asyncio.run(engine.load_weights([("nonsense", torch.zeros(1))], 8))

    shared = make_engine(trained)
    serve(shared, crowd(3))
    with torch.no_grad():
        for parameter, new in zip(trained.parameters(), other.parameters(), strict=True):
            parameter.copy_(new)
    followed = serve(shared, crowd(3))
    assert all(same(followed[key], wanted[key]) for key in wanted)


def updated(model: nn.Module) -> None:
    """One step of the trainer's optimizer, which leaves no trace in the tensors' version counters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_between_requests_of_one_loop_are_followed(make_model, make_engine, serve, dtype):
    model = make_model("qwen3")
    engine = make_engine(model, dtype=dtype)

    async def collect() -> dict[str, Completion]:
        return {completion.request_id: completion async for completion in engine.generate(crowd(4))}

    async def twice() -> dict[str, Completion]:
        await collect()
        updated(model)
        return await collect()

    followed, wanted = asyncio.run(twice()), serve(make_engine(model, dtype=dtype), crowd(4))
    for key, completion in wanted.items():  # a matmul of another shape may round otherwise on some processors
        assert followed[key].token_ids == completion.token_ids
        assert followed[key].log_probs == pytest.approx(completion.log_probs, abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_and_the_state_of_the_model_is_left_alone(make_model, make_engine, serve, dtype):
    model = make_model("qwen3").train()
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    frozen = {name: p.requires_grad for name, p in wrapped.named_parameters()}
    done = serve(make_engine(wrapped, dtype=dtype), crowd(5))
    assert {name: p.requires_grad for name, p in wrapped.named_parameters()} == frozen
    assert wrapped.training and not any(p.is_inference() for p in wrapped.parameters())
    wrapped.eval()
    for one in crowd(5):
        got = done[one.request_id]
        expected = forward_log_probs(wrapped, one, got.token_ids)
        tolerance = 1e-4 if dtype == "float32" else 0.15
        torch.testing.assert_close(torch.tensor(got.log_probs), expected, atol=tolerance, rtol=0)
    context = PackedContext.from_lengths([3], "cpu")
    ids = torch.tensor([[5, 6, 7]])
    out = wrapped(input_ids=ids, position_ids=context.position_ids, context=context, use_cache=False)
    out.logits.sum().backward()


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss"])
def test_bfloat16_stays_near_float32(make_model, make_engine, serve, name):
    model = make_model(name)
    asked = crowd(6)
    for one in asked:
        got = serve(make_engine(model, dtype="bfloat16"), [one])[one.request_id]
        expected = forward_log_probs(model, one, got.token_ids)
        assert float((torch.tensor(got.log_probs) - expected).abs().mean()) < 0.1


def test_a_model_that_scales_its_logits_is_sampled_as_it_is(make_engine, serve):
    from transformers import AutoModelForCausalLM, GraniteConfig

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=0.1,
        attention_multiplier=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    one = request("a", [5, 6, 7])
    got = serve(make_engine(model), [one])["a"]
    torch.testing.assert_close(
        torch.tensor(got.log_probs), forward_log_probs(model, one, got.token_ids), atol=1e-4, rtol=0
    )


def test_repetition_penalty_sees_prompt_and_response(make_model, make_engine, serve):
    greedy = {"temperature": 0.0, "max_tokens": 40}
    asked = [request("free", [5, 6], **greedy), request("held", [5, 6], repetition_penalty=1e6, **greedy)]
    done = serve(make_engine(make_model("llama")), asked)
    tokens = done["held"].token_ids
    assert len(set(tokens)) == 40 and not {5, 6} & set(tokens)
    assert len(set(done["free"].token_ids)) < 40


def test_prompts_of_other_weights_are_not_reused(make_model, make_engine, serve):
    engine = make_engine(make_model("qwen3"))
    asked = [request("a", [5, 6, 7, 8]), request("b", [5, 6, 7, 8], 1)]
    serve(engine, asked)
    asyncio.run(engine.load_weights([], 1))
    serve(engine, [dataclasses.replace(one, request_id=one.request_id + "2") for one in asked])
    assert engine.describe().stats["prefill_tokens"] == 6


def test_an_idle_engine_keeps_fused_weights_until_new_ones_arrive(make_model, make_engine, serve, monkeypatch):
    """Weights of its own change in `load_weights` alone; those it shares with a trainer may change whenever nothing runs."""
    model, fused = make_model("qwen3"), []
    monkeypatch.setattr(decode, "FusedLinear", lambda *args: fused.append(args) or FusedLinear(*args))
    ask = [GenerationRequest("0", [3, 4, 5], SamplingParams(max_tokens=3, temperature=0.0), seed=0)]
    shared, own = make_engine(model), make_engine(copy.deepcopy(model), shares_weights=False)
    counts = []
    for engine in (shared, shared, own, own):
        before = len(fused)
        serve(engine, ask)
        counts.append(len(fused) - before)
    assert counts[0] == counts[1] == counts[2] > 0 and counts[3] == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    asyncio.run(own.load_weights(list(model.named_parameters()), 1))
    assert serve(own, ask)["0"].token_ids == serve(shared, ask)["0"].token_ids
