"""The page for the person on call knows every detector, every event of the webhook, and every way in which a run ends."""

import re
from pathlib import Path

import hone.insight.webhook
from hone.insight.detectors import DETECTORS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "handbook" / "on-call.md").read_text(encoding="utf-8")


def test_every_detector_has_a_first_look() -> None:
    table = PAGE[PAGE.index("## What an alert means") : PAGE.index("## Stop")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(detector.name for detector in DETECTORS)


def test_every_event_is_explained() -> None:
    events = set(re.findall(r"``(\w+)``", hone.insight.webhook.Webhook.send.__doc__ or ""))
    assert events == {"alert", "failed", "ended", "gate"}
    assert all(f"| `{event}`" in PAGE for event in events - {"alert"}) and "## What an alert means" in PAGE
