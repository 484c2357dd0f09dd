"""The budget of code: no package is larger than tests/size.toml allows; a file of hone/ has at most 800 lines."""

from __future__ import annotations

import ast
import io
import random
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import size  # noqa: E402
from pages.devices import by_module, places  # noqa: E402

FIX = (
    "Take code away, or raise the figure in tests/size.toml by a commit of its own that says why. "
    "Work with an allowance there moves its lines from the allowance into the figure of its package."
)


def test_no_package_is_larger_than_its_budget() -> None:
    over = size.excesses(size.sizes(), size.budget())
    assert not over, "\n".join([*over, FIX])


def test_files_stay_small() -> None:
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "hone").rglob("*.py")}
    assert not {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > size.LONGEST}


def test_no_more_places_decide_by_a_devices_name() -> None:
    allowed, found = tomllib.loads(size.BUDGET.read_text(encoding="utf-8"))["devices"], by_module()
    now = {"modules": len(found), "places": sum(map(len, found.values()))}
    assert all(now[name] <= allowed[name] for name in allowed), (
        f"{now}, allowed {allowed}: let hone/models/devices.py or the device's backend decide ({', '.join(found)})"
    )


def test_places_that_decide_by_a_devices_name_are_found() -> None:
    source = "if x.device.type == 'cuda' or t.is_cuda:\n    s = torch.cuda.Stream(torch.device('cuda:1'))\ntorch.device(name)\n"
    assert sorted(places(source)) == ["Stream", "asks", "asks", "makes"]


IMPORTS = tomllib.loads(size.BUDGET.read_text(encoding="utf-8"))["imports"]


def modules() -> dict[str, Path]:
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "hone").rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def imported_by(path: Path) -> set[str]:
    """Names that a module imports anywhere, those for type checkers left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    skipped = {id(inner) for n in guarded for statement in n.body for inner in ast.walk(statement)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in skipped:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and id(node) not in skipped:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("module", IMPORTS)
def test_what_a_module_makes_its_reader_read(module: str) -> None:
    every = modules()
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in every.items()}
    code = f"import {module}, sys; print(*(name for name in sys.modules if name.split('.')[0] == 'hone'))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = sum(lines[name] for name in ran.stdout.splitlines()[-1].split())
    closure, todo = set(), {module}
    while todo:
        name = todo.pop()
        closure.add(name)
        for reached in imported_by(every[name]):
            parts = reached.split(".")
            todo |= {".".join(parts[:k]) for k in range(1, len(parts) + 1)} & every.keys() - closure
    now = {"loaded": loaded, "closure": sum(lines[name] for name in closure)}
    assert not [f"{key}: {now[key]} lines" for key, limit in IMPORTS[module].items() if now[key] > limit], FIX


ODD = r"""
x = (1_0.5e-3j, .5, 0xFf, 1., -1e5, ...)
r'''alone
\''''  # and a comment
if x: \
  f"{x!r}"
b'#' + rb"\""
@a
def f(): "not alone"
"""


def slow_count(text: str) -> int:
    """The definition of code tokens, by the tokenizer of Python."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    count, statement, formatted = 0, [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        formatted += kind == "FSTRING_START"  # from Python 3.12 on a formatted string is cut into its parts
        if kind == "NEWLINE":
            count += len(statement) if set(statement) != {"STRING"} else 0
            statement = []
        elif token.type not in layout and not formatted:
            statement.append(kind)
        if kind == "FSTRING_END":
            formatted -= 1
            statement += ["STRING"] * (not formatted)
    return count


def test_tokens_are_those_of_the_tokenizer() -> None:
    files = sorted((ROOT / "hone").rglob("*.py"))
    for path in random.Random(0).sample(files, 25):
        text = path.read_text(encoding="utf-8")
        assert size.code_tokens(text) == slow_count(text), path
    assert size.code_tokens(ODD) == slow_count(ODD) == 31


def test_more_is_said_and_less_is_free() -> None:
    allowed = {"a": {"lines": 10, "files": 1, "tokens": 5000}}
    assert not size.excesses({"a": dict.fromkeys(size.MEASURES, 1)}, allowed)
    assert size.excesses({"a": {"lines": 10, "files": 1, "tokens": 6200}, "new": {"lines": 3, "files": 0, "tokens": 0}}, allowed) == [
        "a: 6,200 tokens, +1,200 against the budget of 5,000",
        "new: 3 lines, +3 against the budget of 0",
    ]  # fmt: skip


def test_figures_are_lowered_and_never_raised() -> None:
    text = '# why\n"a" = { lines = 10, files = 1, tokens = 50 }\n"gone" = { lines = 1, files = 1, tokens = 1 }\n'
    now = {"a": {"lines": 11, "files": 1, "tokens": 40}}
    assert size.lowered(text, now) == '# why\n"a" = { lines = 10, files = 1, tokens = 40 }\n'
