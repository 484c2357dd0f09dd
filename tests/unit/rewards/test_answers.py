"""The reader of numbers and answers: forms of numbers, marks, letters, thoughts and calls, and what verl and math-verify say."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answer_corpus import Case, corpus, stored_verdicts
from support.growth import grows_linearly

from hone.data.answers import (
    chosen_letter,
    find_numbers,
    last_answer,
    leading_number,
    read_number,
    same_answer,
    stated_answer,
)
from hone.rewards.rubric import parse_score
from hone.rewards.scorers import SCORERS

KNOWN = {("math_dapo", "1+x^2"): "formulas are compared as text"}
"""Right writings that Hone takes for wrong."""


def reason(judge: str, case: Case, hone: bool) -> str:
    """Return why a judge differs from Hone; a KeyError where there is no known reason."""
    if case.noise == "thought after":
        return "reads thoughts"
    if judge == "verl":
        if case.noise == "long tail" and case.scorer != "math":
            return "reads only the last 300 characters"
        if case.noise in ("bold", "stop") and case.scorer != "math":
            return "markdown or a stop changes the answer"
        lenient = {"42/5", "-3/4", "4,2", "12,34", "10, 000"}
        if not hone:
            return {True: "reads a part of the number", False: "drops units"}[case.written in lenient]
        return "compares text, not values"
    return {
        r"10\,000": "does not read a thin space between thousands",
        "": "takes an earlier box for an empty one",
        r"\text{}": "takes an earlier box for an empty one",
        "5,5": "takes a list for a set",
        "$42": "takes an odd dollar sign for a formula",
        "-$3": "takes an odd dollar sign for a formula",
        **dict.fromkeys((r"5\text{ m}", r"90\%", r"18\text{ cents}"), "drops units"),
    }[case.written]


DIFFERENCES = {
    ("math-verify", "does not read a thin space between thousands"): 8,
    ("math-verify", "drops units"): 24,
    ("math-verify", "reads thoughts"): 72,
    ("math-verify", "takes a list for a set"): 8,
    ("math-verify", "takes an earlier box for an empty one"): 3,
    ("math-verify", "takes an odd dollar sign for a formula"): 2,
    ("verl", "compares text, not values"): 697,
    ("verl", "drops units"): 36,
    ("verl", "markdown or a stop changes the answer"): 269,
    ("verl", "reads a part of the number"): 42,
    ("verl", "reads only the last 300 characters"): 136,
    ("verl", "reads thoughts"): 208,
}
"""Number of constructed answers whose verdict differs from that of verl and of math-verify, by reason."""


@pytest.fixture(scope="module")
def verdicts() -> list[tuple[Case, bool]]:
    return [(c, SCORERS.get(c.scorer).compute("x", c.text, c.truth, {})["score"] > 0) for c in corpus()]


def test_constructed_answers(verdicts) -> None:
    assert len(verdicts) > 4000
    wrong = {(c.scorer, c.written) for c, verdict in verdicts if verdict != c.right}
    assert wrong == set(KNOWN)


def test_differences_from_verl_and_math_verify_have_a_reason(verdicts) -> None:
    counts = Counter(
        (judge, reason(judge, case, hone))
        for judge, stored in stored_verdicts().items()
        for (case, hone), theirs in zip(verdicts, stored, strict=True)
        if theirs != "-" and (theirs == "1") != hone
    )
    assert counts == DIFFERENCES


def written(value: Fraction) -> list[str]:
    """Return writings of a number whose denominator is 1, 2, 4 or 5."""
    sign, size = "-" * (value < 0), abs(value)
    plain = [f"{float(size):.2f}", f"{float(size):,.2f}", f"{float(size):.6e}", f"{float(size):.3f}"]
    if size.denominator == 1:
        plain += [str(size), *(f"{int(size):,}".replace(",", mark) for mark in (",", r"\,", "{,}", "\u202f"))]
    else:
        plain += [
            str(size),
            rf"\frac{{{size.numerator}}}{{{size.denominator}}}",
            rf"\dfrac {{{size.numerator}}} {{{size.denominator}}}",
        ]
        plain += [f"{float(size)}".lstrip("0")]
    texts = (
        [sign + text for text in plain]
        + [f"{sign}${text}" for text in plain[:2]]
        + [f"${sign}{text}" for text in plain[:2]]
    )
    return texts + [text.replace("-", "\u2212", 1) for text in texts if sign and text.startswith("-")]


VALUES = st.builds(Fraction, st.integers(-3_000_000, 3_000_000), st.sampled_from([1, 1, 1, 2, 4, 5]))
AROUND = [
    "{}",
    "**{}**",
    "${}$",
    r"\({}\)",
    "{}.",
    "`{}`",
    r"\boxed{{{}}}",
    " {} \n",
    "x = {}",
    "*{}*",
    "__{}__.",
    r"\text{{{}}}",
    "{} apples",
    "{} cm",
]


@given(VALUES, st.data())
def test_numbers_in_all_forms(value: Fraction, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(written(value)))
    around = data.draw(st.sampled_from(AROUND if "$" not in text else [form for form in AROUND if "$" not in form]))
    if "\\" in text and "text" in around:
        around = "{}"
    number = read_number(around.format(text))
    assert number is not None and number.value == value, around.format(text)
    assert "." in number.text or number.exact
    again = read_number(number.text)
    assert again is not None and again.value == value
    prose = find_numbers(f"First 17, then 2/3 of it, at last {text}, I think.")
    assert [found.value for found in prose] == [17, Fraction(2, 3), value]
    assert leading_number(f"**{text}** apples")[0] == number if "apples" not in around and not number.unit else True


@pytest.mark.parametrize(
    "text",
    [*("", "x", "5 or 6", "5, 6", "(5)", "5x", r"5\pi", "5!", "1/0", "1.2.3", "12:30", "4/5/2024", "3-4", "1e999", "9^{9^{9}}", "4,2", "five", "--5"), "1" * 5000],
)  # fmt: skip
def test_what_is_no_number(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        (r"\text{No}", r"\text{Yes}", False),
        (r"\text{yes}", "Yes", True),
        ("(A)", "(C)", False),
        (r"\textbf{(C)}\ 42", "C", True),
        ("(1,234)", "(1234)", False),
        ("1 2", "12", False),
        ("3, 125", "3125", False),
        (r"5\text{ cm}", r"5\text{ m}", False),
        ("5 dollars", r"\$5", True),
        ("50%", "0.5", True),
        ("2 million", "2,000,000", True),
        ("1 1/2", r"\frac{3}{2}", True),
        ("", "x", False),
        ("0.333", "1/3", None),
        ("$5.5", "\u20ac5.6", False),
        ("$5.5", "$5.6", None),
        (r"5.2\text{ kg}", r"5.3\text{ m}", False),
        ("x+1", "1+x", None),
    ],
)
def test_same_answer(answer: str, truth: str, same: bool | None) -> None:
    assert same_answer(answer, truth) is same


def test_an_empty_truth_is_no_verdict() -> None:
    for scorer in ("math", "math_dapo", "exact", "gsm8k", "number", "multiple_choice"):
        with pytest.raises(ValueError):
            SCORERS.get(scorer).compute("x", "5", "", {})


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The correct answer is B. That is the answer I would give.", "B"),
        ("The answer is a bit unclear, but I pick C", "C"),
        ("<answer>B) a dog</answer>", "B"),
        ("The answer is: **(D)** because I say so", "D"),
        (r"\boxed{\textbf{(E)}\ 12}", "E"),
        ("Option C is right.", "C"),
        ("answer: b", "B"),
        ("I think it is (I)", "I"),
        ("The answer is A", "A"),
        ("The answer is B or C.", None),
        ("I would say A or B", None),
        ("I am a cat", None),
        ("<think>The answer is A</think>The answer is B.", "B"),
    ],
)
def test_letters(text: str, letter: str | None) -> None:
    assert chosen_letter(last_answer(text)) == letter


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("**Answer:** 42", "42"),
        ("The answer is **42**. That is the answer I would give, and it is right.", "42"),
        ("**Final Answer**\n\n3.5 apples\nBye", "3.5 apples"),
        ("The answer to the question is therefore 5.", "5"),
        ("Answer:\n\n7", "7"),
        ("I checked the answer and it is fine", None),
        ("the answer is not 5", None),
    ],
)
def test_stated_answers(text: str, answer: str | None) -> None:
    assert stated_answer(text) == answer


CALL = '<tool_call>{"name": "search", "arguments": {"query": "Spain 31"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"I look.\n{CALL}\nOslo", "Oslo"),
        (f"{CALL}\n{CALL}\n<think>so</think>\nOslo", "Oslo"),
        ("hm, so\n</think>\n\nOslo", "Oslo"),
        ("<think><think>hm</think>Oslo", "Oslo"),
        ("<think>Oslo", ""),
        (f"Oslo {CALL}", "Oslo"),
        ("<reasoning>\nhm\n</reasoning>\nOslo", "Oslo"),
        ("[THINK]hm[/THINK]Oslo", "Oslo"),
        ('[TOOL_CALLS][{"name": "f"}]\nOslo', "Oslo"),
        ("<think>a</think>Os<think>b</think>lo", "Oslo"),
        ("Oslo", "Oslo"),
    ],
)
def test_last_answers(text: str, answer: str) -> None:
    assert last_answer(text) == answer
    assert SCORERS.get("exact").compute("x", text, "Oslo", {})["score"] == float(answer == "Oslo")


def test_the_last_turn_is_that_of_the_episode() -> None:
    turns = [{"role": "assistant", "content": "Rome?", "tool_calls": [{}]}, {"role": "tool", "content": "Oslo"}]
    final = {"role": "assistant", "content": "<think>hm</think> Oslo"}
    text = 'Rome? search(query="x")\n<think>hm</think> Oslo'
    assert last_answer(text, {"episode": {"messages": [*turns, final]}}) == "Oslo"
    assert last_answer("nothing of it", {"episode": {"messages": [*turns, final]}}) == "nothing of it"
    assert (
        last_answer(f"Rome? {CALL}\n", {"episode": {"messages": [*turns, {"role": "assistant", "content": ""}]}}) == ""
    )
    assert last_answer("Oslo", {"episode": "a name"}) == "Oslo"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        *(("Score (0-10): 8", 8.0), ("Score: .5", 0.5), ("Score: 1e-1", 0.1), ("Score: 4/5", 8.0), ("Score: \u22123", -3.0), ("Score: 3-4", None)),
        *(("A perfect score 10 is not deserved.\nScore: none", None), ("**Score:** 8/10", 8.0), ("Score: **7**.", 7.0), ("score = 80%", 8.0)),
        *(("Overall score: 4 out of 5", 8.0), ("The score is 6.", 6.0), ("Score: 3 to 4", None), ("<think>Score: 3</think>Score: 9", 9.0)),
        *(("<think>Score: 3", None), ("[[7]]", 7.0), ('"score": "8"', 8.0), ("Score for style: 5", 5.0), ("no number", None)),
    ],
)  # fmt: skip
def test_scores_of_judges(text: str, score: float | None) -> None:
    assert parse_score(text) == (score if score is None else pytest.approx(score))


@pytest.mark.parametrize(
    "piece",
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "**",
        "$",
        "1,",
        "1.",
        "\\frac{1}",
        "answer is ",
        "\\text{",
        "(",
        "score: 1 ",
        "1 ",
        "/1",
    ],
)
def test_reading_takes_linear_time(piece: str) -> None:
    for read in (last_answer, find_numbers, read_number, stated_answer, chosen_letter, parse_score):
        assert grows_linearly(lambda size, read=read: read(piece * size), 20_000), read


@given(st.integers(-(10**20), 10**20))
def test_a_plain_whole_number_is_read_as_one_among_spaces(number: int) -> None:
    assert read_number(str(number)) == read_number(f" {number} ")
    assert read_number(f"0{abs(number)}") == read_number(f" 0{abs(number)} ")
