"""One rank of many, alone in its process: the group is torch's fake one, whose collectives move nothing between ranks.

An all-gather gives as many copies of this rank's part as there are ranks, a sum is this rank's summand, and what comes round a ring is what
this rank sent. So layouts, shapes, plans of
shards and the order of calls are real, and for one rank the numbers are real too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from support.backend_cases import Case, trained
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hone.training.backends.fsdp2.ring import ProcessRing


def join_fake_group(rank: int, world: int) -> None:
    """Make this process rank ``rank`` of ``world``."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    ProcessRing.shift = _own_tensors  # type: ignore[method-assign]  the group's receive leaves memory as it was


def _own_tensors(ring: ProcessRing, tensors: Sequence[Tensor], channel: int) -> Callable[[], list[Tensor]]:
    return lambda: list(tensors)


def train(words: list[str]) -> None:
    """Train a case as one rank, and print what came of it as JSON: layout, losses, norms, and numbers of parameters.

    Args:
        words: rank, number of ranks, and the case as JSON.
    """
    rank, world, case = int(words[0]), int(words[1]), Case(**json.loads(words[2]))
    case = Case(**{**vars(case), "model": Path(case.model)})
    torch.set_num_threads(1)
    join_fake_group(rank, world)
    backend, layout, losses, norms = trained(case, range(case.updates))
    parameters = list(backend.model.parameters())  # type: ignore[attr-defined]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    outcome = {
        "layout": asdict(layout),
        "losses": losses,
        "norms": norms,
        "parameters": sum(p.numel() for p in parameters),
        "here": sum(p.numel() for p in local),
        "finite": all(bool(p.isfinite().all()) for p in local),
    }
    print(json.dumps(outcome))  # noqa: T201 - the answer
