"""`hone runs sheet` and `hone runs note`."""

import random

import pytest
from support.messages import raises
from typer.testing import CliRunner

from hone.apps.lab.run_sheet import read_notes
from hone.cli.runs import app
from hone.config import RLConfig, load_config, to_yaml
from hone.errors import HoneError
from hone.insight.run_directory import RunDirectory


@pytest.fixture
def root(tmp_path):
    for name, rate, gain in (("base", "1e-5", 0.0), ("fast", "1e-4", 0.2)):
        config = load_config(RLConfig, [f"actor_rollout_ref.actor.optim.lr={rate}", "data.train_files=t.jsonl"])
        run = RunDirectory(tmp_path / name)
        run.start(seed=1, config_yaml=to_yaml(config), command=["hone", "train"])
        for step in range(1, 9):
            run.log_metrics(step, {"critic/rewards/mean": (0.1 + gain / 8) * step})
        rest = {"index": 0, "part": 0, "data_source": "sums", "extra": {}, "terms": {}, "text": ""}
        noise = random.Random(0)
        scores = [noise.random() + gain + noise.gauss(0, 0.01) for _ in range(20)]
        run.write_validation(8, [rest | {"uid": f"v:{n}", "score": score} for n, score in enumerate(scores)])
        run.update_status("finished", "all 8 steps done", last_step=8)
        run.close()
    return tmp_path


def invoke(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def sections(page):
    parts = page.split("\n## ")
    return parts[0], {part.partition("\n")[0].partition(" ")[0]: part.partition("\n")[2] for part in parts[1:]}


def test_a_sheet_against_another_run(root):
    invoke("note", "fast", "rate x 10 | see the curve", "--root", root)
    invoke("note", "fast", "kept", "--root", root)
    head, parts = sections(invoke("sheet", "fast", "--base", "base", "--root", root))
    assert head.startswith("# fast\n") and "- steps: 8" in head and "- status: finished, all 8 steps done" in head
    rows = [line for line in parts["Configuration"].splitlines() if line.startswith("| actor")]
    assert rows == ["| actor_rollout_ref.actor.optim.lr | `1e-05` | `0.0001` |"]
    assert "first 0.125, last 1, best 1 at step 8" in parts["Curve"] and "┤" in parts["Curve"]
    assert [line.split(": ", 1)[1] for line in parts["Notes"].split("\n") if line.startswith("- ")] == [
        "rate x 10 | see the curve",
        "kept",
    ]
    assert "**better than the base**" in parts["Verdict"] and "One seed" in parts["Verdict"]


def test_a_sheet_against_the_defaults_shows_what_was_set(root, tmp_path):
    page, png = tmp_path / "out/fast.md", tmp_path / "out/fast.png"
    invoke("sheet", "fast", "--root", root, "--out", page, "--png", png)
    _, parts = sections(page.read_text())
    keys = [line.split("|")[1].strip() for line in parts["Configuration"].splitlines() if line.startswith("| ")][1:]
    assert {"data.train_files", "actor_rollout_ref.actor.optim.lr"} <= set(keys) and len(keys) < 8, keys
    assert "](fast.png)" in parts["Curve"] and png.read_bytes().startswith(b"\x89PNG")
    assert "--base" in parts["Verdict"] and parts["Notes"].strip() == "none"


def test_a_worse_run_and_noise(root):
    _, parts = sections(invoke("sheet", "base", "--base", "fast", "--root", root))
    assert "**worse than the base**" in parts["Verdict"]
    _, parts = sections(invoke("sheet", "base", "--base", "base", "--root", root))
    assert "**within noise**" in parts["Verdict"] and parts["Configuration"].strip() == "equal"


def test_one_number_per_run_decides_nothing(root):
    words = ("sheet", "fast", "--base", "base", "--metric", "critic/rewards/mean", "--root", root)
    _, parts = sections(invoke(*words))
    assert "**undecided**" in parts["Verdict"] and "interval " not in parts["Verdict"].partition("\n")[0]
    assert "trainer.seed" in parts["Verdict"] and "over prompts" not in parts["Verdict"]


def test_bad_input(root):
    with raises(HoneError, "empty", code="E-runs"):
        invoke("note", "fast", "  ", "--root", root)
    with raises(HoneError, "critic/rewards/mean", code="E-runs"):
        invoke("sheet", "fast", "--root", root, "--metric", "critic/reward/mean")
    (root / "fast/notes.jsonl").write_text("a note\n")
    with raises(HoneError, "line 1", code="E-runs"):
        read_notes(root / "fast")
