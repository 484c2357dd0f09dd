"""Asynchronous runs with a real engine process: bounded age, exact resume after a kill, interrupted responses."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import forked_engines
from support.archives import records
from support.launch import Command, hone, kill
from support.world import World, metrics, rl_command, run_record

from hone.insight.records import weight_versions

LONG = pytest.mark.long("hone/trainers", "hone/generation/native", "hone/generation/remote")
ABOUT = pytest.mark.application("hone/trainers", "hone/generation", "hone/training")
NATIVE = (
    "trainer.async.max_staleness=1",
    "trainer.rollout_dump_freq=1",
    "trainer.total_training_steps=6",
    "preflight.reward_rows=0",
)


def started(world: World, run: Path, *overrides: str) -> Command:
    words = rl_command(world, run, "grpo", *NATIVE, *overrides)
    return Command(words, run.with_suffix(".log"), prepare=forked_engines.install)


def train(world: World, run: Path, *overrides: str) -> None:
    ended = started(world, run, *overrides).wait()
    assert ended.code == 0, ended.output


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("async") / "run"
    train(world, run, "trainer.save_freq=2")
    return run


def test_groups_are_one_update_old_and_their_tokens_say_so(undisturbed: Path) -> None:
    rows = metrics(undisturbed)
    assert [row["training/staleness"] for row in rows if row["step"]] == [0, 1, 1, 1, 1, 1]
    for step in range(1, 7):
        assert {weight_versions(record) for record in records(undisturbed, step)} == {(max(0, step - 2),) * 2}
    assert rows[-1]["coverage/drawn"] == rows[-1]["coverage/trained"] == 72, (
        "nothing is generated for steps after the last"
    )
    assert rows[-1]["rollout_corr/log_ratio_abs_max"] > 0, "the correction compares old tokens with the present policy"


def test_a_killed_run_resumes_as_if_nothing_had_happened(world: World, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = started(world, run, "trainer.save_freq=2")
    assert command.wait_until(lambda: (run / "checkpoints/step_4/checkpoint.json").exists())
    assert kill(command) < 0
    train(world, run, "trainer.save_freq=2")
    for step in range(1, 7):
        ours, theirs = records(run, step), records(undisturbed, step)
        for name in ("uid", "response_ids", "score", "token_versions"):
            assert [record[name] for record in ours] == [record[name] for record in theirs], (step, name)
    assert (run / "coverage.jsonl").read_text().count('"trained"') == (
        undisturbed / "coverage.jsonl"
    ).read_text().count('"trained"')
    report = hone("runs", "coverage", run, "--json", log=tmp_path / "coverage.log")
    assert report.code == 0, report.output
    # log-probs depend in their last bits on the requests that the engine computes together
    for ours, theirs in zip(metrics(run), metrics(undisturbed), strict=True):
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)
    assert run_record(run)["status"] == "finished"


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param((), marks=LONG),
        pytest.param(("trainer.async.interrupted_cache=keep", "actor_rollout_ref.rollout.stop=[77]"), marks=ABOUT),
    ],
    ids=["recompute", "keep"],
)
def test_new_weights_interrupt_responses(world: World, tmp_path: Path, cache: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    train(
        world,
        run,
        *cache,
        "trainer.async.partial_rollouts=true",
        "trainer.async.max_staleness=2",
        "trainer.async.order=ready_first",
    )
    rows = [row for row in metrics(run) if row["step"]]
    assert max(row["training/staleness"] for row in rows) <= 2
    versions = [weight_versions(record) for step in range(1, 7) for record in records(run, step)]
    assert all(
        last < step for step in range(1, 7) for record in records(run, step) for last in weight_versions(record)[1:]
    )
    assert len({version for pair in versions for version in pair}) > 2


ONE_UPDATE = ("actor_rollout_ref.actor.ppo_mini_batch_size=12", "actor_rollout_ref.actor.optim.lr=1e-3")


@pytest.mark.parametrize(
    "mode", [pytest.param("token-mean", marks=LONG), pytest.param("seq-mean-token-mean", marks=ABOUT)]
)
def test_a_streamed_batch_gives_the_same_update(world: World, tmp_path: Path, mode: str) -> None:
    runs = {"turns": (), "stream": ("trainer.async.stream=true",)}
    for name, keys in runs.items():
        own = (
            "trainer.total_training_steps=4",
            f"actor_rollout_ref.actor.loss_agg_mode={mode}",
            "preflight.reward_rows=0",
        )
        words = rl_command(world, tmp_path / name, "grpo", *ONE_UPDATE, *own, "trainer.rollout_dump_freq=1", *keys)
        ended = hone(*words, log=tmp_path / f"{name}.log", prepare=forked_engines.install)
        assert ended.code == 0, ended.output
    for step in range(1, 5):
        ours, theirs = records(tmp_path / "stream", step), records(tmp_path / "turns", step)
        for key in ("uid", "response_ids", "score"):
            assert [record[key] for record in ours] == [record[key] for record in theirs], (step, key)
    for ours, theirs in zip(metrics(tmp_path / "stream"), metrics(tmp_path / "turns"), strict=True):
        for key in ("actor/grad_norm", "actor/entropy", "critic/advantages/max"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4)
        assert "async/age_1/token_share" not in ours
