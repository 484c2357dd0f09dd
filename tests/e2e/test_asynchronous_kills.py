"""Twenty kills of an asynchronous run with a slow tool: of the driver and its learner, of engines, and during checkpoints."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support import forked_engines
from support.forked_engines import engines_of
from support.launch import Command, hone
from support.slow_loop import ASYNCHRONOUS, PROMPTS
from support.world import World, metrics, rl_command, run_record

pytestmark = pytest.mark.long("hone/trainers/rollouter.py", "hone/trainers/rollouter.py")
DRIVER_KILLS, ENGINE_KILLS, STEPS = 12, 8, 40


def start(world: World, folder: Path, number: int) -> Command:
    words = rl_command(world, folder / "run", "grpo", *ASYNCHRONOUS, f"trainer.total_training_steps={STEPS}")
    return Command(words, folder / f"log{number}", folder, prepare=forked_engines.install)


def saved(folder: Path) -> int:
    return max((int(path.name[5:]) for path in (folder / "run/checkpoints").glob("step_*")), default=0)


def test_twenty_kills_leave_the_ledger_whole(world: World, tmp_path: Path) -> None:
    chance = random.Random(3)
    kills = [signal.SIGKILL] * DRIVER_KILLS + [None] * ENGINE_KILLS  # None: an engine
    chance.shuffle(kills)
    command, started = start(world, tmp_path, 0), 0
    for number, kill in enumerate(kills):
        step = saved(tmp_path)
        # an engine that dies while the run starts ends the run; a driver may die at any moment
        least = step if kill is None else min(step, number)
        progressed = command.wait_until(lambda least=least: saved(tmp_path) > least)
        assert progressed, command.log.read_text()
        time.sleep(chance.random() * 0.4)  # also in the middle of a checkpoint
        if kill is None:
            assert command.wait_until(lambda command=command: bool(engines_of(command.process.pid))), (
                command.log.read_text()
            )
            chance.choice(engines_of(command.process.pid)).kill()
        else:
            command.signal(signal.SIGKILL, group=True)
            command.wait()
            started += 1
            command = start(world, tmp_path, started)
    ended = command.wait()
    assert ended.code == 0, ended.output
    assert run_record(tmp_path / "run")["status"] == "finished"

    rows = [row for row in metrics(tmp_path / "run") if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["training/staleness"] for row in rows) <= 2
    lines = [json.loads(line) for line in (tmp_path / "run/coverage.jsonl").read_text().splitlines()]
    draws = [line for line in lines if "draw" in line]
    trained = [line["draw"] for line in draws if line["fate"] == "trained"]
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS, "nothing is lost, and nothing is trained on twice"
    assert max(Counter(line["draw"] for line in draws).values()) == 1
    last = rows[-1]
    fates = ("trained", "filtered", "failed", "too_old", "open")
    assert last["coverage/drawn"] == sum(last[f"coverage/{fate}"] for fate in fates)
    report = hone("runs", "coverage", tmp_path / "run", log=tmp_path / "coverage.log")
    assert report.code == 0, report.output
