"""Updates of the actor as a run makes them, on one rank or on several that have different rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.backend_cases import CPU, weights_of
from support.models import random_batch
from torch import Tensor

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import RowGroups
from hone.cluster.roles import PolicyWorker
from hone.config import RLConfig, load_config
from hone.config.parallel import Layout
from hone.data.batch import Batch
from hone.training.layout import build_meshes

ROWS = 12


def update_in_turn(model: Path, overrides: list[str]) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Two passes over two mini-batches, of which this rank has every n-th row.

    Returns:
        The mean of each statistic that is one (not a maximum) per update, and the weights after the last.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    config = load_config(RLConfig, [f"actor_rollout_ref.model.path={model}", *overrides])
    layout = Layout.plan(world, config.actor_rollout_ref.actor)
    meshes = build_meshes(layout, "cpu") if world > 1 else None
    actor = PolicyWorker(WorkerContext(config, CPU, rank, layout, meshes, total_steps=1))
    batch = random_batch(ROWS, 5, group=2)
    rows = list(range(rank, ROWS, world))
    local = batch.reorder(rows)
    local = local.updated(Batch({"old_log_probs": actor.log_probs(local).ragged("log_probs")}))
    minis = [[rows.index(row) for row in rows if row % 4 < 2], [rows.index(row) for row in rows if row % 4 >= 2]]
    update = actor.update(local, RowGroups(minis * 2), 0).meta["update"]
    return [_means(result.statistics) for result in update.results], weights_of(actor.engine)


def _means(statistics: list[dict[str, Any]]) -> dict[str, float]:
    names = {name for one in statistics for name in one if "max" not in name.rpartition("/")[2]}
    weighted = {name: [one[name] for one in statistics if name in one] for name in names}
    return {name: float(sum(v * w for v, w in pairs) / sum(w for _, w in pairs)) for name, pairs in weighted.items()}
