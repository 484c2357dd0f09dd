"""Losses that choose tokens by comparing them across a mini-batch choose the same ones on any number of data-parallel ranks."""

import pytest
import torch
from support.policy_updates import update_in_turn
from support.ranks import Ranks

pytestmark = pytest.mark.long("hone/algorithms/policy_losses", "hone/training/objectives.py")

LOSS = "actor_rollout_ref.actor.policy_loss"
OVERRIDES = [
    "data.train_batch_size=6",
    "data.max_prompt_length=16",
    "data.max_response_length=16",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=60",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.eps=1e-4",
    "algorithm.adv_estimator=grpo",
    "trainer.device=cpu",
]
SELECTING = {
    "clip_cov": [f"{LOSS}.clip_cov_ratio=0.2", f"{LOSS}.clip_cov_lb=0.0", f"{LOSS}.clip_cov_ub=100.0"],
    "kl_cov": [f"{LOSS}.kl_cov_ratio=0.2"],
    "m2po": [f"{LOSS}.m2_threshold=0.001"],
}
CHOSEN = {"clip_cov": "actor/pg_cov_fraction", "kl_cov": "actor/pg_cov_fraction", "m2po": "actor/pg_clipfrac"}


@pytest.mark.parametrize("name", SELECTING)
def test_two_ranks_choose_the_tokens_of_one(name: str, two_ranks: Ranks, tiny_models) -> None:
    """Four updates: later ones compare under weights that earlier ones changed, by a forward pass of each rank's rows."""
    overrides = [*OVERRIDES, f"{LOSS}.loss_mode={name}", *SELECTING[name]]
    expected, weights = update_in_turn(tiny_models["tied"], overrides)
    assert len(expected) == 4
    assert expected[-1][CHOSEN[name]] > 0
    for found, other in two_ranks.run(update_in_turn, tiny_models["tied"], overrides):
        for one, alone in zip(found, expected, strict=True):
            assert one == pytest.approx(alone, rel=1e-4, abs=1e-5)
        for key, value in weights.items():
            torch.testing.assert_close(other[key], value, atol=2e-5, rtol=0)
