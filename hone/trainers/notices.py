"""Notices of a run to its webhook: alerts, an error that ends it, and on request its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hone.config.trees import AnyConfig
from hone.errors import HoneError
from hone.insight.run_directory import RunDirectory
from hone.insight.run_files import RUN, read_run
from hone.insight.webhook import Webhook, alert_notice, failure_notice, run_name

log = logging.getLogger("hone")

_PATIENCE_OF_A_HANG = 5.0
"""Seconds that a run which hangs waits for its notice before it is ended."""


class Notices:
    """Notices of one run, over all its restarts.

    Args:
        config: configuration of the run; without ``insight.webhook`` nothing is sent.
    """

    def __init__(self, config: AnyConfig) -> None:
        self._folder, self._settings = Path(config.trainer.default_local_dir), config.insight
        url = self._settings.webhook
        self._webhook = None if url is None else Webhook(url, run_name(self._folder))

    def alerts(self, step: int, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Send alerts of a step, as ``alerts.jsonl`` has them."""
        for alert in alerts if self._webhook else ():
            text, facts = alert_notice(step, alert)
            self._send("alert", text, facts)

    def failed(self, error: BaseException) -> None:
        """Send the error that ends the run."""
        self._send("failed", *failure_notice(error))

    def hangs(self, reason: str) -> None:
        """Send that the run hangs and is ended, before its process exits."""
        self._send("failed", f"failed: hang: {reason}", {"error": f"hang: {reason}", "code": None, "fix": ""})
        self.close(_PATIENCE_OF_A_HANG)

    def ended(self) -> None:
        """Send the recorded end of the run, if ``insight.notify_end`` asks for it."""
        if self._webhook is None or not self._settings.notify_end:
            return
        record = read_run(self._folder)
        status, reason = str(record.get("status")), str(record.get("exit_reason"))
        facts = {"status": status, "reason": reason, "step": record.get("last_step")}
        self._send("ended", f"{status}: {reason}", facts)

    def close(self, patience: float | None = None) -> None:
        """Wait for notices under way, and record in ``run.json`` how many were delivered and failed."""
        if self._webhook is None:
            return
        counts = self._webhook.close() if patience is None else self._webhook.close(patience)
        if (self._folder / RUN).exists():
            try:
                RunDirectory(self._folder).set_webhook(counts)
            except HoneError as error:  # a full disk
                log.warning("the counts of the webhook could not be recorded: %s", error.what)

    def _send(self, event: str, text: str, facts: Mapping[str, Any]) -> None:
        if self._webhook is not None:
            self._webhook.send(event, text, **facts)


_current: ContextVar[Notices | None] = ContextVar("notices", default=None)


@contextmanager
def notices_of(config: AnyConfig) -> Iterator[Notices]:
    """Send the notices of a run while the block runs: its error, or its end."""
    notices = Notices(config)
    token = _current.set(notices)
    try:
        yield notices
        notices.ended()
    except Exception as error:
        notices.failed(error)
        raise
    finally:
        _current.reset(token)
        notices.close()


def run_notices(config: AnyConfig) -> Notices:
    """Return the notices of the run under way, or new ones for a program that nothing supervises."""
    return _current.get() or Notices(config)
