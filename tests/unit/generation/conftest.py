"""Fixtures for tests with tiny random models of several families."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import families
from transformers import PreTrainedModel

from hone.generation.protocol import Completion, Engine


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    return families.tiny_model


@pytest.fixture
def serve() -> Callable[..., dict[str, Completion]]:
    return families.serve


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    return families.make_engine
