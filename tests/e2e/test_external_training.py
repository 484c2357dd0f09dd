"""Training with an external engine: weights arrive after every update, and the policy learns as with the native engine.

`scripts/conformance NAME` runs this, in the engine's own environment.
"""

from __future__ import annotations

import pytest
from support.world import curve, mean, metrics, rl_command

from hone.errors import ConfigError
from hone.generation.environments import interpreter_of

pytestmark = pytest.mark.engines
LEARN = ("actor_rollout_ref.rollout.n=8", "trainer.val_before_train=false")
LORA = (
    *("actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.lora_alpha=32"),
    *("actor_rollout_ref.actor.optim.lr=3e-3", "trainer.total_training_steps=40"),
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
CASES = {
    "vllm local": ("actor_rollout_ref.actor.optim.lr=2e-3", "trainer.total_training_steps=25"),
    "vllm lora": LORA,
    "vllm lora, the adapter alone": (*LORA, "actor_rollout_ref.rollout.merge_lora=false"),
    "vllm two replicas on Ray": (
        *("actor_rollout_ref.actor.optim.lr=2e-3", "trainer.total_training_steps=25"),
        *("trainer.runtime=ray", "trainer.n_gpus_per_node=2"),
    ),
    "vllm over two devices on Ray": (
        *("actor_rollout_ref.actor.optim.lr=2e-3", "trainer.total_training_steps=25"),
        *("trainer.runtime=ray", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"),
        "actor_rollout_ref.rollout.free_cache_engine=true",
    ),
    "sglang local": ("actor_rollout_ref.actor.optim.lr=2e-3", "trainer.total_training_steps=25"),
    "trtllm local": ("actor_rollout_ref.actor.optim.lr=2e-3", "trainer.total_training_steps=25"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_policy_learns_and_engine_and_trainer_agree(case, world, run, tmp_path):
    engine = case.split()[0]
    try:
        interpreter_of(engine)
    except ConfigError as missing:
        pytest.skip(missing.what)
    name = f"actor_rollout_ref.rollout.name={engine}"
    words = rl_command(world, tmp_path / "run", "grpo", name, *LEARN, *CASES[case])
    ended = run(*words)
    assert ended.code == 0, ended.output
    rows, rewards = metrics(tmp_path / "run"), curve(tmp_path / "run")
    assert max(row["rollout/canary_gap"] for row in rows) < 1e-4
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-3
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.03 and mean(rewards[-5:]) > 1.3 * mean(rewards[:5]), rewards
    logs = list((tmp_path / "run/engines").iterdir())
    assert len(logs) == (2 if "replicas" in case else 1)
