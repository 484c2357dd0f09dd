"""Rules about episodes of several turns: what is wrong is said before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.preflight import change, rows, write_rows

from hone.config import RLConfig
from hone.preflight import findings

MULTI = "actor_rollout_ref.rollout.multi_turn"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
ENABLED = {f"{MULTI}.enable": True, f"{MULTI}.max_assistant_turns": 4}
GAME = {"environment": {"name": "guess_the_number", "seed": 1, "options": {"max_number": 4}}}


def spoken(rl: RLConfig, data: Path, changes: dict[str, Any], columns: dict[str, Any]) -> list[Any]:
    """What is found when all rows have these further columns."""
    write_rows(data, [row | columns for row in rows()])
    (data.parent / "tools.yaml").write_text("tools: [{name: calculator}]\n")
    rl.preflight.reward_rows = 0
    here = {key: str(data.parent / value) if key.endswith("_path") else value for key, value in changes.items()}
    return list(findings(change(rl, here)))


@pytest.mark.parametrize(
    ("changes", "columns", "code", "words"),
    [
        ({f"{MULTI}.enable": True}, {"agent_name": "environment", "extra_info": GAME}, "R38", ["no bound", "max_assistant_turns=8"]),
        (ENABLED, {}, "R33", ["all 10 training rows are played by the loop single_turn", "tool_config_path"]),
        (
            ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml", LOOP: "single_turn"},
            {},
            "R33",
            ["tool_config_path would not be used", "default_agent_loop=tool_agent"],
        ),
        ({f"{MULTI}.tool_config_path": "tools.yaml"}, {}, "R33", ["tool_config_path is set", "enable=true"]),
        (ENABLED, {"agent_name": "tool_agent"}, "R33", ["no file names tools"]),
        (ENABLED | {f"{MULTI}.tool_config_path": "tols.yaml"}, {}, "R48", ["there is no file", "tools.yaml"]),
        (ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml"}, {"prompt": "flat"}, "R34", ["10 of 10 prompts are plain text"]),
        (
            ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml"},
            {"extra_info": {"tools_kwargs": {"calcluator": {}}}},
            "R48",
            ["the tool 'calcluator', which is not registered", "calculator"],
        ),
        (ENABLED, {"agent_name": "interaction"}, "R48", ["no file names any"]),
        (ENABLED | {LOOP: "tool_agnt"}, {}, "R48", ["unknown agent loop 'tool_agnt'"]),
        (
            ENABLED,
            {"agent_name": "environment", "extra_info": {"environment": {"name": "guess_the_nmber"}}},
            "R48",
            ["unknown environment 'guess_the_nmber'"],
        ),
    ],
)  # fmt: skip
def test_rule_speaks(rl: RLConfig, data: Path, changes, columns, code: str, words: list[str]) -> None:
    found = [f for f in spoken(rl, data, changes, columns) if f.error.code == code]
    assert found and all(f.stops for f in found)
    told = "\n".join(f.error.render() for f in found)
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        (ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml"}, {}),
        (ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml"}, {"agent_name": "tool_agent"}),
        (
            ENABLED,
            {"agent_name": "environment", "extra_info": GAME, "data_source": "environment/x", "reward_model": None},
        ),
    ],
)
def test_rules_are_silent(rl: RLConfig, data: Path, changes, columns) -> None:
    codes = {"R33", "R34", "R38", "R43", "R44", "R48"}
    assert [f.error.render() for f in spoken(rl, data, changes, columns) if f.error.code in codes] == []
