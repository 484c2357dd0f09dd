"""Distillation in whole runs: every loss, several teachers, the policy as its own teacher, no reward, a pool of its own."""

import json
import os
from pathlib import Path

import pytest
from support.launch import hone
from support.tiny_runs import make_model, make_tiny_runs, rl_words

from hone.config.distillation import SAMPLED_MODES, TOP_K_MODES, WHOLE_MODES

pytestmark = pytest.mark.application(
    "hone/trainers/teacher_inputs.py",
    "hone/trainers/teacher_inputs.py",
    "hone/training/learners.py",
    "hone/training/served_teacher.py",
    "hone/algorithms/distillation.py",
    "hone/cluster/teacher.py",
)

BLOCK = "distillation"
PRESET = ("--preset=opd", "actor_rollout_ref.rollout.n=2", "data.train_batch_size=4")
ONE_UPDATE = "actor_rollout_ref.actor.ppo_mini_batch_size=4"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_runs(folder)
    make_model(folder / "teacher", layers=1)
    return folder


def trained(tiny: Path, run: Path, *words: str, scored: bool = False) -> list[dict]:
    """Metrics of each step."""
    given = [word for word in rl_words(tiny, run, *words) if scored or "custom_reward_function" not in word]
    ended = hone(*given, log=run.with_suffix(".log"), cwd=tiny)
    assert ended.code == 0, ended.output
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", [*SAMPLED_MODES, *TOP_K_MODES, *WHOLE_MODES])
def test_every_distance_falls(tiny: Path, tmp_path: Path, mode: str) -> None:
    """Without a reward function: the data source has no scorer, and only the teacher changes the policy."""
    steps = trained(
        tiny, tmp_path / "run", *PRESET, ONE_UPDATE, f"{BLOCK}.path={tiny}/teacher", f"{BLOCK}.loss_mode={mode}",
        "trainer.total_training_steps=14", "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.total_epochs=8",
    )  # fmt: skip
    distances = [step["distillation/loss"] for step in steps]
    assert sum(distances[-3:]) < (0.95 if mode in SAMPLED_MODES else 0.8) * sum(distances[:3]), distances
    assert all(value == 0 for step in steps for name, value in step.items() if name.startswith("invariant"))
    assert all(("distillation/teacher_mass" in step) == (mode in TOP_K_MODES) for step in steps)
    assert all(step["critic/score/mean"] == 0 for step in steps)


def test_the_policy_is_a_teacher_without_anything_to_teach(tiny: Path, tmp_path: Path) -> None:
    """Two ways to its weights: a frozen copy, and the actor of the process."""
    for weights in ("initial", "current"):
        words = (ONE_UPDATE, f"{BLOCK}.self_teacher={weights}", f"{BLOCK}.loss_mode=jsd_topk", f"{BLOCK}.coef=5")
        first = trained(tiny, tmp_path / weights, *PRESET, *words)[0]
        assert abs(first["distillation/loss"]) < 1e-5
        assert first["actor/grad_norm"] < 2e-2


@pytest.mark.parametrize("lora", [0, 4])
def test_a_richer_prompt_teaches_the_plain_one(tiny: Path, tmp_path: Path, lora: int) -> None:
    rows = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text().splitlines()]
    rows = [row | {"reward_model": {"ground_truth": str(2 * number)}} for number, row in enumerate(rows)]
    (tiny / "solved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = trained(
        tiny, tmp_path / "run", "--preset=opsd", "data.train_batch_size=4", ONE_UPDATE, f"data.train_files={tiny}/solved.jsonl",
        f"actor_rollout_ref.model.lora_rank={lora}", "data.max_prompt_length=400",
    )  # fmt: skip
    assert all(step["distillation/loss"] > 1e-3 for step in steps)
    assert all(0 < step["distillation/student_mass"] <= 1.0001 for step in steps)


def test_rows_have_the_teacher_of_their_data_source(tiny: Path, tmp_path: Path) -> None:
    """One teacher is the policy itself: rows of both have half the distance of rows of the other."""
    lines = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text().splitlines()]
    mixed = [row | {"data_source": f"source{number % 2}"} for number, row in enumerate(lines)]
    (tiny / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    common = (
        *PRESET,
        ONE_UPDATE,
        f"{BLOCK}.loss_mode=reverse_kl",
        f"data.train_files={tiny}/mixed.jsonl",
        "data.shuffle=false",
    )
    teachers = f"{BLOCK}.teachers={{source0: '{tiny}/model', source1: '{tiny}/teacher'}}"
    two = trained(tiny, tmp_path / "two", *common, teachers)[0]["distillation/loss"]
    one = trained(tiny, tmp_path / "one", *common, f"{BLOCK}.path={tiny}/teacher")[0]["distillation/loss"]
    assert 0.2 * one < two < 0.8 * one


def test_teacher_and_reward_mix_by_their_weights(tiny: Path, tmp_path: Path) -> None:
    """The gradient of a mixture is that of the reward where the teacher is the policy."""
    words = (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_kl_loss=false",
    )
    alone = trained(tiny, tmp_path / "alone", *words, scored=True)[0]
    mixed = (f"{BLOCK}.enable=true", f"{BLOCK}.path={tiny}/model", f"{BLOCK}.task_weight=0.5")
    for name, mode in (("advantage", "k1"), ("loss", "reverse_kl_topk")):
        both = trained(tiny, tmp_path / name, *words, *mixed, f"{BLOCK}.loss_mode={mode}", scored=True)[0]
        assert both["actor/grad_norm"] == pytest.approx(0.5 * alone["actor/grad_norm"], rel=2e-2)
        assert both["critic/score/mean"] == alone["critic/score/mean"]


@pytest.mark.parametrize("mode", ["k1", "k2"])
def test_a_teacher_with_another_tokenizer_teaches_by_spans(tiny: Path, tmp_path: Path, mode: str) -> None:
    """Every row has the text of the policy's answer, in the tokens and the chat template of the teacher."""
    foreign = make_model(tmp_path / "foreign", layers=1, family="llama3_1")
    steps = trained(
        tiny, tmp_path / "run", *PRESET, ONE_UPDATE, f"{BLOCK}.path={foreign}", f"{BLOCK}.loss_mode={mode}",
        "trainer.total_training_steps=14", "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.total_epochs=8",
    )  # fmt: skip
    distances = [step["distillation/loss"] for step in steps]
    assert sum(distances[-3:]) < 0.95 * sum(distances[:3]), distances
    assert all(step["distillation/span_tokens"] >= 1 for step in steps)
    assert all(value == 0 for step in steps for name, value in step.items() if name.startswith("invariant"))


@pytest.mark.long(
    "hone/trainers/teacher_inputs.py",
    "hone/trainers/teacher_inputs.py",
    "hone/training/learners.py",
    "hone/training/served_teacher.py",
)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="three processes")
@pytest.mark.parametrize("mode", ["k1", "reverse_kl_topk", "forward_kl"])
def test_a_teacher_with_a_pool_of_its_own_teaches_the_same(tiny: Path, tmp_path: Path, mode: str) -> None:
    """Two actor processes and a teacher in a third: the numbers of one process."""
    words = (
        *PRESET,
        ONE_UPDATE,
        f"{BLOCK}.path={tiny}/teacher",
        f"{BLOCK}.loss_mode={mode}",
        "trainer.total_training_steps=1",
    )
    alone = trained(tiny, tmp_path / "alone", *words)[0]
    ray = ("trainer.runtime=ray", "trainer.n_gpus_per_node=2", f"{BLOCK}.enable_resource_pool=true", "ray.num_cpus=3")
    apart = trained(tiny, tmp_path / "apart", *words, *ray)[0]
    for name in ("distillation/loss", "actor/grad_norm"):
        assert apart[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5), name
