"""Reward functions that fork, write where they should not, print without end, eat memory, or return numbers beyond float32."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.once import made_once
from support.patience import LONG, SOON
from support.world import World, make_world, rl_command, world_in

from hone.config.reward import CustomRewardConfig, RewardConfig
from hone.data.episode_log import EpisodeLog
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import ProcessError, RewardError
from hone.rewards.manager import RewardManager
from hone.rewards.score import Score
from hone.rewards.worker import LARGEST, to_score

pytestmark = pytest.mark.application("hone/rewards")

FUNCTIONS = """
import os, pickle, signal, struct, sys, time

kept = []

def first_time(mark):
    try: os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError: return False
    return True

def write_everywhere(data):
    for number in range(3, 1024):
        try: os.set_blocking(number, False); os.write(number, data)
        except OSError: pass

class Runs:
    def __init__(self, path): self.path = path
    def __reduce__(self): return open, (self.path, "w")

def f(data_source, solution_str, ground_truth, extra_info, attack="", mark=""):
    if attack == "fork": os.fork()
    if attack == "fork, late": time.sleep(0.1 if os.fork() else 0.02)
    if attack == "garbage": write_everywhere(b"x")
    if attack == "garbage once" and first_time(mark): write_everywhere(b"Connection: close")
    if attack == "pickle":
        body = pickle.dumps(Runs(mark))
        write_everywhere(struct.pack("!i", len(body)) + body)
    if attack == "close": os.closerange(3, 1024)
    if attack == "keeps": kept.append(b"x" * (20 << 20))
    if attack == "killed once" and first_time(mark): os.kill(os.getpid(), signal.SIGKILL)
    if attack == "print": print("x" * 999999)
    if attack == "memory" and solution_str == "2":
        held = bytearray(600 << 20)
        time.sleep(1000)
    if attack == "daemon" and os.fork() == 0:
        os.setsid()
        stop = time.time() + 8
        while time.time() < stop: print("x" * 9999)
        os._exit(0)
    if attack == "slow": time.sleep(0.3)
    return float(solution_str)

async def g(data_source, solution_str, ground_truth, extra_info, attack="", mark=""):
    return f(data_source, solution_str, ground_truth, extra_info, attack, mark)
"""


def trajectory(text: str, row: int = 0) -> Trajectory:
    sample = Sample(f"val:{row}", [1], None, "mine", "1", {})
    return Trajectory(sample.uid, 0, [1], [2], [1], [0.0], [0.0], text, StopReason.STOP, sample)


def config(folder: Path, attack: str, name: str = "f", **settings: Any) -> RewardConfig:
    path = folder / "my_reward.py"
    path.write_text(FUNCTIONS)
    function = CustomRewardConfig(str(path), name, {"attack": attack, "mark": str(folder / "mark")})
    return RewardConfig(
        **{"custom_reward_function": function, "max_no_verdict_rate": 1.0, "max_retries": 0, **settings}
    )


def score(settings: RewardConfig, words: Sequence[str], batches: int = 1) -> list[Score]:
    """Score every word, in each of several batches; a batch that hangs is a TimeoutError."""
    rewards = RewardManager(settings)
    try:
        rows = [trajectory(word, row) for row, word in enumerate(words)]
        return [entry for _ in range(batches) for entry in asyncio.run(asyncio.wait_for(rewards.score(rows), SOON))]
    finally:
        rewards.close()


@pytest.mark.parametrize(("attack", "name"), [("fork", "f"), ("fork", "g"), ("fork, late", "f")])
def test_only_the_worker_answers_when_a_reward_returns_in_two_processes(tmp_path: Path, attack: str, name: str) -> None:
    scores = score(config(tmp_path, attack, name), ["1", "2", "3"], batches=2)
    assert [(entry.total, entry.error) for entry in scores] == [(1.0, None), (2.0, None), (3.0, None)] * 2


@pytest.mark.parametrize("name", ["f", "g"])
@pytest.mark.parametrize("attack", ["garbage once", "killed once"])
def test_calls_of_a_failed_process_are_tried_again(tmp_path: Path, attack: str, name: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="hone.rewards"):
        scores = score(config(tmp_path, attack, name), [str(number) for number in range(12)])
    assert [(entry.total, entry.error) for entry in scores] == [(float(number), None) for number in range(12)]
    assert re.search(r"reward worker \d \(pid \d+\)", caplog.text)


@pytest.mark.parametrize("name", ["f", "g"])
@pytest.mark.parametrize("attack", ["garbage", "close", "pickle"])
def test_a_process_that_always_fails_ends_the_run_and_is_never_a_reward(tmp_path: Path, attack: str, name: str) -> None:
    with pytest.raises(ProcessError) as caught:
        score(config(tmp_path, attack, name, num_workers=1), ["1", "2"])
    assert re.search(r"reward worker \d \(pid \d+\)", caught.value.what) and "my_reward.py" in caught.value.what
    assert not (tmp_path / "mark").exists(), "what a reward function wrote was unpickled"


@pytest.mark.slow
def test_sigterm_ends_a_run_whose_reward_forks(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    from support.launch import Command

    world: World = world_in(made_once(tmp_path_factory, "world", make_world))
    settings = config(tmp_path, "fork").custom_reward_function
    command = Command(
        rl_command(
            world, tmp_path / "run", "grpo", f"reward.custom_reward_function.path={settings.path}",
            "reward.custom_reward_function.name=h", "preflight.reward_rows=0", "trainer.total_training_steps=100000",
            "trainer.val_before_train=false", "trainer.test_freq=0", "trainer.save_freq=0",
        ),
        tmp_path / "log",
    )  # fmt: skip
    with Path(str(settings.path)).open("a") as file:
        file.write(
            "\n\ndef h(data_source, solution_str, ground_truth, extra_info):\n    os.fork()\n    return float(len(solution_str))\n"
        )
    metrics = tmp_path / "run/metrics.jsonl"
    try:
        assert command.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, LONG)
        command.signal(signal.SIGTERM)
        assert command.wait(SOON).code == 128 + signal.SIGTERM
    finally:
        command.process.kill()


BEYOND = {
    "number": 1e308,
    "negative": {"score": -1e300},
    "integer": 10**400,
    "tensor": torch.tensor(1e308, dtype=torch.float64),
    "term": {"score": 1.0, "bonus": 1e308},
    "turns": {"score": 1.0, "turn_rewards": [1e308]},
    "squares": 1e20,
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_number_beyond_float32_is_a_failure_like_nan(name: str) -> None:
    result = to_score(BEYOND[name])
    assert result.error is not None and result.total == 0.0
    assert to_score(LARGEST).error is None and to_score(float("nan")).error is not None


def test_the_message_names_row_data_source_and_function(tmp_path: Path) -> None:
    with pytest.raises(RewardError) as caught:
        score(config(tmp_path, "", max_no_verdict_rate=0.0), ["1", "1e308"])
    for part in ("'mine'", "val:1", "my_reward.py:f", "1e+308"):
        assert part in caught.value.what
    (counted, fine) = score(config(tmp_path, ""), ["1e308", "3"])
    assert counted.error is not None and (fine.total, fine.error) == (3.0, None)


@pytest.mark.parametrize(
    "log", [EpisodeLog(reward=1e308), EpisodeLog(reward=math.nan), EpisodeLog(turn_rewards=[1e308])]
)
def test_rewards_of_episodes_are_checked_too(log: EpisodeLog) -> None:
    row = trajectory("1")
    row.episode = log
    row.sample.data_source = "exact_match"
    rewards = RewardManager(RewardConfig(max_no_verdict_rate=0.0))
    with pytest.raises(RewardError):
        asyncio.run(rewards.score([row]))
    rewards.close()


def test_printing_is_bounded_and_what_was_cut_is_counted(tmp_path: Path, capfd: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="hone.rewards"):
        scores = score(config(tmp_path, "print", num_workers=1, max_output_kb=10), ["1"] * 8)
    assert [entry.error for entry in scores] == [None] * 8
    shown = capfd.readouterr().err.count("x" * 64) * 64
    assert 9 * 1024 < shown <= 10 * 1024
    cut = [record.args for record in caplog.records if record.args and "KiB a minute" in record.msg]
    assert cut[-1][-1] == 8 * 1_000_000 - 10 * 1024


def test_a_daemon_that_prints_on_is_not_waited_for(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    rewards = RewardManager(config(tmp_path, "daemon", num_workers=1))
    [result] = asyncio.run(rewards.score([trajectory("1")]))
    (output,) = [
        thread for thread in set(threading.enumerate()) - before if thread.name.startswith("output of reward worker")
    ]
    rewards.close()
    assert result.total == 1.0 and not output.is_alive()


def test_a_call_over_the_memory_limit_is_a_named_failure(tmp_path: Path) -> None:
    scores = score(config(tmp_path, "memory", memory_mb=300), [str(number) for number in range(8)])
    assert [entry.total for entry in scores if entry.error is None] == [0.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert str(scores[2].error).startswith("memory") and "reward.memory_mb" in str(scores[2].error)


def test_a_worker_that_grows_by_short_calls_is_replaced_and_no_call_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A call of a millisecond ends before its memory is measured."""
    rewards = RewardManager(config(tmp_path, "keeps", num_workers=1, memory_mb=200))
    try:
        with caplog.at_level(logging.WARNING, "hone"):
            results = [asyncio.run(rewards.score([trajectory(str(number))]))[0] for number in range(24)]
    finally:
        rewards.close()
    assert [result.total for result in results] == [float(number) for number in range(24)]
    assert sum("reward.memory_mb" in record.msg for record in caplog.records) >= 2


def test_workers_of_a_killed_driver_end_soon_and_silently(tmp_path: Path) -> None:
    settings = config(tmp_path, "slow").custom_reward_function
    program = f"""
import asyncio
from hone.config.reward import CustomRewardConfig, RewardConfig
from hone.data.types import Sample, StopReason, Trajectory
from hone.rewards.manager import RewardManager

rewards = RewardManager(RewardConfig(CustomRewardConfig({settings.path!r}, "f", {{"attack": "slow"}})))
sample = Sample("a", [1], None, "s", "1", {{}})
rows = [Trajectory("a", 0, [1], [2], [1], [0.0], [0.0], "1", StopReason.STOP, sample)] * 200
asyncio.run(rewards.score(rows))
"""
    log = tmp_path / "log"
    with log.open("w") as file:
        driver = subprocess.Popen([sys.executable, "-c", program], stdout=file, stderr=file, env=dict(os.environ))
    workers: list[psutil.Process] = []
    while len(workers) < 2 and driver.poll() is None:
        time.sleep(0.1)
        workers = psutil.Process(driver.pid).children()
    time.sleep(2.0)  # until both have calls
    assert len(workers) == 2 and driver.poll() is None, log.read_text()
    driver.kill()
    driver.wait()
    _, left = psutil.wait_procs(workers, timeout=SOON)
    assert not left and log.read_text() == ""
