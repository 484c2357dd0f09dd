"""Program that runs assertions in one process and the solution under test in another; both are in the sandbox.

The scorer sends this file to the sandbox as text. It needs only the standard library. The tester, which holds the tests and the
token of the verdict, starts the solution as a second process and exchanges one JSON message a line with it over a socket. Only plain
values cross. Everything else crosses as a number, and stays an object of its own process:

    {"do": [operation, object, values]}        a request; the other side may send requests of its own before it answers
    {"value": v, "changed": {...}, "out": s}   the answer; ``changed`` has arguments that the call changed in place
    {"error": [class names, arguments], "out": s}

The tester believes no comparison that the solution makes between one of its objects and a value of the tests.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import ctypes
import datetime
import decimal
import fractions
import importlib
import io
import itertools
import json
import operator
import os
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, TypeGuard

SOLUTION, TESTS = "solution", "tests"
MAX_ITEMS = 1_000_000  # maximum number of values read from an iterator of the tests
_PURE = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math numpy operator random re"
    " statistics string typing"
)
MODULES = frozenset(_PURE.split())  # modules that the tests may use because the solution has imported them
JUDGING = frozenset({"startswith", "endswith", "issubset", "issuperset", "isdisjoint", "count", "index", "find"})
"""Methods of plain values that compare with an argument: objects of the solution have none."""
LONG_INTEGERS = ("-X", "int_max_str_digits=0")
_NOT_DUMPABLE = 4  # PR_SET_DUMPABLE of prctl(2); 0 keeps the memory and the descriptors from processes of the same user


class Ended(Exception):
    """The solution's process has ended, or has broken the protocol."""


# ------------------------------------------------------------------------------------------------------------ plain values


class Codec:
    """Encoding of plain values as JSON, exact in types: tuples, sets, bytes and large integers survive.

    Args:
        refer: returns the JSON form of any other object.
        resolve: returns the object of such a form.
    """

    def __init__(self, refer: Any, resolve: Any) -> None:
        self.refer, self.resolve = refer, resolve

    def encode(self, value: Any) -> Any:
        """Return the JSON form of a value.

        Raises:
            RecursionError: the value contains itself.
        """
        kind = type(value)
        if value is None or kind in (bool, str, float) or (kind is int and abs(value) < 2**53):
            return value
        if kind is list:
            return [self.encode(item) for item in value]
        if kind in _FORMS:
            return {kind.__name__: _FORMS[kind][0](value)}
        if kind in (tuple, set, frozenset, collections.deque):
            return {kind.__name__: [self.encode(item) for item in value]}
        if kind in (dict, collections.Counter, collections.OrderedDict, collections.defaultdict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"tuple": [self.encode(item) for item in value]}
        if kind.__module__ == "numpy" and (to_list := getattr(value, "tolist", None)) is not None:
            plain = self.encode(to_list())
            return {"array": plain} if kind.__name__ == "ndarray" else plain
        return self.refer(value)

    def decode(self, form: Any) -> Any:
        """Return the value of a JSON form."""
        if isinstance(form, list):
            return [self.decode(item) for item in form]
        if not isinstance(form, dict):
            return form
        ((kind, content),) = form.items()
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind in _FROM_LIST:
            return _FROM_LIST[kind]([self.decode(item) for item in content])
        if kind in _READERS:
            return _READERS[kind](content)
        if kind == "array":
            return importlib.import_module("numpy").array(self.decode(content))
        return self.resolve(kind, content)


_FROM_LIST: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "iterator": iter,
}
_FORMS: dict[type, tuple[Any, Any]] = {  # to plain data, and from it
    int: (hex, lambda text: int(text, 16)),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    complex: (str, complex),
    range: (lambda value: [value.start, value.stop, value.step], lambda ends: range(*ends)),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.timedelta: (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}
_READERS = {kind.__name__: reader for kind, (_, reader) in _FORMS.items()}


# --------------------------------------------------------------------------------------------------------------- messages


class Peer:
    """One end of the connection: sends requests, and answers those of the other end while it waits.

    Args:
        connection: socket to the other process.
        operations: what the other end may do with this end's objects.
        proxy: class of the other end's objects.
    """

    def __init__(self, connection: socket.socket, operations: dict[str, Any], proxy: type[Proxy]) -> None:
        self.stream = connection.makefile("rwb")
        self.operations, self.proxy = operations, proxy
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.printed = io.StringIO()
        self.codec = Codec(self._refer, self._resolve)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            return {"yours": value._number_}
        if isinstance(value, types.BuiltinFunctionType | type) and getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return {"mine": self.numbers[id(value)]}

    def _resolve(self, kind: str, number: Any) -> Any:
        if kind == "mine":
            return self.proxy(self, int(number))
        if kind == "yours":
            return self.objects[number]
        if kind == "builtin":
            return getattr(builtins, str(number))
        raise ValueError(kind)

    def request(self, operation: str, number: int, *values: Any) -> Any:
        """Let the other end carry out an operation on one of its objects; return the value or raise its error."""
        self._send({"do": [operation, number, self.codec.encode(list(values))]})
        answer = self._next()
        sys.stdout.write(str(answer.get("out", "")))
        if "error" in answer:
            names, arguments = answer["error"]
            kind = error_class(tuple(map(str, names)))
            if operation != "next" and issubclass(kind, StopIteration):
                kind = RuntimeError  # it would end a loop of the tests
            raise kind(*self.codec.decode(arguments))
        for place, form in answer.get("changed", {}).items():
            _replace(values[0][int(place)], self.codec.decode(form))
        return self.codec.decode(answer["value"])

    def serve(self) -> None:
        """Answer requests until the other end closes the connection."""
        with contextlib.suppress(Ended):
            self._next()

    def _next(self) -> dict[str, Any]:
        while True:
            try:
                line = self.stream.readline()
                message = json.loads(line) if line else None
            except (OSError, ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                raise Ended("the solution's process ended")
            if "do" not in message:
                return message
            self._send(self._answer(*message["do"]))

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.stream.write(json.dumps(message).encode() + b"\n")
            self.stream.flush()
        except OSError:
            raise Ended("the solution's process ended") from None

    def _answer(self, operation: str, number: int, forms: list[Any]) -> dict[str, Any]:
        try:
            values = self.codec.decode(forms)
            value = self.operations[operation](self.objects[number], *values)
            answer: dict[str, Any] = {"value": self.codec.encode(value)}
            if operation == "call":
                after = {place: self.codec.encode(item) for place, item in enumerate(values[0]) if _mutable(item)}
                answer["changed"] = {place: form for place, form in after.items() if form != forms[0][place]}
        except Ended:
            raise
        except BaseException as error:  # noqa: BLE001 - the other process raises it
            answer = {"error": [[kind.__name__ for kind in type(error).__mro__], self._arguments(error)]}
        answer["out"] = self.printed.getvalue()
        self.printed.seek(0)
        self.printed.truncate()
        return answer

    def _arguments(self, error: BaseException) -> Any:
        try:
            return self.codec.encode(list(error.args))
        except Exception:  # noqa: BLE001 - arguments of any class
            return [str(error)]


def _mutable(value: Any) -> bool:
    return type(value) in (list, dict, set, bytearray, collections.deque)


def _replace(container: Any, content: Any) -> None:
    """Give a container new content in place, as the call did with its copy."""
    if isinstance(container, list | bytearray):
        container[:] = content
    else:
        container.clear()
        (container.extend if isinstance(container, collections.deque) else container.update)(content)


_errors: dict[str, type[BaseException]] = {}


def error_class(names: tuple[str, ...]) -> type[BaseException]:
    """Return the exception class with these names of a class and its bases; one unknown here is made once by name."""
    classes = [kind for name in names if _is_error(kind := getattr(builtins, name, None))]
    base = classes[0] if classes else Exception
    if names[0] == base.__name__:
        return base
    return _errors.setdefault(names[0], types.new_class(names[0], (base,)))


def _is_error(value: Any) -> TypeGuard[type[BaseException]]:
    return isinstance(value, type) and issubclass(value, BaseException)


class Proxy:
    """Object of the other process."""

    __slots__ = ("_number_", "_peer_")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer_", peer)
        object.__setattr__(self, "_number_", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer_.request("call", self._number_, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name != "__name__") or name in JUDGING:
            raise AttributeError(name)
        return self._peer_.request("get", self._number_, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer_.request("set", self._number_, name, value)


# ----------------------------------------------------------------------------------------------------------- the solution


def _find(module: Any, names: list[str]) -> dict[str, Any]:
    """Describe the names of a module: a value, a module or member of one, or the names of an exception's classes."""
    described: dict[str, Any] = {}
    for name in names:
        if name in vars(module):
            value = vars(module)[name]
            home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if isinstance(value, types.ModuleType):
                described[name] = ("import", home, "")
            elif isinstance(home, str) and home in MODULES:
                described[name] = ("import", home, getattr(value, "__name__", None) or getattr(value, "_name", name))
            elif _is_error(value):
                described[name] = ("error", *(kind.__name__ for kind in value.__mro__))
            else:
                described[name] = ("value", value)
    return described


SOLUTION_OPERATIONS: dict[str, Any] = {
    "find": _find,
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "instance": lambda kind, value: isinstance(value, kind),
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "neg")},
    **{kind.__name__: kind for kind in (bool, str, float, int, complex)},
    **{function.__name__: function for function in (len, iter, next, repr, abs)},
}


def run_solution(descriptor: int) -> None:
    """Load the solution and answer the tester's requests."""
    peer = Peer(socket.socket(fileno=descriptor), SOLUTION_OPERATIONS, Proxy)
    module = types.ModuleType(SOLUTION)
    sys.modules[SOLUTION] = module
    sys.stdout = peer.printed
    peer.objects.append(module)

    def load(prelude: str) -> None:
        file = Path(f"{SOLUTION}.py")
        exec(prelude, vars(module))
        exec(compile(file.read_text(encoding="utf-8"), file.name, "exec"), vars(module))

    peer.objects.append(load)
    peer.serve()


# -------------------------------------------------------------------------------------------------------------- the tests


class SolutionObject(Proxy):
    """Object of the solution, for the tests: equal only to an object of the solution, never to a value of the tests."""

    __slots__ = ()

    def _ask(self, operation: str, *values: Any) -> Any:
        return self._peer_.request(operation, self._number_, *values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SolutionObject) and bool(self._ask("eq", other))

    def __hash__(self) -> int:
        return hash(self._number_)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, SolutionObject) and bool(self._ask("instance", value))


def _forwarding(operation: str) -> Any:
    return lambda self, *values: self._ask(operation, *values)


def _between_objects(operation: str) -> Any:
    return lambda self, other: self._ask(operation, other) if isinstance(other, SolutionObject) else NotImplemented


for _name in ("getitem", "setitem", "delitem", "bool", "str", "float", "int", "complex", "len", "iter", "next", "repr"):
    setattr(SolutionObject, f"__{_name}__", _forwarding(_name))
for _name in ("neg", "abs"):
    setattr(SolutionObject, f"__{_name}__", _forwarding(_name))
for _name in ("ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod"):
    setattr(SolutionObject, f"__{_name}__", _between_objects(_name))


def _is_of_tests(value: Any) -> bool:
    return type(value).__module__ == TESTS


def _get(value: Any, name: str) -> Any:
    if not _is_of_tests(value) or name.startswith("_"):
        raise AttributeError(name)
    return getattr(value, name)


def _set(value: Any, name: str, content: Any) -> None:
    if not _is_of_tests(value) or name.startswith("_"):
        raise AttributeError(name)
    setattr(value, name, content)


TEST_OPERATIONS: dict[str, Any] = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "get": _get,
    "set": _set,
}


class Tester(Peer):
    """End of the connection that runs the tests."""

    def _refer(self, value: Any) -> Any:
        if hasattr(value, "__next__") and not isinstance(value, Proxy):
            return {"iterator": [self.codec.encode(item) for item in itertools.islice(value, MAX_ITEMS)]}
        if not (isinstance(value, Proxy) or callable(value) or _is_of_tests(value)):
            raise TypeError(f"a test passes an object of class {type(value).__name__} to the solution")
        return super()._refer(value)


def run_tests() -> None:
    """Read token and tests from standard input, run them, and print the token with the failure of each test, or null."""
    ctypes.CDLL(None).prctl(_NOT_DUMPABLE, 0, 0, 0, 0)
    given = json.loads(sys.stdin.readline())
    with contextlib.suppress(OSError):
        os.ftruncate(0, 0)  # other processes of the sandbox may hold the same file
    space: dict[str, Any] = {"__name__": TESTS}
    exec(given["plan"], planner := {"__name__": "plan"})
    try:
        plan = planner["plan_of"](given["tests"], given["entry_point"])
        space |= planner["modules_of"](plan)
    except Exception as error:  # noqa: BLE001 - a fault of the row, or of the sandbox: the program has not yet run
        verdict = f"{type(error).__name__}: {error}"
    else:
        verdict = _verdicts(plan, planner["run_test"], space, given["prelude"])
    sys.__stdout__.write(f"\n{given['token']} {json.dumps(verdict)}\n")  # pyright: ignore[reportOptionalMemberAccess]


def _verdicts(plan: dict[str, Any], run_test: Any, space: dict[str, Any], prelude: str) -> list[str | None]:
    """Run the tests; return the failure of each text that asserts something, or None."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-B", *LONG_INTEGERS, str(Path(__file__).resolve()), str(theirs.fileno())]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=[theirs.fileno()])
    theirs.close()
    tester = Tester(ours, TEST_OPERATIONS, SolutionObject)
    reached: list[None] = []
    failures: list[str | None] = []
    try:
        tester.request("call", 1, [prelude], {})
        space = _names(tester, plan) | space | {"_reached_": lambda: reached.append(None)}
    except BaseException as error:  # noqa: BLE001 - the verdict of every test
        return [_described(error, child)] * sum(plan["asserts"])
    for code, asserts, runs in zip(plan["codes"], plan["asserts"], plan["runs"], strict=True):
        before, failure = len(reached), None
        try:
            exec(code, space)
            for name in runs:
                run_test(space[name])
            failure = None if len(reached) > before else "the tests ended before an assertion"
        except BaseException as error:  # noqa: BLE001 - the verdict of this test
            failure = _described(error, child)
        failures += [failure] * asserts
    return failures


def _described(error: BaseException, child: subprocess.Popen[bytes]) -> str:
    if isinstance(error, Ended):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"the solution's process ended (exit code {child.wait(timeout=1.0)})"
    try:
        return f"{type(error).__name__}: {str(error)[:300]}"
    except BaseException:  # noqa: BLE001 - an object of the solution in the error
        return type(error).__name__


def _names(tester: Tester, plan: dict[str, Any]) -> dict[str, Any]:
    """Return the names of the solution that the tests mention, also as a module that they may import."""
    space: dict[str, Any] = {}
    described = tester.request("find", 0, plan["names"])
    if plan["needs"] and not described.keys() & set(plan["needs"]):
        raise NameError(f"the program defines none of {', '.join(plan['needs'])}")
    for name in set(plan["names"]) & described.keys():  # and no others, whatever the answer holds
        kind, *content = described[name]
        if kind == "value":
            space[name] = content[0]
        elif kind == "error":
            space[name] = error_class(tuple(content))
        elif kind == "import" and content[0] in MODULES:
            module = importlib.import_module(content[0])
            space[name] = getattr(module, content[1]) if content[1] else module
    sys.modules[SOLUTION] = types.ModuleType(SOLUTION)
    vars(sys.modules[SOLUTION]).update(space)
    return space


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_solution(int(sys.argv[1]))
    else:
        run_tests()
