"""A teacher and an update of the policy as a run makes them, on one rank or on several."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from support.backend_cases import CPU, weights_of
from support.models import random_batch
from torch import Tensor

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import RowGroups
from hone.cluster.roles import PolicyWorker
from hone.cluster.teacher import TeacherWorker
from hone.config import RLConfig, load_config
from hone.config.parallel import Layout
from hone.data.ragged import Ragged
from hone.models.teacher import SPANS
from hone.training.layout import build_meshes

ROWS = 8


def distilled(
    model: Path, teacher: Path, overrides: list[str], *, spans: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """One update on the rows of this rank's data-parallel part.

    Args:
        spans: compare sums over pairs of tokens, as with a teacher of another tokenizer.

    Returns:
        Distance and norm of the gradient, and the weights after the update.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    paths = [f"actor_rollout_ref.model.path={model}", f"distillation.path={teacher}", "distillation.enable=true"]
    config = load_config(RLConfig, [*paths, *overrides])
    layout = Layout.plan(world, config.actor_rollout_ref.actor)
    meshes = build_meshes(layout, "cpu") if world > 1 else None
    context = WorkerContext(config, CPU, rank, layout=layout, meshes=meshes, total_steps=1)
    actor, frozen = PolicyWorker(context), TeacherWorker(context)
    whole = random_batch(ROWS, 5, group=2)
    whole = whole.with_columns(old_log_probs=whole.ragged("noise"))
    if spans:
        lengths = whole.ragged("response_ids").lengths.tolist()
        whole = whole.with_columns(**{SPANS: Ragged.from_rows([[n // 2 for n in range(size)] for size in lengths])})
    part = rank if layout.dp_size == world else 0
    batch = whole.reorder(list(range(part, ROWS, layout.dp_size)))
    batch = batch.updated(frozen.teach(batch))
    update = actor.update(batch, RowGroups([list(range(len(batch)))]), 0).meta["update"]
    (result,) = update.results
    pairs = [one["distillation/loss"] for one in result.statistics if "distillation/loss" in one]
    distance = float(sum(v * w for v, w in pairs) / sum(w for _, w in pairs))
    return [distance, result.grad_norm], weights_of(actor.engine)
