"""Workers are killed and stopped at random moments of training: the run ends with the metrics of an undisturbed one."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from support.transcripts import missing, shown_in
from support.world import World, metrics, rl_command, run_record

from hone.cluster.failures import WorkerLost
from hone.cluster.ray.connection import SETTINGS
from hone.config import RLConfig, load_config
from hone.insight import activity
from hone.insight.activity import Record
from hone.insight.coverage import Fate, read_coverage
from hone.trainers.rl import train

pytestmark = pytest.mark.long("hone/training/checkpoints", "hone/trainers/session.py", "hone/cluster/supervisor.py")

ONCE = ("starting", "checkpoint")
STAGES = (*ONCE, "gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights")
KILLS = 10


@pytest.fixture(scope="module")
def cluster(forked_ray_workers):
    """One Ray for all runs of the module; they leave it open."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=150 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


def run(world: World, where: Path, *overrides: str) -> list[dict]:
    """Metrics of a run over two workers."""
    words = rl_command(world, where, "grpo", "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.total_training_steps=6")
    own = ("trainer.runtime=ray", "trainer.n_gpus_per_node=2", "trainer.save_freq=2", "trainer.watchdog_seconds=20")
    assert train(load_config(RLConfig, [*words[2:], *own, *overrides], preset="grpo")) == 0
    rows = metrics(where)
    gaps = [row.pop("rollout/canary_gap") for row in rows]  # rounding between engine and trainer, not of the run
    assert max(gaps) < 1e-5
    return rows


@pytest.fixture(scope="module")
def undisturbed(cluster, world: World, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    found = run(world, tmp_path_factory.mktemp("undisturbed") / "run")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    return found


class Disturber(threading.Thread):
    """Sends signals to workers, each time a random one in a random stage of the run.

    Args:
        folder: where the processes of the run publish what they do.
        signals: in order.
        seed: of the choices.
    """

    def __init__(self, folder: Path, signals: list[signal.Signals], seed: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.signals, self.random = folder, signals, random.Random(seed)
        self.sent: list[tuple[str, str]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        struck: set[int] = set()
        for number in self.signals:
            stages = STAGES if number == signal.SIGKILL else ("gen", "update_actor")
            stage, odd = self.random.choice(stages), self.random.random() < 0.5
            worker = self._wait(lambda stage=stage, odd=odd: self._victim(stage, odd, struck))
            if worker is None:
                return
            time.sleep(self.random.random() * 0.1)
            self.sent.append((worker.name, stage))
            struck.add(worker.pid)
            os.kill(worker.pid, number)

    def _victim(self, stage: str, odd: bool, struck: set[int]) -> Record | None:
        """A worker, once the run is in this stage: of an odd step, the first after a checkpoint, or of an even one.

        No stage means any.
        """
        records = activity.read_records(self.folder)
        driver = next((record for record in records if record.role == "driver"), None)
        alive = [
            record for record in records if record.role == "main" and record.is_alive() and record.pid not in struck
        ]
        if driver is None or (stage and stage not in driver.stage.split(" > ")) or not alive:
            return None
        if stage and stage not in ONCE and (int(driver.spans[0].what.removeprefix("step ")) % 2 == 1) != odd:
            return None
        return self.random.choice(alive)

    def _wait(self, look: Callable[[], Record | None]) -> Record | None:
        while not self.ended.is_set():
            found = look()
            if found is not None:
                return found
            time.sleep(0.002)
        return None


def test_a_disturbed_run_ends_with_the_metrics_of_an_undisturbed_one(undisturbed, world, tmp_path):
    where, signals = tmp_path / "run", [signal.SIGKILL] * KILLS + [signal.SIGSTOP]
    disturber = Disturber(where / activity.FOLDER, signals, seed=2)
    disturber.start()
    try:
        found = run(world, where, "trainer.max_restarts=100")
    finally:
        disturber.ended.set()
        disturber.join()
    assert found == undisturbed
    record = run_record(where)
    assert len(disturber.sent) == len(signals), f"the run ended before: {disturber.sent}"
    assert len(record["restarts"]) >= KILLS and record["status"] == "finished"
    reports = [path.read_text() for path in (where / "hangs").glob("hang_*.txt")]
    assert any(f"Culprit: {disturber.sent[-1][0]} " in report for report in reports), disturber.sent


def test_without_restarts_the_run_ends_resumable(undisturbed, world, tmp_path):
    where = tmp_path / "run"

    def saved() -> bool:
        return (where / "checkpoints" / "step_2").exists()

    disturber = Disturber(where / activity.FOLDER, [signal.SIGKILL], 3)
    find = disturber._victim
    disturber._victim = lambda stage, odd, struck: find("update_actor", True, struck) if saved() else None
    disturber.start()
    try:
        with pytest.raises(WorkerLost) as caught:
            run(world, where)
    finally:
        disturber.ended.set()
        disturber.join()
    name = disturber.sent[0][0]
    assert caught.value.exit_code == 3 and f"{name} (pid " in caught.value.what and "was killed" in caught.value.what
    said = re.sub(r"main\[\d\]", "main[1]", caught.value.render())
    said = re.sub(r"(, in '[^']*'|, between two calls);", ", in 'actor.update';", said)
    assert not missing(shown_in("failures.md", "E-worker-lost"), said), said
    assert run_record(where)["status"] == "failed" and name in run_record(where)["exit_reason"]
    assert run(world, where) == undisturbed


def test_an_asynchronous_run_survives_kills_of_its_learner(cluster, world, tmp_path):
    where, kills, steps, prompts = tmp_path / "run", 3, 6, 4
    apart = "actor_rollout_ref.rollout={enable_resource_pool: true, nnodes: 1, n_gpus_per_node: 1}"
    keys = (
        *("trainer.async.max_staleness=2", "trainer.async.partial_rollouts=true", apart, "trainer.n_gpus_per_node=1"),
        *("trainer.save_freq=1", "trainer.max_restarts=100", f"trainer.total_training_steps={steps}"),
        *("algorithm.filter_groups.enable=false", f"data.train_batch_size={prompts}"),
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
    )
    disturber = Disturber(where / activity.FOLDER, [signal.SIGKILL] * kills, seed=5)
    any_stage = disturber._victim

    def after_checkpoint(_stage: str, _odd: bool, struck: set[int]) -> Record | None:
        """A learner, once the run has saved one step more than at the last kill: stages are too short to wait for."""
        saved = (where / "checkpoints" / f"step_{len(disturber.sent) + 1}").exists()
        return any_stage("", True, struck) if saved else None

    disturber._victim = after_checkpoint
    disturber.start()
    try:
        run(world, where, *keys)
    finally:
        disturber.ended.set()
        disturber.join()
    record, coverage = run_record(where), read_coverage(where)
    assert len(disturber.sent) == kills <= len(record["restarts"]) and record["status"] == "finished", disturber.sent
    assert coverage.problem is None
    trained = [ended.draw for ended in coverage.draws if ended.fate == Fate.TRAINED]
    assert len(trained) == len(set(trained)) == steps * prompts, "nothing is lost, and nothing is trained on twice"
    assert max(ended.lag or 0 for ended in coverage.draws) <= 2
