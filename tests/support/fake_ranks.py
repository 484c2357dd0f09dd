"""One rank of many, alone in its process: the group is torch's fake one, whose collectives move nothing between ranks.

An all-gather gives as many copies of this rank's part as there are ranks, and a sum is this rank's summand. So layouts, shapes, plans of
shards and the order of calls are real, and for one rank the numbers are real too.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from support.backend_cases import Case, trained
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore


def join_fake_group(rank: int, world: int) -> None:
    """Make this process rank ``rank`` of ``world``."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


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
