"""Losses of a training service, by the names of its protocol. Each is a sum over tokens, so gradients of several calls add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.errors import RequestError, did_you_mean

Inputs = Mapping[str, Tensor]
"""Inputs of the tokens ``[N]``, by name."""


@dataclass(frozen=True)
class Loss:
    """A loss."""

    needs: tuple[str, ...]  # inputs without which it cannot be computed; ``weights`` is optional everywhere else
    settings: Mapping[str, float]  # keys of ``loss_fn_config`` with their defaults
    # (log-probs ``[N]``, inputs, settings) to the loss of each token, ``[N]``
    compute: Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]


def _ratio(log_probs: Tensor, inputs: Inputs) -> Tensor:
    return (log_probs - inputs["logprobs"]).exp()


def _cross_entropy(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    return -log_probs


def _importance_sampling(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    return -_ratio(log_probs, inputs) * inputs["advantages"]


def _ppo(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    ratio, advantages = _ratio(log_probs, inputs), inputs["advantages"]
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _cispo(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    ratio = _ratio(log_probs, inputs).clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -ratio.detach() * log_probs * inputs["advantages"]


def _dro(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    distance = log_probs - inputs["logprobs"]
    return -(log_probs * inputs["advantages"] - 0.5 * settings["beta"] * distance**2)


_POLICY = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss((), {}, _cross_entropy),
    "importance_sampling": Loss(_POLICY, {}, _importance_sampling),
    "ppo": Loss(_POLICY, _CLIP, _ppo),
    "cispo": Loss(_POLICY, _CLIP, _cispo),
    "dro": Loss(_POLICY, {"beta": 0.05}, _dro),
}
"""Losses by name: cross-entropy; importance sampling, PPO's clip, CISPO and DRO over sampled tokens with advantages."""


def loss_named(name: str, settings: Mapping[str, float]) -> tuple[Loss, dict[str, float]]:
    """Return a loss and its settings, those that are not given by default."""
    if name not in LOSSES:
        raise RequestError(f"there is no loss '{name}'", fix=did_you_mean(name, LOSSES), field="loss_fn")
    loss = LOSSES[name]
    unknown = sorted(set(settings) - set(loss.settings))
    if unknown:
        raise RequestError(
            f"loss '{name}' has no setting '{unknown[0]}'",
            fix=f"its settings: {', '.join(loss.settings) or 'none'}",
            field="loss_fn_config",
        )
    return loss, {**loss.settings, **settings}
