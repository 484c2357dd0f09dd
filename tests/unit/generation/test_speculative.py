"""Speculative decoding: tokens and log-probs are those of decoding without drafts, whatever is drafted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.drafters import mixed, right, wrong
from support.examples import examples
from support.families import model_of, tiny_config, tiny_model
from support.templates import tokenizer
from torch import nn

from hone.data.types import StopReason
from hone.generation.native.scheduler import Job
from hone.generation.native.speculative import DraftRow, Speculation
from hone.generation.native.speculative.build import DraftTrainer, Example, ModelDrafter, NgramDrafter
from hone.generation.native.speculative.drafts import accepted
from hone.generation.protocol import (
    Completion,
    Constraint,
    ConstraintKind,
    Engine,
    GenerationRequest,
    SamplingParams,
)
from hone.models.routing import attention_of, use_hone_attention

pytestmark = pytest.mark.application("hone/generation")

CPU = torch.device("cpu")


def draft_model(name: str, seed: int) -> nn.Module:
    model = tiny_model(name, seed=seed)
    use_hone_attention(model)
    return model


def request(name: str, prompt: list[int], seed: int = 0, **sampling: object) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(**{"max_tokens": 12, **sampling}), seed)  # type: ignore[arg-type]


SAMPLINGS = (
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 7},
    {"top_p": 0.8, "report_support": True},
    {"min_p": 0.05, "top_log_probs": 3},
    {"logit_bias": ((5, 2.0), (9, -3.0))},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.6, "presence_penalty": 0.4, "top_log_probs": 2},
    {"stop": ("7", "5a"), "top_log_probs": 1},
    {"stop_token_ids": (7, 11, 30, 31)},
)


def crowd(count: int = 16, groups: int | None = None, **sampling: object) -> list[GenerationRequest]:
    """Requests of many lengths and ways of sampling; with ``groups`` they share that many prompts."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 40, (1 + 5 * i % 23,), generator=generator).tolist() for i in range(groups or count)]
    return [
        request(
            f"r{i}",
            prompts[i % len(prompts)],
            seed=100 + i,
            **{"max_tokens": 1 + 7 * i % 37, **SAMPLINGS[i % len(SAMPLINGS)], **sampling},
        )
        for i in range(count)
    ]


def check_same(actual: Mapping[str, Completion], expected: Mapping[str, Completion]) -> None:
    """Check that completions have the same tokens, ends and support, and log-probs within rounding."""
    assert actual.keys() == expected.keys()
    for key, completion in expected.items():
        other = actual[key]
        assert (other.token_ids, other.stop_reason) == (completion.token_ids, completion.stop_reason), key
        for name in ("log_probs", "sampling_log_probs"):
            torch.testing.assert_close(getattr(other, name), getattr(completion, name), atol=1e-5, rtol=0)
        assert (other.support_sizes, other.support_ids) == (completion.support_sizes, completion.support_ids), key
        assert [[token for token, _ in step] for step in other.alternatives] == [
            [token for token, _ in step] for step in completion.alternatives
        ], key


def counters(engine: Engine) -> tuple[int, int, int, int]:
    stats = engine.describe().stats
    return stats["decode_tokens"], stats["steps"], stats["drafted_tokens"], stats["accepted_tokens"]


@pytest.mark.parametrize(
    ("name", "groups"),
    [("qwen3", None), ("qwen3", 3), ("mistral", 3), ("gemma3", None), ("gpt_oss", 3), ("gemma2", None)],
)
def test_drafts_change_nothing_but_the_number_of_steps(make_model, make_engine, serve, name, groups):
    model, asked = make_model(name), crowd(groups=groups)
    plain = make_engine(model, max_num_seqs=7)
    expected = serve(plain, asked)
    tokens, steps, *_ = counters(plain)
    for drafter in (right(expected), wrong(expected), mixed(expected, seed=3)):
        engine = make_engine(model, max_num_seqs=7, speculation=Speculation(drafter, num_tokens=4))
        check_same(serve(engine, asked), expected)
        drafted = counters(engine)
        assert drafted[0] == tokens and drafted[1] <= steps
        assert sorted(drafter.ended) == sorted(
            (a.request_id, a.prompt_ids + expected[a.request_id].token_ids) for a in asked
        )


def test_right_drafts_are_all_kept_and_wrong_ones_are_not(make_model, make_engine, serve):
    """Without penalties each pass of right drafts samples one token more than it verifies."""
    model = make_model("qwen3")
    asked = [request(str(i), [5, i, 7], seed=i, max_tokens=31, ignore_eos=True) for i in range(3)]
    expected = serve(make_engine(model), asked)
    always = make_engine(model, speculation=Speculation(right(expected), num_tokens=4))
    serve(always, asked)
    assert counters(always) == (93, 7, 3 * 24, 3 * 24)  # six passes of 4 drafts, and one token after them
    never = make_engine(model, speculation=Speculation(wrong(expected), num_tokens=4))
    serve(never, asked)
    assert counters(never) == (93, 31, 3 * (27 * 4 + 3 + 2 + 1), 0)  # no more drafts than tokens are left, less one


@pytest.mark.parametrize("prompts", [[[5, 6, 7, 8]] * 3, [[5], [9, 3], [5, 6, 7], [5, 6, 7]]])
def test_completions_have_the_experts_of_their_tokens(make_model, make_engine, serve, prompts):
    model = make_model("qwen3_moe")
    asked = [request(str(i), ids, seed=i, max_tokens=9 + 2 * i, ignore_eos=True) for i, ids in enumerate(prompts)]
    expected = serve(make_engine(model, report_experts=True), asked)
    for drafter in (wrong(expected), mixed(expected, 4)):
        engine = make_engine(model, report_experts=True, speculation=Speculation(drafter, num_tokens=3))
        done = serve(engine, asked)
        check_same(done, expected)
        for key, completion in expected.items():
            assert np.array_equal(done[key].expert_ids, completion.expert_ids) and len(completion.expert_ids) > 0


def test_constrained_rows_follow_their_grammar_next_to_drafted_ones(serve, make_engine):
    """Rows with a constraint have no drafts; their masks reach their own places among the verified tokens."""
    words = tokenizer("qwen2_5")
    config = tiny_config("qwen3")
    config.vocab_size = len(words)
    model = model_of(config)
    constraint = Constraint(ConstraintKind.REGEX, r"(ab|c)*[0-9]{2}-é?")
    stops = {"stop_token_ids": (words.eos_token_id,)}
    asked = [
        request(str(i), [5, 9, 200 + i % 3], seed=i, max_tokens=20, **stops, constraint=constraint if i % 2 else None)
        for i in range(8)
    ]
    expected = serve(make_engine(model, tokenizer=words), asked)
    engine = make_engine(model, tokenizer=words, speculation=Speculation(mixed(expected, 4), num_tokens=3))
    check_same(serve(engine, asked), expected)
    assert counters(engine)[3] > 0
    unconstrained = sum(len(c.token_ids) for name, c in expected.items() if int(name) % 2 == 0)
    assert counters(engine)[3] < unconstrained


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    num_tokens=st.integers(1, 7),
    max_rows=st.sampled_from([None, 1, 3]),
    max_num_seqs=st.integers(1, 6),
    max_cache_tokens=st.sampled_from([70, 150, None]),
    groups=st.sampled_from([None, 2]),
)
def test_any_drafts_under_any_limits_change_no_token(
    make_model, make_engine, serve, seed, num_tokens, max_rows, max_num_seqs, max_cache_tokens, groups
):
    model = make_model("llama", seed=seed % 3)
    asked = crowd(9, groups=groups)
    random.Random(seed).shuffle(asked)
    limits = {"max_num_seqs": max_num_seqs, "max_cache_tokens": max_cache_tokens}
    expected = serve(make_engine(model, **limits), asked)
    speculation = Speculation(mixed(expected, seed), num_tokens=num_tokens, max_rows=max_rows)
    engine = make_engine(model, **limits, speculation=speculation)
    check_same(serve(engine, asked), expected)
    assert engine.describe().stats["peak_cache_tokens"] <= (max_cache_tokens or max_num_seqs * 128)


def play(engine: Engine, turns: int = 4) -> dict[str, Completion]:
    """Episodes of several turns in sessions, at the same time; each turn continues all tokens of the one before."""

    async def episode(number: int) -> list[tuple[str, Completion]]:
        ids, answers = [3 + number] * (2 + 3 * number), []
        for turn in range(turns):
            name = f"{number}.{turn}"
            sampling = SamplingParams(max_tokens=5 + 2 * number, stop_token_ids=(7, 8, 9))
            asked = GenerationRequest(name, ids, sampling, 31 * number + turn, f"episode {number}")
            (answer,) = [completion async for completion in engine.generate([asked])]
            answers.append((name, answer))
            ids = [*ids, *answer.token_ids, 20 + number, 5]
        return answers

    async def all_episodes() -> list[list[tuple[str, Completion]]]:
        return list(await asyncio.gather(*map(episode, range(4))))

    return {name: answer for answers in asyncio.run(all_episodes()) for name, answer in answers}


@pytest.mark.parametrize("drafter", ["right", "mixed", "ngram"])
def test_turns_of_a_session_continue_a_cache_without_rejected_drafts(make_model, make_engine, drafter):
    model = make_model("qwen3")
    plain = make_engine(model)
    expected = play(plain)
    drafters = {"right": right(expected), "mixed": mixed(expected, 1), "ngram": NgramDrafter(1, 3)}
    engine = make_engine(model, speculation=Speculation(drafters[drafter], num_tokens=3))
    check_same(play(engine), expected)
    for counter in ("session_hits", "session_tokens", "prefill_tokens"):
        assert engine.describe().stats[counter] == plain.describe().stats[counter] > 0


def test_an_abort_keeps_the_tokens_so_far(make_model, make_engine, serve):
    model = make_model("qwen3")
    asked = [request(str(i), [5, i], i, max_tokens=120) for i in range(6)]
    whole = serve(make_engine(model), asked)
    engine = make_engine(model, max_num_seqs=4, speculation=Speculation(mixed(whole, 7), num_tokens=2))

    async def partly() -> dict[str, Completion]:
        async def collect() -> dict[str, Completion]:
            return {c.request_id: c async for c in engine.generate(asked)}

        task = asyncio.create_task(collect())
        while engine.describe().stats["steps"] == 0:
            await asyncio.sleep(0)
        await engine.abort(["1", "5"])
        return await task

    done = asyncio.run(partly())
    for key, completion in done.items():
        count = len(completion.token_ids)
        assert completion.token_ids == whole[key].token_ids[:count]
        torch.testing.assert_close(completion.log_probs, whole[key].log_probs[:count], atol=1e-5, rtol=0)
        assert (completion.stop_reason is StopReason.ABORTED) == (key in "15")
    assert 0 < len(done["1"].token_ids) < 120 and done["5"].token_ids == []


def test_new_weights_during_a_response_count_from_their_token(make_model, make_engine):
    """The versions of the tokens are as without drafts if the weights change after the same number of tokens."""
    completions = []
    for speculation in (None, Speculation(NgramDrafter(1, 2), num_tokens=3)):
        model = make_model("qwen3", seed=4)
        engine = make_engine(model, speculation=speculation)
        asked = request("a", [5, 6, 5, 6, 5], max_tokens=60)

        async def updated(engine: Engine = engine, asked: GenerationRequest = asked) -> Completion:
            async def one() -> Completion:
                return [c async for c in engine.generate([asked])][0]

            task = asyncio.create_task(one())
            while engine.describe().stats["steps"] == 0:
                await asyncio.sleep(0)
            await engine.pause()
            await engine.load_weights([], 1)
            await engine.resume()
            return await task

        completion = asyncio.run(updated())
        cut = completion.token_versions.index(1)
        assert completion.token_versions == [0] * cut + [1] * (60 - cut) and 0 < cut < 60
        completions.append(completion)
    assert completions[0].token_ids == completions[1].token_ids


def test_ngrams_speed_up_what_repeats_itself(make_model, make_engine, serve):
    """Greedy responses of a small model end in a cycle, which the n-grams continue past the end of the sequence."""
    model = make_model("llama")
    asked = [request(str(i), [5, 6 + i], max_tokens=100, temperature=0.0) for i in range(3)]
    plain, engine = make_engine(model), make_engine(model, speculation=Speculation(NgramDrafter(1, 3), num_tokens=4))
    expected = serve(plain, asked)
    check_same(serve(engine, asked), expected)
    _, steps, drafted, kept = counters(engine)
    assert steps < 60 and drafted * 0.5 < kept


def reference_drafts(ids: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """What followed the last earlier occurrence of the longest n-gram, read token by token from the growing sequence."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if size < len(ids) and ids[start : start + size] == ids[-size:]:
                grown = list(ids)
                for index in range(start + size, start + size + most):
                    grown.append(grown[index])
                return grown[len(ids) :]
    return []


@examples(200)
@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    prompt=st.integers(1, 30),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    most=st.integers(1, 6),
)
def test_ngram_drafts_equal_a_search(ids, prompt, sizes, most):
    """Also when the response arrives in parts, and rows share the prompt."""
    shortest, longest = sizes
    drafter = NgramDrafter(shortest, longest)
    jobs = [Job.from_request(GenerationRequest(str(i), ids[:prompt], SamplingParams()), None) for i in range(2)]  # type: ignore[arg-type]
    for end in range(len(ids[:prompt]), len(ids) + 1):
        part = ids[:end]
        expected = reference_drafts(part, shortest, longest, most)
        assert drafter.draft([DraftRow(job, part, most) for job in jobs]) == [expected] * 2


@pytest.mark.parametrize(
    ("tokens", "drafts", "stops", "count"),
    [
        ([4], [], (), 1),
        ([4, 5, 6], [4, 5], (), 3),
        ([4, 5, 6], [4, 9], (), 2),
        ([4, 5, 6], [9, 5], (), 1),
        ([4, 5, 6], [4, 5], (4,), 1),
        ([4, 5, 6], [4, 5], (5, 6), 2),
    ],
)
def test_tokens_are_kept_up_to_the_first_that_differs_or_ends(tokens, drafts, stops, count):
    assert accepted(tokens, drafts, stops) == count


@pytest.mark.parametrize(
    ("name", "groups", "which"),
    [("qwen3", None, "itself"), ("qwen3", 3, "another"), ("gemma3", 3, "itself"), ("gpt_oss", None, "another")],
)
def test_drafts_of_a_model_change_nothing(make_model, make_engine, serve, name, groups, which):
    """A draft model that equals the policy drafts its tokens with the same draws, so that all drafts are right."""
    policy, asked = make_model(name), crowd(groups=groups)
    drafter = ModelDrafter(draft_model(name, 0 if which == "itself" else 1), device=CPU, dtype=torch.float32)
    expected = serve(make_engine(policy, max_num_seqs=6), asked)
    engine = make_engine(policy, max_num_seqs=6, speculation=Speculation(drafter, num_tokens=4))
    for _ in range(2):
        check_same(serve(engine, asked), expected)
    _, _, drafted, kept = counters(engine)
    assert 0 < kept < drafted if which == "another" else kept > 0.9 * drafted


def test_a_draft_model_catches_up_after_steps_without_drafts(make_model, make_engine, serve):
    """Above ``max_rows`` nothing is drafted; afterwards the draft model computes what it lacks, and its drafts are right."""
    policy = make_model("qwen3")
    asked = [request(str(i), [5, 6 + i], seed=i, max_tokens=8 if i < 3 else 60, ignore_eos=True) for i in range(5)]
    expected = serve(make_engine(policy), asked)
    drafter = ModelDrafter(draft_model("qwen3", 0), device=CPU, dtype=torch.float32)
    engine = make_engine(policy, speculation=Speculation(drafter, num_tokens=4, max_rows=3))
    check_same(serve(engine, asked), expected)
    tokens, steps, drafted, kept = counters(engine)
    assert tokens == 3 * 8 + 2 * 60 and drafted == kept > 0
    assert steps == 8 + -(-52 // 5)  # three short responses without drafts, then five tokens a step


def test_a_draft_model_with_fewer_or_more_tokens_drafts_those_of_both(make_engine, serve):
    """Also next to a request with a logit bias for a token that the draft model does not have."""
    config = tiny_config("qwen3")
    for policy_size, draft_size in ((61, 40), (40, 61)):
        config.vocab_size = policy_size
        policy = model_of(config)
        config.vocab_size = draft_size
        small = model_of(config, seed=1)
        use_hone_attention(small)
        asked = [
            request(str(i), [5, 6 + i], seed=i, logit_bias=((policy_size - 1, 4.0),) if i % 2 else ()) for i in range(6)
        ]
        expected = serve(make_engine(policy), asked)
        drafter = ModelDrafter(small, device=CPU, dtype=torch.float32)
        engine = make_engine(policy, speculation=Speculation(drafter, num_tokens=4))
        check_same(serve(engine, asked), expected)
        assert counters(engine)[2] > 0


def entropy_of(model: nn.Module, examples: Sequence[Example]) -> float:
    """Mean cross-entropy of the sampled tokens, by one forward pass for each response."""
    losses = []
    for ids, first, temperature in examples:
        with attention_of(model, "eager"), torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, first - 1 : -1].float()
        chosen = (logits / (temperature or 1.0)).log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])
        losses.append(-chosen[:, 0])
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_the_loss_of_a_draft_model_is_the_cross_entropy_of_the_policys_tokens(temperature):
    model = draft_model("qwen3", 0)
    examples = [Example([3 + (7 * i + j) % 50 for j in range(9 + i)], 4, temperature) for i in range(5)]
    trainer = DraftTrainer(model, learning_rate=1e-2, device=CPU, dtype="float32")
    for example in examples:
        trainer.add(example)
    before = entropy_of(model, examples)
    assert trainer.train() == pytest.approx(before, rel=1e-5)
    assert entropy_of(model, examples) < before
    assert trainer.train() is None and not any(parameter.requires_grad for parameter in model.parameters())


def test_a_trainer_keeps_the_newest_responses(monkeypatch):
    trained = []
    model = draft_model("qwen3", 0)
    trainer = DraftTrainer(model, learning_rate=1e-2, device=CPU, dtype="float32", max_tokens=25)
    monkeypatch.setattr(trainer, "_loss", lambda part: trained.extend(part) or next(model.parameters()).sum())
    examples = [Example([i] * length, 2, 1.0) for i, length in enumerate((10, 10, 26, 2, 10, 5))]
    for example in examples:
        trainer.add(example)
    trainer.train()
    assert trained == [examples[1], examples[4], examples[5]]  # 2 is too long, 3 has no sampled token, 0 is the oldest


def test_training_between_versions_raises_the_acceptance_and_changes_no_token(make_model, make_engine, serve):
    policy = make_model("qwen3")
    asked = [request(str(i), [5, 6 + i % 4], seed=i, max_tokens=40, temperature=0.3) for i in range(24)]
    expected = serve(make_engine(policy), asked)
    small = draft_model("qwen3", 5)
    trainer = DraftTrainer(small, learning_rate=3e-2, device=CPU, dtype="float32")
    drafter = ModelDrafter(small, device=CPU, dtype=torch.float32, trainer=trainer)
    engine = make_engine(policy, speculation=Speculation(drafter, num_tokens=3))
    shares, earlier = [], (0, 0)
    for version in range(1, 9):
        check_same(serve(engine, asked), expected)
        asyncio.run(engine.load_weights([], version))
        _, _, drafted, kept = counters(engine)
        shares.append((kept - earlier[1]) / (drafted - earlier[0]))
        earlier = drafted, kept
    assert shares[-1] > 1.7 * shares[0], shares


def test_weights_that_change_during_a_response_train_no_half_of_it(make_model, make_engine):
    """A response under way is trained on when it is complete; its tokens stay those of the policy."""
    policy = make_model("qwen3")
    examples: list[Example] = []
    tokens = []
    for trains in (False, True):
        small = draft_model("qwen3", 5)
        trainer = DraftTrainer(small, learning_rate=1e-2, device=CPU, dtype="float32") if trains else None
        drafter = ModelDrafter(small, device=CPU, dtype=torch.float32, trainer=trainer)
        engine = make_engine(policy, speculation=Speculation(drafter, num_tokens=3))

        async def updated(engine: Engine = engine) -> Completion:
            async def one() -> Completion:
                return [c async for c in engine.generate([request("a", [5, 6], max_tokens=90)])][0]

            task = asyncio.create_task(one())
            while engine.describe().stats["steps"] == 0:
                await asyncio.sleep(0)
            await engine.load_weights([], 1)
            return await task

        completion = asyncio.run(updated())
        assert completion.weight_versions == (0, 1)
        tokens.append(completion.token_ids)
        examples += trainer._examples if trainer else []
    assert tokens[0] == tokens[1] and [example.ids for example in examples] == [[5, 6, *tokens[0]]]
