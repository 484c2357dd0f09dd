"""The confidence of `hone runs compare`, on runs written for the purpose."""

import json
import random

import pytest
from typer.testing import CliRunner

from hone.cli.runs import app
from hone.insight.run_directory import RunDirectory

REST = {"part": 0, "error": None, "data_source": "sums", "extra": {}}


def write_run(path, *, lr, seed, score, prompts=40, steps=4):
    """A run whose validation scores are ``score`` plus noise of each prompt, the same noise for every configuration."""
    run = RunDirectory(path)
    config = f"optim: {{lr: {lr}}}\ntrainer: {{seed: {seed}, default_local_dir: {path}}}\n"
    run.start(seed=seed, config_yaml=config, command=["hone", "train"])
    for step in range(1, steps + 1):
        run.log_metrics(step, {"critic/rewards/mean": score, "actor/ppo_kl": 0.001})
    noise = random.Random(seed)
    values = [score + noise.uniform(-0.5, 0.5) for _ in range(prompts)]
    records = [
        REST | {"uid": f"val:{n}", "index": 0, "score": value, "terms": {"acc": float(value > 0.5)}, "text": ""}
        for n, value in enumerate(values)
    ]
    run.write_validation(steps, records)
    run.update_status("finished", "done", last_step=steps)
    run.close()


@pytest.fixture
def root(tmp_path):
    shift = {1: 0.1, 2: 0.11, 3: 0.09, 4: 0.105}
    for seed, more in shift.items():
        write_run(tmp_path / f"low{seed}", lr=1e-5, seed=seed, score=0.4)
        write_run(tmp_path / f"high{seed}", lr=1e-4, seed=seed, score=0.4 + more)
    return tmp_path


def confidence(root, *arguments):
    words = ["compare", *map(str, arguments), "--root", str(root), "--json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["confidence"]


def test_runs_that_differ_in_their_seed_form_an_arm(root):
    (item,) = confidence(root, *(f"{arm}{seed}" for seed in range(1, 5) for arm in ("low", "high")))
    assert item["first"] == [f"low{n}" for n in range(1, 5)] and item["second"] == [f"high{n}" for n in range(1, 5)]
    result = item["result"]
    assert (result["seeds"], result["prompts"], item["paired_by_seed"]) == (4, 40, True)
    assert result["difference"] == pytest.approx(0.10125)  # the noise of prompts is common to both and cancels
    assert 0 < result["low"] < 0.10125 < result["high"] and result["verdict"] == "second better"
    assert result["seeds_needed"] == 2


def test_a_difference_within_noise_says_so(root):
    write_run(root / "other1", lr=2e-5, seed=11, score=0.41)
    (item,) = confidence(root, "low1", "other1")
    assert item["result"]["verdict"] == "within noise" and not item["paired_by_seed"]
    assert item["result"]["low"] < 0 < item["result"]["high"] and item["result"]["seeds_needed"] is None


def test_more_seeds_are_needed_for_a_smaller_difference(root):
    runs = [f"{arm}{seed}" for seed in range(1, 5) for arm in ("low", "high")]
    (item,) = confidence(root, *runs, "--effect", 0.005)
    assert item["result"]["seeds_needed"] > 10


def test_named_metrics_are_paired_by_prompt_where_answers_are_stored(root):
    items = confidence(root, "low1", "high1", "--metrics", "critic/rewards/mean")
    assert [item["result"]["prompts"] for item in items] == [1] and items[0]["result"]["low"] == "NaN"


def test_runs_of_one_arm_are_compared_as_seeds(root):
    (item,) = confidence(root, "low1", "low2")
    assert (item["first"], item["second"]) == (["low1"], ["low2"])
    assert item["result"]["verdict"] == "within noise"


def test_runs_without_a_common_prompt(root):
    run = RunDirectory(root / "low1")
    run.write_validation(4, [REST | {"uid": "x", "index": 0, "score": 1.0, "terms": {}, "text": ""}])
    assert confidence(root, "low1", "high1") == []
    shown = CliRunner().invoke(app, ["compare", "low1", "high1", "--root", str(root)], catch_exceptions=False).output
    assert "trainer.log_val_generations" in shown and "optim.lr" in shown, "the rest is shown"


def test_two_runs_of_one_seed_both_count(root):
    write_run(root / "low1b", lr=1e-5, seed=1, score=0.4)
    write_run(root / "high1b", lr=1e-4, seed=1, score=0.52)
    (item,) = confidence(root, "low1", "low1b", "high1", "high1b")
    assert item["result"]["seeds"] == 2 and item["result"]["difference"] == pytest.approx(0.11)


def test_without_validation_the_rewards_of_training_are_paired_by_prompt(tmp_path):
    """Only the last half of the common steps counts: there the second run has 0.25 more for every prompt."""
    for name, rate, last, gain in (("low", 1e-5, 4, 0.0), ("high", 1e-4, 5, 0.25)):
        run = RunDirectory(tmp_path / name)
        run.start(seed=1, config_yaml=f"optim: {{lr: {rate}}}\ntrainer: {{seed: 1}}\n", command=["hone", "train"])
        lines = []
        for step in range(1, last + 1):
            run.log_metrics(step, {"actor/ppo_kl": 0.001})
            for row in range(3):
                draw = {"step": step, "draw": 3 * (step - 1) + row, "row": row, "epoch": step - 1, "uid": f"t:{row}"}
                reward = row / 2 + gain * (step > 2) + (5.0 if step > 4 else 0.0)
                lines.append(draw | {"source": "sums", "fate": "trained", "lag": 0, "reward": reward})
            fates = dict.fromkeys(("waiting", "in_flight", "finished", "filtered", "failed", "too_old"), 0)
            lines.append({"step": step, "counts": fates | {"drawn": 3 * step, "trained": 3 * step}, "open": {}})
        run.update_status("finished", "done", last_step=last)
        run.close()
        (tmp_path / name / "coverage.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (item,) = confidence(tmp_path, "low", "high")
    assert item["score"] == "training reward, steps 3 to 4"
    assert (item["result"]["prompts"], item["result"]["difference"]) == (3, 0.25)
