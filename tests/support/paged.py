"""Native engines with a paged KV cache on the CPU: small pages, and attention over them by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import families

from hone.generation.native.paged import support
from hone.generation.native.paged.pool import PageShape
from hone.generation.native.paged.rows import PagedRows
from hone.generation.protocol import Engine
from hone.models.llama.spec import layers_of

PAGE = 4


def paged_engine(patch: pytest.MonkeyPatch, model: torch.nn.Module, **changes: Any) -> Engine:
    """Return a float32 engine whose rows have pages of 4 tokens."""

    def shape(causal: Any, dtype: torch.dtype) -> PageShape:
        layers = layers_of(causal)
        return PageShape(len(layers), layers[0].heads[1], layers[0].head_dim, dtype, tokens=PAGE)

    with patch.context() as inner:
        inner.setattr(support, "obstacle", lambda *_: None)
        inner.setattr(support, "page_shape", shape)
        engine = families.make_engine(model, **changes)
    assert isinstance(engine._runner.rows, PagedRows)  # type: ignore[attr-defined]
    return engine
