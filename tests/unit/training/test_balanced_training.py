"""Balance changes speed, never a number: loss and gradient over any number of ranks, micro-batches and ways to divide rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.models import random_batch, tiny_model

from hone.config.actor import ActorConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.derived import correction_settings
from hone.data.balance import CostModel, Lengths, balance, in_order
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import PolicyHead
from hone.training.objectives import PolicyObjective, Totals
from hone.training.packing import pack, plan_micro_batches

CPU = torch.device("cpu")
COST = CostModel(40.0)


def with_log_probs(batch: Batch) -> Batch:
    noise = batch.ragged("noise")
    old = noise.with_values(-noise.values.abs() - 1)
    return batch.with_columns(old_log_probs=old, ref_log_probs=noise.with_values(old.values - 0.2))


def share_of(model: torch.nn.Module, micro: Batch, objective: PolicyObjective, totals: Totals) -> float:
    """Loss and (accumulated into the model) gradient of one micro-batch."""
    packed = pack(micro, CPU)
    outputs = packed.outputs_by_row(PolicyHead()(model, packed, with_entropy=True))
    lengths = micro.ragged("response_ids").lengths
    loss, _ = objective(
        {name: Ragged.from_lengths(values.float(), lengths) for name, values in outputs.items()}, micro, totals
    )
    loss.backward()
    return float(loss.detach())


def over_ranks(
    batch: Batch, shares: list[list[int]], objective: PolicyObjective, budget: int
) -> tuple[float, torch.Tensor, set[int]]:
    """Loss and gradient summed over simulated ranks, and how many micro-batches each had."""
    model, totals = tiny_model(), Totals.from_batch(batch)
    locals_ = [batch.reorder(rows) for rows in shares if rows]
    plans = [_plan(local, budget) for local in locals_]
    count = max(map(len, plans))
    loss, counts = 0.0, set()
    for local in locals_:
        plan = _plan(local, budget, count)
        counts.add(len(plan))
        loss += sum(share_of(model, local.reorder(rows), objective, totals) for rows in plan if rows)
    return loss, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), counts


def _plan(local: Batch, budget: int, count: int | None = None) -> list[list[int]]:
    prompts, responses = local.ragged("prompt_ids"), local.ragged("response_ids")
    return plan_micro_batches(prompts, responses, budget, count=count, cost=COST)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm", "seq-mean-token-mean"])
@examples(6)
@given(
    seed=st.integers(0, 1000),
    group=st.integers(1, 4),
    ranks=st.integers(2, 5),
    budget=st.integers(24, 90),
    equal=st.booleans(),
)
def test_loss_and_gradient_do_not_depend_on_ranks_micro_batches_or_balance(mode, seed, group, ranks, budget, equal):
    batch = with_log_probs(random_batch(9, seed, group=group))
    actor = ActorConfig(loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
    objective = PolicyObjective(actor, correction_settings(RolloutCorrectionConfig()), max_response_length=16)
    lengths = Lengths.from_uids(
        batch.ragged("prompt_ids").lengths, batch.ragged("response_ids").lengths, batch.objects("uid")
    )
    balanced = balance(lengths, ranks, COST, equal_count=equal)
    assert balanced is not None
    loss, whole, _ = over_ranks(batch, [list(range(len(batch)))], objective, 10**6)
    for shares in (balanced, in_order(len(batch), ranks)):
        loss2, summed, counts = over_ranks(batch, shares, objective, budget)
        assert len(counts) == 1, "every rank runs the same number of micro-batches"
        assert abs(loss - loss2) <= 1e-5 * max(1.0, abs(loss))
        torch.testing.assert_close(summed, whole, atol=1e-5 * max(1.0, float(whole.norm())), rtol=0)
