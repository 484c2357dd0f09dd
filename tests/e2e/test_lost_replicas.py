"""Replicas of the engine are killed at random moments of a GRPO run: no episode is lost or doubled, and the run comes to its end."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from support import forked_engines
from support.archives import records
from support.launch import Command, kill
from support.patience import SOON
from support.world import World, metrics, rl_command

pytestmark = pytest.mark.long("hone/generation/pool", "hone/trainers/rl.py")
KILLS, STEPS, PROMPTS, N = 20, 12, 12, 4
SERVED = (
    *("actor_rollout_ref.rollout.name=native", "actor_rollout_ref.rollout.num_replicas=3"),
    *("actor_rollout_ref.rollout.server_pool={max_attempts: 1000, start_attempts: 1000, health_check_period: 0.5}",),
    *("trainer.val_before_train=false", "trainer.rollout_dump_freq=1", f"actor_rollout_ref.rollout.n={N}"),
)


def start(world: World, folder: Path, *overrides: str) -> Command:
    words = rl_command(world, folder / "run", "grpo", *SERVED, *overrides)
    return Command(words, folder / "log", folder, prepare=forked_engines.install)


def engines(command: Command) -> list[psutil.Process]:
    """The processes of the replicas: each leads a session, and is forked from a process that leads one too."""
    assert command.process.pid is not None
    found = []
    for process in psutil.Process(command.process.pid).children(recursive=True):
        try:
            if os.getsid(process.pid) == process.pid and process.ppid() != command.process.pid:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return [process for process in found if process.is_running()]


def living(command: Command, killed: set[int]) -> list[int]:
    return sorted({process.pid for process in engines(command)} - killed)


def steps_done(folder: Path) -> int:
    log = folder / "run/metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_twenty_kills_during_a_run_lose_and_double_no_episode(world: World, tmp_path: Path) -> None:
    chance = random.Random(0)
    command = start(world, tmp_path, f"trainer.total_training_steps={STEPS}")
    killed: set[int] = set()
    for number in range(KILLS):
        assert command.wait_until(lambda number=number: steps_done(tmp_path) > number // 2), "the run goes on"
        time.sleep(chance.random() * 0.3)
        assert command.wait_until(lambda: bool(living(command, killed))), "there are engines to kill"
        victim = chance.choice(living(command, killed))
        os.killpg(victim, signal.SIGKILL)
        killed.add(victim)
    ended = command.wait()
    assert ended.code == 0, ended.output
    rows = metrics(tmp_path / "run", timing=True)
    assert [row["training/global_step"] for row in rows] == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        played = Counter((record["uid"], record["index"]) for record in records(tmp_path / "run", step))
        assert len(played) == PROMPTS * N and set(played.values()) == {1}, f"step {step}"
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-3, (
        "all of them sampled by the present weights"
    )
    restarts = sum(rows[-1][f"replica/{replica}/num_restarts"] for replica in range(3))
    assert len(killed) == KILLS and restarts > KILLS / 2, "those that died while they were started were not counted"
    assert sum(value for row in rows for name, value in row.items() if name.endswith("/num_retried")) > 0
    assert not [pid for pid in killed if psutil.pid_exists(pid)]


def test_no_replica_outlives_a_run_that_is_killed(world: World, tmp_path: Path) -> None:
    command = start(world, tmp_path, "trainer.total_training_steps=10000")
    assert command.wait_until(lambda: steps_done(tmp_path) >= 1)
    family = engines(command)
    assert len(family) == 3
    kill(command)
    assert not psutil.wait_procs(family, timeout=SOON)[1]
