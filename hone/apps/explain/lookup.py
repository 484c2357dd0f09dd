"""Look a term up in every source: glossary, configuration keys, metrics, detectors, presets, codes and methods.

The glossary and the codes of errors that are not preflight rules are read from ``glossary.yaml`` and ``error_codes.yaml``. Each
source is where the thing is declared, so an explanation cannot differ from the page that is generated from it. Codes of
rules and methods need torch, which takes seconds to import; they are read only if the term looks like one or if nothing else matches.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone import methods as method_tables
from hone.apps.explain import key_search
from hone.config.keys import documentation
from hone.config.load import PRESETS, preset_names
from hone.config.trees import PRESET_KINDS, TREES
from hone.errors import ConfigError
from hone.insight.detectors import DETECTORS
from hone.insight.metrics import METRICS, MetricSpec, find_metric
from hone.text import replace_between

_GLOSSARY_FILE = Path(__file__).with_name("glossary.yaml")
_HEAD = """# Glossary

<!-- Generated from hone/apps/explain/glossary.yaml by scripts/make_docs. Do not edit. -->

The terms of the field as Hone uses them. Code, messages and pages use these words and no others for the same thing; `scripts/lint` runs
[`scripts/vocabulary.py`](../scripts/vocabulary.py), which lists words to avoid with the standard one for each.

`hone explain TERM` prints an entry of this page, and describes any configuration key, metric, code, detector or method:

```bash
hone explain staleness
hone explain rollout.n
hone explain actor/pg_clipfrac
hone explain entropy_collapse
```
"""


@dataclass(frozen=True)
class Term:
    """A term of the glossary."""

    name: str  # the term; two terms that are explained together are separated by a comma
    meaning: str  # one to three sentences
    section: str  # heading of the page
    also: tuple[str, ...] = ()  # other names
    page: str = ""  # page below docs/, or empty
    keys: tuple[str, ...] = ()  # configuration keys that belong to it
    metrics: tuple[str, ...] = ()  # metrics that measure it

    @property
    def names(self) -> tuple[str, ...]:
        """The term and its other names."""
        return (self.name, *self.also)


@functools.cache
def glossary() -> tuple[Term, ...]:
    import yaml

    sections: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(_GLOSSARY_FILE.read_text(encoding="utf-8"))
    return tuple(
        Term(
            name,
            entry["meaning"],
            section,
            **{part: tuple(entry.get(part, ())) for part in ("also", "keys", "metrics")},
            page=entry.get("page", ""),
        )
        for section, entries in sections.items()
        for name, entry in entries.items()
    )


def glossary_page() -> str:
    """Return the page ``docs/glossary.md``."""
    lines, section = [_HEAD], ""
    for term in glossary():
        if term.section != section:
            section = term.section
            lines += [
                *([""] if len(lines) > 1 else []),
                f"## {section}",
                "",
                "| Term | Meaning | See |",
                "|---|---|---|",
            ]
        names = term.name + (f" ({', '.join(term.also)})" if term.also else "")
        see = [f"[{term.page}]({term.page})"] if term.page else []
        see += [f"`{name}`" for name in (*term.keys, *term.metrics)]
        cells = (names, term.meaning, ", ".join(see))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_CODES_FILE = Path(__file__).with_name("error_codes.yaml")
BEGIN = "<!-- Generated from hone/apps/explain/error_codes.yaml by scripts/make_docs: do not edit from here -->"
END = "<!-- codes: to here -->"


@functools.cache
def error_codes() -> dict[str, str]:
    import yaml

    return yaml.safe_load(_CODES_FILE.read_text(encoding="utf-8"))


def codes_page(existing: str) -> str:
    """Return a page with a new table of the codes between the markers; the rest is unchanged."""
    rows = [f"| {code} | {meaning} |" for code, meaning in error_codes().items()]
    return replace_between(existing, BEGIN, END, "\n".join(["| Code | Raised for |", "|---|---|", *rows]))


_CODE = re.compile(r"(?:R\d+|[ED]-[a-z-]+)", re.IGNORECASE)
_SHOWN = 6
"""Most explanations of one kind, and most names of a suggestion."""
_NEAR = 0.6
_METHODS = {
    *method_tables.ESTIMATOR_INPUTS,
    *method_tables.COMPARES_ACROSS_MINI_BATCH,
    *method_tables.PREFERENCE_LOSS_NEEDS,
    *method_tables.ROLLOUT_CORRECTION_PRESETS,
}
"""Names of methods that are known without torch."""


@dataclass(frozen=True)
class Explanation:
    """Description of a term by one source."""

    kind: str  # term, key, metric, detector, preset, code or method
    name: str  # exact name
    text: str  # description for a person, of one or several lines
    facts: dict[str, Any] = field(default_factory=dict)  # the description as plain data

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, **self.facts}

    def __str__(self) -> str:
        body = "\n".join(f"    {line}".rstrip() for line in self.text.splitlines())
        return f"{self.name}  ({self.kind})\n{body}"


def explain(words: str) -> list[Explanation]:
    """Return what every source says about a term: exact names first, else the entries that contain all words."""
    name = " ".join(words.split())
    if not name:
        raise ConfigError("no term is given", fix="hone explain staleness", code="E-config")
    known_method = [_methods] if name.lower() in _METHODS else []
    sources: list[Callable[[str], Iterable[Explanation]]]
    sources = [_codes] if _CODE.fullmatch(name) else [_terms, _keys, _metrics, _detectors, *known_method, _presets]
    matches = [match for source in sources for match in source(name)]
    matches = matches or list(_methods(name)) or _containing(name)
    if matches:
        return matches
    near = _nearest(name)
    raise ConfigError(
        f"no term, key, metric, code or method is called '{name}'",
        fix=f"Did you mean {', '.join(near)}?"
        if near
        else "docs/glossary.md lists the terms, `hone config show` the keys",
    )


# ---------------------------------------------------------------------------------------------------------- sources


def _terms(name: str) -> Iterator[Explanation]:
    wanted = _plain(name)
    for term in glossary():
        if wanted in map(_plain, (*term.names, *term.name.split(", "))):
            yield _of_term(term)


def _of_term(term: Term) -> Explanation:
    lines = [term.meaning]
    if term.also:
        lines.append(f"Also called {', '.join(term.also)}")
    for label, names in (("Keys", term.keys), ("Metrics", term.metrics)):
        if names:
            lines.append(f"{label}: {', '.join(names)}")
    if term.page:
        lines.append(f"Page: docs/{term.page}")
    facts = {
        "meaning": term.meaning,
        "also": [*term.also],
        "keys": [*term.keys],
        "metrics": [*term.metrics],
        "page": term.page and f"docs/{term.page}",
    }
    return Explanation("term", term.name, "\n".join(lines), facts)


def _keys(name: str) -> Iterator[Explanation]:
    answers = [] if " " in name else key_search.exact(name, [*TREES])
    for answer in answers[:_SHOWN]:
        head, _, text = str(answer).rstrip().partition("\n")
        lines = [line.removeprefix("    ") for line in text.splitlines()]
        if answer is answers[:_SHOWN][-1] and len(answers) > _SHOWN:
            lines.append(f"{len(answers) - _SHOWN} more keys: hone config explain {name}")
        kind = f"{answer.trainer}'s name" if isinstance(answer, key_search.ForeignAnswer) else "key"
        yield Explanation(
            f"{kind}, hone {answer.command}", head.partition("  (")[0], "\n".join(lines), answer.as_json()
        )


def _metrics(name: str) -> Iterator[Explanation]:
    exact = next((spec for spec in METRICS if name == spec.name), None)
    if exact is None and "/" in name:
        try:
            exact = find_metric(name)
        except ValueError:
            return
    if exact is not None:
        yield _of_metric(exact)


def _of_metric(spec: MetricSpec) -> Explanation:
    acting = [detector.name for detector in DETECTORS if spec.name in detector.reads]
    lines = [spec.meaning, f"Unit: {spec.unit}. Several values of a step: {spec.reduction.value}"]
    if acting:
        lines.append(f"Detectors: {', '.join(acting)}")
    facts = {"meaning": spec.meaning, "unit": spec.unit, "reduction": spec.reduction.value, "detectors": acting}
    return Explanation("metric", spec.name, "\n".join(lines), facts)


def _detectors(name: str) -> Iterator[Explanation]:
    for detector in DETECTORS:
        if detector.name == name.lower().replace(" ", "_"):
            facts = {
                "question": detector.question,
                "fires": detector.fires,
                "why": detector.why,
                "changes": detector.changes,
                "reads": [*detector.reads],
            }
            lines = [
                detector.question,
                f"Fires when {detector.fires}",
                f"Why it matters: {detector.why}",
                f"What to change, in order: {detector.changes}",
                f"Reads: {', '.join(detector.reads)}",
            ]
            yield Explanation("detector", detector.name, "\n".join(lines), facts)


def _presets(name: str) -> Iterator[Explanation]:
    for command, tree in TREES.items():
        folder = PRESET_KINDS[tree]
        if name.lower() in preset_names(folder):
            head, _, body = (PRESETS / folder / f"{name.lower()}.yaml").read_text(encoding="utf-8").partition("\n")
            title = head.removeprefix("# ")
            text = f"{title}\nUse it: hone {command} --preset {name.lower()}\n{body.strip()}"
            yield Explanation(f"preset, hone {command}", name.lower(), text, {"meaning": title, "sets": body.strip()})


def _codes(name: str) -> Iterator[Explanation]:
    for code, meaning in error_codes().items():
        if code.lower() == name.lower():
            yield Explanation("error code", code, f"{meaning}\nPage: docs/troubleshooting.md", {"meaning": meaning})
    if not re.fullmatch(r"R\d+", name, re.IGNORECASE):
        return
    from hone.preflight.rules import index

    rules = [entry for entry in index() if entry.code == name.upper()]
    if rules:
        lines = [f"{entry.question} ({entry.when})" for entry in rules]
        if any(entry.trees for entry in rules):
            lines.append(f"An error stops the run before it starts, unless preflight.allow=[{rules[0].code}]")
        lines.append("Page: docs/troubleshooting.md")
        checks = [{"when": entry.when, "check": entry.question, "commands": [*entry.trees]} for entry in rules]
        yield Explanation("rule", rules[0].code, "\n".join(lines), {"checks": checks})


def _methods(name: str) -> Iterator[Explanation]:
    from hone.apps.explain.catalogue import KINDS, methods

    for method in methods():
        if name.lower() in (method.name.lower(), *map(str.lower, method.aliases)):
            lines = [
                method.description.split("\n\n")[0],
                f"Formula: {method.formula}",
                f"Paper: {method.paper}",
                f"Choose it: {method.select}",
                f"All of it: hone algorithms show {method.name}",
            ]
            yield Explanation(f"method, {KINDS[method.kind]}", method.name, "\n".join(lines), method.as_json())


# ----------------------------------------------------------------------------------------------------------- nearest


def _containing(name: str) -> list[Explanation]:
    """Return the entries of glossary, keys and metrics that contain all words of a name."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    if not words:
        return []

    def has_all(text: str) -> bool:
        return all(re.search(rf"\b{re.escape(word)}", text.lower().replace("_", " ")) for word in words)

    terms = [_of_term(term) for term in glossary() if has_all(" ".join(term.names))]
    keys = [
        Explanation(f"key, hone {entry.command}", entry.key.path, entry.key.doc, entry.as_json())
        for entry in key_search.search(name, ["train"])
        if has_all(entry.key.path)
    ]
    metrics = [_of_metric(spec) for spec in METRICS if has_all(spec.name)]
    return [*terms[:_SHOWN], *keys[:_SHOWN], *metrics[:_SHOWN]]


def _nearest(name: str) -> list[str]:
    """Return the names of all sources that are spelled most like a name."""
    names = {known.lower(): known for known in _names()}
    near = difflib.get_close_matches(name.lower(), names, n=_SHOWN // 2, cutoff=_NEAR)
    return [names[known] for known in near]


def _names() -> Iterator[str]:
    from hone.apps.explain.catalogue import methods

    for term in glossary():
        yield from term.names
    for tree in TREES.values():
        for key in documentation(tree):
            yield from (key.path, key.last)
    yield from (spec.name for spec in METRICS)
    yield from (detector.name for detector in DETECTORS)
    yield from error_codes()
    for tree in TREES.values():
        yield from preset_names(PRESET_KINDS[tree])
    for method in methods():
        yield from (method.name, *method.aliases)


def _plain(name: str) -> str:
    """Return a name without case, and with spaces for hyphens and underscores."""
    return re.sub(r"[-_\s]+", " ", name).strip().lower()
