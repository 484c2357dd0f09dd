"""An asynchronous run whose engines join and leave by command while it trains: 1, 2 and 1 replicas."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import forked_engines
from support.launch import Command, Ended, hone
from support.world import World, metrics, rl_command, run_record

pytestmark = pytest.mark.long("hone/trainers/rl.py", "hone/generation/pool")
PROMPTS = 4
KEYS = (
    *("trainer.async.max_staleness=2", "trainer.async.partial_rollouts=true", "preflight.reward_rows=0"),
    *("actor_rollout_ref.rollout.multi_turn={enable: true, max_assistant_turns: 2}",),
    "actor_rollout_ref.rollout.agent.default_agent_loop=support.slow_loop:SlowTool",
    *(f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}"),
    *("trainer.total_training_steps=100000", "algorithm.filter_groups.enable=false"),
)


def last(run: Path) -> dict[str, Any]:
    rows = metrics(run, timing=True) if (run / "metrics.jsonl").exists() else []
    return rows[-1] if rows else {}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a second engine needs a second core")
def test_engines_join_and_leave_while_the_run_trains(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = Command(rl_command(world, run, "grpo", *KEYS), tmp_path / "log", tmp_path, prepare=forked_engines.install)

    def engines(*options: object) -> Ended:
        return hone("runs", "engines", run, *options, "--wait", 60, log=tmp_path / "engines.log")

    assert command.wait_until(lambda: last(run).get("replica/serving") == 1), command.log.read_text()
    answer = engines("--replicas", 2, "--json")
    assert answer.code == 0, answer.output
    assert json.loads(answer.output)["wanted"] == 2
    joined = command.wait_until(
        lambda: last(run).get("replica/serving") == 2 and last(run)["replica/1/num_requests"] > 0
    )
    assert joined, command.log.read_text()

    cores = len(os.sched_getaffinity(0))
    answer = engines("--replicas", cores + 1)
    assert answer.code == 2 and f"{cores} cores" in answer.message, answer.output
    answer = engines("--json")
    reports = json.loads(answer.output)["replicas"]
    assert [(report["replica"], report["state"], report["starts"]) for report in reports] == [
        (0, "serving", 1),
        (1, "serving", 1),
    ]
    assert all(report["version"] >= 1 for report in reports)

    answer = engines("--replicas", 1)
    assert answer.code == 0, answer.output
    left = command.wait_until(
        lambda: last(run).get("replica/serving") == 1 and "replica/1/num_requests" not in last(run)
    )
    assert left, command.log.read_text()
    steps = last(run)["step"]
    assert command.wait_until(lambda: last(run)["step"] >= steps + 3), command.log.read_text()
    command.signal(signal.SIGTERM)
    ended = command.wait()
    assert ended.code == 128 + signal.SIGTERM, ended.output
    assert run_record(run)["status"] == "interrupted"
    assert engines("--replicas", 2).code == 2

    rows = [row for row in metrics(run, timing=True) if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["replica/serving"] for row in rows} == {1, 2}
    assert max(row["training/staleness"] for row in rows) <= 2
    draws = [json.loads(line) for line in (run / "coverage.jsonl").read_text().splitlines()]
    trained = [line["draw"] for line in draws if line.get("fate") == "trained"]
    assert len(trained) == len(set(trained)) == len(rows) * PROMPTS, "nothing is lost, and nothing is trained on twice"
    assert max(Counter(line["draw"] for line in draws if "draw" in line).values()) == 1
    report = hone("runs", "coverage", run, log=tmp_path / "coverage.log")
    assert report.code == 0, report.output
