"""Clipping of a divided gradient in a group of one process, against torch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hone.training.backends.fsdp2.gradients import clip_gradients


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("scale", [1e-8, 1e-6, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("largest", [1e-7, 1e-3, 1.0, 3.9])
def test_clipping_is_torchs(scale: float, largest: float) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.zeros(3, 4, dtype=torch.float64)), nn.Parameter(torch.zeros(7, dtype=torch.float64))]
    theirs = [nn.Parameter(parameter.clone()) for parameter in ours]
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad = torch.randn_like(mine) * scale
        other.grad = mine.grad.clone()
    norm = clip_gradients(ours, largest, torch.device("cpu"))
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, largest)), rel=1e-12)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=0)
