"""A replayed step is the step, bit for bit, from any of its stages; what was changed is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launch import hone
from support.world import World, rl_command, steps_saved

STEP = 3


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    overrides = (
        "trainer.total_training_steps=4",
        f"trainer.save_steps_for_replay=[{STEP}]",
        "trainer.rollout_dump_freq=0",
        "trainer.max_ckpt_to_keep=1",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    )
    ended = hone(*rl_command(world, folder, "grpo", *overrides), log=folder.with_suffix(".log"))
    assert ended.code == 0, ended.output
    assert steps_saved(folder) == [STEP - 1, 4]  # the newest, and the one before the step
    return folder


def replayed(run: Path, log: Path, *arguments: str) -> tuple[int, dict]:
    ended = hone("replay", run, "--step", STEP, "--json", *arguments, log=log)
    text = ended.output
    return ended.code, json.loads(text[text.index("{\n") :]) if ended.code < 2 else {"text": text}


@pytest.mark.slow
@pytest.mark.application("hone/trainers", "hone/training/engine.py", "hone/cli/stored.py")
@pytest.mark.parametrize("first", [None, "reward", "adv", "update_actor"])
def test_a_step_is_repeated_bit_for_bit(run: Path, tmp_path: Path, first: str | None) -> None:
    code, result = replayed(run, tmp_path / "log", *(["--from", first] if first else []))
    assert (code, result["first"]) == (0, None), result
    assert ("gen" in result["stages"]) == (first is None) and "update_actor" in result["stages"]


@pytest.mark.slow
@pytest.mark.application("hone/trainers", "hone/training/engine.py", "hone/cli/stored.py")
def test_what_was_changed_is_seen(run: Path, tmp_path: Path) -> None:
    code, result = replayed(run, tmp_path / "log", "--from", "adv", "algorithm.adv_estimator=rloo")
    assert code == 1 and result["first"]["stage"] == "advantages" and result["first"]["step"] == STEP


@pytest.mark.slow
@pytest.mark.application("hone/trainers", "hone/training/engine.py", "hone/cli/stored.py")
def test_steps_and_stages_that_cannot_be_replayed_are_refused(run: Path, tmp_path: Path) -> None:
    code, result = replayed(run, tmp_path / "log", "--from", "lunch")
    assert code == 2 and "E-replay" in result["text"] and "update_actor" in result["text"]
    code, result = replayed(run, tmp_path / "log3", "--from", "adv", "trainer.runtime=ray")
    assert code == 2 and "trainer.runtime=local" in result["text"]
    ended = hone("replay", run, "--step", 4, log=tmp_path / "log2")
    assert ended.code == 2 and "rollout_dump" in ended.output
