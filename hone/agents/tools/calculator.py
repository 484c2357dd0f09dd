"""Calculator tool that evaluates expressions by their syntax tree and never executes them as Python."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from hone.agents.tools.base import Tool, ToolError, text_schema

MAX_CHARACTERS = 400
"""Maximum number of characters of an expression."""
MAX_VALUE = 10**60
"""Maximum absolute value, so that no expression takes long to compute."""

_SCHEMA = text_schema("calculator", "Compute an arithmetic expression.", "expression")
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(math, name)
        for name in ("sqrt", "floor", "ceil", "log", "log2", "log10", "exp", "sin", "cos", "tan")
    },
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
    "gcd": math.gcd,
}
_ALPHABET = re.compile(r"[\w\s.,()+*/%-]*")
_CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator(Tool):
    """Arithmetic with + - * / // % **, parentheses, and a few functions. Whole results are written without a point."""

    def __init__(self) -> None:
        super().__init__(_SCHEMA)

    async def execute(self, state: Any, arguments: Mapping[str, Any], **kwargs: Any) -> str:
        return calculate(arguments["expression"])


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as text.

    >>> calculate("(12 + 7) * 3"), calculate("7 / 2"), calculate("2**0.5")
    ('57', '3.5', '1.4142135624')

    Raises:
        ToolError: the expression is invalid, too long, too large or undefined.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters, at most {MAX_CHARACTERS} are allowed")
    try:
        if not _ALPHABET.fullmatch(expression):
            raise ValueError("Python knows comments and strings, arithmetic does not")
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError(f"'{expression}' is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (OverflowError, TypeError) as error:
        raise ToolError(f"'{expression}' cannot be computed: {error}") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return f"{value:.11g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if (
            isinstance(node.op, ast.Pow)
            and abs(left) > 1
            and abs(right) * math.log10(abs(left)) > math.log10(MAX_VALUE)
        ):
            raise OverflowError("the value is too large")
        return _bounded(_BINARY[type(node.op)](left, right))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and not node.keywords
    ):
        return _bounded(_FUNCTIONS[node.func.id](*map(_value, node.args)))
    raise ValueError("no arithmetic")


def _bounded(value: Any) -> Any:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)) or abs(value) > MAX_VALUE:
        raise OverflowError("the value is too large, or no real number")
    return value
