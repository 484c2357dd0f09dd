"""Index, filters and groups against loops over the records."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.apps.lab.viewer.api import READS, Workspace
from hone.apps.lab.viewer.index import Rows, RunIndex
from hone.apps.lab.viewer.prompts import shared_prefixes
from hone.apps.lab.viewer.queries import Condition, parse
from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.insight.archive.write import to_table, write_step

pytestmark = pytest.mark.application("hone/apps/lab/viewer", "hone/insight", "hone/apps/lab", "hone/rewards")


@pytest.fixture(scope="module")
def records(run_path: Path) -> list[dict[str, Any]]:
    archive = open_archive(run_path)
    return [record for step in archive.steps() for record in archive.records(step)]


def test_the_index_has_what_loops_over_the_records_give(workspace: Workspace, records: list[dict[str, Any]]) -> None:
    rows = workspace.archived({}).rows()
    assert len(rows) == len(records) == 6 * 8 * 4
    for place, record in enumerate(records):
        sampled = [token for token, chosen in enumerate(record["response_mask"]) if chosen]

        def largest(first: str, second: str, record: Any = record, sampled: Any = sampled) -> float:
            return max(abs(np.float32(record[first][t]) - np.float32(record[second][t])) for t in sampled)

        episode = record["episode"] or {"assistant_turns": 1, "tool_calls": []}
        expected = {
            "step": record["step"],
            "index": record["index"],
            "row": record["row"],
            "score": record["score"],
            "error": 0,
            "tokens": len(record["response_ids"]),
            "sampled": len(sampled),
            "advantage": sum(record["advantages"][t] for t in sampled) / len(sampled),
            "entropy": sum(record["entropy"][t] for t in sampled) / len(sampled),
            "ratio": largest("new_log_probs", "old_log_probs"),
            "gap": largest("old_log_probs", "rollout_log_probs"),
            "influence": sum(abs(record["advantages"][t]) * record["correction"][t] for t in sampled),
            "turns": episode["assistant_turns"],
            "calls": len(episode["tool_calls"]),
            "toolerrors": sum(call["status"] != "ok" for call in episode["tool_calls"]),
            "lag": 0,
        }
        assert {name: float(rows[name][place]) for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


QUERIES = {
    "score<0.5": lambda r: r["score"] < 0.5,
    "score>=0.5 step:3": lambda r: r["score"] >= 0.5 and r["step"] == 3,
    "stop:length": lambda r: r["stop_reason"] == "length",
    "source!=agents": lambda r: r["data_source"] != "agents",
    "-source:agents": lambda r: r["data_source"] != "agents",
    "uid:train:3 step>1": lambda r: r["uid"] == "train:3" and r["step"] > 1,
    "toolerrors>0": lambda r: any(c["status"] != "ok" for c in (r["episode"] or {"tool_calls": []})["tool_calls"]),
    '"work through THIS"': lambda r: "work through this" in r["text"].lower(),
    "calculator -misspelt": lambda r: "calculator" in str(r["episode"]) and "misspelt" not in str(r["episode"]),
    "missing": lambda r: "missing argument" in str(r["episode"]),
    "score=1.1": lambda r: math.isclose(r["score"], 1.1),
    "score!=1.1": lambda r: not math.isclose(r["score"], 1.1),
}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_leaves_the_rows_that_its_predicate_does(
    query: str, workspace: Workspace, records: list[dict[str, Any]]
) -> None:
    archived = workspace.archived({})
    kept = archived.matching(archived.rows(), query)
    assert kept.tolist() == [bool(QUERIES[query](record)) for record in records]
    assert 0 < kept.sum() < len(records)


def test_groups_have_the_means_and_spreads_of_their_answers(
    workspace: Workspace, records: list[dict[str, Any]]
) -> None:
    scores: dict[tuple[int, str], list[float]] = defaultdict(list)
    for record in records:
        scores[record["step"], record["uid"]].append(record["score"])
    listed = READS["groups"](workspace, {"limit": "200"})
    assert listed["total"] == len(scores)
    assert [group["step"] for group in listed["groups"]] == sorted((step for step, _ in scores), reverse=True)
    for group in listed["groups"]:
        answers = scores[group["step"], group["uid"]]
        assert group["scores"] == pytest.approx(answers)
        assert (group["n"], group["score"]) == (4, pytest.approx(np.mean(answers)))
        assert group["spread"] == pytest.approx(np.std(answers), abs=1e-6)
    by_score = READS["groups"](workspace, {"sort": "score", "limit": "200"})["groups"]
    assert [group["score"] for group in by_score] == sorted(group["score"] for group in by_score)


def test_pages_cover_the_list_once(workspace: Workspace) -> None:
    pages = [
        READS["answers"](workspace, {"offset": str(offset), "limit": "50", "sort": "-tokens"})
        for offset in range(0, 200, 50)
    ]
    answers = [answer for page in pages for answer in page["answers"]]
    assert len({(a["step"], a["uid"], a["index"]) for a in answers}) == len(answers) == pages[0]["total"] == 192
    assert [answer["tokens"] for answer in answers] == sorted((a["tokens"] for a in answers), reverse=True)


@given(st.lists(st.text(alphabet="ab", max_size=6), max_size=5))
def test_shared_prefixes_are_those_of_all_pairs(texts: list[str]) -> None:
    def common(left: str, right: str) -> int:
        return next(
            (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )

    pairs = [[common(a, b) for j, b in enumerate(texts) if i != j] for i, a in enumerate(texts)]
    expected = [max(lengths, default=0) for lengths in pairs]
    of_all = min((length for lengths in pairs for length in lengths), default=0)
    assert shared_prefixes(texts) == (of_all, expected)


def test_words_of_a_query() -> None:
    assert parse('score<0.5 -stop:length "two words" -out') == [
        Condition("score", "<", "0.5"),
        Condition("stop", "=", "length", negated=True),
        Condition("", "=", "two words"),
        Condition("", "=", "out", negated=True),
    ]
    assert parse('an "open quote')[0].value == "an"
    assert parse("-https://a.b/c") == [Condition("", "=", "https://a.b/c", negated=True)]
    for wrong in ("scroe<1", "score<high", "stop<length"):
        with pytest.raises(HoneError) as error:
            parse(wrong)
        assert error.value.code == "E-view-query"


def test_new_and_removed_steps_are_noticed_and_a_damaged_file_is_reported(run_path: Path, tmp_path: Path) -> None:
    shutil.copytree(run_path / "rollouts", tmp_path / "rollouts")
    index = RunIndex(tmp_path / "rollouts")
    index.refresh()
    index.wait()
    before = index.rows()
    table = index.archive.table(1)
    write_step(
        tmp_path / "rollouts",
        7,
        table.set_column(0, table.schema.field("step"), pa.array([7] * len(table), pa.int32())),
    )
    (tmp_path / "rollouts" / "step_2.parquet").unlink()
    (tmp_path / "rollouts" / "step_3.parquet").write_bytes(b"PAR1 no")
    index.refresh()
    index.wait()
    after = index.rows()
    assert set(np.unique(after["step"])) == {1, 4, 5, 6, 7}
    assert len(after) == len(before) - 32 and after.version > before.version
    assert list(index.progress()["broken"]) == [3]


def test_sequences_without_numbers_and_without_token_ids_are_indexed(tmp_path: Path) -> None:
    bare = {"step": 1, "index": 0, "part": 0, "fate": "failed"}
    records = [
        bare | {"uid": "a", "text": "x"},
        bare | {"uid": "b", "text": "y", "score": 1.0, "error": "e"},
    ]
    write_step(tmp_path, 1, to_table(records))
    workspace = Workspace({"bare": tmp_path})
    archived = workspace.archived({})
    archived.rows()
    archived.index.wait()
    rows = archived.rows()
    assert rows["error"].tolist() == [0, 1] and np.isnan(rows["advantage"]).all() and rows["tokens"].tolist() == [0, 0]
    listed = READS["groups"](workspace, {})["groups"]
    assert [group["score"] for group in listed] == [None, 1]
    assert READS["tokens"](workspace, {"step": "1", "uid": "a"})["texts"] == ["x"]
    assert READS["prompts"](workspace, {})["total"] == 2


def test_the_lag_of_a_sequence_without_a_sampled_token_is_unknown(tmp_path: Path) -> None:
    base = {"step": 1, "index": 0, "part": 0, "fate": "trained", "text": "x", "response_ids": [1, 2]}
    versions = {"a": [3, 5], "b": [-1, -1], "c": [-1, 4]}
    records = [
        base | {"uid": uid, "token_versions": values, "response_mask": [int(value >= 0) for value in values]}
        for uid, values in versions.items()
    ]
    write_step(tmp_path, 1, to_table(records))
    index = RunIndex(tmp_path)
    index.refresh()
    index.wait()
    assert index.rows()["lag"].tolist() == pytest.approx([2, math.nan, 1], nan_ok=True)


@pytest.mark.parametrize("name", ["answers", "groups", "prompts", "selection"])
def test_an_answer_is_of_one_snapshot_while_the_index_changes(
    name: str, workspace: Workspace, run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = READS[name](workspace, {})
    live = Workspace({"run": run_path})
    archived = live.archived({})
    archived.rows()
    archived.index.wait()
    whole = archived.rows()
    late = whole["step"] > 2
    part = Rows({name: column[late] for name, column in whole.columns.items()}, whole.position[late], whole.version + 1)
    snapshots = iter([whole])
    monkeypatch.setattr(archived, "rows", lambda: next(snapshots, part))
    assert READS[name](live, {}) == expected
