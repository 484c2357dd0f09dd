"""The chain of a token: the product of its factors is the derivative of the loss, for every policy loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.models import random_batch

from hone.algorithms import policy_losses
from hone.apps.lab.replay.what_if import first_pass, token_gradients
from hone.config.tree import RLConfig
from hone.data.batch import Batch

SUMS_OF_TOKENS = sorted(policy_losses)


def batch(rows: int = 12) -> Batch:
    """Rows of four prompts, with log-probs of a policy that has moved."""
    made = random_batch(rows, seed=3)
    torch.manual_seed(0)
    old = made.ragged("noise").with_values(-made.ragged("noise").values.abs() - 0.1)
    moved = old.with_values((old.values + 0.4 * torch.randn(len(old.values))).clamp(max=-1e-3))
    weights = old.with_values(torch.rand(len(old.values)) + 0.5)
    return made.with_columns(
        old_log_probs=old,
        rollout_log_probs=old,
        ref_log_probs=old.with_values(old.values - 0.2),
        rollout_is_weights=weights,
        moved=moved,
        uid=[f"row:{index % 4}" for index in range(rows)],
    )


def config(**actor) -> RLConfig:
    made = RLConfig()
    made.data.max_response_length = 16
    made.trainer.seed = 3
    for name, value in {"ppo_mini_batch_size": 2, "ppo_epochs": 1, **actor}.items():
        setattr(made.actor_rollout_ref.actor, name, value)
    return made


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("use_kl_loss", [False, True])
def test_the_factors_multiply_to_the_derivative(mode: str, use_kl_loss: bool) -> None:
    rows = batch()
    chain = token_gradients(rows, config(loss_agg_mode=mode, use_kl_loss=use_kl_loss), 1, rows.ragged("moved"))
    ratio = (rows.ragged("moved").values - rows.ragged("old_log_probs").values).exp()
    product = -rows.ragged("advantages").values * rows.ragged("rollout_is_weights").values * ratio
    product = product * chain.passes.values * chain.normaliser.values + chain.kl.values
    torch.testing.assert_close(chain.gradient.values, product)
    assert bool((chain.kl.values != 0).any()) == use_kl_loss
    outside = rows.ragged("response_mask").values == 0
    assert not bool(chain.gradient.values[outside].any())
    torch.testing.assert_close(chain.share.values.sum(), torch.tensor(1.0))


def test_clipped_tokens_pass_nothing_and_all_others_everything() -> None:
    rows = batch()
    chain = token_gradients(rows, config(), 1, rows.ragged("moved"))
    ratio = (rows.ragged("moved").values - rows.ragged("old_log_probs").values).exp()
    advantages, mask = rows.ragged("advantages").values, rows.ragged("response_mask").values.bool()
    clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8)) | ((advantages < 0) & (ratio > 3))
    used = mask & (advantages != 0)
    assert bool(clipped[used].any())
    assert not bool(chain.passes.values[used & clipped].any())
    torch.testing.assert_close(chain.passes.values[used & ~clipped], torch.ones(int((used & ~clipped).sum())))


@pytest.mark.parametrize("loss", SUMS_OF_TOKENS)
def test_mini_batches_add_up_and_a_first_update_has_ratio_1(loss: str) -> None:
    rows, made = batch(), config()
    made.actor_rollout_ref.actor.policy_loss = replace(made.actor_rollout_ref.actor.policy_loss, loss_mode=loss)
    rows = rows.select(*(name for name in rows.names() if name != "rollout_is_weights"))
    chain = token_gradients(rows, made, 1)
    minis = list(first_pass(rows.uids, made, 1))
    assert (
        sorted(row for mini in minis for row in mini) == list(range(len(rows))) and len(chain.loss) == len(minis) == 2
    )
    torch.testing.assert_close(chain.ratio.values, rows.ragged("response_mask").values.float())
    for mini, loss_of_mini in zip(minis, chain.loss, strict=True):
        alone = token_gradients(rows.reorder(mini), config_with_one_mini(made), 1)
        torch.testing.assert_close(alone.gradient.values, chain.gradient.select(mini).values)
        assert alone.loss == pytest.approx((loss_of_mini,))


def config_with_one_mini(made: RLConfig) -> RLConfig:
    actor = replace(made.actor_rollout_ref.actor, ppo_mini_batch_size=4, shuffle=False)
    return replace(made, actor_rollout_ref=replace(made.actor_rollout_ref, actor=actor))
