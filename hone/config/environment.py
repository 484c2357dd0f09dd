"""Values from environment variables: they stay interpolations (``${oc.env:NAME}``) in everything that is written.

A loaded configuration has the values themselves. :func:`written_tree` returns it as it is written: each value that comes from the
environment, also through another key, is the text that it was configured with. A run that loads the file resolves it again.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hone.config.keys import leaf_values
from hone.errors import ConfigError

Path = tuple[str | int, ...]

_OPENING = re.compile(r"(?<!\\)\$\{")
_VARIABLE = re.compile(r"(?<!\\)\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)")
_PLAIN_REFERENCE = re.compile(r"(?<!\\)\$\{\s*(\.*[\w.]*)\s*\}")


def environment_values(raw: dict[Any, Any], config: Any) -> dict[Path, tuple[str, Any]]:
    """Return the text and the value of every entry that comes from the environment. ``raw``: composed tree as plain
    values, with its interpolations.
    """
    texts = {path: text for path, text in _texts(raw, ()) if _from_environment(raw, path, text)}
    resolved = dataclasses.asdict(config) if texts else {}
    return {path: (text, _at(resolved, path)) for path, text in texts.items()}


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested mapping with dotted keys; lists are leaves."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, tree


def written_tree(config: Any) -> dict[str, Any]:
    """Return a tree as plain values, with interpolations for values from the environment."""
    tree = dataclasses.asdict(config)
    for path, (text, value) in _kept(config).items():
        parent = _at(tree, path[:-1])
        if parent[path[-1]] == value:  # not changed after the tree was loaded
            parent[path[-1]] = text
    return tree


def written_leaves(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted path, value)`` of every leaf, with interpolations for values from the environment."""
    tree = written_tree(config)
    for path, _ in leaf_values(config):
        yield path, _at(tree, tuple(path.split(".")))


def environment_keys(config: Any) -> set[str]:
    """Return the dotted paths of the leaves whose values come from the environment, in full or in part."""
    return {
        path
        for path, _ in leaf_values(config)
        if any(kept[: path.count(".") + 1] == tuple(path.split(".")) for kept in _kept(config))
    }


def environment_variables(config: Any) -> dict[str, str]:
    names = {name for text, _ in _kept(config).values() for name in _VARIABLE.findall(text)}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def written_value(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of a configuration that was written, with interpolations resolved; None without the key.

    Raises ConfigError: an environment variable is not set.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(OmegaConf.create(dict(tree)), key)
    except OmegaConfBaseException as error:
        raise unresolved(error, key) from error


def unresolved(error: Exception, key: str) -> ConfigError:
    """Return the error about an interpolation that cannot be resolved."""
    text = str(error).splitlines()[0]
    variable = re.search(r"[Ee]nvironment variable '(\w+)'", text)
    fix = "use the full path of the other key: ${data.max_prompt_length}"
    if variable:
        fix = f"export {variable[1]}=..., or give a default: ${{oc.env:{variable[1]},DEFAULT}}"
    return ConfigError(text, where=key, fix=fix)


def _kept(config: Any) -> dict[Path, tuple[str, Any]]:
    return getattr(config, "_environment", {})


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield every text with an interpolation."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _texts(entry, (*path, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _texts(entry, (*path, index))
    elif isinstance(value, str) and _OPENING.search(value):
        yield path, value


def _from_environment(raw: dict[Any, Any], path: Path, text: str, visited: frozenset[Path] = frozenset()) -> bool:
    """Return whether a text depends on the environment.

    Resolvers other than plain references to keys count as such: what they read is not known.
    """
    references = _PLAIN_REFERENCE.findall(text)
    if len(references) < len(_OPENING.findall(text)):
        return True
    if path in visited:
        return False
    targets = [_target(path, reference) for reference in references]
    return any(
        _from_environment(raw, where, inner, visited | {path})
        for target in targets
        for where, inner in _texts(_at(raw, target), target)
    )


def _target(path: Path, reference: str) -> Path:
    """Return the path that a reference means: absolute, or relative with leading dots."""
    dots = len(reference) - len(reference.lstrip("."))
    parts = tuple(part for part in reference.lstrip(".").split(".") if part)
    return (*path[: len(path) - dots], *parts) if dots else parts


def _at(tree: Any, path: Path) -> Any:
    for part in path:
        try:
            tree = tree[part] if isinstance(tree, dict) else tree[int(part)]
        except (KeyError, IndexError, ValueError, TypeError):  # a reference to a key without a value
            return None
    return tree
