"""Process groups of a layout in the form that Megatron-core takes; no global state of Megatron is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from hone.config.parallel_layout import Layout
from hone.training.layout import Meshes, build_meshes


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank."""

    layout: Layout
    tensor: ProcessGroup  # ranks that share every matrix
    pipeline: ProcessGroup  # one rank of each stage
    data: ProcessGroup  # ranks with different rows
    expert: ProcessGroup  # ranks that share the experts of a layer
    expert_data: ProcessGroup  # ranks with the same experts
    collection: ProcessGroupCollection  # the same groups for Megatron

    @property
    def stage(self) -> int:
        return self.pipeline.rank()

    @property
    def first_stage(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.pipeline.size() - 1


def build_groups(meshes: Meshes | None, device: torch.device) -> Groups:
    """Return the groups of a layout; None is one process, for which a group of one rank is created. Collective."""
    if meshes is None:
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        meshes = build_meshes(Layout(), device.type)
    alone, tensor, data = meshes.sequence_group, meshes.tensor_group, meshes.data_group
    pipeline = meshes.pipeline_group
    expert, expert_data = alone, data
    if meshes.experts is not None:
        expert, expert_data = meshes.experts.get_group("expert"), meshes.experts.get_group("expert_shard")
    collection = ProcessGroupCollection(
        tp=tensor,
        pp=pipeline,
        cp=alone,
        tp_cp=tensor,
        embd=_embedding_group(meshes.layout, pipeline),
        pos_embd=alone,
        dp=data,
        dp_cp=data,
        intra_dp_cp=data,
        ep=expert,
        expt_tp=alone,
        tp_ep=expert,
        expt_dp=expert_data,
        intra_expt_dp=expert_data,
        tp_dp_cp=data,
    )
    return Groups(meshes.layout, tensor, pipeline, data, expert, expert_data, collection)


def _embedding_group(layout: Layout, pipeline: ProcessGroup) -> ProcessGroup | None:
    """Return the first and the last stage of this rank's pipeline, which share tied embeddings; None in between. Collective."""
    if layout.pipeline <= 2:
        return pipeline
    within: ProcessGroup | None = None
    for first in range(layout.world):
        stage = first // (layout.sequence * layout.tensor) % layout.pipeline
        if stage:
            continue
        ends = [first, first + (layout.pipeline - 1) * layout.sequence * layout.tensor]
        group = dist.new_group(ends)
        if isinstance(group, ProcessGroup):  # this rank is in it
            within = group
    return within
