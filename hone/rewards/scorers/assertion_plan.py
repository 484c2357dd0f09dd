"""Assertions of a row as code: which of its texts test something, what they need, and what runs them.

The scorer sends this file to the sandbox as text, with ``assertion_program.py``. It needs only the standard library.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import itertools
import math
import re
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

REACHED = "_reached_"  # function that the texts call at each of their assertions
SOLUTION = "solution"  # module name of the program, for tests that import it
_ALIASES = {"np": "numpy", "numpy": "numpy"} | {name: name for name in sys.stdlib_module_names}
_COMPARISONS = {"isclose": "math", "allclose": "numpy", "array_equal": "numpy", "approx": "pytest"}
_COMPARISONS |= dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def plan_of(texts: list[str], entry_point: str | None) -> dict[str, Any]:
    """Return the plan by which ``assertion_program.py`` runs the texts.

    Raises:
        SyntaxError: a text is not code.
        ValueError: no text asserts anything, whatever the program does.
    """
    trees = [ast.parse(text) for text in texts]
    names = {node.name: node for tree in trees for node in tree.body if isinstance(node, _DEFINITIONS)}
    runs = [[name for name, node in names.items() if node in tree.body and _is_run(node)] for tree in trees]
    for tree in trees:
        tree.body = _counted(tree.body, any(runs))
    loose = [[node for node in tree.body if not isinstance(node, _DEFINITIONS)] for tree in trees]
    called = {node.name for nodes in loose for node in _reached(nodes, names) if isinstance(node, _DEFINITIONS)}
    runs = [[n for n in those if n not in called or isinstance(names[n], ast.ClassDef)] for those in runs]
    if entry_point is not None:
        if "check" in names and "check" not in called:
            call = ast.parse(f"check({entry_point})").body
            trees[-1].body += call
            loose[-1] += call
        trees, loose, runs = [ast.parse(f"candidate = {entry_point}"), *trees], [[], *loose], [[], *runs]
    asserts = [
        any(map(_is_assertion, _reached([*nodes, *(names[name] for name in those)], names)))
        for nodes, those in zip(loose, runs, strict=True)
    ]
    if not any(asserts):
        defined = f"; {', '.join(names)} is defined and not called (is entry_point missing?)" if names else ""
        raise ValueError(f"the tests assert nothing{defined}")
    for name in (name for those in runs for name in those):
        node = names[name]
        if not isinstance(node, ast.ClassDef) and _parameters(node) and not node.decorator_list:
            raise ValueError(f"the tests cannot run: {name} has parameters, which a fixture would give")
    codes = [compile(ast.fix_missing_locations(tree), f"test {n}", "exec") for n, tree in enumerate(trees)]
    return {"codes": codes, "asserts": asserts, "runs": runs, **_needed(trees, entry_point)}


def _needed(trees: list[ast.Module], entry_point: str | None) -> dict[str, Any]:
    """Return the names that the texts use: imported ones, ones that must be a module's, and those of the program."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    tried = {id(inner) for node in nodes if isinstance(node, ast.Try) for inner in ast.walk(node)}
    imports: dict[str, tuple[str, str, bool]] = {}  # module, member, whether the tests can do without
    wanted, ours, called, bound = set[str](), {SOLUTION}, set[str](), set[str]()
    attributes: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == SOLUTION:
                    ours.add(name.asname or name.name)
                else:
                    alias, module = (name.asname, name.name) if name.asname else (name.name.partition(".")[0],) * 2
                    imports[alias] = (module, "", id(node) in tried)
                    imports.setdefault(name.name, (name.name, "", id(node) in tried))
        elif isinstance(node, ast.ImportFrom) and node.module == SOLUTION:
            wanted |= {name.name for name in node.names} - {"*"}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                imports[name.asname or name.name] = (node.module, name.name, id(node) in tried)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, _DEFINITIONS):
            bound.add(node.name)
        elif isinstance(node, ast.Name):
            (wanted if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes[node.value.id].add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    wanted = wanted.union(*(attributes[name] for name in ours)) - set(imports) - {REACHED}
    modules = {
        name: (_ALIASES[name], "", sorted(attributes[name]))
        for name in wanted
        if name in _ALIASES and attributes[name] and name not in called | bound
    }
    subjects = wanted - bound - set(vars(builtins)) - set(modules) - set(_COMPARISONS)
    entry = {node.id for node in ast.walk(ast.parse(entry_point or "")) if isinstance(node, ast.Name)}
    if subjects or entry:
        modules |= {name: (_COMPARISONS[name], name, []) for name in wanted if name in _COMPARISONS}
        wanted -= set(vars(builtins)) - entry  # else a built-in name can only be that of the function under test
        modules = {name: module for name, module in modules.items() if name not in entry}
    needs = entry or subjects or wanted - bound - set(modules)
    return {"imports": imports, "modules": modules, "names": sorted(wanted), "needs": sorted(needs)}


def _is_run(node: ast.stmt) -> bool:
    """Return whether pytest or unittest would run a function or class."""
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases]
        has_tests = any(isinstance(method, ast.FunctionDef) and method.name.startswith("test") for method in node.body)
        inherits = any(not base.endswith("TestCase") for base in bases)
        return (has_tests or inherits) and (node.name.startswith("Test") or any("Test" in base for base in bases))
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)


def _reached(nodes: Iterable[ast.AST], names: dict[str, Any]) -> Iterator[ast.AST]:
    """Yield the nodes below some nodes, and below the definitions that these name."""
    waiting, seen = list(nodes), set[str]()
    while waiting:
        for node in ast.walk(waiting.pop()):
            yield node
            if isinstance(node, ast.Name) and node.id in names and node.id not in seen:
                seen.add(node.id)
                waiting.append(names[node.id])


def _is_assertion(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name.startswith("assert") or name in ("fail", "raises")
    return isinstance(node, ast.Assert | ast.Raise)


def _asserts(node: ast.AST) -> bool:
    """Return whether a statement asserts something itself, outside of loops and definitions in it."""
    if isinstance(node, _DEFINITIONS):
        return False
    if isinstance(node, ast.Try | ast.If | ast.With | ast.AsyncWith | ast.For | ast.AsyncFor | ast.While):
        inner = node.orelse if isinstance(node, _LOOPS) else ast.iter_child_nodes(node)
        return any(map(_asserts, inner))
    return any(map(_is_assertion, ast.walk(node)))


def _counted(body: list[Any], drops: bool) -> list[ast.stmt]:
    """Return statements that count the assertions reached, and run or drop what ``if __name__ == "__main__"`` guards."""
    counted: list[ast.stmt] = []
    for node in body:
        for part in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            for name in ("body", "orelse", "finalbody"):
                if getattr(part, name, None):
                    setattr(part, name, _counted(getattr(part, name), drops))
        if isinstance(node, ast.If) and any(
            isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test)
        ):
            counted += [ast.Pass()] if drops else node.body
        else:
            counted += [*ast.parse(f"{REACHED}()" * _asserts(node)).body, node]
    return counted


def modules_of(plan: dict[str, Any]) -> dict[str, Any]:
    """Return what the tests import, or use as if they had, by name: never what the program calls so.

    Raises:
        ImportError: a module is missing here.
    """
    space: dict[str, Any] = {}
    if importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = _pytest()
    for runner in {"unittest", "pytest"} & {module for module, *_ in plan["imports"].values()}:
        with contextlib.suppress(ImportError):  # the tests run once, by `run_test`
            vars(importlib.import_module(runner))["main"] = lambda *_, **__: None
    for name, (module, member, optional) in plan["imports"].items():
        with contextlib.suppress(*[ImportError] * optional):
            space[name] = imported = importlib.import_module(module)
            if member and member != "*":
                space[name] = getattr(imported, member, None) or importlib.import_module(f"{module}.{member}")
    for name, (module, member, attributes) in plan["modules"].items():
        imported = importlib.import_module(module)
        if all(hasattr(imported, attribute) for attribute in attributes):
            space[name] = getattr(imported, member) if member else imported
    return space


def run_test(tested: Any) -> None:
    """Run a test function or a class of tests, as pytest and unittest do."""
    if not isinstance(tested, type):
        for arguments in _cases(tested):
            tested(**arguments)
    elif not hasattr(tested, "countTestCases"):
        for name in sorted(name for name in dir(tested) if name.startswith("test")):
            setup = getattr(instance := tested(), "setup_method", None)
            if setup is not None:
                setup(*[getattr(instance, name)][: setup.__code__.co_argcount - 1])
            run_test(getattr(instance, name))
    else:
        import unittest

        unittest.defaultTestLoader.loadTestsFromTestCase(tested).run(result := unittest.TestResult())
        for _, trace in (*result.failures, *result.errors):
            raise AssertionError(trace.strip().splitlines()[-1])


def _cases(function: Any) -> list[dict[str, Any]]:
    """Return the arguments of each case of a test function: the product of its parametrisations."""
    choices: list[list[dict[str, Any]]] = []
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names, rows = mark.args
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
            rows = [row.values if hasattr(row, "marks") else [row] if len(names) == 1 else row for row in rows]
            choices.append([dict(zip(names, row, strict=True)) for row in rows])
    return [{name: case[name] for case in cases for name in case} for cases in itertools.product(*choices)]


# ------------------------------------------------------------------------------------------------- pytest where it is missing


@contextlib.contextmanager
def _raising(kind: Any, match: str | None) -> Iterator[types.SimpleNamespace]:
    seen = types.SimpleNamespace()
    try:
        yield seen
    except kind as error:
        assert match is None or re.search(match, str(error)), f"{error!r} does not match {match!r}"
        seen.value, seen.type = error, type(error)
    else:
        raise AssertionError(f"{kind} was not raised")


def _raises(kind: Any, *call: Any, match: str | None = None, **kwargs: Any) -> Any:
    if not call:
        return _raising(kind, match)
    with _raising(kind, match) as seen:
        call[0](*call[1:], **kwargs)
    return seen


class _Approx:
    def __init__(self, value: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:  # noqa: A002 - pytest's name
        self.value, self.nan_ok = value, nan_ok
        self.rel = rel if rel is not None else 1e-6 if abs is None else 0.0  # an absolute limit alone is the only one
        self.abs = 1e-12 if abs is None else abs

    def __eq__(self, other: object) -> bool:
        return self._near(other, self.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _near(self, a: Any, b: Any) -> bool:
        if isinstance(b, list | tuple):
            return isinstance(a, list | tuple) and len(a) == len(b) and all(map(self._near, a, b))
        if isinstance(b, dict):
            return isinstance(a, dict) and a.keys() == b.keys() and all(self._near(a[key], b[key]) for key in b)
        if not (isinstance(a, int | float) and isinstance(b, int | float) and math.isfinite(b)) or a == b:
            return bool(a == b or (self.nan_ok and a != a and b != b))
        return abs(a - b) <= max(self.rel * abs(b), self.abs)


class _Marks:
    def __getattr__(self, name: str) -> Any:
        def mark(*args: Any, **_: Any) -> Any:
            def decorate(function: Any) -> Any:
                function.pytestmark = [
                    *getattr(function, "pytestmark", ()),
                    types.SimpleNamespace(name=name, args=args),
                ]
                return function

            return args[0] if len(args) == 1 and callable(args[0]) else decorate

        return mark


def _pytest() -> types.ModuleType:
    module = types.ModuleType("pytest")
    case = lambda *values, **_: types.SimpleNamespace(values=values, marks=())  # noqa: E731 - as short as the others
    vars(module).update(raises=_raises, approx=_Approx, mark=_Marks(), param=case)
    return module
