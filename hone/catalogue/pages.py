"""The pages ``docs/algorithms/*.md``: facts from the registries, and beside them what people wrote.

A page has a generated part between two markers, which :func:`algorithm_pages` writes anew, and whatever stands around
it, which it keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from hone.catalogue.examples import Table, example
from hone.catalogue.methods import methods
from hone.catalogue.presets import preset_title, presets
from hone.catalogue.records import KINDS, Method

BEGIN = "<!-- Generated from the registries by scripts/make_docs: do not edit from here -->"
END = "<!-- to here. What follows is written by hand and kept. -->"
TO_WRITE = "(to be written)"
_NOTES = f"## When to use it and how it fails\n\n{TO_WRITE}\n"
_INDEX = "README.md"


def algorithm_pages(folder: Path) -> dict[str, str]:
    """Return file name to text of every page; what is written by hand is taken from the pages in ``folder``."""
    by_page: dict[str, list[Method]] = {}
    for method in methods():
        by_page.setdefault(method.page, []).append(method)
    pages = {name: _page(folder / name, found) for name, found in sorted(by_page.items())}
    return {_INDEX: splice(_read(folder / _INDEX), "# Algorithms\n", _index()), **pages}


def hand_written(text: str) -> str:
    """What stands after the generated part of a page."""
    return text.partition(END)[2].strip()


def splice(existing: str, head: str, generated: str) -> str:
    """Put ``generated`` between the markers of ``existing``; a page without them becomes head, generated part, notes."""
    if BEGIN in existing and END in existing:
        before, _, rest = existing.partition(BEGIN)
        after = rest.partition(END)[2]
    else:
        before, after = f"{head}\n", f"\n\n{_NOTES}"
    return f"{before}{BEGIN}\n\n{generated.strip()}\n\n{END}{after}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _page(path: Path, found: Sequence[Method]) -> str:
    up = f"[All methods]({_INDEX}) | `hone algorithms show {path.stem}`\n\n"
    if path.name == "rollout_correction.md":
        return splice(_read(path), "# Rollout correction\n", up + _corrections(found))
    titles = len(found) > 1
    sections = [(f"## As {_article(KINDS[method.kind])}\n\n" if titles else "") + _facts(method) for method in found]
    return splice(_read(path), f"# {found[0].name}\n", up + "\n\n".join(sections))


# --------------------------------------------------------------------------------------------------------- one method


def _facts(method: Method) -> str:
    also = f" Also called {', '.join(f'`{name}`' for name in method.aliases)}." if method.aliases else ""
    needs = "; ".join(f"`{need.argument}`: {need.source}" for need in method.needs) or "nothing more"
    rows = [
        ["Paper", method.paper],
        ["Choose it", _choose(method)],
        ["Needs", needs],
        *([label, text] for label, text in method.remarks.items()),
        ["Costs", method.cost.sentence()],
        ["Presets", ", ".join(f"`{name}`" for name in method.presets) or "none"],
    ]
    parts = [
        f"{_capital(_article(KINDS[method.kind]))}.{also}",
        method.description,
        f"```text\n{method.formula}\n```",
        table([["", ""], *rows]),
    ]
    if method.knobs:
        heading = [["Knob", "Default", "Meaning"]]
        knobs = [[f"`{knob.key}`", f"`{knob.default}`", knob.meaning] for knob in method.knobs]
        parts.append(table(heading + knobs))
    shown = example(method)
    if shown:
        parts += [shown[0], table(shown[1])]
    return "\n\n".join(part for part in parts if part)


def _choose(method: Method) -> str:
    return method.select if "(" in method.select else f"`{method.select}`"


def table(rows: Table) -> str:
    """A Markdown table; the first row is the heading."""
    lines = [
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row).rstrip() + " |" for row in rows
    ]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


# ------------------------------------------------------------------------------------------------- pages over several


def _corrections(found: Sequence[Method]) -> str:
    """The function's facts, then every named preset."""
    (function,) = (method for method in found if method.kind == "block")
    rows = [["Preset", "Does", "Sets"]]
    rows += [[f"`{m.name}`", m.formula, f"`{m.remarks['Sets']}`"] for m in found if m is not function]
    return f"{_facts(dataclasses.replace(function, remarks={}))}\n\n{table(rows)}"


def _index() -> str:
    parts = []
    for kind, words in KINDS.items():
        found = [method for method in methods() if method.kind == kind]
        title = f"### {_capital(_plural(words))}"
        if kind == "correction":
            parts += [
                title,
                f"[{len(found)} named presets]({found[0].page}): {', '.join(f'`{m.name}`' for m in found)}.",
            ]
        elif found:
            rows = [["Method", "Formula", "Costs"]]
            rows += [[_link(method), f"`{method.formula}`", _short_cost(method)] for method in found]
            parts += [title, table(rows)]
    parts.append("### Presets")
    for command, folder in (("train", "rl"), ("prefer", "prefer")):
        rows = [[f"`hone {command} --preset`", "Is"]]
        parts.append(table(rows + [[f"`{name}`", preset_title(name, folder)] for name in presets(folder)]))
    return "\n\n".join(parts)


def _plural(words: str) -> str:
    return f"{words}{'es' if words.endswith('s') else 's'}"


def _link(method: Method) -> str:
    also = f" ({', '.join(method.aliases)})" if method.aliases else ""
    return f"[{method.name}]({method.page}){also}"


def _short_cost(method: Method) -> str:
    models = [*method.cost.trained[1:], *method.cost.frozen]
    extra = f"{', '.join(models)} beside the policy" if models else "the policy alone"
    return f"{extra}; {method.cost.generation}" if "greedy" in method.cost.generation else extra
