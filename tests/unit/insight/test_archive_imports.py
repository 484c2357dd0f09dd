"""Rollouts of other programs: hand-written files of each public format, converted and read back."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.archives import archive, records
from support.messages import raises
from typer.testing import CliRunner

from hone.apps.lab.compare import find_run
from hone.apps.lab.importers import IMPORTERS, import_rollouts
from hone.apps.lab.rewards.comparison import mine_pairs, stored_episodes
from hone.apps.lab.samples import SampleQuery, read_samples
from hone.cli.looking import app
from hone.errors import DataError
from hone.insight.archive.read import open_archive
from hone.insight.archive.schema import COLUMNS
from hone.insight.records import trace

DUMPS = Path(__file__).parent / "rollout_dumps"
FORMATS = {
    "verl": "verl",
    "trl": "trl",
    "prime_rl": "prime-rl",
    "prime_rl_legacy": "prime-rl",
    "slime": "slime",
    "jsonl": "jsonl",
}
TOKENS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "token_versions", "advantages")


COMPLETIONS = {
    "step": [4, 4, 4],
    "prompt": ["6*7?", "6*7?", "6*8?"],
    "completion": ["42", "41", "48"],
    "accuracy_reward": [1.0, 0.0, 1.0],
    "format_reward": [0.5, None, 0.25],
    "advantage": [0.75, -0.75, 0.0],
}


def sample(**changes: Any) -> dict[str, Any]:
    usual = {"group_index": 0, "index": 0, "prompt": "6*7?", "tokens": [5, 6, 7, 8], "multimodal_inputs": None}
    usual |= {"response": "42", "response_length": 2, "label": "42", "reward": 1.0, "loss_mask": [1, 1]}
    usual |= {"weight_versions": ["3"], "rollout_log_probs": [-0.5, -0.25], "remove_sample": False}
    return {**usual, "status": "completed", "metadata": {}, "spec_info": {}, "session_id": None, **changes}


SAMPLES = [
    sample(),
    sample(
        index=1,
        tokens=[5, 6, 7, 9, 10],
        response="4 1",
        response_length=3,
        loss_mask=[1, 0, 1],
        rollout_log_probs=[-0.5, 0.0, -1.0],
        weight_versions=["3", "4"],
        reward={"score": 0.5, "format": 1.0},
        status="truncated",
    ),
    sample(
        group_index=1, index=2, status="aborted", reward=None, tokens=[], response_length=0, response="", loss_mask=None
    ),
]


def dump(name: str, folder: Path) -> Path:
    """Return the dump of a format; the binary ones are written as their program does."""
    if name == "trl":
        (folder / "trl/completions").mkdir(parents=True)
        pq.write_table(pa.table(COMPLETIONS), folder / "trl/completions/completions_00004.parquet")
        return folder / "trl"
    if name == "slime":
        (folder / "slime").mkdir()
        torch.save({"rollout_id": 6, "samples": SAMPLES}, folder / "slime/rollout_6.pt")
        return folder / "slime"
    return DUMPS / name


def imported(name: str, out: Path) -> Path:
    result = import_rollouts(dump(name, out.parent), out)
    assert result.format == FORMATS[name]
    return out


def values(run: Path, step: int, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record[name] for name in names) for record in records(run, step)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_reader_opens_an_import(tmp_path: Path, name: str) -> None:
    run = imported(name, tmp_path / "run")
    steps = open_archive(run).steps()
    for step in steps:
        assert all(record.keys() == {column.name for column in COLUMNS} for record in records(run, step))
    shown = read_samples(run / "rollouts", SampleQuery(limit=9))
    assert shown.step == steps[-1] and all(trace(record) for record in shown.shown)
    again = list(stored_episodes(run / "rollouts", [], reward_fn_key="data_source", prompt_key="prompt"))
    assert [t.text for _, _, t in again] == [record["text"] for step in steps for record in records(run, step)]
    found = find_run(str(run), tmp_path)
    assert (found.status, found.steps) == ("finished", steps[-1])


def test_verl(tmp_path: Path) -> None:
    run = imported("verl", tmp_path / "run")
    assert open_archive(run).steps() == [3, 12]
    assert values(run, 3, "index", "prompt", "text", "ground_truth", "score", "terms", "extra") == [
        (0, "user\n6*7?\nassistant\n", "#### 42", "42", 1.0, {"acc": 1.0}, {"pred": "42"}),
        (1, "user\n6*7?\nassistant\n", "#### 41", "42", 0.0, {"acc": 0.0}, {"pred": "41"}),
        (0, "user\n6*8?\nassistant\n", "48", "48", 0.1, {"acc": 0.0}, {}),
    ]
    first, second, third = [record["uid"] for record in records(run, 3)]
    assert first == second != third and [record["uid"] for record in records(run, 12)] == [first], (
        "a prompt is followed"
    )
    assert values(run, 3, *TOKENS)[0] == (None,) * 6
    assert [row["critic/score/mean"] for row in find_run(str(run), tmp_path).metrics] == [pytest.approx(1.1 / 3), 1.0]
    with raises(DataError, "no prompt has two answers"):
        mine_pairs(run, val_share=0)  # without tokens there is nothing to train on


def test_trl(tmp_path: Path) -> None:
    run = imported("trl", tmp_path / "run")
    assert values(run, 4, "index", "prompt", "text", "score", "terms", "extra") == [
        (0, "6*7?", "42", 1.5, {"accuracy_reward": 1.0, "format_reward": 0.5}, {"advantage": 0.75}),
        (1, "6*7?", "41", 0.0, {"accuracy_reward": 0.0}, {"advantage": -0.75}),
        (0, "6*8?", "48", 1.25, {"accuracy_reward": 1.0, "format_reward": 0.25}, {"advantage": 0.0}),
    ]


def test_traces_of_prime_rl(tmp_path: Path) -> None:
    run = imported("prime_rl", tmp_path / "run")
    good, bad = records(run, 2)
    assert [good[name] for name in TOKENS] == [
        *([5, 6, 7], [8, 9, 10, 11, 12], [1, 1, 0, 0, 1]),
        *([-0.5, -0.25, 0.0, 0.0, -0.125], [1, 1, -1, -1, 1], [1.5, 1.5, 0.0, 0.0, 1.5]),
    ]
    assert (good["uid"], good["index"], good["data_source"], good["ground_truth"]) == ("sum:4", 0, "sums", "42")
    assert (good["score"], good["seconds"]) == (2.5, 2.5)
    assert good["terms"] == {"correct": 1.0, "format": 0.5, "turns": 2.0}
    (call,) = good["episode"]["tool_calls"]
    assert (call["name"], call["arguments"], call["result"], call["turn"]) == ("multiply", {"a": 6, "b": 7}, "42", 0)
    assert "multiply: ok" in trace(good)
    assert (bad["uid"], bad["index"], bad["fate"], bad["score"], bad["stop_reason"]) == (
        "sum:4",
        1,
        "failed",
        None,
        "error",
    )
    assert bad["error"] == "ToolError: no connection" and bad["advantages"] is None


def test_older_lines_of_prime_rl(tmp_path: Path) -> None:
    run = imported("prime_rl_legacy", tmp_path / "run")
    assert values(run, 1, "uid", "index", "part", *TOKENS[:4]) == [
        ("sums:4", 0, 0, [5, 6], [7, 8, 9, 10], [1, 1, 0, 1], [-0.5, -0.25, 0.0, -1.0]),
        ("sums:4", 0, 1, [5, 9], [11], [1], [-1.5]),
    ], "a call whose prompt does not begin with the tokens before it is another segment"
    assert values(run, 1, "text", "score", "terms", "extra")[0] == ("6*7 is\n42", 1.0, {"acc": 1.0}, {"advantage": 0.5})


def test_episodes_of_several_agents(tmp_path: Path) -> None:
    line = (DUMPS / "prime_rl/rollouts/step_2/train_rollouts.jsonl").read_text().splitlines()[0]
    trace_of = json.loads(line) | {"info": {}}
    (tmp_path / "step_5").mkdir()
    both = {"prime_rl": {"kind": "eval", "env_name": "duel"}, "traces": [trace_of, trace_of]}
    (tmp_path / "step_5/traces.jsonl").write_text(json.dumps(both) + "\n")
    result = import_rollouts(tmp_path / "step_5", tmp_path / "run")
    assert (result.format, result.rows, result.validation) == ("prime-rl", {}, {5: 2})
    shown = records(tmp_path / "run", 5, "validation")
    assert [(record["fate"], record["data_source"], record["index"]) for record in shown] == [
        ("validation", "duel", 0),
        ("validation", "duel", 1),
    ]


def test_slime(tmp_path: Path) -> None:
    run = imported("slime", tmp_path / "run")
    assert values(run, 6, "uid", "index", "fate", "stop_reason", "score", "terms") == [
        ("group:0", 0, "trained", "stop", 1.0, {}),
        ("group:0", 1, "trained", "length", 0.5, {"score": 0.5, "format": 1.0}),
        ("group:1", 0, "failed", "aborted", None, {}),
    ]
    assert values(run, 6, *TOKENS[:5]) == [
        ([5, 6], [7, 8], [1, 1], [-0.5, -0.25], [3, 3]),
        ([5, 6], [7, 9, 10], [1, 0, 1], [-0.5, 0.0, -1.0], None),
        (None,) * 5,
    ]
    assert import_rollouts(tmp_path / "slime", tmp_path / "named", "miles").rows == {6: 3}
    mined = mine_pairs(run, val_share=0, form="tokens")
    assert [(pair["chosen"], pair["rejected"]) for pair in mined.train] == [([7, 8], [7, 9, 10])]


class Code:
    """An object whose loading calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def test_a_file_with_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"rollout_id": 1, "samples": [Code()]}, "rollout_1.pt")
    with raises(DataError, "rollout_1.pt", "sample.to_dict()"):
        import_rollouts(Path("rollout_1.pt"), tmp_path / "run")
    Path("rollout_1.pt").write_bytes(pickle.dumps({"rollout_id": 1, "samples": [Code()]}))
    with raises(DataError, "rollout_1.pt"):
        import_rollouts(Path("rollout_1.pt"), tmp_path / "run")
    assert not Path("ran").exists() and not (tmp_path / "run").exists()


def test_plain_json_lines(tmp_path: Path) -> None:
    run = imported("jsonl", tmp_path / "run")
    assert values(run, 0, "index", "prompt", "text", "score", "terms", "extra", *TOKENS[1:4]) == [
        (0, "6*7?", "42", 1.0, {"level": 2.0}, {"note": "seen"}, [9, 10], [1, 1], [-0.5, -0.25]),
        (1, "6*7?", "41", 0.0, {}, {}, [9, 11], [1, 1], None),
    ], "log-probs of another length than the response are left out"


def test_an_export_is_imported_unchanged(tmp_path: Path) -> None:
    rows = [
        {"uid": f"train:{n}", "text": "a", "score": n / 3, "terms": {"acc": 0.1}, "response_ids": [1, n]}
        for n in range(3)
    ]
    for step in (1, 2):
        archive(tmp_path / "run", step, rows)
    (tmp_path / "run/run.json").write_text("{}")
    runner, out = CliRunner(), str(tmp_path / "all.jsonl")
    for more, count in ((["--step", "2"], 3), ([], 6)):
        assert runner.invoke(app, ["export", str(tmp_path / "run"), "--out", out, *more]).exit_code == 0
        assert len(Path(out).read_text().splitlines()) == count
    ended = runner.invoke(app, ["import", out, "--out", str(tmp_path / "again")])
    assert ended.exit_code == 0 and "6" in ended.output
    for step in (1, 2):
        assert records(tmp_path / "again", step) == records(tmp_path / "run", step)


def test_what_cannot_be_imported(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with raises(DataError, "nowhere"):
        import_rollouts(tmp_path / "nowhere", out)
    with raises(DataError, "'verll'", "verl"):
        import_rollouts(DUMPS / "verl", out, "verll")
    with raises(DataError, "'slime'"):
        import_rollouts(DUMPS / "verl", out, "slime")
    (tmp_path / "empty").mkdir()
    with raises(DataError, "'auto'"):
        import_rollouts(tmp_path / "empty", out)
    (tmp_path / "odd.jsonl").write_text('{"prompt": "a", "said": "b"}\n')
    with raises(DataError, "no completion", "prompt, said", where=f"{tmp_path / 'odd.jsonl'}, row 1"):
        import_rollouts(tmp_path / "odd.jsonl", out)
    (tmp_path / "half.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prom')
    with raises(DataError, where=f"{tmp_path / 'half.jsonl'}, line 2"):
        import_rollouts(tmp_path / "half.jsonl", out)
    line = {"step": 1, "uid": "a", "index": 0, "part": 0, "fate": "trained", "text": "x"}
    broken: dict[str, tuple[str, bytes]] = {
        "1.jsonl": ("verl", b'{"input": "a", "output": "b", "score": 1, "step": 1}\n{"input": "a", "output": "b"}\n'),
        "step.jsonl": ("jsonl", b'{"prompt": "a", "completion": "b", "step": "first"}\n'),
        "type.jsonl": ("jsonl", json.dumps(line | {"score": "high"}).encode()),
        "lacks.jsonl": ("jsonl", json.dumps(line | {"text": None}).encode()),
        "bytes.jsonl": ("jsonl", b'{"prompt": "\xff"}\n'),
        "digits.jsonl": ("jsonl", b'{"prompt": ' + b"9" * 5000 + b"}\n"),
        "cut.pt": ("slime", b"PK\x03\x04 half"),
        "nothing.pt": ("slime", b""),
    }
    for name, (form, content) in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            import_rollouts(tmp_path / name, out, form)
        assert name in str(caught.value.where), name
    assert not out.exists()
    shutil.copytree(DUMPS / "verl", out)
    with raises(DataError, str(out), where="--out"):
        import_rollouts(DUMPS / "verl", out)
    assert {importer.name for importer in IMPORTERS.values()} == set(FORMATS.values())
