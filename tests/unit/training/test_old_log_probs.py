"""Old log-probs take a forward pass of their own where something needs them before the update, and only there."""

import pytest

from hone.config import RLConfig, load_config
from hone.training.old_log_probs import needs_old_log_probs

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ONE_UPDATE = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8")


def needed(*overrides: str, preset: str | None = None) -> bool:
    return needs_old_log_probs(load_config(RLConfig, [*ONE_UPDATE, *overrides], preset=preset))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm.adv_estimator=gae",),
        (f"{ACTOR}.use_kl_loss=true",),
        (f"{ACTOR}.entropy_coeff=0.01",),
        (f"{ACTOR}.policy_loss.loss_mode=gspo",),
        ("algorithm.filter_groups.enable=true",),
    ],
)
def test_nothing_needs_them_before_the_one_update(overrides):
    assert not needed(*overrides)
    assert needed(*overrides, f"{ACTOR}.recompute_old_log_probs=true")


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{ACTOR}.ppo_mini_batch_size=4",),
        (f"{ACTOR}.ppo_epochs=2",),
        ("algorithm.use_kl_in_reward=true",),
        ("algorithm.use_pf_ppo=true",),
        ("algorithm.adv_estimator=optimal_token_baseline",),
        (f"{ACTOR}.calculate_sum_pi_squared=true",),
        (f"{CORRECTION}.rollout_is=token",),
        (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.1"),
        (f"{CORRECTION}.rollout_token_veto_threshold=0.001",),
        (f"{ACTOR}.policy_loss.loss_mode=clip_cov",),
        (f"{ACTOR}.preference_loss.loss_mode=dpo",),
    ],
)
def test_something_needs_them_before(overrides):
    assert needed(*overrides)


def test_in_bypass_mode_they_are_the_engines():
    assert not needed(f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.ppo_epochs=2")
