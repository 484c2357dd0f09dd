"""Families whose layers keep states (gated delta nets, Mamba2, short convolutions) pass the suite of families."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import RECURRENT, tiny_config, tiny_model
from support.family_suite import ModelFamilySuite

from hone.data.model_settings import read_settings
from hone.models.recurrent import Mixer, route
from hone.models.registry import family_of
from hone.models.routing import use_hone_attention

FAST = ("qwen3_next", "falcon_h1", "lfm2")


@pytest.fixture(
    params=[name if name in FAST else pytest.param(name, marks=pytest.mark.long("hone/models")) for name in RECURRENT]
)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


class TestRecurrent(ModelFamilySuite):
    @pytest.fixture
    def model(self, family: str) -> Any:
        return tiny_model(family)


def test_tokens_after_a_state_equal_the_whole_sequence(family: str) -> None:
    model = tiny_model(family)
    use_hone_attention(model)
    torch.manual_seed(0)
    mixers = [Mixer(module) for module in model.modules() if route(module, model.config)]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        for mixer in mixers:
            hidden = torch.randn(2, 12, 32)
            first, states = mixer.advance(hidden[:, :7], [])
            then, _ = mixer.advance(hidden[:, 7:], states)
            without, _ = mixer.advance(hidden[:, 7:], [])
            torch.testing.assert_close(torch.cat([first, then], dim=1), mixer(hidden), atol=1e-4, rtol=1e-4)
            assert (then - without).abs().max() > 0.01


def test_an_infinite_setting_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    tiny_config("granitemoehybrid").save_pretrained(tmp_path)
    settings = read_settings(tmp_path)
    assert settings["time_step_limit"] == [0.0, math.inf]
    assert family_of("granitemoehybrid").cache_size(settings).per_sequence > 0
