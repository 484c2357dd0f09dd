"""`hone runs bisect` names the first of ten planted divergences, and those of runs that really differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.archives import archive
from support.launch import hone
from support.tiny_runs import make_tiny_runs, rl_words

from hone.apps.lab.compare import read_whole_run
from hone.apps.lab.confidence import stored_samples
from hone.apps.lab.divergence import Bisection, Stage, bisect_runs, read_trace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.application(
        "hone/insight",
        "hone/apps/lab",
        "hone/cli/runs.py",
        "hone/trainers/archiving.py",
        "hone/trainers/batch_ops.py",
    ),
]

KEPT = ("trainer.save_freq=1", "trainer.save_microbatch_steps=[1,2]", "trainer.rollout_dump_freq=1")


def train(root: Path, name: str, *words: str) -> Path:
    ended = hone(*rl_words(root, root / name, *KEPT, *words), log=root / f"{name}.log", cwd=root)
    assert ended.code == 0, ended.output
    return root / name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bisect")
    make_tiny_runs(folder)
    train(folder, "good")
    return folder


def bisected(good: Path, bad: Path, tolerance: float = 0.0) -> Bisection:
    return bisect_runs(*(read_trace(read_whole_run(path)) for path in (good, bad)), tolerance=tolerance)


def change_samples(run: Path, step: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    records = list(stored_samples(run / "rollouts")[step]())
    change(records)
    archive(run, step, records)


def change_lines(file: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def config(run: Path) -> None:
    file = run / "config.yaml"
    text = file.read_text()
    assert text.count("max_response_length: 12\n") == 1
    file.write_text(text.replace("max_response_length: 12\n", "max_response_length: 13\n"))


def data(run: Path) -> None:
    def change(records):
        for record in records:
            if record["uid"] == records[4]["uid"]:
                record["ground_truth"] = "5"

    change_samples(run, 2, change)


def template(run: Path) -> None:
    change_samples(run, 1, lambda records: records[0]["prompt_ids"].append(7))


def order(run: Path) -> None:
    def change(lines):
        drawn = [line for line in lines if "draw" in line and line["step"] == 2]
        drawn[0]["uid"], drawn[1]["uid"] = drawn[1]["uid"], drawn[0]["uid"]

    change_lines(run / "coverage.jsonl", change)


def token(run: Path) -> None:
    def change(records):
        records[5]["response_ids"][4] += 1

    change_samples(run, 2, change)


def log_prob(run: Path) -> None:
    def change(records):
        records[3]["rollout_log_probs"][2] -= 0.01

    change_samples(run, 1, change)


def reward(run: Path) -> None:
    def change(records):
        records[7]["score"] += 0.5
        records[7]["advantages"] = [value + 0.5 for value in records[7]["advantages"]]

    change_samples(run, 2, change)


def advantage(run: Path) -> None:
    def change(records):
        records[1]["advantages"] = [-value for value in records[1]["advantages"]]

    change_samples(run, 2, change)


def micro_batch(run: Path) -> None:
    file = run / "microbatches/step_2/about.json"
    about = json.loads(file.read_text())
    about["totals"]["tokens"] += 3
    about["loss"] *= 2
    file.write_text(json.dumps(about))


def loss(run: Path) -> None:
    def change(lines):
        for line in lines:
            if line["step"] == 2 and "actor/pg_loss" in line:
                line["actor/pg_loss"] += 1e-7

    change_lines(run / "metrics.jsonl", change)


def weights(run: Path) -> None:
    file = run / "checkpoints/step_1/actor/model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name] + torch.eye(*tensors[name].shape) * 1e-4
    save_file(tensors, file)


PLANTED = [
    (config, Stage.CONFIG, None, None, "data.max_response_length"),
    (data, Stage.DATA, 2, 3, "ground_truth"),
    (template, Stage.DATA, 1, 0, "prompt_ids"),
    (order, Stage.ORDER, 2, None, "prompt 1 of the step"),
    (token, Stage.TOKENS, 2, 5, "response token 5"),
    (log_prob, Stage.LOG_PROBS, 1, 3, "log-prob of response token 3"),
    (reward, Stage.REWARDS, 2, 7, "score"),
    (advantage, Stage.ADVANTAGES, 2, 1, "advantages of response token 1"),
    (micro_batch, Stage.MICRO_BATCHES, 2, None, "tokens of the micro-batch"),
    (loss, Stage.LOSS, 2, None, "actor/pg_loss"),
    (weights, Stage.WEIGHTS, 1, None, "model.layers.1.mlp.up_proj.weight"),
]
"""What is planted; the stage, step and row of the sample where it is seen first; and the name of the value."""


@pytest.mark.parametrize(
    ("plant", "stage", "step", "row", "what"), PLANTED, ids=[entry[0].__name__ for entry in PLANTED]
)
def test_a_planted_divergence_is_the_first(tiny, tmp_path, plant, stage, step, row, what) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(tiny / "good", bad)
    plant(bad)
    result = bisected(tiny / "good", bad)
    first = result.first
    assert first is not None and (first.stage, first.step) == (stage, step) and what in first.what
    assert first.good != first.bad and result.cause
    if row is not None:
        record = list(stored_samples(tiny / "good/rollouts")[step]())[row]
        assert first.sample == f"{record['uid']}/{record['index']}"
    if stage is Stage.CONFIG:
        assert result.observed is None and list(result.config) == [first.what]


def test_a_repeated_run_is_equal(tiny: Path) -> None:
    result = bisected(tiny / "good", train(tiny, "again"))
    assert result.first is None and (result.steps, result.with_samples) == ([1, 2], 2)


@pytest.mark.parametrize(
    ("word", "stage", "step"),
    [
        ("trainer.seed=2", Stage.ORDER, 1),
        ("actor_rollout_ref.rollout.temperature=0.7", Stage.TOKENS, 1),
        ("algorithm.norm_adv_by_std_in_grpo=false", Stage.ADVANTAGES, 1),
        ("actor_rollout_ref.actor.optim.lr=2e-3", Stage.LOSS, 1),  # of the second update of the step
    ],
)
def test_a_real_difference_shows_its_key_and_its_first_effect(tiny: Path, word: str, stage: Stage, step: int) -> None:
    key = word.partition("=")[0]
    bad = train(tiny, key.replace(".", "_"), word)
    result = bisected(tiny / "good", bad)
    assert result.first is not None and result.first.stage is Stage.CONFIG and result.first.what == key
    assert result.observed is not None and (result.observed.stage, result.observed.step) == (stage, step)
    assert key in result.cause


def test_the_tolerance_hides_rounding(tiny: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(tiny / "good", bad)
    loss(bad)
    assert bisected(tiny / "good", bad).first is not None
    assert bisected(tiny / "good", bad, tolerance=1e-2).first is None


def test_the_command_prints_stage_step_sample_and_cause(tiny: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(tiny / "good", bad)
    reward(bad)
    ended = hone("runs", "bisect", tiny / "good", bad, "--json", log=tmp_path / "log", cwd=tmp_path)
    assert ended.code == 0, ended.output
    first = json.loads(ended.output)["first"]
    assert (first["stage"], first["step"], first["what"]) == ("rewards", 2, "score")
