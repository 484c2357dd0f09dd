"""Limits of chat templates: a template that loops without end or makes giant texts ends with a message.

Templates come from model directories. transformers renders them in Jinja's sandbox, which bounds neither time nor memory, and
computes constant expressions when it compiles. :func:`check_template` first renders in a sandbox that counts iterations and
calls and bounds every text, list and number; what remains below the limits is then rendered by transformers. The bounded rendering
also tells where the template's loop over the messages begins each of them (:class:`Trace`).
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from hone.errors import DataError

LONGEST = 4_000_000  # characters of a text, or entries of a list, besides eight times the size of the messages
MOST_MADE = 20  # sum of the sizes of all intermediate texts and lists, in multiples of the longest one allowed
MOST_SECONDS = 5.0  # CPU time of rendering one conversation
_PER_LOOK = 16  # operations of a template for one look at the clock, which takes as long as several of them
_MOST_BITS = 10_000
_WIDEST = 100_000  # as the arguments of center, indent, ljust
_WIDTH_FROM_ARGUMENT = re.compile(r":[^{}]*\{|%[^a-zA-Z%]*\*")
_TAKING_DATA = frozenset({"d", "default", "float", "int", "sum", "replace", "startswith", "endswith"})
_WIDE_FIELD = re.compile(r"\d{6,}")
_COUNTED, _JOINED = "hone_counted", "hone_joined"
_LOOKED_AT, _LEFT, _MARKED = "hone_looked_at", "hone_left", "hone_marked"
_OPERATORS: dict[type[nodes.Node], str] = {nodes.Add: "+", nodes.Mul: "*", nodes.Pow: "**", nodes.Mod: "%"}


class TemplateLimit(Exception):
    """A template exceeds a limit."""


@dataclass(frozen=True)
class Trace:
    """Places of a rendering, in characters of its text."""

    text: str
    # where the loop over the messages begins each one; None for a message that no loop of its own reaches
    starts: list[int | None]
    end: int | None  # where that loop ends; None if there is none
    marks: list[tuple[int, int]]  # the spans inside ``{% generation %}``


class _Budget(threading.local):
    """Limits of the rendering in this thread, and its use of them."""

    longest = LONGEST
    deadline = float("inf")
    made = 0
    operations = 0
    position = 0  # characters of the rendering so far
    events: list[tuple[int, Any, int]] = []
    """Number of a loop, the entry that it looks at (None at its end) and the position, in order."""
    marks: list[int] = []  # positions at which a generation block begins or ends, in turn

    def begin(self, size: int) -> None:
        """Begin the rendering of messages and variables of this size."""
        self.longest, self.made = LONGEST + 8 * size, 0
        self.position, self.events, self.marks = 0, [], []
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
        self.operations += 1
        if self.operations % _PER_LOOK == 0 and time.thread_time() > self.deadline:
            raise TemplateLimit(f"rendering one conversation takes more than {MOST_SECONDS:g} s")


_budget = _Budget()


def check_template(
    template: str, conversations: Sequence[Sequence[Mapping[str, Any]]], variables: Mapping[str, Any], name: str
) -> list[Trace | None]:
    """Render conversations within the limits; other errors are left to transformers, which reports them.

    Returns where each rendering shows what; None where the template refuses the conversation.

    Raises DataError: the template exceeds a limit.
    """
    traces = []
    for messages in conversations:
        problem: str | Trace | None = _problems.get(template) or _traced(template, messages, variables)
        if isinstance(problem, str):
            _problems[template] = problem  # other conversations need not wait for it again
            raise DataError(
                f"the chat template of '{name}' exceeds a limit: {problem}",
                where=name,
                why="it would take all time or memory of the machine",
                fix="correct the template (chat_template.jinja or tokenizer_config.json), or set model.custom_chat_template=PATH",
                code="E-template",
            )
        traces.append(problem)
    return traces


_problems: dict[str, str] = {}


def _traced(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Trace | str | None:
    """Return the trace of a rendering, the limit that it exceeds, or None where the template refuses the messages."""
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    _budget.begin(len(str(present)) + len(str(variables)))
    parts = []
    try:
        compiled = _compiled(template)
        # piece by piece, so that the position is known whenever the template runs
        for part in compiled.root_render_func(compiled.new_context({"messages": present, **variables})):
            parts.append(part)
            _budget.position += len(part)
            if _budget.position > _budget.longest:
                break
        _budget.check_size(_budget.position, "a text")
    except TemplateLimit as limit:
        return str(limit)
    except (OverflowError, MemoryError, RecursionError) as error:  # Jinja's own limit of range() is an OverflowError
        return f"{type(error).__name__}: {error}"
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, LookupError):
        return None
    finally:
        _budget.deadline = float("inf")
    starts, end = _starts(present)
    return Trace("".join(parts), starts, end, list(zip(_budget.marks[::2], _budget.marks[1::2], strict=False)))


def _starts(messages: list[dict[str, Any]]) -> tuple[list[int | None], int | None]:
    """Return where the loop that renders the messages begins each one, and where it ends.

    Templates look at the messages in other loops too, such as for the last question. The one that renders them makes text, for
    most of them.
    """
    places = {id(message): place for place, message in enumerate(messages)}
    best: tuple[tuple[int, int], dict[int, int], int] = ((0, 0), {}, 0)
    passes: dict[int, dict[int, int]] = {}
    for loop, entry, position in _budget.events:
        starts = passes.setdefault(loop, {})
        if entry is None:
            del passes[loop]
            made = position - min(starts.values(), default=position)
            if made and list(starts) == sorted(starts) and (len(starts), made) > best[0]:
                best = ((len(starts), made), starts, position)
        else:  # some loop over the numbers of the messages
            place = places.get(id(entry)) if type(entry) is not int else entry if 0 <= entry < len(messages) else None
            if place is not None:
                starts[place] = position
    return [best[1].get(place) for place in range(len(messages))], best[2] if best[1] else None


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    return _BoundedEnvironment().from_string(template)


class _Generation(Extension):
    """The tag of transformers around an assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body between two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope([_calling(_MARKED, [], line), *body, _calling(_MARKED, [], line)]).set_lineno(line)


def _calling(name: str, values: list[nodes.Expr], line: int) -> nodes.Node:
    first = values[0] if values else nodes.Const(None)
    return nodes.ExprStmt(nodes.Filter(first, name, values[1:], [], None, None)).set_lineno(line)


class _Bounding(NodeTransformer):
    """Routes loops through a counter, and ``~`` through a bounded join; loops tell what they look at."""

    loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.loops += 1
        number = nodes.Const(self.loops)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None).set_lineno(node.lineno)
        if isinstance(node.target, nodes.Name):
            node.body.insert(0, _calling(_LOOKED_AT, [nodes.Name(node.target.name, "load"), number], node.lineno))
        return [node, _calling(_LEFT, [number], node.lineno)]

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
        self.filters |= {_COUNTED: _counted, _JOINED: _joined, _LOOKED_AT: _looked_at, _LEFT: _left, _MARKED: _marked}
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


def _looked_at(entry: Any, loop: int) -> None:
    _budget.events.append((loop, entry, _budget.position))


@pass_context  # so that the compiler does not call it for a constant
def _left(_: Any, loop: int) -> None:
    _budget.events.append((loop, None, _budget.position))


@pass_context
def _marked(*_: Any) -> None:
    _budget.marks.append(_budget.position)


def _counted(entries: Any) -> Iterator[Any]:
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

    Raises TemplateLimit: the value is too large.
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
