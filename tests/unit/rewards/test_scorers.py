"""Built-in scorers: right answers, garbage, and answers that try to cheat."""

import importlib.util
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.growth import grows_linearly
from support.messages import raises

from hone.data.answers import final_answer
from hone.errors import RewardError, UnknownMethod
from hone.extras import install_command
from hone.rewards.scorers import SCORERS, math_answer, scorer_for
from hone.rewards.scorers.countdown import evaluate

COUNTDOWN = json.dumps({"target": 33, "numbers": [3, 7, 12]})
GYM = json.dumps({"question": "1 + 1?", "answer": "2", "metadata": {}})


def score(source: str, response: str, truth: object, **options) -> dict:
    scorer = scorer_for(source)
    assert scorer is not None
    return scorer.compute(data_source=source, solution_str=response, ground_truth=truth, extra_info={}, **options)


RIGHT = [
    ("openai/gsm8k", "2 + 16 = 18\n#### 18", "18"),
    ("gsm8k", "#### 1,234", "1234"),
    ("gsm8k", "#### Final Answer\n\n18", "18"),
    ("math", r"so \boxed{\text{The answer is } 42}", "42"),
    ("arithmetic", "#### 7 no, wait\n#### -9", "-9"),
    ("arithmetic", "#### 18", 18),
    ("gsm8k", "#### 18" + " padding" * 50, "18"),  # the last marked answer counts, wherever it is
    ("math", r"so \boxed{\dfrac{1}{2}}", "0.5"),
    ("math", r"so \boxed{1/2}", r"\frac12"),
    ("HuggingFaceH4/MATH-500", r"first \boxed{3}, no: \boxed{x = 1{,}000}", "1000"),
    ("lighteval/MATH-algebra", r"\boxed{5\text{ cm}}", r"the answer: \boxed{5}"),
    ("aime2024", "The final answer is 204.", "204"),
    ("math_dapo", "Answer: 34", "34"),
    ("countdown", "<answer>7 * 3 + 12</answer>", COUNTDOWN),
    ("countdown", "think\n#### 12 + (3 * 7) = 33", COUNTDOWN),
    ("countdown", "<answer>7*3+12</answer>", {"target": 33, "numbers": [12, 7, 3]}),
    ("digit_sequence", "3814", "3814"),
    ("digit_sequence", " 3 8-1;4", "3814"),
    ("exact", "<answer> Paris.</answer>", "paris"),
    ("exact_match", "  Ｐaris\n", ["Lyon", "Paris"]),
    ("exact", "...", "..."),
    ("reasoning_gym/chain_sum", "well <answer>2</answer>", GYM),
    ("reasoning_gym/chain_sum", "2", json.loads(GYM)),
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"of": "#### 999"}}\n</tool_call>'
FORMS = {
    "thought": "<think>#### 999 or \\boxed{999}?</think>\nRIGHT",
    "thought that the prompt opened": "perhaps #### 999\n</think>\nRIGHT",
    "call": f"I look.{CALL}\nRIGHT",
    "two turns": f"#### 999, but let me see.\n{CALL}\n<think>so</think>\nRIGHT",
    "harmony": "<|channel|>analysis<|message|>#### 999?<|end|><|start|>assistant<|channel|>final<|message|>RIGHT<|return|>",
    "harmony without its tokens": "analysis#### 999?assistantfinalRIGHT",
}
"""Text of an episode around its last answer."""


@pytest.mark.parametrize(("source", "response", "truth"), RIGHT)
def test_right_answers(source: str, response: str, truth: object) -> None:
    result = score(source, response, truth)
    assert result["score"] == 1.0 and result["acc"] == 1.0 and result["pred"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("source", "response", "truth"), RIGHT)
def test_the_last_answer_alone_counts(source: str, response: str, truth: object, form: str) -> None:
    plain = score(source, response, truth)
    assert score(source, FORMS[form].replace("RIGHT", response), truth) == plain
    after = FORMS[form].replace("#### 999", response).replace("RIGHT", "I do not know.")
    assert score(source, after, truth) == score(source, "I do not know.", truth)


@pytest.mark.parametrize(
    ("source", "response", "truth"),
    [
        ("gsm8k", "", "18"),
        ("gsm8k", "The answer is 18", "18"),  # strict: not after ####
        ("gsm8k", "#### 18 #### 17", "18"),
        ("gsm8k", "#### ", "18"),
        ("math", "", "0.5"),
        ("math", r"\boxed{1} \boxed{2} \boxed{3}", "2"),  # only the last box counts
        ("math", r"\boxed{2", "2/3"),
        ("math", r"\boxed{}", "2"),
        ("math", r"\boxed{1, 2, 3}", "2"),
        ("countdown", "<answer>33</answer>", COUNTDOWN),
        ("countdown", "<answer>7 * 3 + 12 + 12 - 12</answer>", COUNTDOWN),
        ("countdown", "<answer>7 * 3</answer>", COUNTDOWN),
        ("countdown", "<answer>__import__('os')._exit(1)</answer>", COUNTDOWN),
        ("countdown", "<answer>12 ** 7 ** 3</answer>", COUNTDOWN),
        ("countdown", "<answer>3 / (7 - 7) * 12</answer>", COUNTDOWN),
        ("countdown", "<answer>" + "(" * 200 + "</answer>", COUNTDOWN),
        ("countdown", "<answer>3 7 12</answer>", COUNTDOWN),
        ("countdown", "", COUNTDOWN),
        ("digit_sequence", "", "3814"),
        ("digit_sequence", "words", "3814"),
        ("exact", "", "Paris"),
        ("exact", "Paris or Lyon", "Paris"),
        ("exact", "<answer>Lyon</answer> Paris", "Paris"),
        ("reasoning_gym/chain_sum", "", GYM),
        ("reasoning_gym/chain_sum", "<answer>3</answer>", GYM),
    ],
)
def test_garbage_and_cheating(source: str, response: str, truth: object) -> None:
    result = score(source, response, truth)
    assert result["score"] < 0.5 and result["acc"] == 0.0


def test_gsm8k_options() -> None:
    assert score("gsm8k", "It is 1,234 dollars, so 18.", "18", method="flexible")["score"] == 1.0
    assert score("gsm8k", "no digits . , -", "18", method="flexible")["pred"] is None
    wrong = score("gsm8k", "#### 17", "18", format_score=0.1, score=2.0)
    assert wrong == {"score": 0.1, "acc": 0.0, "format": 1.0, "pred": "17"}
    assert score("gsm8k", "17", "18", format_score=0.1)["score"] == 0.0
    assert score("gsm8k", "#### 18", "18", score=2.0)["score"] == 2.0
    with raises(RewardError, "loose", "strict or flexible"):
        score("gsm8k", "1", "1", method="loose")


def test_digit_sequence_is_graded() -> None:
    assert score("digit_sequence", "3800", "3814")["score"] == 0.5
    assert score("digit_sequence", "38", "3814")["score"] == 0.5
    assert score("digit_sequence", "38143814", "3814")["score"] == 0.5
    assert score("digit_sequence", "8143", "3814")["score"] == 0.0
    with raises(ValueError, "ground_truth ''"):
        score("digit_sequence", "1", "")


@given(st.text("0123456789 x", max_size=12), st.text("0123456789", min_size=1, max_size=8))
def test_digit_sequence_bounds(response: str, truth: str) -> None:
    result = score("digit_sequence", response, truth)
    assert 0.0 <= result["score"] <= 1.0
    assert (result["score"] == 1.0) == (result["acc"] == 1.0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.lists(st.sampled_from("+-*/"), min_size=3, max_size=3))
def test_countdown_arithmetic_is_exact(numbers: list[int], signs: list[str]) -> None:
    expression = str(numbers[0]) + "".join(s + str(n) for s, n in zip(signs, numbers[1:], strict=False))
    value = evaluate(expression, numbers)
    assert value is not None and abs(float(value) - eval(expression)) < 1e-9


def test_countdown_format_score() -> None:
    assert score("countdown", "<answer>7 + 3 + 12</answer>", COUNTDOWN, format_score=0.1)["score"] == 0.1
    assert score("countdown", "<answer>7 + 3</answer>", COUNTDOWN, format_score=0.1)["score"] == 0.0


def test_math_without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    with_package = score("math", r"\boxed{x^2 + 2x + 1}", "(x+1)^2")
    assert (with_package["verifier"], with_package["score"]) == ("math-verify", 1.0)
    monkeypatch.setattr(math_answer, "_installed", lambda: False)
    for response, truth, right in [
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 0.0),  # text alone cannot know
        (r"\boxed{\dfrac{3}{6}}", "0.5", 1.0),
        (r"\boxed{-\frac12}", r"-\frac{1}{2}", 1.0),
        (r"\boxed{\frac{-1}{2}}", "-0.5", 1.0),
        (r"\boxed{10,000}", "$10000$", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{\frac{1}{0}}", "1", 0.0),
        (r"\boxed{}", "1", 0.0),
    ]:
        result = score("math", response, truth)
        assert (result["verifier"], result["score"]) == ("exact", right), response


def test_final_answer() -> None:
    assert final_answer("<answer>a</answer> #### b <answer> c </answer>") == ("c", True)
    assert final_answer("</answer> <answer> open\n#### b \nmore") == ("b", True)
    assert final_answer(" plain ") == ("plain", False)


@pytest.mark.parametrize("name", [n for n in SCORERS if SCORERS.get(n).reads_text_only])
@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "####", "#### 1", "1.", "(", "answer is", "\\boxed{", " "])
def test_scorers_that_run_in_the_trainer_take_linear_time(name: str, piece: str) -> None:
    truth = {"countdown": COUNTDOWN}.get(name, "18")
    compute = SCORERS.get(name).compute
    assert grows_linearly(lambda size: compute(data_source=name, solution_str=piece * size, ground_truth=truth), 20_000)


def test_data_source_patterns() -> None:
    def name(source: str) -> str | None:
        scorer = scorer_for(source)
        return scorer and scorer.name

    assert name("openai/gsm8k") == "gsm8k"
    assert name("reasoning_gym/countdown") == "reasoning_gym"
    assert name("countdown") == "countdown"
    assert name("aime2025") == name("numina_olympiads") == name("lighteval/MATH") == "math"
    assert name("data/gsm8k-local") is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(RewardError, "reasoning-gym", install_command("tasks")):
        SCORERS.get("reasoning_gym").check_installed()


def test_importing_the_package_is_cheap() -> None:
    program = "import sys, hone.rewards.manager; print({'torch', 'numpy', 'transformers', 'sympy'} & set(sys.modules))"
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "set()"


def test_a_scorer_is_known_by_the_source_that_it_scores() -> None:
    assert SCORERS.get("exact_match") is SCORERS.get("exact") is scorer_for("exact_match")
    assert "exact_match" in SCORERS and "exact_match" not in SCORERS.names() and "exact_matches" not in SCORERS
    with raises(UnknownMethod, "exact_matches", where="reward.scorer"):
        SCORERS.get("exact_matches")
