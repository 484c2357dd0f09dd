"""Notices by webhook, against a real HTTP server: delivery, retries, refusals, time limits, counts, and no secret in them."""

from __future__ import annotations

import logging
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.patience import SOON
from support.services import refusing_port, serve

from hone.config import RLConfig, load_config
from hone.errors import ConfigError, DataError
from hone.insight import webhook
from hone.insight.redaction import is_secret_name, redact_command
from hone.insight.webhook import Webhook, alert_notice, check_address, failure_notice, is_address, run_name
from hone.preflight.lifecycle import the_webhook_is_an_address

ALERT = {
    "detector": "zero_reward",
    "severity": "error",
    "what": "every score of 3 steps is 0",
    "why": "w",
    "causes": [f"cause {number}. Fix: f" for number in range(5)],
    "fix": "reward.scorer=gsm8k",
    "samples": [{"step": 3, "uid": "train:1", "index": 0}],
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "PAUSES", (0.01, 0.02))


def accepting(path: str, body: Any) -> tuple[int, Any]:
    return 200, "ok"


def test_an_alert_arrives_in_order_with_text_and_data() -> None:
    with serve(accepting) as (url, seen):
        sender = Webhook(f"{url}/services/T1/secret", "project/demo")
        text, facts = alert_notice(3, ALERT)
        sender.send("alert", text, **facts)
        sender.send("ended", "finished: all 4 steps done", step=4, score=math.nan)
        assert sender.close() == {"delivered": 2, "failed": 0}
    (path, first, headers), (_, second, _) = seen
    assert path == "/services/T1/secret" and headers["content-type"] == "application/json"
    assert first["text"] == (
        "[hone] project/demo: error at step 3, zero_reward: every score of 3 steps is 0. Fix: reward.scorer=gsm8k"
    )
    assert (first["event"], first["run"], first["step"]) == ("alert", "project/demo", 3)
    assert first["causes"] == ALERT["causes"][:3] and first["samples"] == ALERT["samples"]
    assert second["event"] == "ended" and second["step"] == 4 and second["score"] is None


def test_a_busy_server_is_tried_again() -> None:
    answers = iter([503, 429, 200])
    with serve(lambda path, body: (next(answers), "")) as (url, seen):
        sender = Webhook(url, "r")
        sender.send("failed", "x")
        assert sender.close() == {"delivered": 1, "failed": 0}
    assert len(seen) == 3 and seen[0][1] == seen[2][1]


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (403, 1), (302, 1), (500, 3)])
def test_a_refusal_is_counted_once_and_said_without_the_address(
    status: int, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(lambda path, body: (status, "")) as (url, seen), caplog.at_level(logging.WARNING, "hone"):
        sender = Webhook(f"{url}/services/secret", "r")
        for _ in range(2):
            sender.send("alert", "x")
        assert sender.close() == {"delivered": 0, "failed": 2, "error": f"status {status}"}
    assert len(seen) == 2 * tries
    assert "status" in caplog.text and "secret" not in caplog.text and str(url) not in caplog.text
    assert len(caplog.records) == 2  # the first failure, and the counts at the end


def test_a_redirect_is_not_followed() -> None:
    class Moves(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(307)
            self.send_header("location", f"{other}/stolen")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with serve(accepting) as (other, stolen), ThreadingHTTPServer(("127.0.0.1", 0), Moves) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        sender = Webhook(f"http://127.0.0.1:{server.server_port}", "r")
        sender.send("alert", "x")
        assert sender.close()["error"] == "status 307"
        server.shutdown()
    assert not stolen


def test_no_server_is_a_failure_and_no_error() -> None:
    with refusing_port() as port:
        sender = Webhook(f"http://127.0.0.1:{port}/secret", "r")
        sender.send("alert", "x")
        counts = sender.close()
    assert counts["failed"] == 1 and "refused" in counts["error"].lower() and "secret" not in counts["error"]


def test_a_server_that_never_answers_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending does not wait, the end waits as long as it may, and what is left counts as failed: else the server would answer."""
    monkeypatch.setattr(webhook, "TIMEOUT", 60.0)
    held = threading.Event()

    def hang(path: str, body: Any) -> tuple[int, Any]:
        held.wait(SOON)
        return 200, "ok"

    with serve(hang) as (url, _):
        sender = Webhook(url, "r")
        for _ in range(3):
            sender.send("alert", "x")
        counts = sender.close(0.3)
        assert counts == {"delivered": 0, "failed": 3, "error": "not accepted within 0.3 s"}
        held.set()
        time.sleep(0.1)
        assert (sender.delivered, sender.failed) == (0, 3)  # a late answer changes no count


def test_more_notices_than_may_wait_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "WAITING", 2)
    held = threading.Event()

    def slow(path: str, body: Any) -> tuple[int, Any]:
        held.wait(SOON)
        return 200, "ok"

    with serve(slow) as (url, seen):
        sender = Webhook(url, "r")
        for _ in range(8):
            sender.send("alert", "x")
        held.set()
        counts = sender.close()
    assert counts["delivered"] == len(seen) and counts["delivered"] + counts["failed"] == 8 and counts["failed"] >= 5


def test_without_a_notice_there_is_no_thread() -> None:
    before = set(threading.enumerate())
    assert Webhook("http://127.0.0.1:9", "r").close() == {"delivered": 0, "failed": 0}
    assert set(threading.enumerate()) <= before


def test_credentials_in_a_notice_are_hidden() -> None:
    token = "hf_" + "a1" * 15
    with serve(accepting) as (url, seen):
        sender = Webhook(url, "r")
        sender.send("failed", f"cannot load with {token}", error={"what": [f"password=sesame {token}"]})
        sender.close()
    body = seen[0][1]
    assert token not in str(body) and "sesame" not in str(body) and "cannot load with" in body["text"]


def test_errors_become_notices() -> None:
    text, facts = failure_notice(DataError("no rows", fix="data.train_files=x", code="E-data"))
    assert text == "failed: no rows. Fix: data.train_files=x" and facts["code"] == "E-data"
    text, facts = failure_notice(ValueError("2 > 1"))
    assert text == "failed: ValueError: 2 > 1" and facts == {
        "error": "ValueError: 2 > 1",
        "code": None,
        "fix": "see the traceback in the log",
    }


def test_an_address_is_http_and_a_secret() -> None:
    assert is_address("https://hooks.example.com/x") and is_address("http://127.0.0.1:80")
    for wrong in ("hooks.example.com/x", "ftp://a/b", "https://", "http://[::1", ""):
        assert not is_address(wrong)
    with pytest.raises(ConfigError) as caught:
        check_address("s3://secret-place")
    assert "secret-place" not in caught.value.render() and "17 characters" in caught.value.what
    assert is_secret_name("insight.webhook") and not is_secret_name("insight.notify_end")
    assert redact_command(["hone", "gate", "m", "--webhook", "https://a/secret"])[-1] == "<redacted>"


def test_an_address_that_is_none_is_refused_before_the_run_and_not_repeated() -> None:
    config = load_config(RLConfig, ["insight.webhook=hooks.example.com/topsecretplace"])
    (finding,) = the_webhook_is_an_address(config)
    text = str(finding)
    assert "insight.webhook" in text and "32 characters" in text and "https://" in text
    assert "topsecretplace" not in text
    assert not list(the_webhook_is_an_address(load_config(RLConfig, ["insight.webhook=https://a.example/x"])))


@pytest.mark.parametrize(
    ("folder", "name"), [("runs/hone/demo", "runs/hone/demo"), ("/a/b/c/d", "b/c/d"), (Path("run"), "run")]
)
def test_the_name_of_a_run(folder: Any, name: str) -> None:
    assert run_name(folder) == name
