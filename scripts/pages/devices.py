"""The table of docs/other-devices.md: modules that decide by the name of a device, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hone

PACKAGE = Path(hone.__file__).parent
START, END = "<!-- modules: written by scripts/make_docs -->", "<!-- modules: end -->"
NAMES = {"cpu", "cuda"}


def _of_torch(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and getattr(node.value, "id", None) == "torch"


def places(source: str) -> Iterator[str]:
    """Yield what each place of a module that decides by a device's name does: ``asks``, ``makes``, or the name in ``torch.cuda``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) and side.value in NAMES for side in sides):
                yield "asks"
        elif isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            yield "asks"
        elif isinstance(node, ast.Attribute) and _of_torch(node.value, "cuda"):
            yield node.attr
        elif isinstance(node, ast.Call) and _of_torch(node.func, "device"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and str(first.value).partition(":")[0] == "cuda":
                yield "makes"


def by_module() -> dict[str, list[str]]:
    """Modules with such places, by their path in the package. The kernels for CUDA are not counted: they are for that device."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        source = path.read_text(encoding="utf-8")
        named = not name.startswith("models/kernels/cuda/") and ("cuda" in source or '"cpu"' in source)
        if named and (those := list(places(source))):
            found[name] = those
    return found


def devices_page(text: str) -> str:
    """Return the page with today's table."""
    before, _, rest = text.partition(START)
    found = by_module()
    asking = {name: those for name, those in found.items() if set(those) == {"asks"}}
    rows = [
        f"| `{name}` | {those.count('asks') + those.count('makes')} | {', '.join(sorted({f'`{use}`' for use in those if use not in ('asks', 'makes')}))} |"
        for name, those in found.items()
        if name not in asking
    ]
    lines = [
        f"{len(found)} modules outside `hone/models/kernels/cuda` decide by a device's name, at {sum(map(len, found.values()))} places.",
        f"{len(asking)} of them only ask whether it is a CPU or a GPU: {', '.join(f'`{name}`' for name in asking)}.",
        "The others also use `torch.cuda`, or name that device:",
        "",
        "| Module | Asks or names | Uses of `torch.cuda` |",
        "|---|---:|---|",
        *rows,
    ]
    return before + START + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2]
