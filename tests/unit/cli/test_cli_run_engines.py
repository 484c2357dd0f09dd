"""`hone runs engines` against a run directory whose trainer a thread plays."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from click.testing import Result
from support.patience import SOON
from typer.testing import CliRunner

from hone.cli.runs import app
from hone.errors import HoneError
from hone.insight.run_directory import RunDirectory
from hone.insight.stop_requests import REQUEST, ReplicaAnswer, ReplicaRequest, take_request, write_answer

SERVED = "actor_rollout_ref: {rollout: {name: native, num_replicas: 1}}"
ROW = {"replica": 0, "worker": 0, "state": "serving", "requests": 3, "limit": 64, "version": 7, "starts": 1, "problem": ""}  # fmt: skip


def started(path: Path, config: str = SERVED) -> RunDirectory:
    directory = RunDirectory(path)
    directory.start(seed=1, config_yaml=config)
    return directory


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["engines", *map(str, arguments)], env={"COLUMNS": "100"}, catch_exceptions=False)


def answered(
    run: Path, *options: object, refused: dict[str, str] | None = None
) -> tuple[Result | None, ReplicaRequest]:
    """The result of the command, and the request that the trainer got."""
    requests: list[ReplicaRequest] = []

    def train() -> None:
        deadline = time.monotonic() + SOON
        while not requests and time.monotonic() < deadline:
            if (request := take_request(run)) is not None:
                write_answer(run, ReplicaAnswer(request.key, request.replicas or 1, 4, [ROW], refused or {}))
                requests.append(request)
            time.sleep(0.01)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        return invoke(run, *options, "--wait", 30), requests[0]
    finally:
        trainer.join()


def test_the_table_and_the_request(tmp_path: Path) -> None:
    started(tmp_path / "run")
    result, request = answered(tmp_path / "run", "--replicas", 2)
    assert result is not None and result.exit_code == 0 and request.replicas == 2
    assert ["0", "0", "serving", "3", "64", "7", "1"] in [line.split() for line in result.stdout.splitlines()]
    result, request = answered(tmp_path / "run", "--json")
    assert result is not None and request.replicas is None
    answer = json.loads(result.stdout)
    assert answer["replicas"] == [ROW] and (answer["wanted"], answer["limit"]) == (1, 4)


def test_a_refusal_is_an_error_of_the_user(tmp_path: Path) -> None:
    started(tmp_path / "run")
    with pytest.raises(HoneError) as error:
        answered(tmp_path / "run", "--replicas", 9, refused={"what": "9", "why": "2 cores", "fix": "--replicas 2"})
    assert (error.value.code, error.value.fix, error.value.exit_code) == ("E-runs", "--replicas 2", 2)


@pytest.mark.parametrize("replicas", [None, 2])
def test_a_run_that_does_not_answer(tmp_path: Path, replicas: int | None) -> None:
    started(tmp_path / "run")
    with pytest.raises(HoneError) as error:
        invoke(tmp_path / "run", "--wait", 0.2, *(() if replicas is None else ("--replicas", replicas)))
    assert error.value.code == "E-runs" and "0.2 s" in error.value.what
    assert (tmp_path / "run" / REQUEST).exists() == (replicas is not None), "a wanted number stays for the run"


@pytest.mark.parametrize(
    "config",
    ["actor_rollout_ref: {rollout: {name: native, num_replicas: null}}", "optim: {lr: 1.0e-3}"],
)
def test_a_run_without_replicas(tmp_path: Path, config: str) -> None:
    started(tmp_path / "run", config)
    with pytest.raises(HoneError) as error:
        invoke(tmp_path / "run")
    assert error.value.code == "E-runs" and "num_replicas=1" in error.value.fix
    assert not (tmp_path / "run" / REQUEST).exists()


def test_a_run_that_has_ended_or_does_not_exist(tmp_path: Path) -> None:
    started(tmp_path / "run").update_status("finished", exit_reason="all 3 steps done")
    for name in ("run", "other"):
        with pytest.raises(HoneError) as error:
            invoke(name, "--root", tmp_path, "--replicas", 2)
        assert error.value.code == "E-runs" and ("finished" in error.value.what) == (name == "run")
    assert invoke(tmp_path / "run", "--replicas", 0).exit_code == 2
    assert not (tmp_path / "run" / REQUEST).exists()
