"""Commands that look into a run, on runs of the quickstart and of an agent example: archive, view, what-if, replay, profile, alerts."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.browser import viewing
from support.launch import Ended, hone
from support.patience import LONG
from support.small_examples import NAMES, small_example

from hone.insight.archive.read import open_archive
from hone.insight.run_files import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.application(
        "hone/insight", "hone/apps/lab/viewer", "hone/apps/lab/replay", "hone/cli/looking.py", "examples"
    ),
]

STEPS = ("trainer.total_training_steps=3", "trainer.save_steps_for_replay=[2]", "actor_rollout_ref.actor.optim.lr=1e-3")


@pytest.fixture(scope="module", params=NAMES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    example = small_example(request.param, root)
    run = root / "run"
    place = (f"trainer.default_local_dir={run}",)
    ended = hone(
        "train",
        "--config-path",
        example.file.parent,
        "--config-name",
        "grpo",
        *example.words,
        *STEPS,
        *place,
        log=root / "train.log",
        cwd=root,
    )
    assert ended.code == 0, ended.output
    return run


def parsed(ended: Ended, code: int = 0) -> Any:
    """The JSON of a command."""
    assert ended.code == code, ended.output
    start = min(place for place in (ended.output.find("{\n"), ended.output.find("[")) if place >= 0)
    return json.loads(ended.output[start:])


def test_the_archive_goes_out_and_comes_back(trained: Path, run: Callable[..., Ended], tmp_path: Path) -> None:
    assert run("archive", "export", trained, "--out", tmp_path / "rows.jsonl").code == 0
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    records = [record for step in (1, 2, 3) for record in open_archive(trained).records(step)]
    assert len(lines) == len(records) >= 24
    assert run("archive", "import", tmp_path / "rows.jsonl", "--out", tmp_path / "theirs").code == 0
    back = [record for step in (1, 2, 3) for record in open_archive(tmp_path / "theirs").records(step)]
    for name in ("text", "score", "response_ids"):
        assert [record[name] for record in back] == [record[name] for record in records]


def test_the_step_under_its_settings_is_the_step(trained: Path, run: Callable[..., Ended]) -> None:
    table = parsed(run("what-if", trained, "--step", 2, "--json"))
    assert table["advantage_gap"] == 0 and table["exact"]
    lines = {line["name"]: line for line in table["compared"]}
    norm = next(row["actor/grad_norm"] for row in read_metrics(trained) if row["step"] == 2)
    assert lines["the run"]["cosine"] == pytest.approx(1) or norm == 0
    assert lines["adv_estimator=rloo"]["missing"] is None


def test_the_step_again_is_the_step(trained: Path, run: Callable[..., Ended]) -> None:
    result = parsed(run("replay", trained, "--step", 2, "--json"))
    assert result["first"] is None and {"gen", "reward", "adv", "update_actor"} <= set(result["stages"])


def test_failed_episodes_are_sorted(trained: Path, run: Callable[..., Ended], tmp_path: Path) -> None:
    """Every failed episode of the run has a kind, a turn that it has, and an example that `runs samples` finds."""
    found = parsed(run("runs", "triage", trained, "--json", "--per-task", 1000))
    records = {(r["step"], r["uid"], r["index"]): r for step in (1, 2, 3) for r in open_archive(trained).records(step)}
    assert found["episodes"] == len(records) and 0 < found["failed"] == found["sorted"] == sum(found["kinds"].values())
    assert found["change"] and found["because"] in found["kinds"]
    for task in found["tasks"]:
        for failure in task["failures"]:
            episode = records[(failure["step"], failure["uid"], failure["index"])]["episode"]
            assert 1 <= failure["turn"] <= failure["turns"] == (episode["assistant_turns"] if episode else 1)
    page = run("runs", "triage", trained, "--out", tmp_path / "page.md")
    assert page.code == 0 and found["change"] in (tmp_path / "page.md").read_text()


def test_the_profile_has_all_of_the_time(trained: Path, run: Callable[..., Ended], tmp_path: Path) -> None:
    profile = parsed(run("profile", trained, "--trace", tmp_path / "trace.json", "--json"))
    assert sum(profile["shares"].values()) == pytest.approx(1) and profile["steps"] == 2
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"gen", "reward", "adv", "update_actor"} <= {event["name"] for event in events}


def test_alerts_are_those_that_the_detectors_give_again(trained: Path, run: Callable[..., Ended]) -> None:
    stored, again = (parsed(run("runs", word, trained, "--json")) for word in ("alerts", "diagnose"))
    assert [alert["detector"] for alert in again] == [alert["detector"] for alert in stored]


def test_the_viewer_shows_every_answer(trained: Path, run: Callable[..., Ended], tmp_path: Path) -> None:
    records = list(open_archive(trained).records(2))
    with viewing(trained, log=tmp_path / "log", seconds=LONG) as address:
        client = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        client.open(address).close()  # takes the cookie

        def get(name: str, **parameters: object) -> Any:
            with client.open(f"{address.partition('?')[0]}api/{name}?{urllib.parse.urlencode(parameters)}") as answer:
                return json.load(answer)

        page = get("groups", q="step=2")
        assert (page["total"], page["rows"]) == (4, len(records))
        for record in records:
            place = {name: record[name] for name in ("step", "uid", "index", "part")}
            assert len(get("tokens", **place)["ids"]) == len(record["response_ids"])
            factors = {factor["name"]: factor["values"] for factor in get("factors", **place)}
            shares = zip(factors["share"], record["response_mask"], record["advantages"], strict=True)
            assert all((share > 0) == bool(mask and advantage) for share, mask, advantage in shares)
    file = tmp_path / "seen.html"
    assert run("view", trained, "--export", file, "--filter", "step=2", timeout=LONG).code == 0
    assert all(record["uid"] in file.read_text() for record in records)
