"""How `hone eval` plays episodes: as the run did that made the model, or as the command line says."""

from __future__ import annotations

from pathlib import Path

from support.messages import raises

from hone.config import RLConfig, load_config
from hone.config.load import to_yaml
from hone.errors import ConfigError
from hone.trainers.episode_keys import episode_keys, reward_of, run_of


def test_a_model_of_a_run_is_played_as_in_the_run(tmp_path: Path) -> None:
    several = "actor_rollout_ref.rollout.multi_turn"
    words = [
        f"{several}.enable=true",
        f"{several}.max_assistant_turns=3",
        "data.apply_chat_template_kwargs={thinking: false}",
    ]
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(RLConfig, words)))
    (tmp_path / "run.json").write_text("{}")
    actor = tmp_path / "checkpoints/step_4/actor"
    actor.mkdir(parents=True)
    keys = episode_keys(
        actor, ["multi_turn.max_tool_calls=2", f"{several}.max_assistant_turns=5", "agent.max_retries=0"]
    )
    assert (keys.run, keys.multi_turn.enable, keys.multi_turn.max_assistant_turns) == (tmp_path, True, 5)
    assert (keys.multi_turn.max_tool_calls, keys.agent.max_retries, keys.template_kwargs) == (2, 0, {"thinking": False})
    (tmp_path / "config.yaml").write_text("model: {path: x}\n")  # a run of hone sft
    assert run_of(actor) is None and not episode_keys(actor, []).multi_turn.enable


def test_keys_of_other_blocks_are_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "data.train_files=x", "multi_turn"):
        episode_keys(tmp_path, ["data.train_files=x"])
    with raises(ConfigError, "max_turn_s"):
        episode_keys(tmp_path, ["multi_turn.max_turn_s=3"])


def test_keys_of_the_reward_are_read_apart() -> None:
    words = ["reward=[exact_match,'my rewards.py:short']", "multi_turn.enable=true", "reward.timeout=3"]
    reward, rest = reward_of(words)
    assert reward.terms == [{"scorer": "exact_match"}, {"function": "my rewards.py:short"}]
    assert (reward.timeout, rest) == (3, ["multi_turn.enable=true"])
    assert reward_of([])[0] == load_config(RLConfig, []).reward
    with raises(ConfigError, "reward.scorrer", "scorer"):
        reward_of(["reward.scorrer=exact_match"])
    with raises(ConfigError, "reward.reward_model.enable"):
        reward_of(["reward.reward_model.enable=true"])
