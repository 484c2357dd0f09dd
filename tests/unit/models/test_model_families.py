"""The suite of model families, for every family that Hone registers."""

from __future__ import annotations

import pytest
from support.families import tiny_model
from support.family_suite import ModelFamilySuite
from support.messages import raises

from hone.errors import ConfigError
from hone.models.registry import ARCHITECTURES, ModelFamily, family_of, register_model


class TestRegisteredFamilies(ModelFamilySuite):
    @pytest.fixture(params=ARCHITECTURES.names())
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
