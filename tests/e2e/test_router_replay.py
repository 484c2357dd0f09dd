"""The trainer follows the experts that the engine chose: the gap between engine and trainer, other engines and runtimes, a resumed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.launch import hone
from support.world import World, curve, metrics, rl_command

pytestmark = pytest.mark.application("hone/models", "hone/training", "hone/generation")

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REPLAY = f"{ACTOR}.router_replay.mode=R3"
GAP = "training/rollout_log_probs_diff_mean"
EXPERTS = pytest.mark.long(
    *("hone/models/experts.py", "hone/generation/native", "hone/training/engine.py", "hone/apps/lab/replay"),
    *("hone/data/types.py", "hone/trainers/rollouter.py"),
)
STEPS = (
    "trainer.total_training_steps=3",
    "trainer.test_freq=-1",
    f"{ACTOR}.optim.lr=1e-3",
    f"{ACTOR}.recompute_old_log_probs=true",
)


@pytest.fixture(scope="module")
def experts(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """The world with a mixture of experts."""
    model = tmp_path_factory.mktemp("experts") / "model"
    words = ("init", "--arch", "qwen3_moe", "--size", "500k", "--tokenizer", world.tokenizer, "--out", model)
    ended = hone(*words, log=model.with_suffix(".log"))
    assert ended.code == 0, ended.output
    return replace(world, model=model)


def trained(world: World, folder: Path, *words: str) -> Path:
    command = rl_command(world, folder, "grpo", *STEPS, "trainer.watchdog_seconds=0", *words)
    ended = hone(*command, log=folder.with_suffix(".log"))
    assert ended.code == 0, ended.output
    return folder


@pytest.mark.slow
def test_what_two_dtypes_route_otherwise_is_followed(experts: World, tmp_path: Path) -> None:
    words = (f"{ROLLOUT}.dtype=bfloat16", "trainer.save_freq=0")
    free = trained(experts, tmp_path / "free", *words)
    followed = trained(experts, tmp_path / "followed", *words, REPLAY)
    assert not curve(free, "moe/replayed") and len(curve(free, "moe/max_load")) == 3
    assert all(1 <= load <= 4 for load in curve(followed, "moe/max_load"))
    # the last token of a response was no input of the engine
    assert all(0.85 < share < 1 for share in curve(followed, "moe/replayed"))
    changed = curve(followed, "moe/changed_experts")
    assert 0 < max(changed) < 0.1
    assert sum(curve(followed, GAP)) < sum(curve(free, GAP))


@EXPERTS
def test_a_replica_of_the_native_engine_reports_the_same(experts: World, tmp_path: Path) -> None:
    local = trained(experts, tmp_path / "local", REPLAY, "trainer.save_freq=0")
    served = trained(experts, tmp_path / "served", REPLAY, "trainer.save_freq=0", f"{ROLLOUT}.num_replicas=1")
    for name in ("moe/replayed", "actor/grad_norm", "critic/score/mean"):
        assert curve(served, name) == pytest.approx(curve(local, name), rel=1e-5)


@EXPERTS
def test_a_resumed_run_follows_the_experts_of_its_saved_groups(experts: World, tmp_path: Path) -> None:
    words = (REPLAY, "trainer.async.max_staleness=1", "trainer.save_freq=1")
    whole = trained(experts, tmp_path / "whole", *words)
    run = trained(experts, tmp_path / "run", *words, "trainer.total_training_steps=2")
    trained(experts, run, *words)
    name = "moe/replayed"
    assert curve(run, name)[-1] == pytest.approx(curve(whole, name)[-1], abs=0.02) and curve(run, name)[-1] > 0.85


@EXPERTS
def test_what_needs_experts_of_the_archive_is_refused(experts: World, tmp_path: Path) -> None:
    """The archive has no experts: a gradient of other experts would be of another update. A whole replay samples them again."""
    run = trained(
        experts,
        tmp_path / "run",
        REPLAY,
        "trainer.save_freq=1",
        "trainer.rollout_dump_freq=1",
        "trainer.save_steps_for_replay=[2]",
    )
    for number, (words, code) in enumerate(
        [
            (("what-if", run, "--step", 2), 2),
            (("what-if", run, "--step", 2, "--no-weights"), 0),
            (("replay", run, "--step", 2, "--from", "adv"), 2),
            (("replay", run, "--step", 2), 0),
        ]
    ):
        ended = hone(*words, log=tmp_path / f"log{number}")
        assert ended.code == code, ended.output
        assert code == 0 or "router_replay.mode" in ended.output
    command = rl_command(experts, tmp_path / "saving", "grpo", *STEPS, REPLAY, "trainer.save_microbatch_steps=[1]")
    ended = hone(*command, log=tmp_path / "log")
    assert ended.code == 2 and "R78" in ended.output


@pytest.mark.slow
def test_a_critic_routes_for_itself(experts: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = (*STEPS, REPLAY, "trainer.save_freq=0", "trainer.total_training_steps=2")
    ended = hone(*rl_command(experts, folder, "ppo", *words), log=tmp_path / "log")
    assert ended.code == 0, ended.output
    assert all(share > 0.85 for share in curve(folder, "moe/replayed")) and len(curve(folder, "critic/vf_loss")) == 2


@pytest.mark.long("hone/models/experts.py", "hone/training/backends")
def test_two_workers_follow_as_one_process_does(experts: World, tmp_path: Path) -> None:
    words = (REPLAY, "trainer.save_freq=0")
    local = trained(experts, tmp_path / "local", *words)
    ray = ("trainer.runtime=ray", "trainer.n_gpus_per_node=2", "ray.device_fraction=0.5", f"{ACTOR}.strategy=fsdp2")
    two = trained(experts, tmp_path / "two", *words, *ray)
    for row, other in zip(metrics(two), metrics(local), strict=True):
        for name in ("moe/replayed", "actor/grad_norm", "actor/loss", "critic/score/mean"):
            if name in other:
                assert row[name] == pytest.approx(other[name], abs=0.02 if name == "moe/replayed" else 1e-4), name


@pytest.mark.slow
def test_a_balance_loss_that_is_trained_is_part_of_the_loss(experts: World, tmp_path: Path) -> None:
    free = trained(experts, tmp_path / "free")
    balanced = trained(experts, tmp_path / "balanced", f"{ACTOR}.router_aux_loss_coef=0.5")
    assert not curve(free, "actor/balance_loss")
    parts = zip(
        *(curve(balanced, f"actor/{name}") for name in ("loss", "pg_loss", "kl_loss", "balance_loss")), strict=True
    )
    for loss, policy, kl, balance in parts:
        assert loss == pytest.approx(policy + 0.001 * kl + 0.5 * balance, rel=1e-5) and 1 <= balance < 2
