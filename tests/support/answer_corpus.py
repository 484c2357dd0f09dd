r"""Constructed answers: truth x writing x noise, each with its verdict by construction.

``scripts/answer_verdicts.py`` stores what verl and math-verify say about them, in answer_verdicts.json beside this file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VERDICTS = Path(__file__).with_name("answer_verdicts.json")

NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "42": (("42", "42.0", "42.00", "$42", "+42", "42 apples"), ("24", "-42", "4.2", "420", "42/5", "4,2")),
    "-3": (("-3", "\u22123", "-3.0", "-3 degrees", "-$3"), ("3", "-30", "-3/4", "0.3", "-2")),
    "1234": (("1234", "1,234", "1234.0", "$1,234", "1,234 dollars"), ("12,34", "1,235", "-1234", "234", "1.234")),
    "1250000": (("1250000", "1,250,000", "1.25e6", "$1,250,000.00"), ("125000", "1.25e5", "1,250,001", "1,250")),
    "0.5": (("0.5", ".5", "1/2", "0.50", "50%"), ("5", "-0.5", "2/1", "0.05", "5%")),
    "18": (("18", "18.0", "18 eggs", "36/2"), ("8", "1.8", "-18", "18,5", "181")),
    "7": (("7", "7.0", "07", "$7", "14/2"), ("-7", "1/7", "70", "7.5", "7,7")),
    "0": (("0", "0.0", "-0", "0 meters"), ("1", "10", "0.1", "-1")),
}
"""Ground truths that are numbers, with right and wrong writings in plain text."""
LATEX: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    r"\frac{1}{2}": (
        (r"\frac{1}{2}", r"\dfrac{1}{2}", r"\frac12", "1/2", "0.5", ".5"),
        (r"\frac{2}{1}", r"-\frac{1}{2}", "2", "0.05", "1,2"),
    ),
    r"-\frac{3}{4}": (
        (r"-\frac{3}{4}", r"\frac{-3}{4}", r"-\tfrac34", "-0.75", "\u22123/4"),
        (r"\frac{3}{4}", "-4/3", "-0.7", "-3"),
    ),
    "10000": (
        ("10000", "10{,}000", r"10\,000", "10,000", "10^4", r"1 \times 10^{4}"),
        ("10,0000", "1000", "10^5", "(10,000)", "10, 000"),
    ),
    r"\text{Yes}": (
        (r"\text{Yes}", "Yes", r"\text{ yes }", r"\textbf{Yes}"),
        (r"\text{No}", "No", "", r"\text{Yes or No}", r"\text{Maybe}"),
    ),
    r"\text{(A)}": (
        (r"\text{(A)}", "(A)", "A", r"\textbf{(A)}", r"\mathrm{A}"),
        (r"\text{(C)}", "(B)", "C", r"\text{}", "(A), (B)"),
    ),
    r"\text{east}": ((r"\text{east}", "east", r"\text{East}"), (r"\text{west}", "", r"\text{north-east}", "5")),
    r"5\text{ cm}": (
        (r"5\text{ cm}", "5", "5 cm", r"5\mathrm{cm}", r"5\,\text{cm}"),
        (r"5\text{ m}", "6", r"50\text{ cm}", r"\text{cm}"),
    ),
    r"90^\circ": ((r"90^\circ", "90", r"90^{\circ}", r"90\text{ degrees}"), (r"9^\circ", "180", r"90\%", "-90")),
    r"50\%": ((r"50\%", "50", r"50 \%", "0.5"), (r"5\%", "5", "0.05", "500")),
    r"\$18": ((r"\$18", "18", r"\$18.00", r"18\text{ dollars}"), (r"\$81", "8", r"\$1.8", r"18\text{ cents}")),
    "(1,2)": (("(1,2)", "(1, 2)", r"\left(1,2\right)"), ("(2,1)", "12", "(12)", "[1,2]", "(1,3)")),
    "x^2+1": (("x^2+1", "x^{2} + 1", "1+x^2"), ("x^2-1", "x+1", "x2+1", "2x+1")),
    r"2\sqrt{3}": ((r"2\sqrt{3}", r"2\sqrt3", r"2 \sqrt {3}"), (r"3\sqrt{2}", r"2\sqrt{5}", "6", r"\sqrt{3}")),
    r"\pi": ((r"\pi",), (r"2\pi", "p", r"\frac{\pi}{2}", "3")),
    "5": (("5", "x = 5", "5.0", r"\text{5}", r"\mathbf{5}"), ("-5", "x = 6", "5,5", "5 6", r"\text{12}")),
}
"""Ground truths as LaTeX, with right and wrong writings for a box."""
MARKS = {
    "gsm8k": "So we add them up.\n#### {}",
    "math_dapo": "Some reasoning first.\nAnswer: {}",
    "math": r"Therefore the result is $\boxed{{{}}}$.",
}
TAIL = "Let me check this once more, step by step, to be sure that nothing was missed. " * 6
NOISE = {
    "none": "{marked}",
    "line after": "{marked}\nI hope this helps.",
    "long tail": "{marked}\n" + TAIL,
    "wrong before": "{decoy}\nNo, that is not it.\n{marked}",
    "right before": "{right}\nNo, that is not it.\n{marked}",
    "thought before": "<think>\nPerhaps {decoy}\n</think>\n{marked}",
    "thought after": "{marked}\n<think>\nOr was it {decoy}\n</think>",
    "call before": '<tool_call>{{"name": "f", "arguments": {{"x": 31}}}}</tool_call>\n{marked}',
    "bold": "{bold}",
    "stop": "{stop}",
}
"""Texts around a marked answer; ``decoy`` is a marked wrong answer."""


@dataclass(frozen=True)
class Case:
    """Constructed answer: the scorer that reads it, its text, the truth, what was written, the noise, and whether it is right."""

    scorer: str
    text: str
    truth: str
    written: str
    noise: str
    right: bool


def corpus() -> Iterator[Case]:
    """Yield all cases, in a fixed order."""
    for scorer, mark in MARKS.items():
        tables = {
            "gsm8k": NUMBERS,
            "math_dapo": NUMBERS | LATEX,
            "math": LATEX | {"42": NUMBERS["42"], "-3": NUMBERS["-3"]},
        }[scorer]
        for truth, (right, wrong) in tables.items():
            for noise, form in NOISE.items():
                if scorer == "math" and noise == "stop":
                    continue  # a box has its own end
                for number, written in enumerate((*right, *wrong)):
                    bold = mark.replace("{}", "**{}**") if scorer != "math" else f"**{mark}**"
                    parts = {"marked": mark, "bold": bold, "stop": mark + ".", "decoy": mark, "right": mark}
                    filled = {
                        name: text.format({"decoy": "31", "right": right[0]}.get(name, written))
                        for name, text in parts.items()
                    }
                    yield Case(scorer, form.format(**filled), truth, written, noise, number < len(right))


def digest() -> str:
    """Return a hash of the corpus, kept with the stored verdicts."""
    return hashlib.sha256(json.dumps([vars(case) for case in corpus()]).encode()).hexdigest()


def stored_verdicts() -> dict[str, str]:
    """Return the stored verdicts by judge: one character a case, 1, 0, or - where the judge does not read the case's scorer."""
    stored = json.loads(VERDICTS.read_text())
    if stored.pop("corpus") != digest():
        raise ValueError("the corpus has changed: run scripts/answer_verdicts.py again")
    return {judge: "".join(lines) for judge, lines in stored["verdicts"].items()}
