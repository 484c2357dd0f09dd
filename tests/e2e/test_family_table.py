"""Every family of Transformers: what docs/models.md says of it is what happens."""

from __future__ import annotations

import json

import pytest
from support.family_page import VERDICTS
from support.family_probe import KINDS, probe

pytestmark = pytest.mark.long("hone/models", "hone/training", "hone/generation/native", "tests/families.json")
KNOWN = {one["kind"]: one for one in json.loads(VERDICTS.read_text())}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KNOWN.get(kind, {}).get("verdict") != "untried"])
def test_a_family_does_what_the_table_says(kind: str) -> None:
    assert kind in KNOWN, f"python scripts/families.py {kind}"
    found, known = probe(kind), KNOWN[kind]
    assert (found.verdict, found.adapter == "yes") == (known["verdict"], known["adapter"] == "yes"), found
    assert (found.gap or 0) <= max(5e-5, 3 * (known["gap"] or 0))  # processors differ by a few times


def test_no_family_ends_without_a_message() -> None:
    assert [one["kind"] for one in KNOWN.values() if one["verdict"] == "fails"] == []
