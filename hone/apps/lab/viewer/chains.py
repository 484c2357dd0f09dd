"""Chain of every token of a stored step: from its reward to its share of the gradient, each factor with its key."""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.errors import HoneError

log = logging.getLogger("hone.view")
_ACTOR = "actor_rollout_ref.actor"
KEYS = {
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


@functools.cache
def prepare() -> threading.Thread:
    """Import in the background, once, what the factors need: the first answer would otherwise wait for it."""
    thread = threading.Thread(
        target=importlib.import_module, args=("hone.apps.lab.replay.token_gradients",), daemon=True
    )
    thread.start()
    return thread


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
        {"name": name, "key": KEYS[name], "values": values, **({"why": reasons} if name == "share" else {})}
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
    prepare().join()  # two threads that import transformers at once see it half imported
    from hone.apps.lab.replay.stored import load_step
    from hone.apps.lab.replay.token_gradients import token_gradients
    from hone.trainers.update_view import learnt_tokens

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
