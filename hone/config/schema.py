"""JSON schema of a tree, for completion and checks of configuration files in editors."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any

from hone.config.keys import field_docs

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object"}
_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}  # an interpolation, which is allowed for any value


def json_schema(tree: type) -> dict[str, Any]:
    """Return the schema of a configuration file for the tree (JSON Schema, draft 2020-12)."""
    schema = _block(tree, tree())
    schema["properties"]["defaults"] = {"type": "array", "description": "Files to merge first (Hydra)."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"Hone: {tree.__name__}", **schema}


def _block(cls: type, instance: Any) -> dict[str, Any]:
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    properties = {}
    for item in fields(cls):
        value = getattr(instance, item.name)
        doc = " ".join(docs.get(item.name, "").split())
        inner = (
            _block(type(value), value) if is_dataclass(value) else _leaf(hints[item.name], dict(item.metadata), value)
        )
        properties[item.name] = {"description": doc, **inner}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _leaf(hint: Any, metadata: dict[str, Any], default: Any) -> dict[str, Any]:
    if "texts" in metadata:
        options = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]
    else:
        options = [_option(member, metadata) for member in _members(hint)]
    strings = any(option.get("type") == "string" and "enum" not in option for option in options)
    return {"anyOf": options if strings else [*options, _REFERENCE], "default": default}


def _members(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _option(hint: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    if hint is type(None):
        return {"type": "null"}
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is list:
        options = {"enum": list(metadata["choices"])} if "choices" in metadata else {}
        items = {**_scalar(arguments[0]), **_bounds(metadata), **options} if arguments else {}
        length = metadata.get("length")
        return {"type": "array", "items": items, **({"minItems": length, "maxItems": length} if length else {})}
    if origin is Any:
        return {}
    if "choices" in metadata:
        return {"type": "string", "enum": list(metadata["choices"])}
    if origin is str and "words" in metadata:
        return {"type": "string", "enum": list(metadata["words"])}
    return {**_scalar(origin), **_bounds(metadata)}


def _scalar(kind: Any) -> dict[str, Any]:
    return {"type": _TYPES[kind]} if kind in _TYPES else {}


def _bounds(metadata: dict[str, Any]) -> dict[str, Any]:
    names = {"low": "minimum", "high": "maximum", "above": "exclusiveMinimum"}
    return {word: metadata[name] for name, word in names.items() if metadata.get(name) is not None}
