"""Answers of the viewer's addresses: prompts, questions, comparison, labels, selections, export and access."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.viewer_runs import write_run

from hone.apps.lab.viewer.api import READS, WRITES, Workspace
from hone.apps.lab.viewer.comparison import phrases
from hone.apps.lab.viewer.export import PAGE, bundle, export, page_with
from hone.apps.lab.viewer.overview import config_sources
from hone.apps.lab.viewer.prompts import COURSES
from hone.apps.lab.viewer.server import Viewer
from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.insight.archive.write import to_table, write_step
from hone.insight.detectors.watch import Watch
from hone.insight.metrics import find_metric
from hone.insight.run_directory import RunDirectory
from hone.insight.run_files import read_alerts
from hone.user_code import looking

pytestmark = pytest.mark.application("hone/apps/lab/viewer", "hone/insight", "hone/apps/lab", "hone/rewards")

RIGHT = 0.5


def ask(workspace: Workspace, name: str, **parameters: Any) -> Any:
    return READS[name](workspace, {key: str(value) for key, value in parameters.items()})


def test_a_prompt_has_its_visits_in_order_and_the_courses_count_all_prompts(
    workspace: Workspace, run_path: Path
) -> None:
    listed = ask(workspace, "prompts", limit=200)
    assert listed["total"] == 16 == sum(listed["courses"].values()) and set(listed["courses"]) == set(COURSES)
    archive = open_archive(run_path)
    for prompt in listed["prompts"]:
        visits = ask(workspace, "prompt", source=prompt["source"], row=prompt["row"])["visits"]
        shares = []
        for visit in visits:
            scores = [record["score"] for record in archive.records(visit["step"], ["score"], f"train:{prompt['row']}")]
            shares.append(sum(score >= RIGHT for score in scores) / len(scores))
        assert [visit["right"] for visit in visits] == pytest.approx(shares)
        assert prompt["course"] == "never" if max(shares) == 0 else prompt["course"] != "never"
        assert prompt["gain"] == pytest.approx(shares[-1] - shares[0])


def test_ready_questions_find_what_loops_find(workspace: Workspace, run_path: Path) -> None:
    archive = open_archive(run_path)
    records = [record for step in archive.steps() for record in archive.records(step)]
    groups: dict[tuple[int, str], list[Any]] = {}
    for record in records:
        groups.setdefault((record["step"], record["uid"]), []).append(record)

    def members(record: Any) -> list[Any]:
        return groups[record["step"], record["uid"]]

    expected = {
        "rejected": lambda r: (
            r["score"] < RIGHT
            and r["stop_reason"] == "stop"
            and re.search(rf"(?<![\d.]){r['ground_truth']}(?![\d])", r["text"][-240:]) is not None
        ),
        "identical": lambda r: sum(r["text"] == other["text"] for other in members(r)) >= 2,
        "equal": lambda r: len({other["score"] for other in members(r)}) == 1,
        "tools": lambda r: any(c["status"] != "ok" for c in (r["episode"] or {"tool_calls": []})["tool_calls"]),
        "cut": lambda r: r["stop_reason"] == "length",
        "verdict": lambda r: False,
        "gap": lambda r: any(
            chosen and abs(old - sampled) > 0.02  # float noise is below it
            for old, sampled, chosen in zip(r["old_log_probs"], r["rollout_log_probs"], r["response_mask"], strict=True)
        ),
    }
    for name, holds in expected.items():
        assert ask(workspace, "count", question=name)["count"] == sum(map(holds, records)), name
    listed = {question["name"] for question in ask(workspace, "questions")}
    assert set(expected) < listed
    for name in listed:
        assert ask(workspace, "count", question=name)["count"] <= len(records)


def test_tokens_have_one_value_each_and_the_differences_of_the_log_probs(workspace: Workspace, run_path: Path) -> None:
    record = next(open_archive(run_path).records(4))
    shown = ask(workspace, "tokens", step=4, uid=record["uid"])
    assert "".join(shown["prompt_texts"]) == record["prompt"]
    assert "".join(shown["texts"]).startswith(record["text"].split("\n")[0])
    assert {len(values) for values in shown["columns"].values()} == {len(record["response_ids"])}
    ratios = [value for value in shown["columns"]["log_ratio"] if value is not None]
    pairs = zip(record["new_log_probs"], record["old_log_probs"], record["response_mask"], strict=True)
    assert ratios == pytest.approx([new - old for new, old, chosen in pairs if chosen], abs=1e-6)
    assert [factor["name"] for factor in shown["chain"]][:3] == ["reward", "advantage", "correction"]
    assert next(factor for factor in shown["chain"] if factor["name"] == "advantage")["config"] == "grpo"


def test_an_episode_has_its_calls_at_their_turns(workspace: Workspace, run_path: Path) -> None:
    archive = open_archive(run_path)
    record = next(
        r
        for step in archive.steps()
        for r in archive.records(step)
        if r["episode"] and len(r["episode"]["tool_calls"]) == 2
    )
    shown = ask(workspace, "episode", step=record["step"], uid=record["uid"], index=record["index"])
    turns = [entry for entry in shown["lanes"][0]["entries"] if entry["turn"] is not None]
    assert [entry["turn"] for entry in turns] == [0, 1, 2]
    assert [[call["status"] for call in entry["calls"]] for entry in turns] == [["invalid_arguments"], ["ok"], []]
    assert turns[0]["reward"] == pytest.approx(-0.1)
    seconds = sum(call["seconds"] for call in record["episode"]["tool_calls"])
    assert shown["times"] == {"generate": 1.2, "outside": pytest.approx(seconds)}


def test_sub_agents_are_lanes_after_the_turn_that_called_them(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "x"}
    episode = {
        "assistant_turns": 3,
        "messages": [said, {"role": "tool", "content": "r"}, said],
        "turn_rewards": [0.0, 0.5, 1.0],
        "tool_calls": [{"name": "delegate", "turn": 0, "status": "ok"}],
        "conversations": [{"turn": 1, "turns": 1, "messages": [{"role": "user", "content": "q"}, said]}],
    }
    base = {
        "step": 1,
        "uid": "u",
        "index": 0,
        "fate": "trained",
        "text": "x",
        "episode": episode,
        "turn_values": {2: 0.25},
    }
    parts = [
        base | {"part": 0, "prompt_ids": [1, 2], "response_ids": [3, 4]},
        base | {"part": 1, "prompt_ids": [1, 2, 9], "response_ids": [5]},
    ]
    write_step(tmp_path, 1, to_table(parts))
    shown = ask(Workspace({"r": tmp_path}), "episode", step=1, uid="u", index=0)
    own, child = shown["lanes"]
    assert [(entry["turn"], entry["reward"]) for entry in own["entries"] if entry["turn"] is not None] == [
        (0, 0),
        (2, 1),
    ]
    assert (child["first"], child["after"], [entry["turn"] for entry in child["entries"]]) == (1, 0, [None, 1])
    assert [(segment["tokens"], segment["shared"]) for segment in shown["segments"]] == [(4, 0), (4, 2)]


def test_two_steps_are_paired_by_prompt_and_by_seed(workspace: Workspace) -> None:
    same = ask(workspace, "compare", q_a="step=2", q_b="step=2")
    assert (same["paired"]["count"], same["paired"]["better"], same["paired"]["mean"]) == (8, 0, 0)
    assert (same["same_seed"]["pairs"], same["same_seed"]["equal"]) == (32, 32) and not same["phrases"]["more"]
    changed = ask(workspace, "compare", q_a="step=2", q_b="step=6")  # 16 prompts, 8 a step
    assert changed["paired"]["count"] == 8 and changed["same_seed"]["pairs"] == 0
    differences = [b - a for a, b in (prompt["scores"] for prompt in changed["paired"]["prompts"])]
    assert changed["paired"]["mean"] == pytest.approx(sum(differences) / 8, abs=1e-6)
    assert [abs(d) for d in differences] == sorted((abs(d) for d in differences), reverse=True)
    with pytest.raises(HoneError) as error:
        ask(workspace, "compare", q_a="step=2", q_b="step=99")
    assert error.value.code == "E-view-comparison"


def test_the_phrases_that_differ_are_found() -> None:
    first = [f"the sum is {number}" for number in range(40)]
    second = [f"wait let me check the sum is {number}" for number in range(40)]
    found = phrases(first, second)
    assert found["more"][0] == {
        "phrase": "let me check the sum",
        "first": 0,
        "second": 1,
        "z": pytest.approx(8.94, abs=0.01),
    }
    assert not found["less"]


def test_a_label_is_kept_found_again_and_refused_when_empty(run_path: Path, tmp_path: Path) -> None:
    shutil.copytree(run_path, tmp_path / "copy")
    workspace = Workspace({"copy": tmp_path / "copy"})
    at = {"step": 2, "uid": "train:8", "index": 1, "part": 0}
    WRITES["label"](workspace, at | {"label": "reward wrong", "comment": "<b>x</b>\u2028y\x85z"})
    listed = ask(workspace, "labels")
    assert [{name: entry[name] for name in at} for entry in listed["labels"]] == [at]
    assert listed["names"][0] == "reward wrong"
    found = ask(workspace, "answers", q='label:"reward wrong"')
    assert [(a["step"], a["uid"], a["index"]) for a in found["answers"]] == [(2, "train:8", 1)]
    for wrong, code in ((at | {"label": " "}, "E-view-label"), (at | {"index": 77, "label": "x"}, "E-view-address")):
        with pytest.raises(HoneError) as error:
            WRITES["label"](workspace, wrong)
        assert error.value.code == code
    assert (tmp_path / "copy" / "labels.jsonl").read_text().count("\n") == 1


def test_a_selection_is_conversations_or_pairs_of_best_and_worst(workspace: Workspace) -> None:
    lines = [
        json.loads(line) for line in ask(workspace, "selection", q="step=5 score>=0.5", form="sft").text.splitlines()
    ]
    assert lines and all(line["score"] >= 0.5 and line["step"] == 5 for line in lines)
    assert all(line["messages"][0]["role"] == "user" and line["messages"][-1]["role"] == "assistant" for line in lines)
    pairs = [json.loads(line) for line in ask(workspace, "selection", q="step=5", form="pairs").text.splitlines()]
    groups = [group for group in ask(workspace, "groups", q="step=5")["groups"] if group["spread"] > 0]
    assert len(pairs) == len(groups)
    by_uid = {group["uid"]: group for group in groups}
    for pair in pairs:
        scores = by_uid[pair["uid"]]["scores"]
        assert (pair["chosen_score"], pair["rejected_score"]) == (
            pytest.approx(max(scores)),
            pytest.approx(min(scores)),
        )
    with pytest.raises(HoneError) as error:
        ask(workspace, "selection", q="step=99")
    assert error.value.code == "E-view-selection"


def test_the_sources_of_keys() -> None:
    flat = {"actor_rollout_ref.actor.optim.lr": 1e-3, "trainer.seed": 3, "data.shuffle": True, "data.train_files": "x"}

    def sources(*command: str) -> dict[str, str]:
        return {entry["key"]: entry["source"] for entry in config_sources(flat, command)}

    typed = sources("hone", "train", "--preset=grpo", "actor.optim.lr=1e-3", "trainer.seed=3")
    assert typed["trainer.seed"] == "command line" and typed["data.train_files"] == "derived"
    assert sources("hone", "train", "--config-name=mine")["data.train_files"] == "file"
    assert sources("train.py")["data.train_files"] == "script"
    assert typed["data.shuffle"] == sources("train.py")["data.shuffle"] == sources()["data.shuffle"] == "default"


def test_a_run_without_expected_answers_shows_the_columns_of_its_rows_and_where_prompts_differ(tmp_path: Path) -> None:
    path, file = write_run(tmp_path / "price", steps=1, groups=2, n=1, prompts=2, agents=0), tmp_path / "train.jsonl"
    rows = [
        {"prompt": f"Extract the price, as a number: {price}", "price": price, "long": "x" * 81} for price in (5, 38)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    RunDirectory(path).start(seed=1, config_yaml=f"data: {{train_files: {file}}}", command=["hone", "train"])
    records = [r | {"ground_truth": None, "prompt": rows[r["row"]]["prompt"]} for r in open_archive(path).records(1)]
    write_step(path / "rollouts", 1, to_table(records))
    workspace = Workspace({"price": path})
    assert [group["prompt"] for group in ask(workspace, "groups")["groups"]] == ["… 5", "… 38"]
    assert [answer["text"] for answer in ask(workspace, "answers")["answers"]] == [r["text"][-220:] for r in records]
    assert [ask(workspace, "group", step=1, uid=f"train:{row}")["columns"] for row in (0, 1)] == [
        {"price": 5},
        {"price": 38},
    ]
    file.write_text(file.read_text().replace("38", "39"))  # not the file that the run had
    assert ask(workspace, "group", step=1, uid="train:1")["columns"] == {}


def test_the_run_page_has_curves_ledger_and_environment(workspace: Workspace) -> None:
    metrics, overview = ask(workspace, "metrics"), ask(workspace, "overview")
    assert metrics["steps"] == [1, 2, 3, 4, 5, 6] and len(metrics["columns"]["critic/rewards/mean"]) == 6
    assert overview["ledger"]["counts"]["drawn"] == 48 and overview["ledger"]["problem"] is None
    assert overview["record"]["versions"]["hone"] and overview["status"] == "finished"
    assert find_metric("critic/rewards/mean").meaning == metrics["about"]["critic/rewards/mean"]
    (line,) = ask(workspace, "summaries")
    assert (line["name"], line["step"], line["metric"]) == ("demo", 6, "critic/rewards/mean")
    assert line["result"] == metrics["columns"][line["metric"]][-1]


def test_an_edited_reward_scores_the_stored_answers_again(run_path: Path, tmp_path: Path) -> None:
    reward = tmp_path / "edited.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(ground_truth in solution_str)\n"
    )
    workspace = Workspace({"demo": run_path}, [f"{reward}:compute_score"])
    with looking():  # as `hone view` does
        result = WRITES["rescore"](workspace, {"reward": f"{reward}:compute_score"})
    assert (result["episodes"], result["groups"]) == (192, 48) and result["changed"] >= len(result["differences"]) > 0
    for one in result["differences"]:
        record = workspace.archived({}).record(one["step"], one["uid"], one["index"], 0)
        assert (one["old"], one["new"]) == (
            pytest.approx(record["score"]),
            float(record["ground_truth"] in record["text"]),
        )
    with pytest.raises(HoneError) as error:
        Workspace({"demo": run_path}, [f"{tmp_path}/none.py:f"])
    assert error.value.code == "E-view-reward"


BODIES = [b"", b"[]", b"3", b"null", b"{", b"[" * 100_000, b"\xff", b"{}", b'{"run": []}', b'{"step": "x", "label": "a"}', b'{"reward": []}',
          b'{"label": "a", "step": 1e400, "uid": "u", "index": 0, "part": 0}',
          b'{"label": "\\ud800", "step": 1, "uid": "train:0", "index": 0, "part": 0}']  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_wrong_body_is_the_client_s_mistake(body: bytes, run_path: Path, tmp_path: Path) -> None:
    shutil.copytree(run_path, tmp_path / "run")
    client = TestClient(Viewer(Workspace({"run": tmp_path / "run"}), "token").app, raise_server_exceptions=False)
    client.get("/?token=token")
    for name in WRITES:
        answer = client.post(f"/api/{name}", content=body, headers={"X-Hone-View": "1"})
        assert answer.status_code in (200, 400, 404), (name, answer.status_code)
    wrong = {"X-Hone-View": "1", "Content-Length": "abc"}
    assert client.post("/api/label", content=body, headers=wrong).status_code == 413


def test_answers_are_scored_by_functions_named_at_the_start_only(run_path: Path, tmp_path: Path) -> None:
    reward = tmp_path / "another.py"
    reward.write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(data_source, solution_str, ground_truth, extra_info): return 0\n"
    )
    for rewards in ([], [[f"{__file__}:ask"]]):
        workspace = Workspace({"demo": run_path}, *rewards)
        for name in (f"{reward}:f", f"{reward}", "another:f", "", f"{__file__}:test"):
            with pytest.raises(HoneError) as error:
                WRITES["rescore"](workspace, {"reward": name})
            assert error.value.code == "E-view-reward" and not (tmp_path / "ran").exists()


def test_the_alerts_are_those_of_the_detectors_and_the_end_of_the_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "dead")
    run.start(seed=1, config_yaml="data: {max_response_length: 64}\n", command=["hone", "train"])
    watch = Watch(run, {"data.max_response_length": 64})
    for step in range(1, 5):
        metrics = {"critic/score/max": 0.0, "critic/score/min": 0.0, "response_length/clip_ratio": 0.9}
        run.log_metrics(step, metrics)
        watch.observe(step, metrics)
    run.update_status("failed", exit_reason="out of memory", last_step=4)
    run.close()
    shown = ask(Workspace({"dead": tmp_path / "dead"}), "alerts")
    assert shown[0]["step"] == 4 and "out of memory" in shown[0]["what"] and not shown[0]["detector"]
    reported = read_alerts(tmp_path / "dead")
    assert reported and [alert["detector"] for alert in shown[1:]] == [alert["detector"] for alert in reported][::-1]
    zero = next(alert for alert in shown if alert["detector"] == "zero_reward")
    assert "data.max_response_length=128" in zero["causes"][0]


# access --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(workspace: Workspace) -> TestClient:
    return TestClient(Viewer(workspace, "secret").app, base_url="http://127.0.0.1:8750", follow_redirects=False)


def test_nothing_is_served_without_the_token_and_the_cookie_keeps_it(client: TestClient) -> None:
    for path in ("/", "/app.js", "/api/runs", "/?token=wrong"):
        assert client.get(path).status_code == 403
    entered = client.get("/?token=secret")
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    page = client.get("/")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    for path in ("/app.js", "/vendor/preact.js", "/style.css", "/api/runs"):
        assert client.get(path).status_code == 200
    assert client.get("/../server.py").status_code == client.get("/vendor/LICENSES.txt").status_code == 404


def test_a_write_needs_the_header(client: TestClient) -> None:
    client.get("/?token=secret")
    body = {"step": 1, "uid": "none", "index": 0, "part": 0, "label": "x"}
    header = {"X-Hone-View": "1"}
    assert client.post("/api/label", json=body).status_code == 403
    allowed = client.post("/api/label", json=body, headers=header)
    assert allowed.status_code == 404 and allowed.json()["error"]["code"] == "E-view-address"
    assert client.get("/api/groups?q=scroe<1").json()["error"]["code"] == "E-view-query"


# the file of an export -----------------------------------------------------------------------------------------------


def test_an_export_holds_the_groups_of_the_filter_and_asks_nobody(workspace: Workspace, tmp_path: Path) -> None:
    written = export(workspace, tmp_path / "run.html", "step=3")
    text = (tmp_path / "run.html").read_text()
    data = json.loads(re.search(r'id="hone-data">(.*?)</script>', text, re.DOTALL)[1])
    assert written == {"groups": 8, "bytes": len(text.encode())}
    assert sum(key.startswith("tokens?") for key in data["answers"]) == 32
    assert "default-src &#x27;none&#x27;" in text and not re.search(r'(?:src|href)="', text)
    with pytest.raises(HoneError) as error:
        export(workspace, tmp_path / "none.html", "step=99")
    assert error.value.code == "E-view-export" and not (tmp_path / "none.html").exists()


def test_data_cannot_end_the_script_that_holds_it() -> None:
    text = page_with({"about": "</script><script>alert(1)</script>", "answers": {}})
    assert text.count("<script") == 3 and "alert(1)\\u003c/script>" in text


def test_the_bundle_has_no_modules_left() -> None:
    assert not re.search(r"^(import|export) ", bundle("app.js"), re.MULTILINE)


def test_the_files_of_others_are_those_whose_hashes_are_listed() -> None:
    folder = PAGE / "vendor"
    listed = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    files = {file.name for file in folder.iterdir()} - {"SHA256SUMS", "LICENSES.txt"}
    assert set(listed) == files == {"preact.js", "uplot.js", "uplot.css"}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
