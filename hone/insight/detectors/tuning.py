"""Order in which to change settings of an unstable policy: batches, clip and KL, learning rate and warm-up, loss mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.insight.detectors.base import Cause, Settings

ACTOR = "actor_rollout_ref.actor"


def setting(settings: Settings, key: str, default: Any = None) -> Any:
    """Return the value of a key, the default where the run has no such key or null."""
    value = settings.get(key)
    return default if value is None else value


def trains_policy(settings: Settings) -> bool:
    """Return whether the run is one of RL, with the keys of a policy; other programs have ``optim.lr``."""
    return "optim.lr" not in settings


def learning_rate_key(settings: Settings) -> str:
    """Return the key of the learning rate: that of the policy in RL, else of the model."""
    return f"{ACTOR}.optim.lr" if trains_policy(settings) else "optim.lr"


def slower(settings: Settings, factor: float = 2.0) -> str:
    """Return the change that lowers the learning rate by a factor, with a warm-up if the run has none."""
    key = learning_rate_key(settings)
    change = f"{key}={setting(settings, key, 1e-6) / factor:.3g}"
    warm_up, ratio = f"{key}_warmup_steps", f"{key}_warmup_steps_ratio"
    none = setting(settings, warm_up, -1) <= 0 and setting(settings, ratio, 0.0) == 0
    return f"{change} {warm_up}=10" if none else change


def tuning(settings: Settings, seen: str) -> Iterator[Cause]:
    """Yield changes that make updates smaller, in the order in which to try them; without a policy the learning rate
    only. ``seen``: what was measured, as evidence of the first change.
    """
    key = learning_rate_key(settings)
    rate = Cause(f"the learning rate is {setting(settings, key, 1e-6):.3g}; {seen}", slower(settings))
    if not trains_policy(settings):
        yield rate
        return
    epochs = setting(settings, f"{ACTOR}.ppo_epochs", 1)
    batch, mini = setting(settings, "data.train_batch_size", 0), setting(settings, f"{ACTOR}.ppo_mini_batch_size", 0)
    updates = epochs * max(1, -(-batch // mini)) if mini else epochs
    if updates > 1:
        one = " ".join(
            [
                *([f"{ACTOR}.ppo_epochs=1"] if epochs > 1 else []),
                *([f"{ACTOR}.ppo_mini_batch_size={batch}"] if mini < batch else []),
            ]
        )
        yield Cause(f"a batch is used for {updates} updates; {seen}", one)
    clip = setting(settings, f"{ACTOR}.clip_ratio_high", setting(settings, f"{ACTOR}.clip_ratio", 0.2))
    if clip > 0.2:  # 0.2 is the default of PPO (arXiv 1707.06347)
        yield Cause(f"the upper clip is {clip:g}", f"{ACTOR}.clip_ratio_high=0.2")
    if not (settings.get(f"{ACTOR}.use_kl_loss") or settings.get("algorithm.use_kl_in_reward")):
        yield Cause("no KL penalty holds the policy near its reference", f"{ACTOR}.use_kl_loss=true")
    yield rate
    if setting(settings, f"{ACTOR}.policy_loss.loss_mode", "vanilla") == "vanilla":
        yield Cause("ratios are clipped by token (loss mode vanilla)", f"{ACTOR}.policy_loss.loss_mode=gspo")
