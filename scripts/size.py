#!/usr/bin/env python3
"""How large the code is, package by package, against the budget in tests/size.toml.

``scripts/size.py`` prints lines, files and code tokens (without comments and docstrings), and the difference to the budget.
``--lower`` writes today's figures where they are below the budget. A figure is raised by hand, in a commit of its own.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
BUDGET = ROOT / "tests" / "size.toml"
MEASURES = ("lines", "files", "tokens")
LONGEST = 800
"""Lines of a file of hone/."""

Size = dict[str, int]

TOKEN = re.compile(
    r"""(?:[ \t\f]|\\\n)*(?:(?P<newline>(?:\#[^\n]*)?\n)
    |(?P<string>(?:[rR][bBfF]?|[bBfF][rR]?|[uU])?(?:\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}
        |\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'))
    |(?P<opened>[(\[{])|(?P<closed>[)\]}])
    |(?P<other>(?:\d[\d_]*\.?(?![xXoObB])|\.\d)[\d_]*(?:[eE][-+]?\d[\d_]*)?[jJ]?
        |\w+|\.\.\.|(?:\*\*|//|>>|<<)=?|->|[-+*/%&|^=<>!:@]=|.))""",
    re.VERBOSE | re.DOTALL,
)
"""A token of Python as ``tokenize`` cuts it, several times faster; tests/unit/test_size.py compares the two."""


def code_tokens(text: str) -> int:
    """Tokens of Python code, without comments and without statements that are only a string, as docstrings are."""
    count = depth = statement = strings = 0
    for match in TOKEN.finditer(text + "\n"):
        kind = match.lastgroup
        if kind != "newline":
            statement += 1
            strings += kind == "string"
            depth += (kind == "opened") - (kind == "closed")
        elif not depth:
            count += statement if strings < statement else 0
            statement = strings = 0
    return count


def sources(place: Path) -> Iterator[Path]:
    """Files of code below a folder: Python, pages of the viewer and scripts; without what others wrote."""
    for path in sorted(place.rglob("*") if place.is_dir() else [place]):
        program = path.suffix in (".py", ".js", ".css", ".html", ".cpp") or (not path.suffix and path.parent == SCRIPTS)
        if program and path.is_file() and "vendor" not in path.parts:
            yield path


def places() -> dict[str, list[Path]]:
    """What has figures of its own: each package of the core, each application, the modules beside them, and other folders of code."""
    hone = ROOT / "hone"
    packages = sorted(file.parent for file in (*hone.glob("*/__init__.py"), *(hone / "apps").glob("*/__init__.py")))
    packages.remove(hone / "apps")
    return {
        **{str(path.relative_to(ROOT)): [path] for path in packages},
        "hone/*.py": sorted([*hone.glob("*.py"), hone / "apps" / "__init__.py"]),
        **{name: [ROOT / name] for name in ("tests", "scripts", "benchmarks")},
    }


def sizes() -> dict[str, Size]:
    """Lines, files and code tokens of each place; tokens are those of Python."""
    found = {}
    for name, paths in places().items():
        texts = {path: path.read_text(encoding="utf-8") for place in paths for path in sources(place)}
        found[name] = {
            "lines": sum(text.count("\n") for text in texts.values()),
            "files": len(texts),
            "tokens": sum(code_tokens(text) for path, text in texts.items() if path.suffix == ".py"),
        }
    return found


def budget() -> dict[str, Size]:
    """The figures of tests/size.toml."""
    return tomllib.loads(BUDGET.read_text(encoding="utf-8"))["sizes"]


def excesses(now: dict[str, Size], allowed: dict[str, Size]) -> list[str]:
    """Where the code is larger than the budget, and by how much."""
    return [
        f"{name}: {size[measure]:,} {measure}, {size[measure] - limit:+,} against the budget of {limit:,}"
        for name, size in now.items()
        for measure in MEASURES
        if size[measure] > (limit := allowed.get(name, {}).get(measure, 0))
    ]


def lowered(text: str, now: dict[str, Size]) -> str:
    """The text of the budget with today's figures where they are smaller; a place that is no more leaves."""
    lines = []
    for line in text.splitlines():
        named = re.match(r'"([^"]+)" = \{ lines', line)
        if named and named[1] not in now:
            continue
        if named:
            for measure in MEASURES:
                smaller = now[named[1]][measure]
                line = re.sub(rf"({measure} = )(\d+)", lambda m, s=smaller: f"{m[1]}{min(int(m[2]), s)}", line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the table, or lower the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true", help="write today's figures where they are below the budget")
    options = parser.parse_args()
    now = sizes()
    if options.lower:
        BUDGET.write_text(lowered(BUDGET.read_text(encoding="utf-8"), now), encoding="utf-8")
    allowed = budget()
    print(f"{'':18}" + "".join(f"{measure:>11}{'':>9}" for measure in MEASURES))
    for title, kept in {"the core": "hone/(?!apps/)", "hone in all": "hone/"}.items():
        for figures in (now, allowed):
            sums = [size for name, size in figures.items() if re.match(kept, name)]
            figures[title] = {measure: sum(size[measure] for size in sums) for measure in MEASURES}
    for name, size in now.items():
        least = allowed.get(name, dict.fromkeys(MEASURES, 0))
        print(f"{name:18}" + "".join(f"{size[m]:>11,}{f'({size[m] - least[m]:+,})':>9}" for m in MEASURES))
    over = excesses(now, allowed)
    print("\n".join(over))
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
