"""The ``config.json`` of a model directory, checked before transformers builds anything of its size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from hone.errors import ModelError

_MOST_BYTES = 4 * 2**20
_MOST_SHOWN = 300
_WIDTHS = ["d_model", "d_ff", "ffn_dim", "n_inner", "intermediate_size", "moe_intermediate_size"]
_HEADS = ["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "n_embd", "n_head"]
_EXPERTS = ["num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"]
_BOUNDS = {
    **dict.fromkeys(_HEADS, (1, 10**7)),
    **dict.fromkeys(_WIDTHS, (0, 10**7)),
    **dict.fromkeys(_EXPERTS, (0, 10**6)),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer"], (0, 4096)),
    **dict.fromkeys(["max_position_embeddings", "n_positions"], (-1, 10**12)),
    "vocab_size": (0, 10**8),
    "num_labels": (0, 10**5),
}
"""Least and greatest size under a key; a list has one a layer, null is the family's own."""
DEQUANTISED = ("fp8", "mxfp4")
"""Values of ``quant_method`` whose weights are converted to float32 as they are read: blocks of 8 bits (DeepSeek), and of 4 (GPT-OSS)."""
_PARTS = ("text_config", "vision_config", "audio_config", "quantization_config")


def read_settings(path: str | Path | None) -> dict[str, Any]:
    """Return the content of the ``config.json`` of a model directory; empty without one.

    Raises ModelError: it is too large or not a JSON object, or :func:`check_settings` refuses it.
    """
    file = Path(path or "") / "config.json"
    if not file.is_file():
        return {}
    try:
        with file.open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise _refused(file, f"has more than {_MOST_BYTES >> 20} MiB")
        settings = json.loads(text, object_hook=_float_of)
    except (OSError, ValueError, RecursionError) as error:  # also too many digits, or nested too deeply
        raise _refused(file, f"is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise _refused(file, f"holds {_shown(settings)}, not an object with the model's sizes")
    check_settings(settings, file)
    return settings


def _float_of(entry: dict[str, Any]) -> Any:
    """Return the number that Transformers writes as an object, such as ``{"__float__": "Infinity"}``; other objects unchanged."""
    return float(str(entry["__float__"])) if entry.keys() == {"__float__"} else entry


def check_settings(settings: Mapping[str, Any], file: str | Path) -> None:
    """Check the sizes of a model and of its parts.

    Raises ModelError: one is not a whole number within bounds, key-value heads do not divide heads, or a part is not an object.
    """
    for place, part in _parts(settings, file):
        for key, bounds in _BOUNDS.items():
            least = 0 if key == "head_dim" and "qk_rope_head_dim" in part else bounds[0]  # latent attention has its own
            for value in _values(part.get(key)):
                if not _whole(value) or not least <= value <= bounds[1]:
                    allowed = f"not a whole number from {least} to {bounds[1]}"
                    raise _refused(file, f"has {place}{key}={_shown(value)}, {allowed}")
        heads, shared, width = (part.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        if _whole(heads) and _whole(shared) and heads % shared:
            raise _refused(
                file, f"has {place}num_key_value_heads={shared}, which does not divide num_attention_heads={heads}"
            )
        if _whole(width) and width % 2 and ("rope_theta" in part or "rope_parameters" in part):
            raise _refused(file, f"has {place}head_dim={width}, but rotary positions turn pairs of numbers")


def dequantised_by(settings: Mapping[str, Any], path: str | Path) -> str | None:
    """Return which of :data:`DEQUANTISED` the weights of a model directory are in; None for plain ones.

    Raises ModelError: they are quantised in another way.
    """
    quantisation = settings.get("quantization_config")
    if quantisation is None:
        return None
    method = quantisation.get("quant_method")
    if method in DEQUANTISED:
        return method
    bits = quantisation.get("bits") or next((n for n in (4, 8) if quantisation.get(f"load_in_{n}bit")), None)
    card = Path(path) / "README.md"
    named = (
        re.search(r"^base_model:\s*(?:- )?([\w.-]+/[\w.-]+)", card.read_text("utf-8", "replace"), re.M)
        if card.is_file()
        else None
    )
    base = named[1] if named else settings.get("_name_or_path", "")
    raise ModelError(
        f"the weights in '{path}' are quantised by {method or 'an unnamed method'}"
        + (f" in {bits} bits" if bits else ""),
        why="training and Hone's own engine need the values themselves; of quantised weights only "
        f"{' and '.join(DEQUANTISED)} are converted to them",
        where="model.path",
        fix="the directory or name of the unquantised model" + (f": {base}" if base else ""),
    )


def decoder_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with those of ``text_config`` of a multimodal model merged in."""
    text = settings.get("text_config")
    text = text if isinstance(text, dict) else {}
    return {**text, **settings}


def reason_of(error: Exception) -> str:
    """Return the error that transformers raised on one line: its kind where the text alone says nothing."""
    text = " ".join(str(error).split())[:_MOST_SHOWN]
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__} {text}".strip()


def _parts(settings: Mapping[str, Any], file: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the settings and all objects under a key ``*_config``, with the path to their keys."""
    left: list[tuple[str, Mapping[str, Any]]] = [("", settings)]
    while left:
        place, part = left.pop()
        kind = part.get("model_type")
        if kind is not None and not isinstance(kind, str):
            raise _refused(file, f"has {place}model_type={_shown(kind)}, not the name of an architecture")
        for key, value in part.items():
            if key in _PARTS and value is not None and not isinstance(value, dict):
                raise _refused(file, f"has {place}{key}={_shown(value)}, not an object")
            if isinstance(value, dict) and key.endswith("_config"):
                left.append((f"{place}{key}.", value))
        yield place, part


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        yield from (entry for entry in value if entry is not None)
    elif value is not None and not isinstance(value, dict):
        yield value


def _whole(value: Any) -> TypeGuard[int | float]:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _refused(file: str | Path, what: str) -> ModelError:
    return ModelError(
        f"'{file}' {what}",
        why="the model's sizes decide what is allocated and computed",
        where="model.path",
        fix="restore config.json from where the model was published",
    )
