"""The trained balance loss of experts: its value by hand, no effect of micro-batches, its part in the loss, and loads that even out.

`tests/integration/test_train_backends.py` compares updates with a computation of one sequence after the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import tiny_model
from support.messages import raises
from support.models import random_batch
from support.models import tiny_model as dense_model

from hone.config.actor import ActorConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.derived import correction_settings
from hone.config.model import OptimConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import ModelError
from hone.models.experts import balance_losses
from hone.models.heads import PolicyHead
from hone.models.routing import use_hone_attention
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import DIVISORS, PartialLoss, PolicyObjective

COEF = 0.5


def engine_of(model: Any, **settings: Any) -> LocalBackend:
    use_hone_attention(model)
    optim = OptimConfig(lr=1e-2)
    return LocalBackend(
        model, PolicyHead(), TrainSettings(torch.device("cpu"), optim=optim, total_steps=20, **settings)
    )


def objective_of(coef: float, mode: str = "token-mean") -> PolicyObjective:
    actor = ActorConfig(router_aux_loss_coef=coef, loss_agg_mode=mode)
    return PolicyObjective(actor, correction_settings(RolloutCorrectionConfig()), max_response_length=16)


def mean(statistics: list[Any], name: str) -> float:
    """A metric of an update, of the statistics of its micro-batches."""
    pairs = [one[name] for one in statistics if name in one]
    return float(sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs))


def without_advantages(batch: Batch) -> Batch:
    """The rows with a policy loss that has no gradient."""
    advantages = batch.ragged("advantages")
    return batch.with_columns(advantages=advantages.with_values(torch.zeros_like(advantages.values)))


def test_it_is_1_for_an_even_load_and_n_over_k_for_the_worst() -> None:
    mask = Ragged.from_rows([[1.0, 1.0, 0.0], [0.0, 1.0]])
    one = torch.tensor([[0, 1], [2, 3], [0, 1], [0, 1], [0, 1]])[:, None]
    even = torch.full((5, 1, 4), 0.25, requires_grad=True)
    losses = balance_losses(even, one, mask)
    assert losses[:2].mean().item() == pytest.approx(1.0)  # the token with mask 0 is not counted
    worst = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(5, 1, 4)
    assert balance_losses(worst, one[[0, 2, 3, 3, 4]], mask).tolist() == pytest.approx([2.0] * 5)
    (gradient,) = torch.autograd.grad(losses[:2].mean(), even)
    assert gradient[0, 0].tolist() == pytest.approx([0.5] * 4) and not gradient[2:].any()
    assert balance_losses(even, one, Ragged.from_rows([[0.0] * 3, [0.0] * 2])).tolist() == [0.0] * 5


def test_micro_batches_change_nothing_and_the_loss_contains_it() -> None:
    batch, found = random_batch(10, seed=3), []
    for budget in (10**6, 30):
        engine = engine_of(tiny_model("qwen3_moe"), max_tokens=budget, balances_experts=True)
        engine.begin_update()
        statistics = engine._loop.accumulate_gradients(batch, engine.head, objective_of(COEF))
        gradient = torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])
        policy, balance = mean(statistics, "actor/pg_loss"), mean(statistics, "actor/balance_loss")
        assert mean(statistics, "actor/loss") == pytest.approx(policy + COEF * balance, rel=1e-5)
        found.append((gradient, balance, len(statistics)))
    (whole, value, _), (split, other, parts) = found
    assert parts > 2 and other == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-4)


def test_parts_of_an_update_add_up_with_an_aggregation_by_sequences() -> None:
    """As in a streamed update, of parts with other numbers of sequences and tokens."""
    batch = random_batch(7, seed=6)
    gradients = []
    for parts in ([range(7)], [range(2), range(2, 7)]):
        engine = engine_of(tiny_model("qwen3_moe"), balances_experts=True)
        loss = PartialLoss(objective_of(COEF, "seq-mean-token-mean"), DIVISORS["seq-mean-token-mean"])
        engine.begin_update()
        for rows in parts:
            engine.accumulate(batch.reorder(list(rows)), loss)
        found = [p.grad.flatten() * loss.scale for p in engine.model.parameters() if p.grad is not None]
        gradients.append(torch.cat(found))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-4)


def test_training_evens_out_the_load() -> None:
    model: Any = tiny_model("gpt_oss")
    for layer in model.get_decoder().layers:
        layer.mlp.router.bias.data[:2] += 1.0  # two of four experts get most tokens
    engine = engine_of(model, balances_experts=True)
    batch = without_advantages(random_batch(12, seed=5))
    results = [engine.train_batch(batch, objective_of(COEF), step=step) for step in range(15)]
    losses, loads = (
        [mean(result.statistics, name) for result in results] for name in ("actor/balance_loss", "moe/max_load")
    )
    assert losses[0] > 1.3 and losses[-1] < 1.1
    assert loads[0] > 1.95 and sum(loads[-5:]) / 5 < loads[0] - 0.2


def test_a_model_without_routers_is_refused_and_a_weight_of_0_computes_none() -> None:
    with raises(ModelError, "no routers", where="actor_rollout_ref.actor.router_aux_loss_coef"):
        engine_of(dense_model(), balances_experts=True)
    result = engine_of(tiny_model("qwen3_moe")).train_batch(random_batch(4, seed=1), objective_of(0.0), step=0)
    assert not any("actor/balance_loss" in one for one in result.statistics)
