"""Pages ``docs/algorithms/*.md``: facts from the registries, and hand-written text.

A page has a generated part between two markers, which :func:`algorithm_pages` replaces, and hand-written text around it,
which it keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from hone.apps.explain.catalogue.examples import Table, example
from hone.apps.explain.catalogue.methods import methods
from hone.apps.explain.catalogue.presets import preset_title, presets
from hone.apps.explain.catalogue.records import KINDS, Method
from hone.text import replace_between

BEGIN = "<!-- Generated from the registries by scripts/make_docs: do not edit from here -->"
END = "<!-- to here. What follows is written by hand and kept. -->"
TO_WRITE = "(to be written)"
_NOTES = f"## When to use it and how it fails\n\n{TO_WRITE}\n"
_INDEX = "README.md"


def algorithm_pages(folder: Path) -> dict[str, str]:
    """Return the text of every page by file name; hand-written text is read from the pages in ``folder``."""
    by_page: dict[str, list[Method]] = {}
    for method in methods():
        by_page.setdefault(method.page, []).append(method)
    pages = {name: _page(folder / name, page_methods) for name, page_methods in sorted(by_page.items())}
    return {_INDEX: splice(_read(folder / _INDEX), "# Algorithms\n", _index()), **pages}


def hand_written(text: str) -> str:
    """Return the text after the generated part of a page."""
    return text.partition(END)[2].strip()


def splice(existing: str, head: str, generated: str) -> str:
    """Put ``generated`` between the markers of ``existing``; a page without them becomes head, generated part, notes."""
    page = existing if BEGIN in existing and END in existing else f"{head}\n{BEGIN}{END}\n\n{_NOTES}"
    return replace_between(page, BEGIN, END, generated.strip())


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _page(path: Path, methods_on_page: Sequence[Method]) -> str:
    up = f"[All methods]({_INDEX}) | `hone algorithms show {path.stem}`\n\n"
    if path.name == "rollout_correction.md":
        return splice(_read(path), "# Rollout correction\n", up + _corrections(methods_on_page))
    titles = len(methods_on_page) > 1
    sections = [
        (f"## As {_article(KINDS[method.kind])}\n\n" if titles else "") + _facts(method) for method in methods_on_page
    ]
    return splice(_read(path), f"# {methods_on_page[0].name}\n", up + "\n\n".join(sections))


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
    numbers = example(method)
    if numbers:
        parts += [numbers[0], table(numbers[1])]
    return "\n\n".join(part for part in parts if part)


def _choose(method: Method) -> str:
    return method.select if "(" in method.select else f"`{method.select}`"


def table(rows: Table) -> str:
    """Return a Markdown table; the first row is the heading."""
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


def _corrections(corrections: Sequence[Method]) -> str:
    """Return the function's facts, then every named preset."""
    (function,) = (method for method in corrections if method.kind == "block")
    rows = [["Preset", "Effect", "Sets"]]
    rows += [[f"`{m.name}`", m.formula, f"`{m.remarks['Sets']}`"] for m in corrections if m is not function]
    return f"{_facts(dataclasses.replace(function, remarks={}))}\n\n{table(rows)}"


def _index() -> str:
    parts = []
    for kind, words in KINDS.items():
        of_kind = [method for method in methods() if method.kind == kind]
        title = f"### {_capital(_plural(words))}"
        if kind == "correction":
            parts += [
                title,
                f"[{len(of_kind)} named presets]({of_kind[0].page}): {', '.join(f'`{m.name}`' for m in of_kind)}.",
            ]
        elif of_kind:
            rows = [["Method", "Formula", "Costs"]]
            rows += [[_link(method), f"`{method.formula}`", _short_cost(method)] for method in of_kind]
            parts += [title, table(rows)]
    parts.append("### Presets")
    for command, folder in (("train", "rl"), ("prefer", "prefer")):
        rows = [[f"`hone {command} --preset`", "Description"]]
        parts.append(table(rows + [[f"`{name}`", preset_title(name, folder)] for name in presets(folder)]))
    return "\n\n".join(parts)


def _plural(words: str) -> str:
    return f"{words}{'es' if words.endswith('s') else 's'}"


def _link(method: Method) -> str:
    also = f" ({', '.join(method.aliases)})" if method.aliases else ""
    return f"[{method.name}]({method.page}){also}"


def _short_cost(method: Method) -> str:
    models = [*method.cost.trained[1:], *method.cost.frozen]
    extra = f"{', '.join(models)} besides the policy" if models else "the policy alone"
    return f"{extra}; {method.cost.generation}" if "greedy" in method.cost.generation else extra
