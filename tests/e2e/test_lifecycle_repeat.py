"""The same seed gives the same metrics; a run that is killed or told to stop goes on as if nothing had happened."""

import random
import signal
import time
from pathlib import Path

import pytest
from support.launch import Command, hone, kill
from support.world import World, curve, metrics, rl_command, run_record, sft_command, steps_saved

pytestmark = pytest.mark.slow

STEPS = 8
GRPO = ("grpo", "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.shuffle=true")
PPO = (
    "ppo",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "critic.optim.lr=3e-3",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.05",
    "algorithm.kl_ctrl.horizon=200",
    "actor_rollout_ref.actor.entropy_target=100",
    "actor_rollout_ref.actor.entropy_coeff_delta=0.001",
)
LORA = (
    "grpo",
    "actor_rollout_ref.actor.optim.lr=3e-3",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
)
LONG = pytest.mark.long("hone/training/checkpoints", "hone/trainers", "hone/data/prompts.py")
"""Of kinds whose state the others of a test have a part of."""
RUNS = {"grpo": GRPO, "ppo": PPO, "lora": LORA}
COMMON = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=3",
    "trainer.test_freq=3",
    "data.train_batch_size=6",
    "trainer.max_ckpt_to_keep=2",
)


def arguments(world: World, run: Path, kind: str) -> list[str]:
    if kind == "sft":
        return sft_command(world, run, *COMMON, f"data.val_files={world.conversations}", "data.val_max_samples=32")
    preset, *overrides = RUNS[kind]
    return rl_command(world, run, preset, *COMMON, *overrides, f"data.val_files={world.val}")


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory):
    """Metrics of an uninterrupted run of each kind."""
    found = {}

    def of(kind: str):
        if kind not in found:
            root = tmp_path_factory.mktemp(kind)
            ended = hone(*arguments(world, root / "run", kind), log=root / "log")
            assert ended.code == 0, ended.output
            found[kind] = metrics(root / "run")
            assert [row["step"] for row in found[kind]] == list(range(STEPS + 1))
        return found[kind]

    return of


def resumed(world: World, run: Path, kind: str, log: Path) -> list:
    ended = hone(*arguments(world, run, kind), log=log)
    assert ended.code == 0, ended.output
    assert run_record(run)["status"] == "finished"
    assert steps_saved(run) == [STEPS - 2, STEPS]
    assert not list((run / "checkpoints").glob(".partial-*"))
    return metrics(run)


@pytest.mark.parametrize("kind", ["grpo", pytest.param("sft", marks=LONG)])
def test_the_same_seed_gives_the_same_metrics(world, whole, tmp_path, kind):
    ended = hone(*arguments(world, tmp_path / "run", kind), log=tmp_path / "log")
    assert ended.code == 0, ended.output
    assert metrics(tmp_path / "run") == whole(kind)


def test_another_seed_gives_other_metrics(world, whole, tmp_path):
    ended = hone(*arguments(world, tmp_path / "run", "grpo"), "trainer.seed=2", log=tmp_path / "log")
    assert ended.code == 0, ended.output
    assert curve(tmp_path / "run") != [row["critic/score/mean"] for row in whole("grpo") if "critic/score/mean" in row]


@pytest.mark.parametrize(
    ("kind", "seed"),
    [*(pytest.param(kind, seed, marks=LONG) for seed, kind in enumerate(RUNS, 1)), ("sft", 4)],
)
def test_killed_at_random_steps_and_run_again(world, whole, tmp_path, kind, seed):
    draw, run = random.Random(seed), tmp_path / "run"
    expected = whole(kind)
    seen = run / "metrics.jsonl"
    for step in (draw.randint(1, 3), draw.randint(4, STEPS - 1)):  # before and after the first checkpoint
        command = Command(arguments(world, run, kind), tmp_path / f"log{step}")
        reached = command.wait_until(lambda step=step: seen.exists() and len(seen.read_text().splitlines()) > step)
        if step >= 4:  # a checkpoint is written while the next steps run
            reached = reached and command.wait_until(lambda: bool(steps_saved(run)))
        assert reached, command.log.read_text()
        time.sleep(draw.random() * 0.05)
        assert kill(command) == -signal.SIGKILL
        assert run_record(run)["status"] in {"running", "failed"}  # failed, once the watcher has seen it
    assert resumed(world, run, kind, tmp_path / "log") == expected
    assert len(run_record(run)["resumed"]) >= 1


@pytest.mark.parametrize("kind", ["grpo", pytest.param("ppo", marks=LONG)])
def test_killed_while_a_checkpoint_is_written(world, whole, tmp_path, kind):
    expected, run = whole(kind), tmp_path / "run"
    for delay in (0.0, 0.01):
        command = Command(arguments(world, run, kind), tmp_path / "log_killed")
        newest = max(steps_saved(run), default=0)
        partial = run / "checkpoints" / f".partial-step_{newest + 3}"
        assert command.wait_until(partial.exists), command.log.read_text()
        time.sleep(delay)
        assert kill(command) == -signal.SIGKILL
    assert resumed(world, run, kind, tmp_path / "log") == expected


@pytest.mark.parametrize(
    ("kind", "number"),
    [("grpo", signal.SIGTERM), pytest.param("ppo", signal.SIGINT, marks=LONG), ("sft", signal.SIGTERM)],
)
def test_told_to_stop(world, whole, tmp_path, kind, number):
    run, expected = tmp_path / "run", whole(kind)
    seen = run / "metrics.jsonl"
    command = Command(arguments(world, run, kind), tmp_path / "log_stopped")
    assert command.wait_until(lambda: seen.exists() and len(seen.read_text().splitlines()) > 3)
    command.signal(number, group=number == signal.SIGINT)
    ended = command.wait()
    assert ended.code == 128 + number, ended.output
    assert "Traceback" not in ended.output
    record = run_record(run)
    assert record["status"] == "interrupted"
    assert number.name in record["exit_reason"]
    assert record["last_step"] == metrics(run)[-1]["step"] == steps_saved(run)[-1]
    assert record["last_step"] < STEPS
    ended = hone(*arguments(world, run, kind), log=tmp_path / "log")
    assert ended.code == 0, ended.output
    assert metrics(run) == expected


def test_a_finished_run_is_not_trained_again(world, tmp_path):
    run = tmp_path / "run"
    first = hone(*arguments(world, run, "grpo"), log=tmp_path / "log1")
    before = {file: file.stat().st_mtime_ns for file in (run / "checkpoints").rglob("*")}
    rows = (run / "metrics.jsonl").read_text()
    again = hone(*arguments(world, run, "grpo"), log=tmp_path / "log2")
    assert (first.code, again.code) == (0, 0), again.output
    assert (run / "metrics.jsonl").read_text() == rows
    assert {file: file.stat().st_mtime_ns for file in (run / "checkpoints").rglob("*")} == before
    assert run_record(run)["status"] == "finished"


def test_more_steps_continue_the_curve(world, whole, tmp_path):
    run = tmp_path / "run"
    short = [a for a in arguments(world, run, "grpo") if "total_training_steps" not in a]
    assert hone(*short, "trainer.total_training_steps=4", log=tmp_path / "log1").code == 0
    ended = hone(*short, f"trainer.total_training_steps={STEPS}", log=tmp_path / "log2")
    assert ended.code == 0, ended.output
    trained = [name for name in metrics(run)[-1] if not name.startswith("val")]
    expected = whole("grpo")
    assert [[row.get(n) for n in trained] for row in metrics(run)] == [
        [row.get(n) for n in trained] for row in expected
    ]


def test_resume_modes(world, whole, tmp_path):
    run = tmp_path / "run"
    assert hone(*arguments(world, run, "grpo"), "trainer.max_ckpt_to_keep=null", log=tmp_path / "log").code == 0
    rows = (run / "metrics.jsonl").read_text()

    refused = hone(*arguments(world, run, "grpo"), "trainer.resume_mode=disable", log=tmp_path / "log")
    assert refused.code == 2
    assert "trainer.experiment_name=" in refused.message
    assert (run / "metrics.jsonl").read_text() == rows

    other = hone(*arguments(world, run, "grpo"), "actor_rollout_ref.model.lora_rank=4", log=tmp_path / "log")
    assert other.code == 2
    assert "actor_rollout_ref.model.lora_rank=4" in other.message
    assert (run / "metrics.jsonl").read_text() == rows

    changed = hone(
        *arguments(world, run, "grpo"),
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={run}/checkpoints/step_3",
        "trainer.max_ckpt_to_keep=1",
        log=tmp_path / "log",
    )
    assert changed.code == 0, changed.output
    assert metrics(run) == whole("grpo")
    assert steps_saved(run) == [STEPS], "the later checkpoints of the first try are not mistaken for its own"
    assert "set aside" in changed.message

    elsewhere = tmp_path / "elsewhere"
    copied = hone(
        *arguments(world, elsewhere, "grpo"),
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={run}/checkpoints/abandoned_step_6",
        "actor_rollout_ref.actor.clip_ratio=0.3",
        log=tmp_path / "log",
    )
    assert copied.code == 0, copied.output
    assert [row["step"] for row in metrics(elsewhere)] == [7, 8]
    assert "clip_ratio: 0.2 -> 0.3" in copied.message
