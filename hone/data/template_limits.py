"""Limits of chat templates: a template that loops without end or makes giant texts ends with a message.

Templates come from model directories. transformers renders them in Jinja's sandbox, which bounds neither time nor memory, and
computes constant expressions when it compiles. :func:`check_template` first renders in a sandbox that counts iterations and
calls and bounds every text, list and number; what remains below the limits is then rendered by transformers.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from hone.errors import DataError

LONGEST = 4_000_000
"""Characters of a text, or entries of a list, besides eight times the size of the messages."""
MOST_MADE = 20
"""Sum of the sizes of all intermediate texts and lists, in multiples of the longest one allowed."""
MOST_SECONDS = 5.0
"""CPU time of rendering one conversation."""
_MOST_BITS = 10_000
_WIDEST = 100_000  # as the arguments of center, indent, ljust
_WIDTH_FROM_ARGUMENT = re.compile(r":[^{}]*\{|%[^a-zA-Z%]*\*")
_TAKING_DATA = frozenset({"d", "default", "float", "int", "sum", "replace", "startswith", "endswith"})
_WIDE_FIELD = re.compile(r"\d{6,}")
_COUNTED, _JOINED = "hone_counted", "hone_joined"
_OPERATORS: dict[type[nodes.Node], str] = {nodes.Add: "+", nodes.Mul: "*", nodes.Pow: "**", nodes.Mod: "%"}


class TemplateLimit(Exception):
    """A template exceeds a limit."""


class _Budget(threading.local):
    """Limits of the rendering in this thread, and its use of them."""

    longest = LONGEST
    deadline = float("inf")
    made = 0

    def begin(self, size: int) -> None:
        """Begin the rendering of messages and variables of this size."""
        self.longest, self.made = LONGEST + 8 * size, 0
        self.deadline = time.thread_time() + MOST_SECONDS

    def check_size(self, size: float, what: str) -> None:
        if size > self.longest:
            raise TemplateLimit(f"it makes {what} of {size:.2g} characters or entries, more than {self.longest}")
        self.made += int(size)
        if self.made > MOST_MADE * self.longest:
            raise TemplateLimit(
                f"its texts and lists have more than {MOST_MADE * self.longest} characters and entries together"
            )

    def check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise TemplateLimit(f"rendering one conversation takes more than {MOST_SECONDS:g} s")


_budget = _Budget()


def check_template(
    template: str,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    variables: Mapping[str, Any],
    name: str,
) -> None:
    """Render conversations within the limits; other errors are left to transformers, which reports them.

    Args:
        template: Jinja text.
        conversations: messages to render.
        variables: other variables, such as the special tokens.
        name: directory of the tokenizer, for the message.

    Raises:
        DataError: the template exceeds a limit.
    """
    for messages in conversations:
        problem = _known_problem(template) or _rendering_problem(template, messages, variables)
        if problem:
            _problems[template] = problem
            raise DataError(
                f"the chat template of '{name}' exceeds a limit: {problem}",
                where=name,
                why="it would take all time or memory of the machine",
                fix="correct the template (chat_template.jinja or tokenizer_config.json), or set model.custom_chat_template=PATH",
                code="E-template",
            )


_problems: dict[str, str] = {}


def _known_problem(template: str) -> str:
    """Return the limit that a template exceeded before: other conversations need not wait for it again."""
    return _problems.get(template, "")


def _rendering_problem(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    _budget.begin(len(str(present)) + len(str(variables)))
    try:
        _compiled(template).render(messages=present, **variables)
    except TemplateLimit as limit:
        return str(limit)
    except (OverflowError, MemoryError, RecursionError) as error:  # Jinja's own limit of range() is an OverflowError
        return f"{type(error).__name__}: {error}"
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, LookupError):
        return ""
    finally:
        _budget.deadline = float("inf")
    return ""


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    return _BoundedEnvironment().from_string(template)


class _Generation(Extension):
    """The tag of transformers around an assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body as it is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Bounding(NodeTransformer):
    """Routes loops through a counter, and ``~`` through a bounded join."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None).set_lineno(node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        listed = nodes.List(node.nodes).set_lineno(node.lineno)
        return nodes.Filter(listed, _JOINED, [], [], None, None).set_lineno(node.lineno)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with limits."""

    intercepted_binops = frozenset(_OPERATORS.values())

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded(function, name) for name, function in self.filters.items()}
        self.filters[_COUNTED], self.filters[_JOINED] = _counted, _joined
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": time.strftime}
        self.concat = _joined  # type: ignore[method-assign]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.BinExpr, nodes.Concat, nodes.Filter)):
            _constant(node, self)
        tree = _Bounding().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right`` if the result is not too large."""
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call a function of the template, or a method of a value."""
        _budget.check_time()
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # the sandbox wraps str.format
        if isinstance(owner, str):
            _check_call(getattr(function, "__name__", ""), (owner, *args), kwargs)
        elif not isinstance(function, Macro):  # the numbers that a macro receives are data
            _check_widths(args, kwargs)
        return _checked(super().call(context, function, *args, **kwargs))


def _bounded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a filter with limits."""
    context_arguments = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _budget.check_time()
        _check_call(name, args[context_arguments:], kwargs)
        return _checked(function(*args, **kwargs))

    return bounded


def _check_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the size of the result of a filter or a text method with its subject as the first argument."""
    subject = args[0] if args else ""
    formats = name in ("format", "format_map")
    is_width = (
        isinstance(subject, str) and _WIDTH_FROM_ARGUMENT.search(subject) if formats else name not in _TAKING_DATA
    )
    if is_width:
        _check_widths(args[1:], kwargs)
    if formats and isinstance(subject, str) and _WIDE_FIELD.search(subject):
        raise TemplateLimit("it formats a field of more than 99999 characters")
    if name == "replace" and len(args) > 2 and all(isinstance(arg, str) for arg in args[:3]):
        _budget.check_size(len(subject) + subject.count(args[1]) * len(args[2]), "a text")
    if name == "join" and len(args) > 1:
        separator, entries = (args[0], args[1]) if isinstance(args[0], str) else (args[1], args[0])
        if isinstance(separator, str) and isinstance(entries, Sequence):
            _budget.check_size(len(separator) * len(entries), "a text")
    if name in ("indent", "expandtabs") and isinstance(subject, str):
        width = next((arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, int | str)), 8)
        size = width if isinstance(width, int) else len(width)
        _budget.check_size(len(subject) + size * (subject.count("\n") + subject.count("\t") + 1), "a text")


def _check_widths(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _WIDEST:
            raise TemplateLimit(f"it calls a function with the number {value:.2g}, more than {_WIDEST}")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    _budget.check_time()
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MOST_BITS:
            raise TemplateLimit(f"it computes a number with more than {_MOST_BITS} bits")
    elif operator == "*":
        count, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(count, int) and isinstance(value, Sized):
            _budget.check_size(float(count) * len(value), "a repetition")
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        _budget.check_size(len(left) + len(right), "a text")
    elif operator == "%" and isinstance(left, str):
        if "*" in left:
            _check_widths(right if isinstance(right, tuple) else (right,), {})
        if _WIDE_FIELD.search(left):
            raise TemplateLimit("it formats a field of more than 99999 characters")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict):
        _budget.check_size(len(value), "a text or list")
    return value


def _counted(entries: Any) -> Iterator[Any]:
    """Yield the entries of a loop while there is time."""
    for entry in entries:
        _budget.check_time()
        yield entry


def _joined(parts: Iterable[Any]) -> str:
    """Join texts while they are not too long together."""
    texts, size = [], 0
    for part in parts:
        texts.append(str(part))
        size += len(texts[-1])
        if size > _budget.longest:
            break
    _budget.check_size(size, "a text")
    return "".join(texts)


def _constant(node: nodes.Node, environment: _BoundedEnvironment) -> Any:
    """Return the value of a constant expression, which transformers computes when it compiles; None for any other.

    Raises:
        TemplateLimit: the value is too large.
    """
    _budget.check_time()
    if isinstance(node, nodes.Const):
        return node.value
    if isinstance(node, nodes.BinExpr) and type(node) in _OPERATORS:
        left, right = _constant(node.left, environment), _constant(node.right, environment)
        if left is None or right is None:
            return None
        operator = _OPERATORS[type(node)]
        _check_operation(operator, left, right)
        return _tried(lambda: environment.binop_table[operator](left, right))
    if isinstance(node, nodes.Concat):
        values = [_constant(part, environment) for part in node.nodes]
        return None if None in values else _joined(values)
    if isinstance(node, nodes.Filter) and node.node is not None and node.name in environment.filters:
        values = [_constant(part, environment) for part in (node.node, *node.args)]
        options = {str(pair.key): _constant(pair.value, environment) for pair in node.kwargs}
        function = environment.filters[node.name]
        if None in values or None in options.values() or hasattr(function, "jinja_pass_arg"):
            return None
        return _tried(lambda: function(*values, **options))
    return None


def _tried(compute: Callable[[], Any]) -> Any:
    """Return a value; None if its computation fails, as it then does in the compiler, which leaves it to the rendering."""
    try:
        return _checked(compute())
    except TemplateLimit:
        raise
    except Exception:  # noqa: BLE001  # any error of a filter with these values
        return None


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
