"""Curves as text and PNG; search, summaries and comparison of runs."""

import json
import math
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises

from hone.apps.lab.compare import (
    ABSENT,
    config_differences,
    find_run,
    flatten,
    headline_metrics,
    read_whole_run,
    require_metrics,
    run_names,
    summarise,
)
from hone.errors import HoneError
from hone.insight.curves import draw_png, points, sparkline, text_chart

FINITE = st.floats(-1e9, 1e9)


# curves -------------------------------------------------------------------------------------------------------------


def test_points_leave_out_steps_without_the_metric():
    assert points([{"step": 0, "a": 1.0}, {"step": 1}, {"step": 5, "a": 2.0}], "a") == [(0, 1.0), (5, 2.0)]


@given(st.lists(st.one_of(FINITE, st.just(math.nan), st.just(math.inf)), max_size=100), st.integers(1, 60))
def test_sparkline_is_as_wide_as_asked_and_marks_what_is_not_finite(values, width):
    line = sparkline(list(enumerate(values)), width)
    assert len(line) == min(width, len(values))
    if len(values) <= width:
        assert [mark == "?" for mark in line] == [not math.isfinite(value) for value in values]
        finite = [value for value in values if math.isfinite(value)]
        if finite and max(finite) > min(finite):
            assert line[values.index(max(finite))] == "█" and line[values.index(min(finite))] == "▁"


@given(
    st.lists(st.tuples(st.integers(0, 1000), FINITE), min_size=1, max_size=50), st.integers(10, 80), st.integers(2, 12)
)
def test_chart_has_its_size_whatever_the_curve(curve, width, height):
    lines = text_chart(sorted(curve), width=width, height=height).splitlines()
    assert len(lines) == height + 1
    assert all(len(line.split("┤")[1]) <= width for line in lines[:-1])
    assert any(line.split("┤")[1] for line in lines[:-1])


def test_chart_draws_a_rising_line_rising():
    rows = [line.split("┤")[1] for line in text_chart([(0, 0.0), (10, 1.0)], width=20, height=5).splitlines()[:-1]]
    starts = [len(row) - len(row.lstrip("\u2800")) for row in rows]
    assert starts == sorted(starts, reverse=True) and starts[-1] == 0 and starts[0] >= 14


def test_charts_next_to_each_other_share_their_axes():
    short, long = [(0, 0.0), (5, 1.0)], [(0, -1.0), (20, 3.0)]
    chart = text_chart(short, width=20, height=6, compared_with=[short, long])
    assert "3 ┤" in chart and "-1 ┤" in chart and chart.endswith("20")
    assert max(len(line.split("┤")[1]) for line in chart.splitlines()[:-1]) <= 6  # a quarter of the steps


def test_chart_of_nothing():
    assert text_chart([]) == text_chart([(1, math.nan)]) == "(no values)"


def test_png_is_an_image_with_one_panel_a_metric(tmp_path):
    from matplotlib.image import imread

    curve = [(0, 0.0), (1, 1.0)]
    one = imread(draw_png(tmp_path / "deep" / "one.png", {"a": {"run": curve}}))
    four = imread(draw_png(tmp_path / "four.png", {name: {"run": curve, "other": curve} for name in "abcd"}, title="T"))
    assert four.shape[0] > 1.5 * one.shape[0] and four.shape[1] > 1.5 * one.shape[1]
    assert one.min() < 0.5 < one.max()


def test_curves_load_no_matplotlib_until_drawn():
    code = "import sys, hone.insight.curves, hone.cli.runs; sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# compare ------------------------------------------------------------------------------------------------------------


def rows(values, name="critic/rewards/mean"):
    return [{"step": step, name: value} for step, value in enumerate(values, 1)]


def test_runs_are_found_by_path_name_and_last_part(make_run, tmp_path):
    root = tmp_path / "runs"
    path = make_run("p/one", rows([1.0]))
    make_run("p/two", [])
    make_run("q/two", [])
    assert list(run_names(root)) == ["p/one", "p/two", "q/two"]
    assert run_names(tmp_path / "nowhere") == {}
    for wanted in (str(path), "p/one", "one"):
        assert find_run(wanted, root).path == path
    with raises(HoneError, "'two'", 2, "p/two, q/two", code="E-runs"):
        find_run("two", root)
    with raises(HoneError, "'p/ome'", 3, "p/one"):
        find_run("p/ome", root)


def test_a_run_inside_another_folder_is_not_searched_for_runs(make_run, tmp_path):
    make_run("p/one", [])
    make_run("p/one/checkpoints/odd", [])
    assert list(run_names(tmp_path / "runs")) == ["p/one"]


def test_status_of_a_run_whose_process_is_gone(make_run):
    path = make_run("p/one", [], status="running")
    assert read_whole_run(path).status == "running"  # this very process
    record = json.loads((path / "run.json").read_text())
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    (path / "run.json").write_text(json.dumps(record | {"pid": done.pid}))
    run = read_whole_run(path)
    assert run.status == "dead" and run.seconds is None
    (path / "run.json").write_text(json.dumps(record | {"pid": done.pid, "host": "elsewhere"}))
    assert read_whole_run(path).status == "running"


def test_summary_knows_what_is_better(make_run):
    run = read_whole_run(
        make_run(
            "a",
            [
                {"step": s, "critic/rewards/mean": v, "val/loss": v, "actor/ppo_kl": v}
                for s, v in ((1, 2.0), (2, 3.0), (4, 1.0))
            ],
        )
    )
    reward, loss, kl = (summarise(run, name) for name in ("critic/rewards/mean", "val/loss", "actor/ppo_kl"))
    assert (reward.count, reward.first, reward.last, reward.best, reward.best_step) == (3, 2.0, 1.0, 3.0, 2)
    assert (loss.best, loss.best_step) == (1.0, 4)
    assert (kl.best, kl.best_step) == (None, None)
    assert summarise(run, "actor/lr") is None
    assert (run.steps, run.last("val/loss"), run.last("x")) == (4, 1.0, None)


def test_best_ignores_what_is_not_finite(make_run):
    run = read_whole_run(make_run("a", rows([math.nan, 1.0, math.inf])))
    assert summarise(run, "critic/rewards/mean").best == 1.0


def test_config_differences(make_run):
    a = read_whole_run(make_run("a", [], config="x: {y: 1, z: [1, 2]}\nonly: here\n"))
    b = read_whole_run(make_run("b", [], config="x: {y: 2, z: [1, 2]}\n"))
    assert config_differences([a, b]) == {"x.y": [1, 2], "only": ["here", ABSENT]}
    assert config_differences([a, a]) == {}
    assert dict(flatten({"a": {"b": {}}, "c": None})) == {"c": None}


def test_headlines_and_unknown_metrics(make_run):
    run = read_whole_run(
        make_run("a", [{"step": 1, "actor/lr": 1, "critic/rewards/mean": 1, "val-core/s/acc/mean@1": 1}])
    )
    assert headline_metrics([run]) == ["val-core/s/acc/mean@1", "critic/rewards/mean"]
    assert require_metrics(["actor/lr"], [run]) == ["actor/lr"]
    with raises(HoneError, "'actor/lrr'", "actor/lr"):
        require_metrics(["actor/lrr"], [run])


def test_a_damaged_config_is_one_message(make_run):
    path = make_run("a", [])
    (path / "config.yaml").write_text("a: [")
    with raises(HoneError, "YAML", where=str(path / "config.yaml")):
        read_whole_run(path)
