"""The part of pytest that tests of programs meet where pytest is missing, against pytest itself."""

from __future__ import annotations

import math
import types

import pytest

from hone.rewards.scorers.assertion_plan import _pytest

STAND_IN = _pytest()
EXPRESSIONS = [
    "pytest.raises(ValueError, int, 'x') is not None",
    "pytest.raises(ValueError, int, 'x', base=10) is not None",
    "pytest.raises(ZeroDivisionError, divmod, 1, 0) is not None",
    "pytest.raises(TypeError, int, 'x')",
    "pytest.raises(ValueError, int, '3')",
    *(
        f"{a} == pytest.approx({b})"
        for a, b in [
            ("1 + 9e-7", "1"),
            ("1 + 2e-6", "1"),
            ("1", "1 + 1e-6"),
            ("1e9", "1e9 + 1, abs=1e-3"),
            ("1e9", "1e9 + 1, abs=1e-3, rel=1e-6"),
            ("0", "1e-13"),
            ("0", "1e-11"),
            ("1.04", "1, rel=0.05"),
            ("1.06", "1, rel=0.05"),
            ("[1, 2.0000001]", "[1, 2]"),
            ("[1, 2]", "[1]"),
            ("(1, 2)", "(1, 3)"),
            ("{'a': 1.0000001}", "{'a': 1}"),
            ("{'a': 1, 'b': 2}", "{'a': 1}"),
            ("math.inf", "math.inf"),
            ("1e300", "math.inf"),
            ("math.inf", "1"),
            ("math.nan", "math.nan"),
            ("math.nan", "math.nan, nan_ok=True"),
            ("'a'", "1"),
            ("None", "None"),
            ("True", "True"),
        ]
    ),
    "[test.name for test in pytest.mark.parametrize('a', [1, 2])(function()).pytestmark]",
    "pytest.mark.parametrize('a', [1, 2])(function()).pytestmark[0].args",
    "pytest.param(1, 2, id='x').values",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_it_says_what_pytest_says(expression: str) -> None:
    assert said(expression, STAND_IN) == said(expression, pytest)


def said(expression: str, module: object) -> object:
    try:
        return eval(
            expression,
            {"pytest": module, "math": math, "function": lambda: types.FunctionType(said.__code__, {}, "test")},
        )
    except BaseException as error:  # noqa: BLE001 - a failure of pytest is no Exception
        return type(error) if isinstance(error, Exception) and type(error) is not AssertionError else "not raised"
