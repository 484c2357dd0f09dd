"""The keys of a config tree: their paths, types, defaults and documentation, read from the dataclasses; and checks of single
values against types and bounds. Preflight checks combinations of keys.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from hone.errors import ConfigError, HoneError, did_you_mean

TYPE_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}


@dataclass(frozen=True)
class KeyDoc:
    """One leaf of the tree: ``path`` is dotted, ``type`` and ``allowed`` are texts to display."""

    path: str
    type: str
    default: Any
    doc: str
    allowed: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    hint: Any = None

    @property
    def last(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def meaning(self) -> str:
        """The first sentence of the documentation."""
        return re.split(r"(?<=[.])\s+(?=[A-Z0-9])|;\s", self.doc, maxsplit=1)[0].rstrip(".;")


@functools.cache
def documentation(cls: type) -> tuple[KeyDoc, ...]:
    return tuple(key for key in _keys(cls(), "") if not dataclasses.is_dataclass(key.default))


@functools.cache
def blocks(cls: type) -> dict[str, str]:
    """Return the inner nodes of the tree ``cls``: dotted path to documentation."""
    inner = [key for key in _keys(cls(), "") if dataclasses.is_dataclass(key.default)]
    return {key.path: " ".join((inspect.getdoc(key.hint) or key.doc).split()) for key in inner}


def leaf_of(path: str, cls: type) -> KeyDoc | None:
    """Return the leaf of the tree ``cls`` at a path, or the mapping or list that the path points into."""
    keys = {key.path: key for key in documentation(cls)}
    if path in keys:
        return keys[path]
    while path := path.rpartition(".")[0]:
        if path in keys:
            return keys[path] if keys[path].type == TYPE_WORDS[dict] or "a list" in keys[path].type else None
    return None


BLOCKS = (
    "trainer.", "data.", "algorithm.", "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.",
    "actor_rollout_ref.model.", "optim.", "model.", "loss.", "reward.",
)  # fmt: skip
"""Blocks in which the end of a key is looked up first, in this order; keys of other models come last."""


def key_named(end: str, cls: type) -> str:
    """Return the key of the tree ``cls`` that ends so, or an empty text.

    Of several keys with that end, the one of the first block in :data:`BLOCKS` is meant, and in it the least nested.

    Raises:
        ConfigError: several are equally near.
    """
    by_distance: dict[tuple[int, int], list[str]] = {}
    for path in (key.path for key in documentation(cls)):
        if f".{path}".endswith(f".{end}"):
            block = next((number for number, start in enumerate(BLOCKS) if path.startswith(start)), len(BLOCKS))
            by_distance.setdefault((0, 0) if path == end else (block + 1, path.count(".")), []).append(path)
    nearest = by_distance[min(by_distance)] if by_distance else [""]
    if len(nearest) > 1:
        raise ConfigError(
            f"{len(nearest)} keys are named '{end}': {', '.join(nearest)}",
            where=end,
            fix=f"{nearest[0]}=... on the command line, config={{'{nearest[0]}': ...}} in Python",
            code="R09",
        )
    return nearest[0]


def leaf_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted path, value)`` of every leaf of a tree instance."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from leaf_values(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value


def _keys(instance: Any, prefix: str) -> Iterator[KeyDoc]:
    """Yield all keys of a tree instance; a block has itself as its default, before the keys in it."""
    docs, hints = field_docs(type(instance)), typing.get_type_hints(type(instance))
    for item in dataclasses.fields(instance):
        path, value, hint = f"{prefix}{item.name}", getattr(instance, item.name), hints[item.name]
        doc, metadata = " ".join(docs.get(item.name, "").split()), dict(item.metadata)
        if dataclasses.is_dataclass(value):
            yield KeyDoc(path, "", value, doc, hint=type(value))
            yield from _keys(value, f"{path}.")
        else:
            yield KeyDoc(path, _type_words(hint, metadata), value, doc, _allowed_words(metadata), metadata, hint)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the attribute docstrings of a dataclass and its bases: field name to the string below the field."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for statement, following in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                docs[statement.target.id] = inspect.cleandoc(following.value.value)
    return docs


def _type_words(hint: Any, metadata: dict[str, Any]) -> str:
    if "texts" in metadata:
        return f"a {metadata['texts']} or a list of {metadata['texts']}s"
    members = members_of(hint)
    words = [_plain_type(member) for member in members if member is not type(None)]
    if "names" in metadata:
        words = [f"the name of {article(metadata['names'])}"]
    if type(None) in members:
        words.append("null")
    return " or ".join(words)


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _plain_type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    member = (typing.get_origin(arguments[0]) or arguments[0]) if arguments else None
    if origin is list and member in TYPE_WORDS:
        return f"a list of {TYPE_WORDS[member].split()[-1]}s"
    return TYPE_WORDS[origin or hint]


def _allowed_words(metadata: dict[str, Any]) -> str:
    if "choices" in metadata:
        return ", ".join(metadata["choices"])
    bounds = (("above", ">"), ("low", ">="), ("high", "<="))
    limits = " and ".join(f"{sign} {metadata[key]:g}" for key, sign in bounds if metadata.get(key) is not None)
    return " or ".join([limits, *metadata.get("words", ())])


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


_NEAR = 0.55
_ALIKE = 0.7  # spelling of a name and that of a block, from which the block is meant
_WORSE = 0.2  # largest difference in score from the best suggestion


def nearest_keys(key: str, cls: type, *, limit: int = 3) -> list[KeyDoc]:
    """Return the leaves of the tree ``cls`` that are most similar to ``key``, best first.

    The score of a key depends on the spelling of its last part, on the words of ``key`` in its documentation
    ("group_size" matches the key documented as "the group size"), and on the whole path.
    """
    scored = sorted((_nearness(key, candidate), candidate.path, candidate) for candidate in documentation(cls))
    bar = max(_NEAR, scored[-1][0] - _WORSE)
    return [candidate for score, _, candidate in scored[::-1] if score >= bar][:limit]


def unknown_key(key: str, cls: type, *, origin: str = "") -> ConfigError:
    """Return the error for a key that the tree ``cls`` does not have; ``origin`` is where it was written."""
    near = nearest_keys(key, cls)
    inside = next((leaf for leaf in documentation(cls) if key.startswith(f"{leaf.path}.")), None)
    siblings = [leaf for leaf in documentation(cls) if leaf.path.rpartition(".")[0] == key.rpartition(".")[0]]
    same_name = any(leaf.last == key.rpartition(".")[2] for leaf in near)
    last = key.rpartition(".")[2]
    alike = [b for b in blocks(cls) if difflib.SequenceMatcher(None, last, b.rpartition(".")[2]).ratio() > _ALIKE]
    block = difflib.get_close_matches(key, alike, n=1, cutoff=0.8)
    if block and not same_name:
        fix = f"Did you mean the block {block[0]}?"
    elif inside:
        fix = f"{inside.path} is a value, not a block: {inside.path}=..."
    elif near:
        width = max(len(candidate.path) for candidate in near)
        fix = "Did you mean\n" + "\n".join(f"    {c.path:<{width}}  {c.meaning}" for c in near)
    elif siblings:
        fix = f"keys of this block: {', '.join(leaf.last for leaf in siblings)}"
    else:
        fix = "`hone config show` prints all keys"
    return ConfigError(
        f"unknown key {key}" + (f" ({origin})" if origin else ""), why="it would have no effect", fix=fix, code="R09"
    )


def _nearness(key: str, candidate: KeyDoc) -> float:
    last = key.rpartition(".")[2]
    spelling = difflib.SequenceMatcher(None, last, candidate.last).ratio()
    whole = difflib.SequenceMatcher(None, key, candidate.path).ratio()
    return 0.75 * max(spelling, 0.9 * _shared_words(last, candidate)) + 0.25 * whole


def _shared_words(last: str, candidate: KeyDoc) -> float:
    wanted = set(re.findall(r"[a-z0-9]{2,}", last.lower()))
    offered = set(re.findall(r"[a-z0-9]+", f"{candidate.path} {candidate.doc}".lower()))
    shared = [word for word in wanted if word in offered or difflib.get_close_matches(word, offered, n=1, cutoff=0.85)]
    return len(shared) / len(wanted) if wanted else 0.0


class ConfigProblems(ConfigError):
    """All mistakes in a configuration; ``problems`` holds the single errors."""

    def __init__(self, problems: Sequence[HoneError]) -> None:
        self.problems = list(problems)
        super().__init__(f"{len(self.problems)} problems", code=self.problems[0].code)

    def render(self) -> str:
        return "\n".join([*(problem.render() for problem in self.problems), f"({len(self.problems)} problems)"])


def raise_together(problems: Sequence[HoneError]) -> None:
    """Raise a single problem, or :class:`ConfigProblems` with several; do nothing without problems."""
    problems = list({problem.render(): problem for problem in problems}.values())  # two rules may meet the same mistake
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigProblems(problems)


Provenance = dict[str, str]
"""Origin of each value: dotted path to "preset grpo", "file DIR/NAME.yaml" or "command line"."""


def check_values(config: Any, provenance: Provenance) -> list[ConfigError]:
    """Return one error for each value that the metadata of its field forbids."""
    keys = {key.path: key for key in documentation(type(config))}
    return [
        problem
        for path, value in leaf_values(config)
        for problem in complaints(keys[path], value, provenance.get(path, ""))
    ]


def complaints(key: KeyDoc, value: Any, origin: str) -> Iterator[ConfigError]:
    """Yield the errors of a value according to the metadata of its key."""
    if value is None:
        return
    metadata, where = key.metadata, functools.partial(place, key.path, value, origin)  # most values have no error
    if "texts" in metadata and not _is_texts(value):
        yield wrong_type(key, value, origin)
    elif "names" in metadata and _is_number(value):
        yield _number_for_name(key, value, where)
    elif "choices" in metadata:
        for item in value if isinstance(value, list) else [value]:
            if item not in metadata["choices"]:
                yield ConfigError(
                    f"'{item}' is not one of {key.allowed}",
                    fix=did_you_mean(str(item), metadata["choices"]),
                    where=where(),
                    code="R11",
                )
    elif isinstance(value, str) and "words" in metadata and value not in metadata["words"]:
        yield ConfigError(
            f"'{value}' is neither a number nor {' or '.join(metadata['words'])}",
            fix=did_you_mean(value, metadata["words"]),
            where=where(),
            code="R11",
        )
    elif "length" in metadata and len(value) != metadata["length"]:
        yield ConfigError(
            f"expects {metadata['length']} numbers, got {len(value)}",
            fix=f"for example {key.path}={yaml_value(key.default)}",
            where=where(),
            code="R11",
        )
    else:
        yield from _bound_complaints(key, value, where)


def place(path: str, value: Any, origin: str) -> str:
    """Return ``path=value (origin)``, the place of an error."""
    return f"{path}={yaml_value(value)}" + (f" ({origin})" if origin else "")


def wrong_type(key: KeyDoc, value: Any, origin: str) -> ConfigError:
    """Return the error for a value of the wrong type; ``origin`` is where it was written."""
    expected = key.type + (f" ({key.allowed})" if key.allowed else "")
    example = "null" if key.default is None else key.default
    return ConfigError(
        f"expects {expected}, got {describe(value)}",
        why=f"this key means: {key.meaning}",
        fix=f"for example {key.path}={yaml_value(example)} (the default)",
        where=place(key.path, value, origin),
        code="R11",
    )


def describe(value: Any) -> str:
    """Return a value with its kind: ``the string 'abc'``, ``the number 0.5``, ``a list``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the truth value {yaml_value(value)}"
    if isinstance(value, int | float):
        return f"the number {value:g}" if isinstance(value, float) else f"the number {value}"
    if isinstance(value, str):
        return f"the string '{value}'"
    return f"a {'mapping' if isinstance(value, dict) else type(value).__name__} ({yaml_value(value)})"


def yaml_value(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(yaml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{yaml_value(item)}" for name, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bound_complaints(key: KeyDoc, value: Any, where: Callable[[], str]) -> Iterator[ConfigError]:
    values = value if isinstance(value, list) else [value]
    bad = [item for item in values if isinstance(item, int | float) and not _within(item, key.metadata)]
    if bad:
        shown = ", ".join(f"{item:g}" for item in bad)
        limits = key.allowed or "a finite number"
        yield ConfigError(
            f"must be {limits}, got {shown}",
            why=f"this key means: {key.meaning}",
            fix=f"{key.path}={yaml_value(key.default)} is the default",
            where=where(),
            code="R11",
        )


def _within(value: float, metadata: dict[str, Any]) -> bool:
    low, high, above = metadata.get("low"), metadata.get("high"), metadata.get("above")
    return (
        math.isfinite(value)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )


def _number_for_name(key: KeyDoc, value: str, where: Callable[[], str]) -> ConfigError:
    wanted, instead = key.metadata["names"], key.metadata["instead"]
    return ConfigError(
        f"expects the name of {article(wanted)}, got the number {value}",
        why=f"this key chooses a method: {key.meaning}",
        fix=f"the number goes to {instead}={value}" if instead else f"{key.path}={key.default}",
        where=where(),
        code="R11",
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
