"""Every preset of `hone train` learns: the reward of its last steps is above that of its first, from one start and one budget."""

from pathlib import Path

import pytest
from support.world import World, curve, mean, metrics, rl_command

from hone.config.load import preset_names

pytestmark = pytest.mark.long("hone/algorithms", "hone/config/presets", "hone/trainers/estimates.py")

OTHERS = {"online_dpo", "grpo", "ppo", "agent_grpo", "agent_ppo", "opd", "opsd"}
"""Presets that have tests of their own, in test_preferences, test_learning, test_agents and test_distillation."""
ACTOR = "actor_rollout_ref.actor"
COMMON = (
    *("data.train_batch_size=12", "actor_rollout_ref.rollout.n=8", f"{ACTOR}.ppo_mini_batch_size=12"),
    *("trainer.val_before_train=false", "trainer.save_freq=0", "trainer.rollout_dump_freq=0"),
    *(f"{ACTOR}.optim.lr=2e-3", "trainer.total_training_steps=15"),
)
QUARTERS = (
    f"{ACTOR}.ppo_mini_batch_size=3",
    f"{ACTOR}.optim.lr=1e-3",
)  # several updates a step, as the method means it
CHANGES: dict[str, tuple[str, ...]] = {
    "grpo_lora": ("trainer.total_training_steps=25",),
    "dapo": (*QUARTERS, "reward.overlong_buffer.len=2"),
    "reinforce_plus_plus": QUARTERS,
    "reinforce_plus_plus_baseline": QUARTERS,
    "gspo": QUARTERS,
    "cispo": QUARTERS,
    "sapo": QUARTERS,
    "gmpo": QUARTERS,
    "clip_cov": QUARTERS,
    "kl_cov": QUARTERS,
    "decoupled_tis": QUARTERS,
}
"""What a preset needs to be told beyond the common budget: its updates a step."""
EXTRA = {
    "dapo": ("training/filter_groups/tried_groups", "reward/overlong/mean"),
    "remax": ("critic/greedy_baseline/mean",),
    "otb": ("actor/sum_pi_squared",),
    "decoupled_tis": ("rollout_corr/rollout_is_eff_sample_size",),
    "clip_cov": ("actor/pg_cov_fraction",),
    "kl_cov": ("actor/pg_cov_fraction",),
}
"""Metrics that only this preset has, to know that it did what it is named after."""


@pytest.mark.parametrize("preset", sorted(set(preset_names("rl")) - OTHERS))
def test_preset_learns(world: World, run, tmp_path: Path, preset: str):
    ended = run(*rl_command(world, tmp_path / "run", preset, *COMMON, *CHANGES.get(preset, ())))
    assert ended.code == 0, ended.output
    rewards = curve(tmp_path / "run")
    first, last = mean(rewards[:3]), mean(rewards[-3:])
    assert last > first + 0.05 and last > 1.3 * first, rewards
    rows = metrics(tmp_path / "run")
    for name in EXTRA.get(preset, ()):
        assert name in rows[-1], sorted(rows[-1])
    assert all(value == 0 for row in rows for name, value in row.items() if name.startswith("invariant"))
