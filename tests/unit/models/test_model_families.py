"""The suite of model families, for every family that Hone registers."""

from __future__ import annotations

import pytest
from support.families import tiny_model
from support.family_suite import ModelFamilySuite
from support.messages import raises

from hone.errors import ConfigError
from hone.models.registry import ARCHITECTURES, ModelFamily, family_of, register_model

USUAL = ("gemma2", "gpt_oss", "llama", "qwen2_5_vl", "qwen3_5", "qwen3_moe")
"""One of each kind: windows and caps, sinks, plain, images, recurrent layers, experts. The others run when a model or engine changed."""
OTHERS = ("nemotron", "stablelm", "deepseek_v3", "longcat_flash")
"""Layers that do not hand the context on, latent attention, and layers that attend twice."""
ABOUT = pytest.mark.application("hone/models", "hone/generation/native", "hone/training")


class TestRegisteredFamilies(ModelFamilySuite):
    @pytest.fixture(
        params=[
            name if name in USUAL else pytest.param(name, marks=ABOUT) for name in (*ARCHITECTURES.names(), *OTHERS)
        ]
    )
    def model(self, request):
        return tiny_model(request.param)


def test_a_model_type_is_registered_once():
    with raises(ValueError, "llama"):
        register_model(ModelFamily("llama"))


def test_a_type_without_an_entry_goes_through_transformers_interface():
    family = family_of("never_seen")
    assert (family.model_type, family.own_attention, family.llama_shaped) == ("never_seen", False, False)
    with raises(ConfigError, "qwen33", "qwen3"):
        ARCHITECTURES.get("qwen33")
