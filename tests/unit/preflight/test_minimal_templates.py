"""The two shortest configurations that people start from: all that they lack is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hone.cli.config import app
from hone.config import RLConfig, load_config
from hone.config.overrides import hydra_value
from hone.generation import environments
from hone.preflight import examine

PPO = """
algorithm:
  adv_estimator: gae
  use_kl_in_reward: false
actor_rollout_ref:
  rollout:
    name: vllm
    n: 1
critic:
  enable: true
"""
TOOLS = """
algorithm:
  adv_estimator: grpo
actor_rollout_ref:
  actor:
    use_kl_loss: true
    kl_loss_coef: 0.001
  rollout:
    name: sglang
    n: 8
    multi_turn:
      enable: true
      tool_config_path: /path/to/tools.yaml
data:
  return_raw_chat: true
"""


@pytest.fixture(autouse=True)
def engines_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate installed engines."""
    monkeypatch.setattr(environments, "interpreter_of", lambda name, folder: Path(name))


def checked(template: str, rl: RLConfig, **changes: Any) -> list[tuple[str, bool, str]]:
    """Return code, severity and text of all findings, with paths and sizes of a small run."""
    folder = Path(rl.trainer.default_local_dir).parent
    (folder / "template.yaml").write_text(template)
    imported = CliRunner().invoke(
        app, ["import", str(folder / "template.yaml"), "--out", str(folder / "imported.yaml")]
    )
    assert imported.exit_code == 0, imported.output
    small: dict[str, Any] = {
        "data.train_files": rl.data.train_files,
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.model.path": rl.actor_rollout_ref.model.path,
        "trainer.default_local_dir": rl.trainer.default_local_dir,
        "trainer.device": "cpu",
    }
    overrides = [f"{key}={hydra_value(value)}" for key, value in (small | changes).items()]
    config = load_config(RLConfig, overrides, config_path=folder, config_name="imported")
    return [(by_code.error.code, by_code.stops, by_code.error.render()) for by_code in examine(config).findings]


def test_ppo(rl: RLConfig) -> None:
    assert checked(PPO, rl) == []


def test_grpo_with_tools(rl: RLConfig, tmp_path: Path) -> None:
    by_code = {code: (stops, text) for code, stops, text in checked(TOOLS, rl)}
    assert by_code["R48"][0] and "/path/to/tools.yaml" in by_code["R48"][1]
    assert by_code["R38"][0] and "max_assistant_turns=8" in by_code["R38"][1]
    assert set(by_code) == {"R38", "R48"}
    (tmp_path / "tools.yaml").write_text("tools: [{name: calculator}]\n")
    block = "actor_rollout_ref.rollout.multi_turn"
    fixed = {f"{block}.tool_config_path": str(tmp_path / "tools.yaml"), f"{block}.max_assistant_turns": 8}
    ((code, stops, text),) = checked(TOOLS, rl, **fixed)  # this model's chat template does not support tools
    assert (code, stops) == ("R35", True) and f"{block}.renderer=text_tools" in text
    assert checked(TOOLS, rl, **fixed, **{f"{block}.renderer": "text_tools"}) == []
