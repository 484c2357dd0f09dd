"""Scorer of programs by tests in the sandbox: printed output, return values or assertions."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import textwrap
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.rewards.sandbox import Ending, Result
from hone.rewards.scorers.base import register_scorer

if TYPE_CHECKING:
    from hone.rewards.services import Services


_FENCE = re.compile(r"(?P<before>.*?)(?P<mark>(?<!`)```++(?=[^`]*$)|(?<!~)~~~++)(?P<info>.*)$")
_OUTSIDE = re.compile(
    r"[\s>]*(?:[-*+]|\d+[.)])?\s*"
)  # what is allowed before a fence: indentation, a quote, a list's mark
_PYTHON = re.compile(r"[{\s.]*(?:language-)?(?:(?:i?python|py|pypy)[\d.]*(?![\w.+#-])|[\w./-]+\.py\b)", re.IGNORECASE)
_TAG = re.compile(r"[{.\w][\w.+#:/}-]*(?:[ ,].*[={].*)?")
_CODE = re.compile(r"\"\"\"|'''|\"(?:\\.|[^\"\\])*\"?|'(?:\\.|[^'\\])*'?|#.*|```+|^\s*~~~+")


@dataclass
class _Block:
    mark: str
    info: str
    before: str
    lines: list[str] = field(default_factory=list)
    quote: str = ""  # that of a string over several lines, which is open

    @property
    def is_python(self) -> bool:
        return _PYTHON.match(self.info) is not None

    @property
    def is_code(self) -> bool:
        return not self.info or self.is_python

    @property
    def text(self) -> str:
        text = "".join(self.lines)
        return textwrap.dedent(text) if text.lstrip("\r\n")[:1] in ("\t", " ") else text

    def inner(self, line: str) -> str:
        """Return a line without the indentation or the quote's marks of the fence."""
        if ">" in self.before:
            return re.sub(rf"^(?:\s*>){{1,{self.before.count('>')}}} ?", "", line)
        width = len(self.before) if _OUTSIDE.fullmatch(self.before) else 0
        return line[min(width, len(line) - len(line.lstrip(" \t"))) :]

    def add(self, line: str) -> bool:
        """Add a line, unless code has a fence there, outside of strings and comments; return whether it was added."""
        place, quote = 0, self.quote
        while match := (re.compile(rf"\\.|{quote}") if quote else _CODE).search(line, place):
            place, token = match.end(), match[0].strip()
            if not quote and token[:1] in ("`", "~"):
                return False
            if token == quote:
                quote = ""
            elif not quote and token in ('"""', "'''"):
                quote = token
        self.quote = quote
        self.lines.append(line)
        return True


def last_program(text: str) -> str | None:
    """Return the last block of Python code in a response, else its last block without a language.

    Blocks in a thought do not count. A fence in a string of the program belongs to the program.
    """
    blocks, cut = _blocks(text, strings=True)
    if cut and cut[-1].is_code:  # perhaps a quote that is none, or a fence in a comment
        blocks, cut = _blocks(text, strings=False)
    marked = [block.text for block in blocks if block.is_python]
    others = [block.text for block in blocks if not block.info] or [block.text for block in cut if not block.info]
    return marked[-1] if marked else others[-1] if others else None


def _blocks(text: str, *, strings: bool) -> tuple[list[_Block], list[_Block]]:
    """Return the blocks, and those that the end of the text cut off; among the first are cut ones of Python."""
    done: list[_Block] = []
    open_blocks: list[_Block] = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        block = open_blocks[-1] if open_blocks else None
        code = block is not None and block.is_code and strings
        if block is not None and code and not line.lstrip().startswith("</think>") and block.add(block.inner(line)):
            continue
        if "</think>" in line:
            done, open_blocks, block = [], [], None
            line = line.rpartition("</think>")[2]
        fence = _FENCE.match(line.strip("\r\n") if block is None else block.inner(line).strip("\r\n"))
        before, mark, info = (fence["before"], fence["mark"], fence["info"].strip()) if fence else ("", "", "")
        starts = bool(fence and _OUTSIDE.fullmatch(before))
        opens = bool(fence and (starts or mark[0] == "`") and (not info or _PYTHON.match(info) or _TAG.fullmatch(info)))
        if block is None:
            if opens or (starts and mark[0] == "`"):
                open_blocks.append(_Block(mark, info, before))
            continue
        ends = bool(fence) and mark[0] == block.mark[0] and len(mark) >= len(block.mark)
        if ends and (not info or (starts and not opens) or (code and not starts)):
            block.lines += [before] if before.strip() else []
            done.append(open_blocks.pop())
        elif starts and opens and (ends or not block.is_python):  # another block before the end of this one
            if block.is_python:
                done.append(open_blocks.pop())
            open_blocks.append(_Block(mark, info, before))
        else:
            block.lines.append(block.inner(line))
    done += [block for block in open_blocks if block.is_python]
    return [block for block in done if block.text.strip()], open_blocks


SOLUTION = "solution.py"
PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from builtins import pow
sys.setrecursionlimit(50_000)
"""
"""Names that sites with a class `Solution` give to its programs."""

_CALLS = """
import json, os, sys, types
answers = os.dup(1)
os.dup2(2, 1)  # what the program prints is not its answer
getattr(sys, "set_int_max_str_digits", int)(0)
given = json.loads(sys.stdin.buffer.read())
def plain(value):
    return value.tolist() if hasattr(value, "tolist") else float(value) if hasattr(value, "__float__") else list(value)
module = sys.modules["solution"] = types.ModuleType("solution")
exec(given["prelude"], vars(module))
exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), vars(module))
for arguments in given["calls"]:
    try:
        function = vars(module).get(given["name"]) or getattr(module.Solution(), given["name"])
        line = json.dumps({"value": function(*arguments)}, default=plain)
    except BaseException as error:
        try:
            line = json.dumps({"error": repr(error)[:300]})
        except BaseException:
            line = json.dumps({"error": type(error).__name__})
    os.write(answers, line.encode() + b"\\n")
"""
_ASSERTIONS, _PLAN = (Path(__file__).with_name(f"assertion_{name}.py") for name in ("program", "plan"))
_WRAPPED = ("apps", "taco")  # data whose expected values are in lists of one
_INTEGER = re.compile(r"[+-]?(?:0|[1-9]\d*)", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e[+-]?\d+)?|nan|inf|infinity)", re.ASCII | re.IGNORECASE)
_SHORTHAND = re.compile(r"[+-]?\d+e\d+", re.ASCII | re.IGNORECASE)  # a word that no program prints for a number
_DIGITS = 4000  # longer integers stay text, because Python refuses to convert them


@dataclass(frozen=True)
class Tests:
    """Tests of a row."""

    # of a program, with the expected outputs; with ``function`` the arguments, with expected values
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    function: str | None = None  # name of the function to call
    assertions: tuple[str, ...] = ()  # code that raises for a wrong program, one test each
    entry_point: str | None = None  # the function that the assertions' ``check`` takes


def _check(services: Services) -> None:
    assert services.sandbox  # creating it reports a missing sandbox


@register_scorer(
    "code",
    "code", "code_*", "codecontests", "apps", "codeforces", "taco", "humaneval*", "openai_humaneval", "mbpp*",
    check=_check,
)  # fmt: skip
async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    services: Services,
    continuous: bool = True,
    max_tests: int = 20,
) -> dict[str, Any]:
    """Score the share of tests that the response's last block of Python code passes.

    Args:
        data_source: ``apps*`` and ``taco*`` may have their expected values in lists of one; else not used.
        solution_str: the response; the program is its last block marked as Python, else its last block without a language.
        ground_truth: the tests, as JSON text or plain data: ``{"inputs": [...], "outputs": [...]}`` for a program that reads and
            prints, with ``"fn_name"`` for a function (or method of a class ``Solution``); or ``{"assert_case": [...]}``,
            ``{"tests": "..."}``, ``{"test": "...", "entry_point": "f"}``, a list of assertions, or a text of them.
        extra_info: its ``entry_point`` counts where the ground truth has none.
        services: provides the sandbox.
        continuous: True to reward the share of passed tests; False to require all.
        max_tests: maximum number of tests to run.

    Returns:
        ``score``; ``acc`` (1 if all pass); ``format`` (1 if there is a program); ``passed`` (share of tests); ``timeout`` (1 if
        a limit of the sandbox ended a program); ``fault`` (the first failure).

    Raises:
        ValueError: the ground truth has no tests, its tests assert nothing, or they cannot run here.
        NoVerdict: the sandbox failed, which is an error and not a reward of 0.
    """
    tests, program = (
        read_tests(ground_truth, max_tests, (extra_info or {}).get("entry_point")),
        last_program(solution_str),
    )
    if program is None:
        return {"score": 0.0, "acc": 0.0, "format": 0.0, "passed": 0.0, "timeout": 0.0, "fault": "no block of code"}
    if tests.assertions:
        verdicts = await _assertions(services, program, tests)
    elif tests.function is not None:
        wrapped = data_source.startswith(_WRAPPED) and all(isinstance(o, list) and len(o) == 1 for o in tests.outputs)
        verdicts = await _calls(services, program, tests, wrapped=wrapped)
    else:
        verdicts = await _programs(services, program, tests, first_only=not continuous)
    share = sum(verdict is None for verdict in verdicts) / len(verdicts)
    fault = next((verdict for verdict in verdicts if verdict is not None), None)
    stopped = any(verdict in _LIMITS for verdict in verdicts)
    return {
        "score": share if continuous else float(share == 1.0),
        "acc": float(share == 1.0),
        "format": 1.0,
        "passed": share,
        "timeout": float(stopped),
        "fault": fault and fault[-300:],
    }


_LIMITS = tuple(f"stopped: {ending.value}" for ending in Ending)


def read_tests(ground_truth: Any, max_tests: int = 20, entry_point: Any = None) -> Tests:
    """Parse the tests of a row.

    Raises:
        ValueError: there are no tests, or numbers of inputs and outputs differ.
    """
    truth: Any = _plain_data(ground_truth)
    truth = {"test": truth} if isinstance(truth, str | list) else truth
    if not isinstance(truth, dict):
        return _no_tests(ground_truth)
    names = ("assert_case", "tests", "test_list", "test")
    if asserted := next(filter(None, (_plain_data(truth.get(name)) for name in names)), None):
        texts = [asserted] if isinstance(asserted, str) else [str(text) for text in asserted[:max_tests]]
        if not any(text.strip() for text in texts):
            return _no_tests(ground_truth)
        before = [*_plain_data(truth.get("test_imports") or []), str(truth.get("test_setup_code") or "")]
        texts = [text for text in (*before, *texts) if text.strip()]
        return Tests(assertions=tuple(texts), entry_point=truth.get("entry_point") or entry_point)
    inputs, outputs = _plain_data(truth.get("inputs")) or [], _plain_data(truth.get("outputs")) or []
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"tests need equal, nonzero numbers of inputs and outputs, not {len(inputs)} and {len(outputs)}"
        )
    function = truth.get("fn_name")
    if function is None and not any(_text(output).strip() for output in outputs):
        return _no_tests(ground_truth)  # a program that prints nothing would pass
    return Tests(tuple(inputs[:max_tests]), tuple(outputs[:max_tests]), function)


def _plain_data(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return _value(value) if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else value


def _no_tests(ground_truth: Any) -> Tests:
    raise ValueError(f"ground_truth {_shown(ground_truth)} has no tests")


# --------------------------------------------------------------------------------------------------------------- forms


async def _programs(services: Services, program: str, tests: Tests, *, first_only: bool) -> list[str | None]:
    """Test a program's printed output; return a failure per test, or None."""

    async def one(test_input: Any, expected: Any) -> str | None:
        result = (await services.sandbox.run(program, stdin=_text(test_input))).checked()
        return _run_failure(result) or (
            None if same_output(result.stdout, _text(expected)) else _difference(result.stdout, expected)
        )

    pairs = list(zip(tests.inputs, tests.outputs, strict=True))
    first = await one(*pairs[0])
    if first is not None and first_only:
        return [first] * len(pairs)
    return [first, *await asyncio.gather(*(one(*pair) for pair in pairs[1:]))]


async def _calls(services: Services, program: str, tests: Tests, *, wrapped: bool) -> list[str | None]:
    """Test a function's return values; return a failure per test, or None."""
    calls = [_marked(_arguments(given)) for given in tests.inputs]
    request = json.dumps({"name": tests.function, "prelude": _prelude(program), "calls": calls})
    request = re.sub(r'"\\u0000(-?\d+)"', r"\1", request)
    result = (await services.sandbox.run(_CALLS, stdin=request, files={SOLUTION: program})).checked()
    lines, missing = result.stdout.splitlines(), _run_failure(result) or "no answer"
    verdicts: list[str | None] = []
    for number, (given, expected) in enumerate(zip(tests.inputs, tests.outputs, strict=True)):
        try:
            answer = json.loads(lines[number], parse_int=_integer)
            if "value" not in answer:
                verdicts.append(str(answer["error"]))
                continue
            value = answer["value"]
            if isinstance(given, str) and isinstance(expected, str):
                same = _same(value, _value(expected))
            else:
                same = (same_value if wrapped or isinstance(given, str) else _same)(value, _marked(expected))
            verdicts.append(None if same else _difference(value, expected))
        except IndexError:
            verdicts.append(missing)
        except Exception as error:  # noqa: BLE001 - an answer that cannot be read or compared is wrong
            verdicts.append(f"unreadable answer: {type(error).__name__}")
    return verdicts


async def _assertions(services: Services, program: str, tests: Tests) -> list[str | None]:
    """Run assertions against a program in another process; return a failure per test, or None.

    The verdict follows a token that only the process with the tests knows, so a program can neither print nor pass it early.
    """
    token = secrets.token_hex(16)
    given = {"token": token, "tests": tests.assertions, "entry_point": tests.entry_point, "prelude": _prelude(program)}
    request = json.dumps(given | {"plan": _PLAN.read_text(encoding="utf-8")}) + "\n"
    source = _ASSERTIONS.read_text(encoding="utf-8")
    result = (await services.sandbox.run(source, stdin=request, files={SOLUTION: program})).checked()
    line = next((line for line in result.stdout.splitlines() if line.startswith(f"{token} ")), None)
    if line is None:
        return [_run_failure(result) or "the tests ended early"] * len(tests.assertions)
    verdicts = json.loads(line.partition(" ")[2])
    if isinstance(verdicts, str):
        raise ValueError(f"the tests cannot run: {verdicts}")
    return verdicts


def _prelude(program: str) -> str:
    return PRELUDE if re.search(r"^class Solution\b", program, re.MULTILINE) else ""


def _run_failure(result: Result) -> str | None:
    if result.ending is not Ending.FINISHED:
        return f"stopped: {result.ending.value}"
    if result.exit_code:
        return (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]
    return None


# ---------------------------------------------------------------------------------------------------------- comparison


def same_output(printed: str, expected: str) -> bool:
    """Compare outputs by lines without trailing white space; words that print numbers also match as numbers."""
    left, right = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, expected))
    if left == right:
        return True
    if len(left) != len(right):
        return False
    return all(
        len(a.split()) == len(b.split()) and all(map(_same_word, a.split(), b.split()))
        for a, b in zip(left, right, strict=True)
    )


def same_value(value: Any, expected: Any) -> bool:
    """Compare JSON values; the expected value may be in a list of one, as in APPS."""
    if isinstance(expected, list) and len(expected) == 1 and _same(value, expected[0]):
        return True
    return _same(value, expected)


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in value)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return _same_number(value, expected)
    return value == expected


def _same_number(value: float, expected: float) -> bool:
    """Compare numbers: exactly if both are whole and one is an integer, else within 1e-6; NaN is equal to NaN."""
    if isinstance(value, int) and isinstance(expected, int):
        return value == expected
    if isinstance(value, int) or isinstance(expected, int):
        number = expected if isinstance(value, int) else value
        if float(number).is_integer() and (number is value or abs(number) < 2**53):  # a larger float is rounded
            return value == expected
    try:
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9) or (value != value and expected != expected)
    except OverflowError:  # an integer beyond all floats
        return False


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    x, y = _number(a), _number(b)
    if x is None or y is None or (isinstance(x, int) != isinstance(y, int) and any(map(_SHORTHAND.fullmatch, (a, b)))):
        return False
    return _same_number(x, y)


def _number(word: str) -> float | None:
    """Return the number that a word prints; None for other words, and where Python has no such number."""
    if len(word) < _DIGITS and _INTEGER.fullmatch(word):  # with leading zeros it is text
        return int(word)
    number = float(word) if _DECIMAL.fullmatch(word) else None
    return None if number is not None and math.isinf(number) and any(map(str.isdigit, word)) else number


def _arguments(given: Any) -> list[Any]:
    """Return the arguments of a call: a list, or text with one JSON value per line."""
    if isinstance(given, str):
        return [_value(line) for line in given.splitlines()]
    return given if isinstance(given, list) else [given]


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError):
        return text


def _integer(digits: str) -> Any:
    return int(digits) if len(digits) < _DIGITS else f"\0{digits}"


def _marked(value: Any) -> Any:
    """Return a row's value with its long integers in the form that :func:`_integer` gives them."""
    if isinstance(value, list | tuple):
        return [_marked(item) for item in value]
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    return _integer(str(Decimal(value))) if isinstance(value, int) and not isinstance(value, bool) else value


def _text(value: Any) -> str:
    """Return the text of an input or output: itself, the lines of a list, or JSON."""
    if isinstance(value, str):
        return value.removeprefix("\0")
    if isinstance(value, list):
        return "\n".join(_text(item) if type(item) is int else str(item) for item in value)
    return str(Decimal(value)) if type(value) is int else json.dumps(value)


def _difference(actual: Any, expected: Any) -> str:
    return f"gives {_shown(actual)}, not {_shown(expected)}"


def _shown(value: Any) -> str:
    try:
        return repr(str(value)[:100])
    except (ValueError, RecursionError):
        return f"a long {type(value).__name__}"
