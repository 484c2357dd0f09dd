"""Two versions of a reward on stored episodes: shares against a direct count, and what a run stored is scored the same again."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.agents import call, play, sample, setting
from support.archives import archive
from support.examples import examples
from typer.testing import CliRunner

from hone.agents.tools.calculator import Calculator
from hone.apps.lab.rewards.comparison import ScoredTwice, advantages, compare, scores_of
from hone.cli.reward import app
from hone.config.reward import RewardConfig
from hone.data.files import read_rows
from hone.errors import HoneError
from hone.insight.run_directory import RunDirectory
from hone.rewards.probes import LOOP, bad_episodes, good_episode, plain_episode
from hone.rewards.score import Score
from hone.trainers.reporting import sample_record

SCHEMA = Calculator().schema
scores = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]))


def twice(group: int, index: int, old: float | None, new: float | None) -> ScoredTwice:
    right = [None if score is None else score > 0 for score in (old, new)]
    return ScoredTwice(1, f"r{group}", index, 3, "text", old, new, *right)


@given(st.lists(st.lists(st.tuples(scores, scores), min_size=1, max_size=5), min_size=1, max_size=4))
@examples(200)
def test_shares_are_those_of_a_direct_count(groups: list[list[tuple[float | None, float | None]]]) -> None:
    episodes = [twice(g, i, *pair) for g, group in enumerate(groups) for i, pair in enumerate(group)]
    result = compare(episodes)
    assert (result.episodes, result.groups) == (len(episodes), len(groups))
    assert result.flipped == sum(e.old_right != e.new_right for e in episodes) / len(episodes)
    moved = total = 0
    for group in groups:
        for (a, b), (c, d) in itertools.combinations(group, 2):
            if None not in (a, b, c, d):
                total += 1
                moved += ((a > c) - (a < c)) != ((b > d) - (b < d))
    assert result.reordered_pairs == (moved / total if total else 0.0)
    assert 0.0 <= result.gradient <= 1.0 and all(0.0 <= share <= 1.0 for share in result.shares().values())
    same = compare([twice(0, i, e.old, e.old) for i, e in enumerate(episodes)])
    assert not any(same.shares().values()) and same.differences == []


@given(st.lists(scores, min_size=1, max_size=6))
@examples(100)
def test_advantages_are_those_of_the_episodes_with_a_verdict(values: list[float | None]) -> None:
    present = [value for value in values if value is not None]
    result = advantages(values)
    assert [value is None for value in result] == [value is None or len(present) < 2 for value in values]
    if len(present) > 1:
        deviation = statistics.stdev(present) + 1e-6
        expected = [(value - statistics.fmean(present)) / deviation for value in present]
        assert [value for value in result if value is not None] == pytest.approx(expected)


def test_a_scale_changes_nothing_and_the_opposite_changes_everything() -> None:
    values = [0.0, 1.0, 0.5, 1.0]
    scaled = compare([twice(0, i, v, 4 * v + 1) for i, v in enumerate(values)])
    assert scaled.reordered_pairs == 0.0 and scaled.gradient == pytest.approx(0.0, abs=1e-5)
    opposite = compare([twice(0, i, v, -v) for i, v in enumerate(values)])
    assert opposite.gradient == pytest.approx(1.0) and opposite.reordered_groups == 1.0


# ----------------------------------------------------------------------------------------------------------- a stored run


OLD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(ground_truth in solution_str)\n"
NEW = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    calls = extra_info["episode"]["tool_calls"]
    if extra_info["hint"] != "none" or extra_info["episode"]["tokens"]["sampled"] < 1:
        raise ValueError("the row is not the dataset's")
    return float(ground_truth in solution_str) - 0.25 * len(calls)
"""


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A run that stored four episodes of a row with a tool: one, two, no calls, and a wrong answer."""
    for name, code in (("old", OLD), ("new", NEW)):
        (tmp_path / f"{name}.py").write_text(code)
    row = {
        "prompt": "q",
        "data_source": "calculator",
        "extra_info": {"hint": "none"},
        "reward_model": {"ground_truth": "42"},
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (uid,) = [row.uid for row in read_rows([tmp_path / "train.jsonl"], required=())]

    def script(name: str, turn: int) -> str:
        calls, answer = [(1, "42"), (2, "42"), (0, "42"), (1, "7")][int(name.split("#")[1][0])]
        return call("calculator", expression=f"6*{turn}") if turn < calls else f"#### {answer}"

    played, _ = play(setting([Calculator()]), script, [sample(uid=uid, tools=[SCHEMA])], n=4)
    run = RunDirectory(tmp_path / "runs/hone/demo")
    run.start(seed=1, config_yaml=f"data: {{train_files: {tmp_path}/train.jsonl}}\n", command=["hone"])
    archive(run.path, 1, [sample_record(t, Score(float("42" in t.text))) for t in played])
    run.close()
    return tmp_path


def invoke(stored: Path, *words: str, code: int = 0) -> dict:
    arguments = ["diff", *words, "--run", "hone/demo", "--root", str(stored / "runs"), "--json", "--show", "9"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.output)


def test_the_same_reward_differs_nowhere(stored: Path) -> None:
    result = invoke(stored, "stored", f"{stored}/old.py:compute_score")
    assert result["episodes"] == 4 and result["groups"] == 1 and result["differences"] == []


def test_a_price_on_calls_reorders_what_was_equal(stored: Path) -> None:
    result = invoke(stored, "stored", f"{stored}/new.py:compute_score", code=1)
    assert {e["index"]: (e["old"], e["new"]) for e in result["differences"]} == {
        0: (1.0, 0.75),
        1: (1.0, 0.5),
        2: (1.0, 1.0),
        3: (0.0, -0.25),
    }
    assert result["flipped"] == 0.0 and result["reordered_pairs"] == 0.5 and result["reordered_groups"] == 1.0
    allowed = invoke(stored, "stored", f"{stored}/new.py:compute_score", "--allow", "0.5")
    assert allowed["gradient"] == result["gradient"] > 0


def test_a_run_without_rollouts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "hone/empty")
    run.start(seed=1, config_yaml="data: {train_files: x.jsonl}\n", command=["hone"])
    run.close()
    with pytest.raises(HoneError) as caught:
        CliRunner().invoke(
            app, ["diff", "exact", "f1", "--run", "hone/empty", "--root", str(tmp_path)], catch_exceptions=False
        )
    assert "rollout_dump_freq" in caught.value.fix


# ------------------------------------------------------------------------------------------------------- episode probes


def test_probes_have_the_form_of_played_episodes() -> None:
    row = sample(uid="a", tools=[SCHEMA])
    row.extra_info["tools"] = json.dumps([SCHEMA])
    turns = {"good": 1, "loop": LOOP}
    probes = {"good": good_episode(row, "42"), **{form: log for form, _, log in bad_episodes(row, "42", "42")}}
    for form, calls in turns.items():
        said = [call("calculator", expression="a")] * calls + ["42"]
        (played,), _ = play(setting([Calculator()]), lambda name, turn, said=said: said[turn], [row], max_tokens=2000)
        log, probe = played.episode, probes[form]
        assert log is not None and [m["role"] for m in log.messages] == [m["role"] for m in probe.messages]
        shown, probed = log.summary(), probe.summary()
        for name in ("end", "num_turns", "assistant_turns", "turn_rewards", "error"):
            assert shown[name] == probed[name], name
        assert [set(c) for c in shown["tool_calls"]] == [set(c) for c in probed["tool_calls"]]
        assert [(c["name"], c["arguments"], c["turn"]) for c in shown["tool_calls"]] == [
            (c["name"], c["arguments"], c["turn"]) for c in probed["tool_calls"]
        ]
        assert set(log.costs()["seconds"]) == set(probe.costs()["seconds"])


@pytest.mark.parametrize(("scorer", "loop", "good"), [("tool_efficiency", -1.0, 0.0), ("tool_format", 1.0, 1.0)])
def test_episode_scorers_tell_loops_from_good_episodes(scorer: str, loop: float, good: float) -> None:
    row = sample(uid="a", tools=[SCHEMA])
    bad = {form: log for form, _, log in bad_episodes(row, "42", "42")}
    (played,), _ = play(setting([Calculator()]), lambda name, turn: "42", [row])
    trajectories = []
    for index, log in enumerate((good_episode(row, "42"), bad["loop"], plain_episode("42"))):
        trajectories.append(type(played)(**{**vars(played), "episode": log, "text": "42", "index": index}))
    totals = [score.total for score in scores_of(RewardConfig(scorer=scorer), trajectories)]
    assert totals[:2] == [good, loop]


def test_a_verdict_is_acc_or_a_positive_reward() -> None:
    assert Score(0.5).passes and Score(-1.0, {"acc": 1.0}).passes
    assert not Score(0.0).passes and not Score(1.0, error="x").passes
