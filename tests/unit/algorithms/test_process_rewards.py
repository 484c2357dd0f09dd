"""Implicit process rewards: the loss of outcomes against plain Python, and what it learns."""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.messages import raises

from hone.algorithms.process_rewards import implicit_rewards, outcome_loss
from hone.errors import ConfigError

BETA = 0.3


def made(seed: int, rows: int = 6, columns: int = 5):
    draw = random.Random(seed)
    mask = torch.tensor([[float(t < draw.randint(0, columns)) for t in range(columns)] for _ in range(rows)])
    mask[0, 0] = 1.0
    log_probs, reference = (
        torch.tensor([[-draw.expovariate(1.0) for _ in range(columns)] for _ in range(rows)]) for _ in "ab"
    )
    outcomes = torch.tensor([draw.choice([0.0, 1.0, 0.25]) for _ in range(rows)])
    return [x.double() for x in (log_probs, reference, mask, outcomes)]


@pytest.mark.parametrize("seed", range(8))
def test_loss_and_metrics_equal_plain_python(seed: int):
    log_probs, reference, mask, outcomes = made(seed)
    losses, right = [], []
    for p, q, m, y in zip(log_probs.tolist(), reference.tolist(), mask.tolist(), outcomes.tolist(), strict=True):
        if any(m):
            odds = math.fsum(BETA * (a - b) for a, b, keep in zip(p, q, m, strict=True) if keep)
            chance = 1 / (1 + math.exp(-odds))
            losses.append(-y * math.log(chance) - (1 - y) * math.log(1 - chance))
            right.append(float((odds > 0) == (y > 0.5)))
    hidden = torch.where(mask > 0, log_probs, torch.nan).requires_grad_()
    loss, metrics = outcome_loss(hidden, reference, mask, outcomes, beta=BETA)
    loss_value = float(loss.detach())
    assert loss_value == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    assert float(metrics["critic/prm_loss"]) == pytest.approx(loss_value)
    assert float(metrics["critic/prm_accuracy"]) == pytest.approx(sum(right) / len(right))
    loss.backward()
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all() and not hidden.grad[mask == 0].any()
    parts = [outcome_loss(log_probs[rows], reference[rows], mask[rows], outcomes[rows], beta=BETA, global_batch_size=len(losses))[0]
             for rows in (slice(2), slice(2, None))]  # fmt: skip
    assert float(sum(parts)) == pytest.approx(loss_value, rel=1e-9)


def test_learnt_odds_are_those_of_the_outcomes():
    """A token that occurs in right answers three times of four gets log-odds of log 3."""
    token = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([token], max_iter=50)
    outcomes, ones = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.ones(4, 1)

    def closure():
        optimizer.zero_grad()
        loss, _ = outcome_loss(token.expand(4, 1), torch.zeros(4, 1), ones, outcomes, beta=BETA)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert float(implicit_rewards(token, torch.zeros(1), BETA).detach()) == pytest.approx(math.log(3), abs=1e-3)


def test_outcomes_beyond_right_and_wrong_are_refused():
    log_probs, reference, mask, outcomes = made(0)
    with raises(ConfigError, "2", "algorithm.use_kl_in_reward=false", where="algorithm.adv_estimator"):
        outcome_loss(log_probs, reference, mask, outcomes * 2 + 2, beta=BETA)
