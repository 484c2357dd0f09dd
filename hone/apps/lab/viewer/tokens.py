"""Tokens of one answer with every number the run kept about them, and the chain from reward to weight in the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hone.apps.lab.viewer.chains import loss_factors
from hone.apps.lab.viewer.images import pictures_by_place
from hone.apps.lab.viewer.run import Archived, ViewedRun, number, numbers, plain
from hone.data.images import IMAGE_MARK, REST_OF_IMAGE, is_image, place_of
from hone.insight.archive.schema import COLUMNS

_NO_ID = -1
"""Id of all tokens of images for the page, whose numbers have 53 bits."""
KEYS = {
    "reward": "reward.*",
    "advantage": "algorithm.adv_estimator",
    "correction": "algorithm.rollout_correction",
    "mask": "algorithm.rollout_correction",
}
"""Config key of each stored factor."""


def token_list(run: ViewedRun, archived: Archived, step: int, uid: str, index: int, part: int) -> dict[str, Any]:
    """Return the tokens of a sequence.

    ``prompt`` (texts of the prompt's tokens), ``texts`` and ``ids`` of the response, ``pictures`` and ``prompt_pictures`` (names of
    images by the place in the texts), ``columns`` (name to one value per token), and ``chain``: factors with ``name``, ``key``,
    ``config`` (value of the key) and ``values``.
    """
    record = archived.record(step, uid, index, part)
    vocabulary = archived.vocabulary()
    ids = record["response_ids"] or []
    shown = [token for token in record["prompt_ids"] or [] if not is_image(token) or place_of(token) == 0]
    columns = {
        column.name: numbers(record[column.name])
        for column in COLUMNS
        if column.by_token and column.name != "response_ids" and record[column.name] is not None
    }
    columns |= _differences(record)
    facts = (
        "step",
        "uid",
        "index",
        "part",
        "fate",
        "score",
        "stop_reason",
        "terms",
        "prompt",
        "text",
        "data_source",
        "row",
    )
    return {
        **{name: plain(record[name]) for name in facts},
        "prompt_texts": token_texts(shown, vocabulary),
        "prompt_pictures": pictures_by_place(shown),
        "pictures": pictures_by_place(ids),
        "texts": token_texts(ids, vocabulary) if ids else [record["text"]],
        "ids": [max(token, _NO_ID) for token in ids],
        "columns": columns,
        "chain": _with_settings(stored_factors(record), run.read().config),
    }


def token_texts(ids: Sequence[int], vocabulary: Sequence[str] | None) -> list[str]:
    """Return the text of each token; of an image's tokens, the first one has the mark of an image."""
    texts = vocabulary or ()
    return [
        (REST_OF_IMAGE if place_of(token) else IMAGE_MARK)
        if is_image(token)
        else texts[token]
        if token < len(texts)
        else f"⟨{token}⟩"
        for token in ids
    ]


def _differences(record: Mapping[str, Any]) -> dict[str, list[Any]]:
    pairs = {
        "log_ratio": ("new_log_probs", "old_log_probs"),
        "engine_gap": ("old_log_probs", "rollout_log_probs"),
        "reference_gap": ("old_log_probs", "ref_log_probs"),
    }
    mask = record["response_mask"] or []
    return {
        name: [
            number(left - right) if chosen and left is not None and right is not None else None
            for left, right, chosen in zip(record[first], record[second], mask, strict=False)
        ]
        for name, (first, second) in pairs.items()
        if record[first] is not None and record[second] is not None
    }


def factor_list(run: ViewedRun, archived: Archived, step: int, uid: str, index: int, part: int) -> list[dict[str, Any]]:
    """Return the factors that the loss computes, after those of :func:`token_list`: ratio, clip, normaliser, KL loss, share."""
    return _with_settings(loss_factors(run.path, archived.record(step, uid, index, part)), run.read().config)


def stored_factors(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the factors that the run stored, from the reward on, each with its config key."""
    ids, mask = record["response_ids"] or [], record["response_mask"] or []
    factors: list[tuple[str, Any]] = [
        ("reward", record["token_rewards"] or [record["score"]] * len(ids)),
        ("advantage", record["advantages"]),
        ("correction", record["correction"]),
        ("mask", record["loss_mask"] or mask),
    ]
    return [{"name": name, "key": KEYS[name], "values": values} for name, values in factors if values is not None]


def _with_settings(factors: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {**factor, "config": plain(config.get(factor["key"])), "values": numbers(factor["values"])}
        for factor in factors
    ]
