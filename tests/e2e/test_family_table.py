"""Every family of Transformers: what docs/models.md says of it is what happens."""

from __future__ import annotations

import json

import pytest
import torch
from support.family_page import VERDICTS
from support.family_probe import KINDS, probe, small_config
from transformers import AutoModelForCausalLM

from hone.models.streaming import empty_model

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


def test_buffers_of_a_sharded_model_are_those_of_a_whole_one() -> None:
    for kind in (kind for kind, one in KNOWN.items() if one["verdict"] == "trains"):
        config = small_config(kind, 64)
        whole = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_buffers())
        empty = dict(empty_model(AutoModelForCausalLM, config, trust_remote_code=False).named_buffers())
        assert empty.keys() == whole.keys()
        for name, buffer in whole.items():
            if not empty[name].isnan().any():  # else files hold it, and `fill` waits for it
                torch.testing.assert_close(empty[name], buffer, msg=lambda text, at=f"{kind} {name}": f"{at}: {text}")
