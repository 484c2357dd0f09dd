"""Descriptions of keys, looked up by path, last parts, block, older name, or words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hone.config.keys import KeyDoc, blocks, documentation, unknown_key, yaml_value
from hone.config.load import with_whole_block
from hone.config.migration import TABLES, trl_table
from hone.config.migration.entries import described
from hone.config.migration.reading import means_another
from hone.config.trees import TREES

_SHOWN = 8
_STEM = 4
"""Length from which a part of a key matches words that begin with it."""


@dataclass(frozen=True)
class KeyAnswer:
    """A key of one command's tree."""

    command: str
    key: KeyDoc

    def as_json(self) -> dict[str, Any]:
        key = self.key
        return {
            "command": self.command,
            "key": key.path,
            "type": key.type,
            "allowed": key.allowed,
            "default": key.default,
            "doc": key.doc,
            "mentions": self.mentions,
        }

    @property
    def mentions(self) -> list[str]:
        """Related keys: those that its documentation mentions, or whose documentation mentions it."""
        return mentioned(self.key, TREES[self.command])

    def __str__(self) -> str:
        allowed = f"; {self.key.allowed}" if self.key.allowed else ""
        lines = [
            f"{self.key.path}  (hone {self.command})",
            f"    {self.key.doc}",
            f"    Takes {self.key.type}{allowed}. Default: {yaml_value(self.key.default)}",
        ]
        if self.mentions:
            lines.append(f"    See also {', '.join(self.mentions)}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class ForeignAnswer:
    """A name of verl or TRL that the tree does not have, or means otherwise."""

    command: str
    key: str
    words: str
    trainer: str = "verl"

    def as_json(self) -> dict[str, Any]:
        return {"command": self.command, "key": self.key, self.trainer.lower(): self.words}

    def __str__(self) -> str:
        return f"{self.key}  ({self.trainer}; here hone {self.command})\n    {self.words}\n"


Answer = KeyAnswer | ForeignAnswer


def answer(words: str, commands: list[str]) -> list[Answer]:
    """Return the descriptions of a key, a block, or words."""
    if " " in words.strip():
        matches = search(words, commands)
        if matches:
            return [*matches]
        raise unknown_key(words.replace(" ", "_"), TREES[commands[0]])
    name = _name(words)
    if answers := exact(words, commands):
        return answers
    matches = search(name.replace("_", " "), commands) if "." not in name else []
    near = [entry for entry in matches if name in entry.key.path]
    if near:
        return [*near]
    raise unknown_key(name, TREES[commands[0]])


def exact(word: str, commands: list[str]) -> list[Answer]:
    """Return the keys of a block, the keys whose path ends in ``word``, what is a name of TRL, or else a key of verl."""
    name = _name(word)
    keys = [KeyAnswer(command, key) for command in commands for key in documentation(TREES[command])]
    inside = [entry for entry in keys if name in blocks(TREES[entry.command]) and entry.key.path.startswith(f"{name}.")]
    same = [e for e in keys if f".{e.key.path}".endswith(f".{with_whole_block(name, TREES[e.command])}")]
    trl = {command: trl_table(TREES[command]).find(name) for command in commands if means_another(name, TREES[command])}
    named = [ForeignAnswer(command, name, described(entry), "TRL") for command, entry in trl.items()]
    if inside or same or named:
        return [*named, *(inside or same)]
    tables = {command: TABLES[TREES[command]] for command in commands if TREES[command] in TABLES}
    return [ForeignAnswer(command, name, described(t.find(name))) for command, t in tables.items() if t.find(name)]


def _name(word: str) -> str:
    """Return the key of an override: ``+trainer.seed=1`` names ``trainer.seed``."""
    return word.strip().lstrip("+~").partition("=")[0]


def search(words: str, commands: list[str]) -> list[KeyAnswer]:
    """Return the keys whose path or documentation contains all words, matches in the path first."""
    wanted = re.findall(r"[a-z0-9]+", words.lower())
    scored = []
    for command in commands:
        for key in documentation(TREES[command]):
            path, text = re.findall(r"[a-z0-9]+", key.path.lower()), f"{key.path} {key.doc}".lower().replace("_", " ")
            if all(re.search(rf"\b{re.escape(word)}", text) for word in wanted):
                in_last = sum(_among(word, key.last.lower().split("_")) for word in wanted)
                scored.append((-in_last, -sum(word in path for word in wanted), len(scored), KeyAnswer(command, key)))
    return [entry for *_, entry in sorted(scored, key=lambda item: item[:3])][:_SHOWN]


def _among(word: str, parts: list[str]) -> bool:
    """Return whether a word is one of the parts, which may be abbreviated (coef for coefficient)."""
    return any(word == part or (len(part) >= _STEM and word.startswith(part)) for part in parts)


def mentioned(key: KeyDoc, tree: type) -> list[str]:
    """Return the keys that the documentation of ``key`` mentions or that mention it."""
    paths = []
    block = key.path.rpartition(".")[0]
    for other in documentation(tree):
        near = other.path.rpartition(".")[0] == block
        if other.path != key.path and (_names(key.doc, other, near) or _names(other.doc, key, near)):
            paths.append(other.path)
    return paths[:_SHOWN]


def _names(text: str, key: KeyDoc, near: bool) -> bool:
    """Return whether a text mentions a key by the end of its path, or within its block by a last part with underscores."""
    parts = key.path.split(".")
    endings = [".".join(parts[at:]) for at in range(len(parts) - 1)]
    if near and "_" in key.last:
        endings.append(key.last)
    return any(re.search(rf"(?<![\w.]){re.escape(ending)}(?![\w.]*\w)", text) for ending in endings)
