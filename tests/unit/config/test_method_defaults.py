"""The keys that belong to the method of an estimator, and short names of keys."""

from pathlib import Path

import pytest

from hone.algorithms.advantages import advantage_estimators
from hone.apps.explain.key_search import answer
from hone.config import RLConfig, SFTConfig, load_config, load_with_provenance
from hone.config.load import method_preset, preset_names

LABEL = "from adv_estimator=rloo"


def test_without_a_preset_a_run_is_that_of_grpo() -> None:
    assert load_config(RLConfig, by_method=True) == load_config(RLConfig, preset="grpo")
    assert load_config(RLConfig).actor_rollout_ref.rollout.n == 1  # a configuration of its own is not changed


@pytest.mark.parametrize("estimator", sorted(advantage_estimators))
def test_an_estimator_brings_the_keys_of_its_method(estimator: str) -> None:
    preset = method_preset(estimator)
    config = load_config(RLConfig, [f"algorithm.adv_estimator={estimator}"], by_method=True)
    if preset is None:
        assert estimator not in preset_names("rl")
        assert config == load_config(RLConfig, [f"algorithm.adv_estimator={estimator}"])
    else:
        assert config == load_config(RLConfig, preset=preset) and config.algorithm.adv_estimator == estimator


def test_keys_of_the_user_win_and_the_source_is_told() -> None:
    lines = ["algorithm.adv_estimator=rloo", "algorithm.kl_ctrl.kl_coef=0.5"]
    config, provenance = load_with_provenance(RLConfig, lines, by_method=True)
    assert config.algorithm.kl_ctrl.kl_coef == 0.5 and config.algorithm.use_kl_in_reward
    assert provenance["algorithm.kl_ctrl.kl_coef"] == provenance["algorithm.adv_estimator"] == "command line"
    assert provenance["algorithm.use_kl_in_reward"] == provenance["actor_rollout_ref.rollout.n"] == LABEL


@pytest.mark.parametrize(
    ("estimator", "batch", "mini"),
    [("rloo", 16, 16), ("gae", 64, 16), ("gae", 6, 6), ("grpo", 12, 12), ("gae", 256, 64)],
)
def test_mini_batches_follow_the_batch(estimator: str, batch: int, mini: int) -> None:
    lines = [f"algorithm.adv_estimator={estimator}", f"data.train_batch_size={batch}"]
    assert load_config(RLConfig, lines, by_method=True).actor_rollout_ref.actor.ppo_mini_batch_size == mini
    lines.append("actor_rollout_ref.actor.ppo_mini_batch_size=2")
    assert load_config(RLConfig, lines, by_method=True).actor_rollout_ref.actor.ppo_mini_batch_size == 2


def test_a_preset_or_a_file_has_the_say(tmp_path: Path) -> None:
    line = ["algorithm.adv_estimator=rloo"]
    with_preset = load_config(RLConfig, line, preset="dapo", by_method=True)
    assert not with_preset.algorithm.use_kl_in_reward and with_preset.actor_rollout_ref.rollout.n == 16
    (tmp_path / "mine.yaml").write_text("actor_rollout_ref: {rollout: {n: 5}}\n")
    config, provenance = load_with_provenance(RLConfig, line, config_path=tmp_path, config_name="mine", by_method=True)
    assert not config.algorithm.use_kl_in_reward and LABEL not in provenance.values()


def test_the_policy_has_the_short_name_of_the_other_commands() -> None:
    assert load_config(RLConfig, ["model.path=M", "model.lora_rank=8"]).actor_rollout_ref.model.path == "M"
    assert load_config(SFTConfig, ["model.path=M"]).model.path == "M"
    (entry,) = answer("model.path", ["train"])
    assert entry.key.path == "actor_rollout_ref.model.path"  # type: ignore[union-attr]


@pytest.mark.parametrize(("steps", "warm_up"), [(2, 0), (10, 1), (11, 10)])
def test_a_warm_up_of_a_preset_is_shortened_with_a_short_run(
    steps: int, warm_up: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hone")
    config = load_config(RLConfig, [f"trainer.total_training_steps={steps}"], preset="agent_ppo")
    assert config.actor_rollout_ref.actor.optim.lr_warmup_steps == warm_up
    assert config.critic.optim.lr_warmup_steps == steps // 10
    assert ("actor.optim.lr_warmup_steps" in caplog.text) == (steps <= 10)


def test_a_warm_up_of_a_file_is_shortened_by_the_command_line_alone(tmp_path: Path) -> None:
    folder = tmp_path / "ein ordner"
    folder.mkdir()
    (folder / "config.yaml").write_text("optim: {lr_warmup_steps: 10}\ntrainer: {total_training_steps: 5}\n", "utf-8")
    assert load_config(SFTConfig, config_path=folder).optim.lr_warmup_steps == 10  # R56 stops it
    assert load_config(SFTConfig, ["trainer.total_training_steps=4"], config_path=folder).optim.lr_warmup_steps == 0
    own = ["trainer.total_training_steps=4", "optim.lr_warmup_steps=8"]
    assert load_config(SFTConfig, own, config_path=folder).optim.lr_warmup_steps == 8
