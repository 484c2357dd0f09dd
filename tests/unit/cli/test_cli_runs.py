"""`hone runs` on runs written for the purpose."""

import json

import pytest
from support.archives import archive
from support.messages import raises
from typer.testing import CliRunner

from hone.cli.runs import app
from hone.errors import HoneError
from hone.insight.run_directory import RunDirectory


@pytest.fixture
def root(tmp_path):
    for number, name in enumerate(("hone/slow", "hone/fast"), 1):
        run = RunDirectory(tmp_path / name)
        run.start(
            seed=number,
            config_yaml=f"algorithm: {{adv_estimator: grpo}}\noptim: {{lr: {number}.0e-5}}\n",
            command=["hone", "train"],
        )
        for step in range(1, 13):
            run.log_metrics(
                step, {"critic/rewards/mean": number * step / 24, "actor/ppo_kl": 0.001, "timing_s/step": 1.5}
            )
        run.update_status("finished", "all 12 steps done", last_step=12)
        run.close()
    return tmp_path


def invoke(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list(root):
    out = invoke("list", "--root", root)
    lines = [line.split() for line in out.splitlines() if "hone/" in line]
    assert [line[:4] for line in lines] == [
        ["hone/slow", "finished", "12", "0.500"],
        ["hone/fast", "finished", "12", "1.000"],
    ]
    rows = json.loads(invoke("list", "--root", root, "--json"))
    assert [(row["name"], row["steps"], row["last_reward"]) for row in rows] == [
        ("hone/slow", 12, 0.5),
        ("hone/fast", 12, 1.0),
    ]


def test_list_of_an_empty_and_of_no_folder(tmp_path):
    assert "no runs under" in invoke("list", "--root", tmp_path)
    with raises(HoneError, "--root", code="E-runs"):
        invoke("list", "--root", tmp_path / "nowhere")


def test_show(root):
    out = invoke("show", "fast", "--root", root)
    assert "finished: all 12 steps done" in out and "algorithm.adv_estimator" in out and "grpo" in out
    (row,) = [
        line.split() for line in out.splitlines() if line.strip().startswith("critic/rewards/mean") and "█" in line
    ]
    assert row[1:5] == ["0.08333", "1", "1", "12"]
    assert out.count("┤") == 16  # two charts of eight lines: reward and KL
    assert "timing_s/step" not in out and "more metrics: --all, or --metric NAME" in out
    every = invoke("show", "fast", "--root", root, "--all")
    assert "timing_s/step" in every and "more metrics" not in every


def test_show_one_metric_and_json(root, tmp_path):
    png = tmp_path / "curve.png"
    out = invoke("show", root / "hone" / "fast", "--metric", "timing_s/step", "--png", png)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "timing_s/step" in out and "critic/rewards/mean" not in out and out.count("┤") == 8
    record = json.loads(invoke("show", "hone/fast", "--root", root, "--json"))
    assert record["config"] == {"algorithm.adv_estimator": "grpo", "optim.lr": 2e-5}
    assert record["metrics"]["critic/rewards/mean"]["best_step"] == 12
    assert record["exit_reason"] == "all 12 steps done"


def test_compare(root, tmp_path):
    png = tmp_path / "curves.png"
    out = invoke("compare", "slow", "fast", "--root", root, "--png", png)
    (difference,) = [line.split() for line in out.splitlines() if line.strip().startswith("optim.lr")]
    assert difference == ["optim.lr", "1e-05", "2e-05"]
    assert "algorithm.adv_estimator" not in out  # equal
    (reward,) = [line for line in out.splitlines() if line.strip().startswith("critic/rewards/mean  ") and "(" in line]
    assert "0.5 (0.5)" in reward and "1 (1)" in reward
    assert png.read_bytes().startswith(b"\x89PNG")


def test_compare_chosen_metrics_as_json(root):
    record = json.loads(
        invoke("compare", "slow", "fast", "--root", root, "--metrics", "timing_s/step,actor/ppo_kl", "--json")
    )
    assert record["config"] == {"optim.lr": [1e-5, 2e-5]}
    assert list(record["metrics"]) == ["timing_s/step", "actor/ppo_kl"]
    assert record["metrics"]["timing_s/step"]["hone/fast"]["last"] == 1.5


def test_bad_input(root):
    with raises(HoneError, "'fasst'") as caught:
        invoke("show", "fasst", "--root", root)
    assert "fast" in caught.value.fix
    with raises(HoneError, "hone runs compare A B", code="E-runs"):
        invoke("compare", "fast", "--root", root)
    with raises(HoneError, "'critic/reward/mean'") as caught:
        invoke("compare", "slow", "fast", "--root", root, "--metric", "timing_s/step", "--metric", "critic/reward/mean")
    assert "critic/rewards/mean" in caught.value.fix
    (root / "file").write_text("")
    with raises(HoneError, "x.png"):
        invoke("compare", "slow", "fast", "--root", root, "--png", root / "file" / "x.png")


def test_samples_of_a_run(root):
    record = {"uid": "train:1", "index": 0, "prompt": "p", "messages": [{"role": "user", "content": "p"}], "terms": {}}
    rest = {
        "error": None,
        "episode": None,
        "part": 0,
        "stop_reason": "stop",
        "response_ids": [1, 2],
        "ground_truth": "4",
    }
    archive(root / "hone/fast", 3, [record | rest | {"score": float(n), "text": f"answer {n}"} for n in range(4)])
    out = invoke("samples", "hone/fast", "--root", root, "--worst", 1)
    assert "answer 0" in out and "answer 1" not in out and "step 3" in out
    lines = invoke("samples", "hone/fast", "--root", root, "--best", 2, "--json").splitlines()
    assert [json.loads(line)["score"] for line in lines] == [3.0, 2.0]


def test_list_shows_the_loss_of_supervised_runs(tmp_path):
    run = RunDirectory(tmp_path / "hone/sft")
    run.start(seed=1, config_yaml="optim: {lr: 1.0e-5}\n", command=["hone", "sft"])
    run.log_metrics(1, {"train/loss": 2.5})
    run.close()
    (row,) = json.loads(invoke("list", "--root", tmp_path, "--json"))
    assert row["last_loss"] == 2.5 and row["last_reward"] is None
    assert "2.500" in invoke("list", "--root", tmp_path)
