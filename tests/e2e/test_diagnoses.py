"""Planted defects of agent runs are named while the run trains, and a sound run is silent."""

from pathlib import Path

import pytest
from support.launch import hone
from support.tiny_runs import make_tiny_runs, rl_words

pytestmark = pytest.mark.slow

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
AGENT = (
    f"{MULTI_TURN}.enable=true",
    f"{MULTI_TURN}.max_tokens_per_turn=8",
    f"{MULTI_TURN}.max_assistant_turns=2",
    f"{MULTI_TURN}.tool_config_path=tools.yaml",
    "data.max_prompt_length=400",
    "data.max_response_length=80",
    "trainer.total_training_steps=3",
)
ZERO = "def nothing(solution_str, **row):\n    return 0.0\n"
LEAK = """
from tiny_loop import Calls

class Leaks(Calls):
    "Counts the tool's answer as sampled."
    async def play(self, episode):
        await super().play(episode)
        episode.ledger.mask = [1] * len(episode.ledger.mask)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_runs(folder)
    (folder / "zero.py").write_text(ZERO)
    (folder / "leak.py").write_text(LEAK)
    rows = (folder / "calls.jsonl").read_text()
    (folder / "leaks.jsonl").write_text(rows.replace("tiny_loop:Calls", "leak:Leaks"))
    return folder


def trained(tiny: Path, run: Path, *words: str, rows: str = "calls"):
    return hone(*rl_words(tiny, run, *AGENT, *words, rows=rows), log=run.with_suffix(".log"), cwd=tiny)


def test_a_sound_run_is_silent(tiny: Path, tmp_path: Path) -> None:
    ended = trained(tiny, tmp_path / "run", "actor_rollout_ref.actor.optim.lr=1e-5")
    assert ended.code == 0, ended.output
    assert "diagnosis" not in ended.output


def test_rewards_of_0_are_named(tiny: Path, tmp_path: Path) -> None:
    words = (
        f"custom_reward_function.path={tiny}/zero.py",
        "custom_reward_function.name=nothing",
        "preflight.reward_rows=0",
    )
    ended = trained(tiny, tmp_path / "run", *words)
    assert ended.code == 0, ended.output
    assert ended.output.count("diagnosis, step 3") == 1 and "last 3 steps" in ended.output


def test_an_exploding_ratio_is_named_with_its_learning_rate(tiny: Path, tmp_path: Path) -> None:
    words = ("actor_rollout_ref.actor.optim.lr=0.3", "actor_rollout_ref.actor.ppo_epochs=3")
    ended = trained(tiny, tmp_path / "run", *words)
    assert "diagnosis, step 1" in ended.output, ended.output
    assert "optim.lr=0.03" in ended.output and "ppo_epochs=1" in ended.output


def test_tool_tokens_in_the_loss_stop_the_run(tiny: Path, tmp_path: Path) -> None:
    ended = trained(tiny, tmp_path / "run", rows="leaks")
    assert ended.code != 0 and "D-mask" in ended.output and "12 rows" in ended.output, ended.output
