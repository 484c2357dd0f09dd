"""The scorer library: each scorer with right answers, garbage, cheats and truths that it cannot read."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises

from hone.data.episode_log import CallRecord, CallStatus, EpisodeLog
from hone.rewards.scorers import SCORERS, scorer_for
from hone.rewards.scorers.code import last_program, read_tests, same_output, same_value
from hone.rewards.scorers.matching import squad_normal
from hone.rewards.worker import to_score

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def score(source: str, response: str, truth: Any = None, info: dict[str, Any] | None = None, **options: Any) -> dict:
    scorer = scorer_for(source)
    assert scorer is not None, source
    return scorer.compute(data_source=source, solution_str=response, ground_truth=truth, extra_info=info, **options)


@pytest.mark.parametrize(
    ("source", "response", "truth", "options", "expected"),
    [
        # DAPO: 1 or -1
        ("math_dapo", "Answer: 34", "34", {}, 1.0),
        ("math_dapo", "so it is\nAnswer: $x = \\frac{1}{2}$", "0.5", {}, 1.0),
        ("math_dapo", "Answer: 5 units", "5", {}, 1.0),
        ("math_dapo", "Answer: 1,000", 1000, {}, 1.0),
        ("math_dapo", "I get \\boxed{7}", "7", {}, 1.0),
        ("math_dapo", "Answer: 3\nAnswer: 4", "3", {}, -1.0),  # the last one counts
        ("math_dapo", "Answer: 34" + " padding" * 50, "34", {}, -1.0),
        ("math_dapo", "", "34", {}, -1.0),
        ("math_dapo", "Answer: 7", "7", {"strict_box_verify": True}, -1.0),
        ("math_dapo", "", "34", {"wrong": 0.0}, 0.0),
        # multiple choice
        ("multiple_choice", "<answer>B</answer>", "B", {}, 1.0),
        ("multiple_choice", "<answer>(B) Paris</answer>", "B", {}, 1.0),
        ("mmlu_physics", "The answer is (C).", 2, {}, 1.0),
        ("gpqa", "so **Answer:** D", "D", {}, 1.0),
        ("arc_challenge", r"hence \boxed{\text{A}}", "a", {}, 1.0),
        ("mmlu", "B", "(B)", {}, 1.0),
        ("mmlu", "A B C D", "B", {}, 0.0),
        ("mmlu", "<answer>A, B, C, D</answer>", "A", {}, 0.0),
        ("mmlu", "A because cats. The answer is B", "A", {}, 0.0),
        ("mmlu", "", "A", {}, 0.0),
        ("mmlu", "Apples are a fruit", "A", {}, 0.0),
        # F1 and exact match of search
        ("f1", "<answer>the cat sat</answer>", "A cat sat!", {}, 1.0),
        ("squad_v2", "cat", ["dog", "black cat"], {}, 2 / 3),
        ("f1", "", "cat", {}, 0.0),
        ("searchR1_nq", "<answer> The Beatles </answer>", {"target": ["beatles"]}, {}, 1.0),
        ("searchR1_nq", "The Beatles", {"target": ["beatles"]}, {}, 0.0),  # not in tags
        ("searchR1_nq", "<answer>Queen</answer>", json.dumps({"target": ["beatles"]}), {"format_score": 0.1}, 0.1),
        ("searchR1_nq", "<answer>x</answer>" * 10 + "<answer>beatles</answer>", {"target": ["beatles"]}, {}, 0.25),
        ("search_em", "<answer>the Beatles of Liverpool</answer>", ["beatles"], {"substring": True}, 1.0),
        # numbers
        ("number", "about 3.1415 or so", "3.1415", {}, 1.0),
        ("number", "#### 1,234", 1234, {}, 1.0),
        ("number", "90", 100, {"partial": 0.5}, 0.45),
        ("number", "100", "99", {"tolerance": 0.02}, 1.0),
        ("number", "none", 5, {}, 0.0),
        # JSON
        ("json_schema", '{"n": 3}', SCHEMA, {}, 1.0),
        ("json_schema", 'Here:\n```json\n{"n": 3}\n```', json.dumps(SCHEMA), {}, 1.0),
        ("json_schema", '<answer>{"n": 3}</answer>', None, {"schema": SCHEMA}, 1.0),
        ("json_schema", '{"n": "3"}', SCHEMA, {}, 0.2),
        ("json_schema", '{"n": 3, "x": 1}', SCHEMA, {"valid_score": 0.0}, 0.0),
        ("json_schema", "n is 3", SCHEMA, {}, 0.0),
        ("json_schema", '{"n": NaN}', SCHEMA, {}, 0.0),
        ("json_schema", "[" * 100_000, SCHEMA, {}, 0.0),
        # form
        ("format", "<think>why</think> because", None, {}, 1.0),
        ("format", "<think></think> because", None, {}, 0.0),
        ("format", "<think>a</think><think>b</think> c", None, {}, 0.0),
        ("format", "because", None, {}, 0.0),
        ("format", "yes or no: yes", None, {"pattern": r".*: (yes|no)"}, 1.0),
        ("length", "abc", None, {"max_chars": 3}, 1.0),
        ("length", "abcdef", None, {"max_chars": 4}, 0.5),
        ("length", "", None, {"min_chars": 5, "max_chars": 10}, 0.0),
        ("length", "", None, {"min_chars": 0}, 1.0),
        ("length", "a" * 12, None, {"max_chars": 10, "margin": 4}, 0.5),
        ("keywords", "The CAT sat", ["cat", "dog"], {}, 0.5),
        ("keywords", "concatenate", ["cat"], {}, 0.0),
        ("keywords", "c++ and c", None, {"words": ["C++"]}, 1.0),
        ("banned_words", "it is FINE", None, {"words": ["fine"]}, -1.0),
        ("banned_words", "finely", None, {"words": ["fine"], "penalty": 2}, 0.0),
        ("repetition", "a b c d e f g h", None, {}, 0.0),
        ("repetition", "a b c d " * 3, None, {}, -5 / 9),
        ("repetition", "", None, {}, 0.0),
        ("language", "hello, мир", None, {}, 5 / 8),
        ("language", "你好 world", None, {"language": "zh"}, 2 / 7),
        ("language", "1234", None, {}, 0.0),
    ],
)
def test_scores(source: str, response: str, truth: Any, options: dict, expected: float) -> None:
    assert score(source, response, truth, **options)["score"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("source", "truth", "options"),
    [
        ("multiple_choice", None, {}),
        ("multiple_choice", "both", {}),
        ("f1", None, {}),
        ("f1", [], {}),
        ("search_em", {"answers": ["x"]}, {}),
        ("number", "3 or 4", {}),
        ("number", None, {}),
        ("keywords", None, {}),
        ("banned_words", [], {}),
        ("json_schema", {"type": "nothing"}, {}),
        ("json_schema", "{", {}),
        ("format", None, {"pattern": "("}),
        ("length", None, {"min_chars": 3, "max_chars": 2}),
        ("repetition", None, {"n": 0}),
        ("language", None, {"language": "klingon"}),
    ],
)
def test_what_cannot_be_read_is_an_error_and_no_silent_zero(source: str, truth: Any, options: dict) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        score(source, "something", truth, **options)


@given(st.text(max_size=300))
def test_any_text_gets_a_finite_score(text: str) -> None:
    truths = {"multiple_choice": "A", "number": "3", "keywords": ["a"], "banned_words": ["a"], "json_schema": SCHEMA}
    for name in ("math_dapo", "multiple_choice", "f1", "search_em", "number", "json_schema", "format", "length",
                 "keywords", "banned_words", "repetition", "language"):  # fmt: skip
        result = to_score(score(name, text, truths.get(name, "18")))
        assert result.error is None and -1.0 <= result.total <= 1.0


@given(st.text(), st.text())
def test_f1_is_symmetric_and_1_for_the_same(a: str, b: str) -> None:
    assert score("f1", f"<answer>{a}</answer>" if "<" in a or "#" in a else a or "x", a or "x")[
        "score"
    ] == 1.0 or not squad_normal(a)
    plain_a, plain_b = squad_normal(a).replace("#", ""), squad_normal(b).replace("#", "")
    assert score("f1", plain_a, plain_b)["score"] == pytest.approx(score("f1", plain_b, plain_a)["score"])


def episode(*calls: tuple[str, CallStatus, Any]) -> dict[str, Any]:
    log = EpisodeLog(calls=[CallRecord(name, arguments, status) for name, status, arguments in calls])
    return {"episode": log.summary()}


def test_tool_calls() -> None:
    good = ("add", CallStatus.OK, {"a": 1})
    failed = ("add", CallStatus.ERROR, {"a": 2})
    bad = ("ad", CallStatus.UNKNOWN_TOOL, {})
    result = score("tool_format", "", None, episode(good, failed, bad, ("x", CallStatus.MALFORMED, None)))
    assert (result["score"], result["tool_calls"], result["tool_success"]) == (0.5, 4.0, 0.25)
    assert score("tool_format", "", None, {})["score"] == 0.0
    assert score("tool_format", "", None, {}, required=False)["score"] == 1.0
    assert score("tool_efficiency", "", None, episode(good))["score"] == 0.0
    twice = score("tool_efficiency", "", None, episode(good, good, bad))
    assert twice["score"] == pytest.approx(-0.3) and twice["repeated_calls"] == 1
    assert score("tool_efficiency", "", None, episode(*[good] * 50))["score"] == -1.0


def test_the_last_program_counts() -> None:
    assert last_program("```python\na\n```\ntext\n```python\nb\n```\n```\noutput\n```") == "b\n"
    assert last_program("```\nonly\n```") == "only\n"
    assert last_program("```python\ncut off") == "cut off"
    assert last_program("no code") is None


def test_forms_of_tests() -> None:
    assert read_tests({"inputs": ["1"], "outputs": ["2"]}).inputs == ("1",)
    assert read_tests(json.dumps({"inputs": [[1]], "outputs": [2], "fn_name": "f"})).function == "f"
    assert read_tests({"assert_case": ["assert 1", "assert 2"]}, max_tests=1).assertions == ("assert 1",)
    assert read_tests("assert f(1) == 2").assertions == ("assert f(1) == 2",)
    assert read_tests({"inputs": '["a", "b"]', "outputs": '["c", "d"]'}).outputs == ("c", "d")
    for nothing in (None, "", [], {}, {"inputs": ["1"], "outputs": []}, 3):
        with raises(ValueError, "tests"):
            read_tests(nothing)


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [("1 2\n", "1 2", True), ("1\n2", "1 2", False), ("0.3333333", "0.33333331", True), ("a  b", "a b", True), ("1", "", False), ("True", "1", False)],
)  # fmt: skip
def test_outputs_are_compared_line_by_line(printed: str, wanted: str, same: bool) -> None:
    assert same_output(printed, wanted) is same


@pytest.mark.parametrize(
    ("value", "wanted", "same"),
    [([1, 2], [[1, 2]], True), (3, [3], True), (0.1 + 0.2, 0.3, True), (1, True, False), ({"a": [1.0]}, {"a": [1]}, True), ("3", 3, False), (None, [None], True)],
)  # fmt: skip
def test_values_are_compared_as_json(value: Any, wanted: Any, same: bool) -> None:
    assert same_value(value, wanted) is same


def test_every_scorer_is_documented() -> None:
    for name in SCORERS:
        assert (SCORERS.get(name).compute.__doc__ or "").strip(), name
