"""Tokens of one answer with every number the run kept about them, and the chain from reward to weight in the update."""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.apps.lab.viewer.episodes import pictures_by_place
from hone.apps.lab.viewer.run import Archived, ViewedRun, number, numbers, plain
from hone.data.images import IMAGE_MARK, REST_OF_IMAGE, is_image, place_of
from hone.errors import HoneError
from hone.insight.archive.schema import COLUMNS

log = logging.getLogger("hone.view")
_ACTOR = "actor_rollout_ref.actor"
CHAIN_KEYS = {
    "clip": f"{_ACTOR}.policy_loss.loss_mode",
    "ratio": f"{_ACTOR}.ppo_epochs",
    "normaliser": f"{_ACTOR}.loss_agg_mode",
    "KL loss": f"{_ACTOR}.kl_loss_coef",
    "share": f"{_ACTOR}.ppo_mini_batch_size",
}
"""Config key of each factor that the loss computes."""
WHY = {
    "mask": "the token is not learned from: the policy did not sample it, or the correction rejects it",
    "advantage": "its advantage is 0: the answers of the group have equal rewards, or the baseline is the reward",
    "correction": "the weight of the rollout correction is 0",
    "clip": "the loss clips it: the ratio has left the bounds on the side that the advantage pushes to",
}
"""Reason for a share of 0, by the first factor that is 0."""


_imports = threading.Thread(target=importlib.import_module, args=("hone.apps.lab.replay.what_if",), daemon=True)
_starting = threading.Lock()


def prepare() -> threading.Thread:
    """Import in the background, once, what the factors need: the first answer would otherwise wait for it.

    Who imports modules of training joins this thread first: two threads that import transformers at once see it half imported.
    """
    with _starting:
        if _imports.ident is None:
            _imports.start()
    return _imports


def loss_factors(run: Path, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the factors that the loss computes, for each token of a sequence of the archive.

    ``name``, ``key``, ``values`` and, for ``share``, ``why`` of each; empty where the step is not stored whole, or its loss is
    not a sum over tokens.
    """
    file = run / "rollouts" / f"step_{record['step']}.parquet"
    try:
        factors = _step_factors(run, int(record["step"]), file.stat().st_mtime_ns)
    except (HoneError, OSError) as error:
        if isinstance(error, HoneError) and error.code == "E-trust":
            log.warning("the factors of the loss are left out: %s", error)
        return []
    mine = factors.get((record["uid"], record["index"], record["part"]))
    if mine is None:
        return []
    share = mine["share"]
    reasons = [None if value else _why(record, mine, token) for token, value in enumerate(share)]
    return [
        {"name": name, "key": CHAIN_KEYS[name], "values": values, **({"why": reasons} if name == "share" else {})}
        for name, values in mine.items()
    ]


def _why(record: Mapping[str, Any], factors: Mapping[str, list[float]], token: int) -> str | None:
    """Return the reason for a share of 0."""
    stored = {"mask": record["loss_mask"], "advantage": record["advantages"], "correction": record["correction"]}
    for name, values in {**stored, "clip": factors["clip"]}.items():
        if values is not None and not values[token]:
            return WHY[name]
    return None


@functools.lru_cache(maxsize=4)
def _step_factors(run: Path, step: int, modified: int) -> dict[tuple[str, int, int], dict[str, list[float]]]:
    """Return the factors of every sequence of a step; ``modified`` names the version of its file."""
    prepare().join()
    from hone.apps.lab.replay.stored import load_step
    from hone.apps.lab.replay.what_if import token_gradients
    from hone.trainers.algorithm import learnt_tokens

    stored = load_step(run, step)
    config = stored.config
    if config.algorithm.use_pf_ppo or config.actor_rollout_ref.actor.preference_loss.loss_mode is not None:
        return {}
    view = learnt_tokens(stored.batch)
    if "old_log_probs" not in view or "advantages" not in view:
        return {}
    new = view.ragged("new_log_probs") if "new_log_probs" in view else None
    chain = token_gradients(view, config, step, new)
    columns = {"ratio": chain.ratio, "clip": chain.passes, "normaliser": chain.normaliser}
    if config.actor_rollout_ref.actor.use_kl_loss:
        columns["KL loss"] = chain.kl
    columns["share"] = chain.share
    names = zip(view.uids, view.objects("index"), view.tensor("part").tolist(), strict=True)
    return {
        name: {factor: column.row(row).tolist() for factor, column in columns.items()} for row, name in enumerate(names)
    }


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
