"""Constrained decoding, penalties, bias and reported alternatives, against slow scalar computations."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.families import make_engine, model_of, serve, tiny_config
from support.templates import tokenizer
from torch import Tensor, nn

from hone.config.rollout import ConstraintConfig
from hone.data.types import StopReason
from hone.errors import ConfigError, RequestError
from hone.generation import constraints
from hone.generation.constraints import configured_constraint, constraint_option
from hone.generation.grammars import Grammars, check_compiles, spread_bits
from hone.generation.protocol import Completion, Constraint, ConstraintKind, GenerationRequest, SamplingParams
from hone.models.attention.packed import PackedContext  # noqa: F401 - registers the attention of the model
from hone.models.routing import attention_of

TOKENIZER = tokenizer("qwen2_5")
VOCABULARY = len(TOKENIZER) + 9
"""A few logits more than tokens, as in most models."""
END = TOKENIZER.eos_token_id
PROMPTS = [[5, 9, 200], [17], [300, 4, 4, 8, 31]]
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": -40, "maximum": 2000},
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "bb", None]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["count", "kind"],
    "additionalProperties": False,
}
EXPRESSION = r"(ab|c)*[0-9]{2}-é?"
CHOICES = ["yes", "no", "not sure", "はい", "😀"]
LARK = 'start: "[" item ("," item)* "]"\nitem: /[0-9]+/ | start\n'


def constraint(kind: str, value: Any = "") -> Constraint:
    return Constraint(ConstraintKind(kind), value if isinstance(value, str) else json.dumps(value))


def brackets(text: str) -> bool:
    return re.fullmatch(r"[\[\],0-9]+", text) is not None and isinstance(
        json.loads(re.sub("([0-9]+)", '"x"', text)), list
    )


def satisfies_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CASES = {
    "schema": (constraint("json_schema", SCHEMA), satisfies_schema),
    "regex": (constraint("regex", EXPRESSION), lambda text: re.fullmatch(EXPRESSION, text) is not None),
    "choice": (constraint("choice", CHOICES), lambda text: text in CHOICES),
    "grammar": (constraint("grammar", LARK), brackets),
    "object": (constraint("json_object"), lambda text: isinstance(json.loads(text), dict)),
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    config = tiny_config("qwen3")
    config.vocab_size = VOCABULARY
    return model_of(config)


def request(name: str, prompt: list[int], seed: int = 0, **sampling: Any) -> GenerationRequest:
    given = {"max_tokens": 120, "stop_token_ids": (END,), **sampling}
    return GenerationRequest(name, prompt, SamplingParams(**given), seed)


def engine_of(model: nn.Module, name: str = "native") -> Any:
    return make_engine(model, name, tokenizer=TOKENIZER)


def text_of(completion: Completion) -> str:
    return TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)


def all_logits(model: nn.Module, asked: GenerationRequest, tokens: list[int]) -> Tensor:
    """``[T, V]`` logits of every sampled token, by transformers' own attention."""
    ids = torch.tensor([asked.prompt_ids + tokens])
    with attention_of(model, "eager"), torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0, len(asked.prompt_ids) - 1 : -1].float()


def slow_mask(asked: Constraint, before: list[int], stops: tuple[int, ...]) -> Tensor:
    """Tokens that may follow, each one tried in a new matcher that has read the tokens before; text without a choice has one token."""

    async def start() -> Any:
        return await Grammars(TOKENIZER, VOCABULARY).start(SamplingParams(constraint=asked, stop_token_ids=stops))

    matcher = asyncio.run(start()).matcher
    assert matcher.consume_tokens(before)
    if forced := matcher.compute_ff_tokens():
        return torch.arange(VOCABULARY) == forced[0]
    allowed = torch.zeros(VOCABULARY, dtype=torch.bool)
    for token in range(len(TOKENIZER)):
        if token != END:
            allowed[token] = matcher.validate_tokens([token]) == 1
    allowed[list(stops)] = matcher.is_accepting()
    return allowed


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("case", CASES)
def test_a_constrained_response_satisfies_an_independent_check(model: nn.Module, engine: str, case: str) -> None:
    asked, is_satisfied = CASES[case]
    requests = [
        request(f"{number}", PROMPTS[number % 3], seed=number, constraint=asked, temperature=0.5 + number % 3)
        for number in range(24 if engine == "native" else 4)
    ]
    answers = serve(engine_of(model, engine), requests)
    complete = [one for one in answers.values() if one.stop_reason is StopReason.STOP]
    assert len(complete) >= (0 if case == "object" else len(requests) * 2 // 3)
    for answer in complete:
        assert answer.token_ids[-1] == END
        assert is_satisfied(text_of(answer))


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_reported_log_probs_are_those_of_the_masked_distribution(model: nn.Module, engine: str) -> None:
    asked = request("a", PROMPTS[2], seed=3, constraint=CASES["schema"][0], temperature=0.8, top_k=30, max_tokens=14)
    (answer,) = serve(engine_of(model, engine), [asked]).values()
    scaled = all_logits(model, asked, answer.token_ids) / 0.8
    for place, token in enumerate(answer.token_ids):
        masked = scaled[place].masked_fill(~slow_mask(CASES["schema"][0], answer.token_ids[:place], (END,)), -torch.inf)
        kept = masked >= masked.sort(descending=True).values[29]
        expected = masked.masked_fill(~kept, -torch.inf).log_softmax(-1)[token].item()
        assert answer.sampling_log_probs[place] == pytest.approx(expected, abs=1e-4)
        assert answer.log_probs[place] == pytest.approx(scaled[place].log_softmax(-1)[token].item(), abs=1e-4)
    assert min(answer.log_probs) < -1 < max(answer.sampling_log_probs)


def test_unconstrained_neighbours_are_bit_equal(model: nn.Module) -> None:
    free = [request(f"f{number}", PROMPTS[number % 3], seed=number, max_tokens=30) for number in range(4)]
    others = [request(f"o{number}", [7, 8, number], seed=number, max_tokens=30) for number in range(3)]
    held = [
        GenerationRequest(one.request_id, one.prompt_ids, SamplingParams(30, constraint=asked), one.seed)
        for one, (asked, _) in zip(others, CASES.values(), strict=False)
    ]
    alone, beside = (serve(engine_of(model), [*free, *company]) for company in (others, held))
    for one in free:
        assert alone[one.request_id].token_ids == beside[one.request_id].token_ids
        assert alone[one.request_id].log_probs == beside[one.request_id].log_probs
        assert alone[one.request_id].sampling_log_probs == beside[one.request_id].sampling_log_probs


def test_a_response_ends_without_stop_tokens_once_nothing_can_follow(model: nn.Module) -> None:
    for ending in ({"stop_token_ids": ()}, {"ignore_eos": True}):
        asked = request("a", PROMPTS[0], constraint=constraint("choice", ["yes", "no"]), **ending)
        (answer,) = serve(engine_of(model), [asked]).values()
        assert TOKENIZER.decode(answer.token_ids) in ("yes", "no") and answer.stop_reason is StopReason.STOP


def test_any_stop_token_ends_a_response_and_only_where_it_may_end(model: nn.Module) -> None:
    other = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
    ends = Counter()
    for seed in range(20):
        asked = request("a", PROMPTS[0], seed, constraint=constraint("regex", "[ab]{3,5}"), stop_token_ids=(END, other))
        (answer,) = serve(engine_of(model), [asked]).values()
        ends[answer.token_ids[-1]] += 1
        assert re.fullmatch("[ab]{3,5}", text_of(answer))
    assert set(ends) == {END, other}


def test_masks_are_the_same_on_every_device() -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (5, (VOCABULARY + 31) // 32), dtype=torch.int32)
    words[0, 0], words[1, 1] = -(2**31), -1
    assert torch.equal(Grammars(TOKENIZER, VOCABULARY).allowed(words), spread_bits(words)[:, :VOCABULARY])


REFUSED = [
    constraint("json_schema", "{"),
    constraint("json_schema", [1]),
    constraint("json_schema", {"type": "array", "uniqueItems": True}),
    constraint("json_schema", {"$ref": "http://localhost/schema"}),
    constraint("json_schema", {"type": "object", "x-guidance": 3}),
    constraint("regex", "(a"),
    constraint("regex", "(?=a)b"),
    constraint("regex", r"[^\s\S]"),
    constraint("regex", "\ud800"),
    constraint("choice", []),
    constraint("choice", ["a", 1]),
    constraint("grammar", "start: missing"),
    constraint("grammar", "x" * (constraints.MAX_CONSTRAINT_CHARACTERS + 1)),
]


@pytest.mark.parametrize("asked", REFUSED, ids=range(len(REFUSED)))
def test_a_constraint_that_cannot_be_compiled_is_refused_before_anything_starts(
    model: nn.Module, asked: Constraint
) -> None:
    engine = engine_of(model)
    with pytest.raises(RequestError) as error:
        serve(engine, [request("good", [3]), request("bad", [4], constraint=asked)])
    assert error.value.field == "constraint"
    assert engine.describe().stats["decode_tokens"] == 0
    assert len(serve(engine, [request("good", [3])])) == 1


def test_constraints_compile_without_a_tokenizer_as_with_one() -> None:
    for asked, _ in CASES.values():
        check_compiles(asked)
    with pytest.raises(RequestError):
        check_compiles(constraint("regex", "(a"))


def test_a_constraint_of_a_configuration_and_of_an_option(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    schema = constraint("json_schema", SCHEMA)
    assert configured_constraint(ConstraintConfig()) is None
    assert configured_constraint(ConstraintConfig("json_schema", file=str(file))) == schema
    assert configured_constraint(ConstraintConfig("json_object")) == constraint("json_object")
    assert constraint_option(f"json_schema=@{file}") == schema
    assert constraint_option("regex=a=b") == constraint("regex", "a=b")
    assert constraint_option("json_object") == constraint("json_object")
    for wrong in ("regexp=a", "json_schema={", f"choice=@{tmp_path / 'missing'}"):
        with pytest.raises(ConfigError):
            constraint_option(wrong)
    several = {"text": "a", "file": str(file)}
    for keys in ({"text": "a"}, {"kind": "regex"}, {"kind": "regex", **several}, {"kind": "json_object", "text": "{}"}):
        with pytest.raises(ConfigError) as error:
            configured_constraint(ConstraintConfig(**keys))
        assert error.value.where.startswith("actor_rollout_ref.rollout.constraint")


changes = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7, -1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "logit_bias": st.sampled_from([(), ((3, 5.0),), ((0, -100.0), (7, 2.5), (8, 100.0))]),
        "temperature": st.sampled_from([0.7, 1.0]),
    }
)


@examples(12)
@given(several=st.lists(changes, min_size=1, max_size=4), engine=st.sampled_from(["native", "native", "hf"]))
def test_penalties_and_bias_follow_the_formula(model: nn.Module, several: list[dict[str, Any]], engine: str) -> None:
    requests = [
        request(f"{number}", PROMPTS[number % 3], seed=number, max_tokens=4 + 3 * number, **one)
        for number, one in enumerate(several)
    ]
    answers = serve(engine_of(model, engine), requests)
    for asked in requests:
        answer, sampling = answers[asked.request_id], asked.sampling
        raw = all_logits(model, asked, answer.token_ids)
        for place, token in enumerate(answer.token_ids):
            scores = raw[place].tolist()
            scores[len(TOKENIZER) :] = [-torch.inf] * 9  # padding of the embeddings is never sampled
            for biased, bias in sampling.logit_bias:
                scores[biased] += bias
            for seen in {*asked.prompt_ids, *answer.token_ids[:place]}:
                penalty = sampling.repetition_penalty
                scores[seen] = scores[seen] / penalty if scores[seen] > 0 else scores[seen] * penalty
            for seen, count in Counter(answer.token_ids[:place]).items():
                scores[seen] -= sampling.frequency_penalty * count + sampling.presence_penalty
            expected = (torch.tensor(scores) / sampling.temperature).log_softmax(-1)[token].item()
            assert answer.sampling_log_probs[place] == pytest.approx(expected, abs=2e-4)
            policy = (raw[place] / sampling.temperature).log_softmax(-1)[token].item()
            assert answer.log_probs[place] == pytest.approx(policy, abs=2e-4)


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_alternatives_are_the_likeliest_tokens_of_the_raw_policy(model: nn.Module, engine: str) -> None:
    reports: list[int] = []
    requests = [
        request(f"{number}", PROMPTS[number % 3], seed=number, max_tokens=9 + number, top_log_probs=count, **more)
        for number, (count, more) in enumerate(
            [(3, {"temperature": 0.6}), (0, {}), (20, {"constraint": CASES["schema"][0]}), (1, {"temperature": 0.0})]
        )
    ]
    requests[0] = GenerationRequest(
        "0", PROMPTS[0], requests[0].sampling, progress=lambda ids, _, tops: reports.append(len(ids) - len(tops))
    )
    answers = serve(engine_of(model, engine), requests)
    for asked in requests:
        answer, count = answers[asked.request_id], asked.sampling.top_log_probs
        if count == 0:
            assert answer.alternatives == []
            continue
        assert len(answer.alternatives) == len(answer.token_ids)
        policy = (all_logits(model, asked, answer.token_ids) / (asked.sampling.temperature or 1)).log_softmax(-1)
        for place, alternatives in enumerate(answer.alternatives):
            expected = policy[place].topk(count)
            assert [token for token, _ in alternatives] == expected.indices.tolist()
            torch.testing.assert_close(torch.tensor([p for _, p in alternatives]), expected.values, atol=1e-4, rtol=0)
    if engine == "native":
        assert reports and set(reports) == {0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"presence_penalty": 2.1},
        {"frequency_penalty": float("nan")},
        {"logit_bias": ((3, 101.0),)},
        {"logit_bias": ((VOCABULARY, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((3, 1.0), (3, 1.0))},
        {"top_log_probs": 21},
    ],
)
def test_parameters_out_of_range_are_refused(model: nn.Module, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        serve(engine_of(model), [request("bad", [3], **wrong)])
    assert error.value.field == next(iter(wrong))
