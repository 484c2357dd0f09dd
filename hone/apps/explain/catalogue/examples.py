"""Numbers on the pages: every method applied to the same small cases.

Estimators get the batch of four: one prompt, four answers, the first one right. Policy losses get twelve tokens: six
ratios, each with an advantage of +1 and of -1. KL estimators get a few log-ratios, aggregations two responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.apps.explain.catalogue.methods import Method

Table = list[list[str]]
"""Rows of cells; the first row is the heading."""

SCORES = (1.0, 0.0, 0.0, 0.0)
LENGTHS = (2, 4, 3, 3)
RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5, 4.0)
OLD_PROBABILITY = 0.2
LOG_RATIOS = (-2.0, -0.5, 0.0, 0.5, 2.0)
MARGINS = (-10.0, -2.0, 0.0, 2.0, 10.0)


def batch_of_four() -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return rewards and mask ``[4, 4]`` of four answers to one prompt, and every input that an estimator may need.

    The first answer is right. Its reward of 1 is on its last token; the answers have 2, 4, 3 and 3 tokens. The critic
    expects 0.25 at first, and 0.5 at the second token of the right answer.
    """
    lengths = torch.tensor(LENGTHS)
    mask = (torch.arange(4) < lengths[:, None]).float()
    rewards = torch.zeros(4, 4)
    rewards[torch.arange(4), lengths - 1] = torch.tensor(SCORES)
    values = torch.full((4, 4), 0.25) * mask
    values[0, 1] = 0.5
    inputs: dict[str, Any] = {
        "group_ids": ["prompt"] * 4,
        "values": values,
        "reward_baselines": torch.zeros(4),
        "old_log_probs": torch.full((4, 4), math.log(0.5)),
        "sum_pi_squared": torch.full((4, 4), 0.5),
        "reward_components": {"right": torch.tensor(SCORES), "format": torch.tensor([1.0, 1.0, 0.0, 1.0])},
        "turn_ids": (torch.arange(4) >= 2).long().expand(4, 4),
        "turn_group_ids": [["first", "first", "second", "second"] for _ in range(4)],
        "turn_values": [{}, {1: 0.5}, {1: 0.0}, {}],
        "turn_baselines": [[("first", 0.25), ("second", -0.25)] for _ in range(4)],
    }
    return rewards, mask, inputs


def example(method: Method) -> tuple[str, Table] | None:
    """Return a caption and a table of numbers for ``method``; None if it has no example."""
    tables = {
        "estimator": _estimator,
        "loss": _policy_loss,
        "kl": _kl,
        "aggregation": _aggregation,
        "preference": _preference,
    }
    return tables[method.kind](method) if method.kind in tables else None


def _estimator(method: Method) -> tuple[str, Table]:
    rewards, mask, inputs = batch_of_four()
    advantages, _ = method.entry(rewards, mask, **inputs)
    rows = [["answer", "score", "advantages of its tokens"]]
    for number, (score, row, length) in enumerate(zip(SCORES, advantages, LENGTHS, strict=True), 1):
        rows.append([str(number), f"{score:g}", ", ".join(number_text(value) for value in row[:length])])
    return "Four answers to one prompt, of 2, 4, 3 and 3 tokens; the first one is right:", rows


def _policy_loss(method: Method) -> tuple[str, Table]:
    push = token_push(method.entry, RATIOS * 2, [1.0] * len(RATIOS) + [-1.0] * len(RATIOS))
    rows = [["ratio to the old policy", "push, A = +1", "push, A = -1"]]
    for i, ratio in enumerate(RATIOS):
        rows.append([f"{ratio:g}", number_text(push[i]), number_text(push[i + len(RATIOS)])])
    caption = (
        f"Twelve responses of one token, each sampled with probability {OLD_PROBABILITY:g}. The push is the effect of a gradient "
        "step on the log-probability of the token: minus the derivative of the loss of its response. A push of 1 at "
        "ratio 1 is the plain policy gradient; 0 means that the token has no gradient:"
    )
    return caption, rows


def token_push(loss: Any, ratios: Sequence[float], advantages: Sequence[float]) -> Tensor:
    """Return minus the derivative of the loss, with its defaults, in the log-prob of each of B responses of one token, ``[B]``.

    The old policy has probability 0.2 everywhere; ``ratios`` are the policy's over it.
    """
    old = torch.full((len(ratios), 1), math.log(OLD_PROBABILITY), dtype=torch.float64)
    new = (old + torch.tensor(ratios, dtype=torch.float64).log()[:, None]).requires_grad_()
    advantage, mask = torch.tensor(advantages, dtype=torch.float64)[:, None], torch.ones(len(ratios), 1)
    torch.manual_seed(0)
    total, _ = loss(old, new, advantage, mask, loss_agg_mode="seq-mean-token-mean", **_loss_options(loss))
    (gradient,) = torch.autograd.grad(total, new)
    return -len(ratios) * gradient[:, 0]


def _loss_options(loss: Any) -> dict[str, float]:
    return {"dro_beta": 0.5} if "dro_beta" in loss.options else {}


def _kl(method: Method) -> tuple[str, Table]:
    gap = torch.tensor(LOG_RATIOS, dtype=torch.float64, requires_grad=True)
    value = method.entry(gap, torch.zeros_like(gap))
    (gradient,) = torch.autograd.grad(value.sum(), gap)
    straight = method.entry.func(gap, torch.zeros_like(gap), f"{method.name}+")
    (plus,) = torch.autograd.grad(straight.sum(), gap)
    rows = [["log p - log p_ref", "value", "derivative", "derivative with +"]]
    columns = zip(LOG_RATIOS, value, gradient, plus, strict=True)
    rows += [[f"{d:g}", number_text(v), number_text(g), number_text(p)] for d, v, g, p in columns]
    return "At five log-ratios of a sampled token:", rows


def _aggregation(method: Method) -> tuple[str, Table]:
    lengths = torch.tensor([1, 3])
    mask = (torch.arange(3) < lengths[:, None]).double()
    loss = torch.tensor([[4.0, 0, 0], [1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    options = {"loss_scale_factor": 3.0} if method.name == "seq-mean-token-sum-norm" else {}
    total = method.entry(loss, mask, **options)
    (weight,) = torch.autograd.grad(total, loss)
    rows = [["response", "loss of its tokens", "weight of each token"]]
    rows += [["1", "4", number_text(weight[0, 0])], ["2", "1, 1, 1", number_text(weight[1, 0])]]
    scale = ", with loss_scale_factor=3" if options else ""
    return f"Two responses, of one and of three tokens{scale}; together {number_text(total)}:", rows


def _preference(method: Method) -> tuple[str, Table]:
    rows = [["margin h", "loss", "push on the chosen one", "push on the rejected one"]]
    for margin in MARGINS:
        reference = torch.full((2, 10), -2.0, dtype=torch.float64)
        shift = torch.tensor([[margin / 20], [-margin / 20]], dtype=torch.float64)
        log_probs = (reference + shift).requires_grad_()
        mask, labels = torch.ones(2, 10), torch.tensor([True, False])
        loss, _ = method.entry(log_probs, mask, labels, ref_log_probs=reference, kl=0.0)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        push = -gradient[:, 0] * method.entry.counts(mask, labels)["units"]
        rows.append([f"{margin:g}", *(number_text(value) for value in (loss, push[0], push[1]))])
    caption = (
        "Two responses of ten tokens, each with log-prob -2 per token under the reference; the policy gives the chosen one h/2 "
        "nats more and the rejected one h/2 nats less. The push is minus the derivative in the log-prob of a response:"
    )
    return caption, rows


def number_text(value: Any) -> str:
    """Format with at most three decimals and without a minus zero."""
    text = f"{float(value.detach() if isinstance(value, Tensor) else value):.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
