"""Fixtures for tests with tiny random models of several families."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import families
from transformers import PreTrainedModel


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    return families.tiny_model
