"""Updates of an actor that saves its first micro-batch, and the oracle's comparison of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from support.families import model_of, tiny_config
from support.models import random_batch

from hone.apps.lab.oracle import Comparison, compare
from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import RowGroups
from hone.cluster.roles import PolicyWorker
from hone.config import RLConfig, load_config
from hone.data.batch import Batch
from hone.training.microbatches import load_micro_batch

STEP = 3
ROWS = 8


def actor_of(folder: Path, arch: str, *overrides: str) -> PolicyWorker:
    """An actor of a tiny model that saves the first micro-batch of :data:`STEP`."""
    model = folder / "model"
    if not model.exists():
        model_of(tiny_config(arch)).save_pretrained(model)
    keys = [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder}/run"]
    config = load_config(RLConfig, [*keys, f"trainer.save_microbatch_steps=[{STEP}]", *overrides])
    return PolicyWorker(WorkerContext(config, torch.device("cpu"), total_steps=STEP))


def batch_of(actor: PolicyWorker) -> Batch:
    """Rows of two prompt groups, with masked tokens and log-probs of an older and a reference policy."""
    batch = random_batch(ROWS, 5, group=4, longest=20)
    log_probs, noise = actor.log_probs(batch).ragged("log_probs"), batch.ragged("noise").values
    old = log_probs.with_values(log_probs.values + 0.1 * noise)
    ref = log_probs.with_values(log_probs.values - 0.3 * noise)
    return batch.updated(Batch({"old_log_probs": old, "ref_log_probs": ref}))


def update(actor: PolicyWorker, batch: Batch) -> None:
    """One update over all rows."""
    actor.update(batch, RowGroups([list(range(ROWS))]), STEP - 1)


def compared(folder: Path) -> Comparison:
    """The oracle's comparison of what an update has saved."""
    return compare(load_micro_batch(folder / "run", STEP))


def fault_in_layer(actor: PolicyWorker, layer: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let ``change`` alter the attention output of one layer in the actor's packed forward passes."""
    forward = actor.engine._loop._forward

    def faulty(head, packed, with_entropy):
        context = packed.context

        class Faulty(type(context)):
            def attend(self, index, *args):
                output = super().attend(index, *args)
                return change(output) if index == layer else output

        changed = Faulty(**{field.name: getattr(context, field.name) for field in dataclasses.fields(context)})
        return forward(head, dataclasses.replace(packed, context=changed), with_entropy)

    actor.engine._loop._forward = faulty
