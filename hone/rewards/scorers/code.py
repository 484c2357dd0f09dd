"""Programs scored by tests, in the sandbox: what they print, what their functions return, or assertions."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hone.rewards.sandbox import Ending, Result
from hone.rewards.scorers.base import register_scorer

if TYPE_CHECKING:
    from hone.rewards.services import Services

_FENCE = re.compile(r"```(?:python|py)[ \t]*\r?\n(.*?)(?:```|\Z)|```[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
SOLUTION = "solution.py"

_CALLS = """
import json, os, sys
answers = os.dup(1)
os.dup2(2, 1)  # what the program prints is not its answer
given = json.loads(sys.stdin.buffer.read())
space = {"__name__": "solution"}
exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), space)
function = space.get(given["name"]) or getattr(space["Solution"](), given["name"])
for arguments in given["calls"]:
    try:
        line = json.dumps({"value": function(*arguments)}, default=list)
    except Exception as error:
        line = json.dumps({"error": repr(error)})
    os.write(answers, line.encode() + b"\\n")
"""
_ASSERTIONS = """
import json, sys

def check():
    given = json.loads(sys.stdin.readline())
    space = {"__name__": "solution"}
    exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), space)
    passed = 0
    for number, test in enumerate(given["tests"]):
        try:
            exec(compile(test, f"test {number}", "exec"), space)
            passed += 1
        except Exception as error:
            print(f"test {number}: {error!r}", file=sys.stderr)
    print("\\n" + given["token"], passed)

check()
"""


@dataclass(frozen=True)
class Tests:
    """The tests of a row.

    Attributes:
        inputs, outputs: what a program reads and must print; or with ``function``, arguments and what it must return.
        function: name of the function to call.
        assertions: code that raises where the program is wrong, one test each.
    """

    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    function: str | None = None
    assertions: tuple[str, ...] = ()


def _check(services: Services) -> None:
    assert services.sandbox  # made here, it says what is missing


@register_scorer(
    "code",
    *("code", "code_*", "codecontests", "apps", "codeforces", "taco", "humaneval*", "openai_humaneval", "mbpp*"),
    check=_check,
)
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
    """The share of tests that the response's last block of Python code passes.

    Args:
        data_source: not used.
        solution_str: the response; its last block marked as Python is the program, or else its last block.
        ground_truth: the tests, as JSON text or plain data: ``{"inputs": [...], "outputs": [...]}`` for a program that reads and
            prints, with ``"fn_name"`` for a function (or method of a class ``Solution``) that takes and returns; or
            ``{"assert_case": [...]}``, ``{"tests": "..."}``, a list of assertions, or a text of them.
        extra_info: not used.
        services: the sandbox is among them.
        continuous: whether a part of the tests gives a part of the reward; else all must pass.
        max_tests: tests that are run, from the first.

    Returns:
        ``score``; ``acc`` (1 if all pass); ``format`` (1 if there is a program); ``passed`` (share of tests); ``timeout`` (1 if
        a limit of the sandbox ended a program); ``fault`` (the first thing that went wrong).

    Raises:
        ValueError: the ground truth holds no tests.
        RuntimeError: the sandbox failed: an error, not a reward of 0.
    """
    tests, program = read_tests(ground_truth, max_tests), last_program(solution_str)
    if program is None:
        return {"score": 0.0, "acc": 0.0, "format": 0.0, "passed": 0.0, "timeout": 0.0, "fault": "no block of code"}
    if tests.assertions:
        verdicts = await _assertions(services, program, tests)
    elif tests.function is not None:
        verdicts = await _calls(services, program, tests)
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


def last_program(text: str) -> str | None:
    """The last block of Python code in a response, or else its last block of code."""
    blocks = _FENCE.findall(text)
    marked = [python for python, _ in blocks if python.strip()]
    others = [other for _, other in blocks if other.strip()]
    return marked[-1] if marked else others[-1] if others else None


def read_tests(ground_truth: Any, most: int = 20) -> Tests:
    """Read the tests of a row.

    Raises:
        ValueError: there are none, or as many inputs as outputs are missing.
    """
    truth = _plain(ground_truth)
    if isinstance(truth, str):
        return Tests(assertions=(truth,)) if truth.strip() else _none(ground_truth)
    if isinstance(truth, list):
        return Tests(assertions=tuple(map(str, truth[:most]))) if truth else _none(ground_truth)
    if not isinstance(truth, dict):
        return _none(ground_truth)
    asserted = truth.get("assert_case") or truth.get("tests") or truth.get("test_list") or truth.get("test")
    if asserted:
        return Tests(assertions=(asserted,) if isinstance(asserted, str) else tuple(map(str, asserted[:most])))
    inputs, outputs = _plain(truth.get("inputs")) or [], _plain(truth.get("outputs")) or []
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs are no tests")
    return Tests(tuple(inputs[:most]), tuple(outputs[:most]), truth.get("fn_name"))


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _none(ground_truth: Any) -> Tests:
    raise ValueError(f"ground_truth {str(ground_truth)[:80]!r} holds no tests")


# --------------------------------------------------------------------------------------------------------------- forms


async def _programs(services: Services, program: str, tests: Tests, *, first_only: bool) -> list[str | None]:
    """What is wrong with what a program prints, for each test; None where nothing is."""

    async def one(given: Any, wanted: Any) -> str | None:
        result = _sound(await services.sandbox.run(program, stdin=_text(given)))
        return _ended_badly(result) or (
            None if same_output(result.stdout, _text(wanted)) else _differs(result.stdout, wanted)
        )

    pairs = list(zip(tests.inputs, tests.outputs, strict=True))
    first = await one(*pairs[0])
    if first is not None and first_only:
        return [first] * len(pairs)
    return [first, *await asyncio.gather(*(one(*pair) for pair in pairs[1:]))]


async def _calls(services: Services, program: str, tests: Tests) -> list[str | None]:
    """What is wrong with what a function returns, for each test."""
    calls = [_arguments(given) for given in tests.inputs]
    given = json.dumps({"name": tests.function, "calls": calls})
    result = _sound(await services.sandbox.run(_CALLS, stdin=given, files={SOLUTION: program}))
    answers: list[Any] = []
    for line in result.stdout.splitlines():
        try:
            answers.append(json.loads(line))
        except json.JSONDecodeError:
            answers.append(None)
    missing = _ended_badly(result) or "no answer"
    verdicts: list[str | None] = []
    for number, wanted in enumerate(tests.outputs):
        answer = answers[number] if number < len(answers) else None
        if not isinstance(answer, dict) or "value" not in answer:
            verdicts.append(str(answer["error"]) if isinstance(answer, dict) and "error" in answer else missing)
        else:
            verdicts.append(None if same_value(answer["value"], _plain(wanted)) else _differs(answer["value"], wanted))
    return verdicts


async def _assertions(services: Services, program: str, tests: Tests) -> list[str | None]:
    """What is wrong by assertions. They run in the program's own process: one that ends early, or prints what it likes, has not
    passed, as it does not know what the end of the tests prints.
    """
    token = secrets.token_hex(16)
    given = json.dumps({"token": token, "tests": tests.assertions}) + "\n"
    result = _sound(await services.sandbox.run(_ASSERTIONS, stdin=given, files={SOLUTION: program}))
    line = next((line for line in result.stdout.splitlines() if line.startswith(f"{token} ")), None)
    fault = _ended_badly(result) or (result.stderr.strip().splitlines() or ["the tests did not come to their end"])[0]
    passed = int(line.split()[1]) if line else 0
    return [None] * passed + [fault] * (len(tests.assertions) - passed)


def _sound(result: Result) -> Result:
    if result.ending is Ending.BROKEN:
        raise RuntimeError(f"the sandbox failed: {result.error}")
    return result


def _ended_badly(result: Result) -> str | None:
    if result.ending is not Ending.FINISHED:
        return f"stopped: {result.ending.value}"
    if result.exit_code:
        return (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]
    return None


# ---------------------------------------------------------------------------------------------------------- comparison


def same_output(printed: str, wanted: str) -> bool:
    """Equal line by line apart from white space at the ends of lines and of the text, or word by word as numbers."""
    left, right = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, wanted))
    if left == right:
        return True
    if len(left) != len(right):
        return False
    return all(
        len(a.split()) == len(b.split()) and all(map(_same_word, a.split(), b.split()))
        for a, b in zip(left, right, strict=True)
    )


def same_value(value: Any, wanted: Any) -> bool:
    """Equal as JSON, numbers within 1e-6; what is wanted may stand in a list of its own, as APPS writes it."""
    if isinstance(wanted, list) and len(wanted) == 1 and _same(value, wanted[0]):
        return True
    return _same(value, wanted)


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(_same(value[key], wanted[key]) for key in value)
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return value == wanted or math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)
    return value == wanted


def _same_word(a: str, b: str) -> bool:
    try:
        return a == b or math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _arguments(given: Any) -> Sequence[Any]:
    """The arguments of a call: a list, or text with one JSON value a line."""
    if isinstance(given, str):
        return [_value(line) for line in given.splitlines()]
    return given if isinstance(given, list) else [given]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _differs(found: Any, wanted: Any) -> str:
    return f"gives {str(found)[:100]!r}, not {str(wanted)[:100]!r}"
