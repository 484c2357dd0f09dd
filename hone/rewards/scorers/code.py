"""Scorer of programs by tests in the sandbox: printed output, return values or assertions."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
_ASSERTIONS = Path(__file__).with_name("assertion_program.py")


@dataclass(frozen=True)
class Tests:
    """Tests of a row.

    Attributes:
        inputs, outputs: input and expected output of a program; with ``function``, arguments and expected values.
        function: name of the function to call.
        assertions: code that raises for a wrong program, one test each.
    """

    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    function: str | None = None
    assertions: tuple[str, ...] = ()


def _check(services: Services) -> None:
    assert services.sandbox  # creating it reports a missing sandbox


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
    """Score the share of tests that the response's last block of Python code passes.

    Args:
        data_source: not used.
        solution_str: the response; the program is its last block marked as Python, else its last block.
        ground_truth: the tests, as JSON text or plain data: ``{"inputs": [...], "outputs": [...]}`` for a program that reads and
            prints, with ``"fn_name"`` for a function (or method of a class ``Solution``); or ``{"assert_case": [...]}``,
            ``{"tests": "..."}``, a list of assertions, or a text of them.
        extra_info: not used.
        services: provides the sandbox.
        continuous: True to reward the share of passed tests; False to require all.
        max_tests: maximum number of tests to run.

    Returns:
        ``score``; ``acc`` (1 if all pass); ``format`` (1 if there is a program); ``passed`` (share of tests); ``timeout`` (1 if
        a limit of the sandbox ended a program); ``fault`` (the first failure).

    Raises:
        ValueError: the ground truth has no tests.
        RuntimeError: the sandbox failed, which is an error and not a reward of 0.
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
    """Return the last block of Python code in a response, else its last block of code."""
    blocks = _FENCE.findall(text)
    marked = [python for python, _ in blocks if python.strip()]
    others = [other for _, other in blocks if other.strip()]
    return marked[-1] if marked else others[-1] if others else None


def read_tests(ground_truth: Any, max_tests: int = 20) -> Tests:
    """Parse the tests of a row.

    Raises:
        ValueError: there are no tests, or numbers of inputs and outputs differ.
    """
    truth = _plain_data(ground_truth)
    if isinstance(truth, str):
        return Tests(assertions=(truth,)) if truth.strip() else _no_tests(ground_truth)
    if isinstance(truth, list):
        return Tests(assertions=tuple(map(str, truth[:max_tests]))) if truth else _no_tests(ground_truth)
    if not isinstance(truth, dict):
        return _no_tests(ground_truth)
    asserted = truth.get("assert_case") or truth.get("tests") or truth.get("test_list") or truth.get("test")
    if asserted:
        return Tests(assertions=(asserted,) if isinstance(asserted, str) else tuple(map(str, asserted[:max_tests])))
    inputs, outputs = _plain_data(truth.get("inputs")) or [], _plain_data(truth.get("outputs")) or []
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"tests need equal, nonzero numbers of inputs and outputs, not {len(inputs)} and {len(outputs)}"
        )
    return Tests(tuple(inputs[:max_tests]), tuple(outputs[:max_tests]), truth.get("fn_name"))


def _plain_data(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _no_tests(ground_truth: Any) -> Tests:
    raise ValueError(f"ground_truth {str(ground_truth)[:80]!r} has no tests")


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


async def _calls(services: Services, program: str, tests: Tests) -> list[str | None]:
    """Test a function's return values; return a failure per test, or None."""
    calls = [_arguments(request) for request in tests.inputs]
    request = json.dumps({"name": tests.function, "calls": calls})
    result = (await services.sandbox.run(_CALLS, stdin=request, files={SOLUTION: program})).checked()
    answers: list[Any] = []
    for line in result.stdout.splitlines():
        try:
            answers.append(json.loads(line))
        except json.JSONDecodeError:
            answers.append(None)
    missing = _run_failure(result) or "no answer"
    verdicts: list[str | None] = []
    for number, expected in enumerate(tests.outputs):
        answer = answers[number] if number < len(answers) else None
        if not isinstance(answer, dict) or "value" not in answer:
            verdicts.append(str(answer["error"]) if isinstance(answer, dict) and "error" in answer else missing)
        else:
            verdicts.append(
                None if same_value(answer["value"], _plain_data(expected)) else _difference(answer["value"], expected)
            )
    return verdicts


async def _assertions(services: Services, program: str, tests: Tests) -> list[str | None]:
    """Run assertions against a program in another process; return a failure per test, or None.

    The verdict follows a token that only the process with the tests knows, so a program can neither print nor pass it early.
    """
    token = secrets.token_hex(16)
    request = json.dumps({"token": token, "tests": tests.assertions}) + "\n"
    source = _ASSERTIONS.read_text(encoding="utf-8")
    result = (await services.sandbox.run(source, stdin=request, files={SOLUTION: program})).checked()
    line = next((line for line in result.stdout.splitlines() if line.startswith(f"{token} ")), None)
    if line is None:
        return [_run_failure(result) or "the tests ended early"] * len(tests.assertions)
    return json.loads(line.partition(" ")[2])


def _run_failure(result: Result) -> str | None:
    if result.ending is not Ending.FINISHED:
        return f"stopped: {result.ending.value}"
    if result.exit_code:
        return (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]
    return None


# ---------------------------------------------------------------------------------------------------------- comparison


def same_output(printed: str, expected: str) -> bool:
    """Compare outputs by lines without trailing white space; words also match as numbers."""
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
    """Compare JSON values, numbers within 1e-6; the expected value may be in a list of one, as in APPS."""
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
        return value == expected or math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
    return value == expected


def _same_word(a: str, b: str) -> bool:
    try:
        return a == b or math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _arguments(given: Any) -> Sequence[Any]:
    """Return the arguments of a call: a list, or text with one JSON value per line."""
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


def _difference(actual: Any, expected: Any) -> str:
    return f"gives {str(actual)[:100]!r}, not {str(expected)[:100]!r}"
