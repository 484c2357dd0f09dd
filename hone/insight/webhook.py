"""Notices of a run by webhook: JSON that is posted to a URL, for Slack and for programs.

A notice is an object with `text`, which Slack and compatible services show, and the same as data: `event`, `run`, `host`, `at`, and what
belongs to the event. A thread of its own delivers notices in order. A run never waits for it, except at its end for at most
:data:`PATIENCE` seconds, and never fails by it: what cannot be delivered is counted.

The URL is a secret: who has it can write into the channel. It is in no notice, message or file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import platform
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from hone.errors import ConfigError, HoneError
from hone.insight.redaction import redact_text
from hone.insight.run_files import now
from hone.text import valid_data

log = logging.getLogger("hone")

SCHEMES = ("https://", "http://")
TIMEOUT = 5.0  # seconds that a try may wait for the other side
PAUSES = (1.0, 3.0)  # seconds before the second and the third try
PATIENCE = 15.0  # seconds that the end of a run waits for notices under way
WAITING = 100  # notices that wait; further ones are not sent
_LATER = {408, 425, 429}
_CAUSES = 3


class Webhook:
    """Sender of notices to one URL.

    Attributes:
        failed: number of notices that were given up, or that found :data:`WAITING` others waiting.
        error: why the last one failed; empty while none has.
    """

    def __init__(self, url: str, run: str) -> None:
        self._url, self.run = url, run
        self.delivered, self.failed, self.error = 0, 0, ""
        self._waiting: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._sent = 0
        self._thread: threading.Thread | None = None

    def send(self, event: str, text: str, **facts: Any) -> None:
        """Give a notice to the thread that delivers it, without waiting.

        Args:
            event: ``alert``, ``failed``, ``ended`` or ``gate``.
            text: what a person reads; the name of the run is put before it.
            facts: further entries, plain data.
        """
        place = {"event": event, "run": self.run, "host": platform.node(), "at": now()}
        notice = _plain({"text": f"[hone] {self.run}: {text}", **place, **facts})
        body = json.dumps(valid_data(notice), default=str).encode()
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name="webhook", daemon=True)
            self._thread.start()
        self._sent += 1
        try:
            self._waiting.put_nowait(body)
        except queue.Full:
            self._give_up(f"{WAITING} notices wait")

    def close(self, patience: float = PATIENCE) -> dict[str, Any]:
        """Wait for the notices under way, and return the counts; those that are left count as failed."""
        if self._thread is not None:
            end = time.monotonic() + patience
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=patience)
            self._thread.join(max(0.0, end - time.monotonic()))
            self._closing.set()
            self._thread = None
        with self._lock:
            if left := self._sent - self.delivered - self.failed:
                self.failed, self.error = self.failed + left, f"not accepted within {patience:g} s"
        if self.failed:
            log.warning("webhook: %d of %d notices failed: %s", self.failed, self.failed + self.delivered, self.error)
        counts = {"delivered": self.delivered, "failed": self.failed}
        return counts | ({"error": self.error} if self.error else {})

    def _deliver(self) -> None:
        while (body := self._waiting.get()) is not None:
            self._post(body)

    def _post(self, body: bytes) -> None:
        """Try to post a notice, as often as :data:`PAUSES` says while the failure may pass."""
        problem = ""
        for pause in (0.0, *PAUSES):
            if self._closing.wait(pause):
                return
            try:
                request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
                with _OPENER.open(request, timeout=TIMEOUT), self._lock:
                    self.delivered += not self._closing.is_set()
                    return
            except urllib.error.HTTPError as error:
                error.close()
                problem = f"status {error.code}"
                if error.code < 500 and error.code not in _LATER:
                    break
            except Exception as error:  # noqa: BLE001 - anything that a server or a network does must not end the run
                problem = f"{type(error).__name__}: {getattr(error, 'reason', None) or error}".replace(self._url, "URL")
        self._give_up(problem)

    def _give_up(self, problem: str) -> None:
        with self._lock:
            if self._closing.is_set():
                return  # counted already
            self.failed, self.error = self.failed + 1, problem
            first = self.failed == 1
        if first:
            log.warning("webhook: a notice failed (%s); the run continues, further failures are counted", problem)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a notice is for the configured address only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Return no further request, so that the status counts as the answer."""


_OPENER = urllib.request.build_opener(_NoRedirects)


def is_address(url: str) -> bool:
    try:
        return url.startswith(SCHEMES) and bool(urlsplit(url).hostname)
    except ValueError:  # a bracket that is not closed
        return False


def check_address(url: str) -> None:
    """Raise ConfigError unless the text is an http or https address."""
    if not is_address(url):
        raise ConfigError(
            f"the webhook is a text of {len(url)} characters that is not an http or https address",
            fix="--webhook https://..., or HONE_WEBHOOK=https://... in the environment",
            where="--webhook",
        )


def alert_notice(step: int, alert: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return text and facts of a detector's alert, an object of ``alerts.jsonl``."""
    text = f"{alert['severity']} at step {step}, {alert['detector']}: {alert['what']}. Fix: {alert['fix']}"
    return text, {**alert, "step": step, "causes": list(alert["causes"])[:_CAUSES]}


def failure_notice(error: BaseException) -> tuple[str, dict[str, Any]]:
    """Return text and facts of an error that ends a run."""
    if isinstance(error, HoneError):
        fix = f" Fix: {error.fix}" if error.fix else ""
        return f"failed: {error.what}.{fix}", {"error": error.what, "code": error.code, "fix": error.fix}
    said = f"{type(error).__name__}: {error}"
    return f"failed: {said}", {"error": said, "code": None, "fix": "see the traceback in the log"}


def run_name(folder: str | Path) -> str:
    return "/".join(Path(folder).parts[-3:])


def _plain(value: Any) -> Any:
    """Return data for JSON: credentials in texts hidden, and numbers that JSON has not as null."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
