"""Planted defects of agent runs are named while the run trains, may end it, and a sound run is silent."""

from pathlib import Path

import pytest
from support.launch import hone
from support.tiny_runs import make_tiny_runs, rl_words

from hone.errors import EXIT_STOPPED
from hone.insight.archive.read import open_archive
from hone.insight.run_files import read_alerts, read_metrics, read_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.application("hone/insight", "hone/apps/lab", "hone/trainers/reporting.py", "hone/rewards"),
]

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
    folder = make_tiny_runs(tmp_path_factory.mktemp("tiny"), zero=ZERO, leak=LEAK)
    rows = (folder / "calls.jsonl").read_text()
    (folder / "leaks.jsonl").write_text(rows.replace("tiny_loop:Calls", "leak:Leaks"))
    return folder


def trained(tiny: Path, run: Path, *words: str, rows: str = "calls"):
    return hone(*rl_words(tiny, run, *AGENT, *words, rows=rows), log=run.with_suffix(".log"), cwd=tiny)


def detected(run: Path) -> dict[str, int]:
    """Return the step of each alert of a run by its detector."""
    return {alert["detector"]: alert["step"] for alert in read_alerts(run)}


def zero_words(tiny: Path) -> tuple[str, ...]:
    return (
        f"custom_reward_function.path={tiny}/zero.py",
        "custom_reward_function.name=nothing",
        "preflight.reward_rows=0",
    )


def test_a_sound_run_is_silent(tiny: Path, tmp_path: Path) -> None:
    ended = trained(tiny, tmp_path / "run", "actor_rollout_ref.actor.optim.lr=1e-5")
    assert ended.code == 0, ended.output
    assert detected(tmp_path / "run") == {} and "alert, step" not in ended.output
    listed = hone("runs", "alerts", tmp_path / "run", "--json", log=tmp_path / "alerts.log", cwd=tiny)
    assert listed.code == 0 and "[]" in listed.output


def test_rewards_of_0_are_named_and_end_the_run(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (
        *zero_words(tiny),
        "insight.stop_on=[zero_reward]",
        "trainer.total_training_steps=5",
        "trainer.save_freq=-1",
    )
    ended = trained(tiny, run, *words)
    assert ended.code == EXIT_STOPPED, ended.output
    assert detected(run) == {"zero_reward": 3} and ended.output.count("alert, step 3, zero_reward") == 1
    record = read_run(run)
    assert (record["status"], record["last_step"], record["alerts"]) == ("interrupted", 3, {"zero_reward": 1})
    assert "zero_reward" in record["exit_reason"] and "insight.stop_on" in record["exit_reason"]
    assert read_metrics(run)[-1]["insight/alerts"] == 1
    (alert,) = read_alerts(run)
    stored = {
        (row["uid"], row["index"]) for row in open_archive(run).records(alert["samples"][0]["step"], ["uid", "index"])
    }
    assert alert["samples"] and {(sample["uid"], sample["index"]) for sample in alert["samples"]} <= stored
    again = trained(tiny, run, *words)  # two more steps: the warm-up starts again, so the run ends by itself
    assert again.code == 0, again.output
    record = read_run(run)
    assert (record["status"], record["last_step"], detected(run)) == ("finished", 5, {"zero_reward": 3})
    diagnosed = hone("runs", "diagnose", run, "--json", log=tmp_path / "diagnose.log", cwd=tiny)
    assert diagnosed.code == 0 and '"detector": "zero_reward"' in diagnosed.output


def test_an_exploding_ratio_is_named_with_its_learning_rate(tiny: Path, tmp_path: Path) -> None:
    words = ("actor_rollout_ref.actor.optim.lr=0.3", "actor_rollout_ref.actor.ppo_epochs=3")
    ended = trained(tiny, tmp_path / "run", *words)
    assert detected(tmp_path / "run")["ratio_explosion"] == 1, ended.output
    assert "optim.lr=0.03" in ended.output and "ppo_epochs=1" in ended.output


def test_tool_tokens_in_the_loss_stop_the_run(tiny: Path, tmp_path: Path) -> None:
    ended = trained(tiny, tmp_path / "run", rows="leaks")
    assert ended.code != 0 and "D-mask" in ended.output and "12 rows" in ended.output, ended.output
