"""A stored step computed again is the step: its advantages bit for bit, its gradient norm, and those of runs of other methods."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.launch import hone
from support.world import World, rl_command

from hone.apps.lab.replay.stored import WeightGradients, load_step
from hone.apps.lab.replay.trace import trace
from hone.apps.lab.replay.what_if import recompute, what_if
from hone.apps.lab.viewer.tokens import loss_factors
from hone.config.trust import run_config
from hone.insight.archive.read import open_archive
from hone.insight.run_files import read_metrics
from hone.trainers.algorithm import Algorithm

STEPS = ("trainer.total_training_steps=2", "trainer.rollout_dump_freq=1", "trainer.test_freq=0", "trainer.save_freq=1")
ONE_UPDATE = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
METHODS = {
    "rloo": ("algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"),
    "gspo": ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo",),
    "kl": ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.3"),
    "kl_loss": ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.2"),
    "correction": (
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.actor.recompute_old_log_probs=true",
    ),
    "remax": ("algorithm.adv_estimator=remax",),
    "otb": ("algorithm.adv_estimator=optimal_token_baseline",),
    "prime": ("algorithm.adv_estimator=prime",),
    "entropy_target": ("actor_rollout_ref.actor.entropy_target=0.0001",),  # a bonus that rests
}


def trained(world: World, folder: Path, *overrides: str) -> Path:
    ended = hone(*rl_command(world, folder, "grpo", *STEPS, *ONE_UPDATE, *overrides), log=folder.with_suffix(".log"))
    assert ended.code == 0, ended.output
    return folder


@pytest.fixture(scope="module")
def plain(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(world, tmp_path_factory.mktemp("plain") / "run")


def grad_norm(run: Path, step: int) -> float:
    return next(row["actor/grad_norm"] for row in read_metrics(run) if row["step"] == step)


@pytest.mark.slow
@pytest.mark.application("hone/apps/lab/replay", "hone/cli/stored.py", "hone/training", "hone/algorithms")
@pytest.mark.parametrize("method", METHODS)
def test_the_step_of_each_method_is_computed_again(world: World, plain: Path, tmp_path: Path, method: str) -> None:
    """The first step of both runs has the same rollouts, so the plain one under another method is the other run."""
    other = trained(world, tmp_path / "run", *METHODS[method])
    for step in (1, 2):
        stored = load_step(other, step)
        weights = WeightGradients(stored)
        result = what_if(stored, [], weights)
        assert result.gap == 0
        norm = float(weights.gradient(result.actual.token_gradient).norm())
        assert norm == pytest.approx(grad_norm(other, step), rel=1e-4)
    traced = hone("trace", other, "--step", "2", "--explain", log=tmp_path / "log")
    assert traced.code == 0, traced.output
    if method in ("rloo", "gspo"):  # the others need columns that a plain run does not have
        stored = load_step(plain, 1)
        changed = recompute(stored, run_config(plain, METHODS[method]))
        actual = load_step(other, 1)
        assert changed.advantages.values.tolist() == actual.batch.ragged("advantages").values.tolist()
        norm = float(WeightGradients(stored).gradient(changed.token_gradient).norm())
        assert norm == pytest.approx(grad_norm(other, 1), rel=1e-4)


@pytest.mark.slow
@pytest.mark.application("hone/apps/lab/replay", "hone/cli/stored.py", "hone/training", "hone/algorithms")
def test_every_method_in_one_table(plain: Path, tmp_path: Path) -> None:
    ended = hone("what-if", plain, "--step", "1", "--json", log=tmp_path / "log")
    assert ended.code == 0, ended.output
    table = json.loads(ended.output[ended.output.index("{") :])
    assert table["advantage_gap"] == 0 and table["exact"]
    lines = {line["name"]: line for line in table["compared"]}
    assert lines["the run"]["cosine"] == pytest.approx(1) and lines["the run"]["direction"] == 1
    same = lines["adv_estimator=grpo"]
    assert same["cosine"] == pytest.approx(1) and same["direction"] == pytest.approx(1)
    assert lines["adv_estimator=gae"].keys() == {"name", "missing"} and lines["adv_estimator=rloo"]["missing"] is None
    assert len(lines) > 30
    ended = hone("what-if", plain, "--step", "1", "algorithm.norm_adv_by_std_in_grpo=false", log=tmp_path / "other")
    assert ended.code == 0 and "norm_adv_by_std_in_grpo=false" in ended.message


@pytest.mark.slow
@pytest.mark.application("hone/apps/lab/replay", "hone/cli/stored.py", "hone/training", "hone/algorithms")
def test_a_step_without_all_its_samples_or_its_checkpoint_is_refused(world: World, tmp_path: Path) -> None:
    run = trained(
        world, tmp_path / "run", "trainer.rollout_dump_freq=2", "trainer.save_freq=0", "trainer.rollout_dump_share=1.0"
    )
    ended = hone("what-if", run, "--step", "2", log=tmp_path / "log")
    assert ended.code == 2 and "E-what-if" in ended.output and "save_steps_for_replay" in ended.output
    assert hone("what-if", run, "--step", "2", "--no-weights", log=tmp_path / "log2").code == 0
    assert hone("what-if", run, "--step", "9", log=tmp_path / "log3").code == 2


@pytest.mark.slow
@pytest.mark.application("hone/apps/lab/replay", "hone/cli/stored.py", "hone/training", "hone/algorithms")
def test_the_viewer_shows_the_chain_of_each_token(plain: Path) -> None:
    """The product of the factors, and their shares of the step, for every token that the policy sampled."""
    total = 0.0
    for record in open_archive(plain).records(1):
        factors = {factor["name"]: factor for factor in loss_factors(plain, record)}
        assert list(factors) == ["ratio", "clip", "normaliser", "KL loss", "share"]
        assert all(factor["key"] for factor in factors.values())
        for token, share in enumerate(factors["share"]["values"]):
            sampled = record["response_mask"][token]
            assert (share > 0) == bool(sampled and record["advantages"][token])
            assert (factors["share"]["why"][token] is None) == (share > 0)
            total += share
    assert total == pytest.approx(1, rel=1e-5)


@pytest.mark.slow
@pytest.mark.application("hone/apps/lab/replay", "hone/cli/stored.py", "hone/trainers")
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_trace_has_the_numbers_of_the_step(world: World, plain: Path, tmp_path: Path, mode: str) -> None:
    """At the first update every ratio is 1: a token's derivative is that of the KL less its advantage, times its weight in the mean."""
    run = plain
    if mode != "token-mean":
        run = trained(world, tmp_path / "run", f"actor_rollout_ref.actor.loss_agg_mode={mode}")
    stored = load_step(run, 2)
    actor = stored.config.actor_rollout_ref.actor
    assert actor.use_kl_loss and actor.kl_loss_type == "low_var_kl"
    uids = list(dict.fromkeys(stored.batch.uids))
    traces = {uid: trace(stored, uid) for uid in uids}
    assert sum(one.share for traced in traces.values() for one in traced.sequences) == pytest.approx(1, abs=1e-5)
    sampled = int(stored.batch.ragged("response_mask").values.sum())
    records = {(record["uid"], record["index"]): record for record in open_archive(run).records(2)}
    for uid, traced in traces.items():
        for one in traced.sequences:
            record = records[uid, one.index]
            assert one.score == record["score"] and one.text == record["text"]
            own = sum(record["response_mask"])
            weight = 1 / sampled if mode == "token-mean" else 1 / len(stored.batch) / own
            for place, token in enumerate(one.tokens):
                kl = actor.kl_loss_coef * (1 - math.exp(token["ref_log_probs"] - token["old_log_probs"]))
                derivative = (kl - record["advantages"][place]) * record["response_mask"][place] * weight
                assert token["derivative"] == pytest.approx(derivative, rel=1e-4, abs=1e-9)
                assert token["old_log_probs"] == record["old_log_probs"][place]
    metrics = next(row for row in read_metrics(run) if row["step"] == 2)
    timed = {name.removeprefix("timing_s/") for name in metrics if name.startswith("timing_s/")}
    recorded = json.loads((run / "run.json").read_text(encoding="utf-8"))["flow"]
    names = [stage["name"] for stage in recorded["stages"]]
    assert names == [stage.name for stage in traces[uids[0]].stages] and set(names) <= timed
    assert {stage.name for stage in Algorithm.planned(stored.config) if not stage.when}.isdisjoint(timed)
    for column, most in recorded["bytes"].items():
        values = stored.batch.ragged(column).values if column in stored.batch else None
        assert values is None or values.nbytes <= most


@pytest.mark.slow
@pytest.mark.application("hone/apps/lab/replay", "hone/cli/stored.py", "hone/trainers")
def test_the_commands_of_a_trace(plain: Path, tmp_path: Path) -> None:
    shown = hone("trace", plain, "--step", "1", "--explain", log=tmp_path / "log")
    assert shown.code == 0, shown.output
    read = hone("trace", plain, "--step", "1", "--json", log=tmp_path / "log")
    traced = json.loads(read.output[read.output.index("{") :])
    assert len(traced["sequences"]) > 1 and traced["uid"] in shown.output
    assert all(stage["about"] for stage in traced["stages"])
    for wrong in (["--prompt", "none"], ["--answer", "99"], ["--step", "9"]):
        assert hone("trace", plain, *wrong, log=tmp_path / "log").code == 2
