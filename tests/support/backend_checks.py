"""What every rank checks of its backend in the conformance suite; each function is called on all ranks of a layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.backend_cases import (
    Case,
    averages_of,
    backend_of,
    batch_of,
    continued,
    objective_of,
    share_of,
    trained,
    weights_of,
)
from torch import Tensor

from hone.data.batch import Batch
from hone.models.loading import saved_model
from hone.training.engine import Outputs


def with_and_without_adapter(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs after training: with the adapter, in reference mode, and with it again."""
    backend, *_ = trained(case, range(case.updates))

    def log_probs() -> Tensor:
        return backend.infer_batch(batch_of(case, 0))["log_probs"].values

    before = log_probs()
    with backend.reference_mode():
        reference = log_probs()
    return before, reference, log_probs()


def refuses_reference_mode(case: Case) -> bool:
    """Whether a model without an adapter has no reference mode."""
    backend, _ = backend_of(case)
    with pytest.raises(TypeError), backend.reference_mode():
        pass
    return True


def every_export(case: Case) -> dict[str, dict[str, Tensor]]:
    """The exported weights after training: all, the adapter alone, and merged."""
    backend, *_ = trained(case, range(case.updates))
    return {which: weights_of(backend, which) for which in ("all", "adapter", "merged")}


def shared(case: Case) -> dict[str, Tensor] | None:
    """The parameters of the shared module after training, if there is one."""
    backend, *_ = trained(case, range(case.updates))
    module = backend.shared_module()
    return None if module is None else {name: value.detach() for name, value in module.named_parameters()}


def uninterrupted(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a training twice as long."""
    backend, _, losses, _ = trained(case, range(2 * case.updates))
    return weights_of(backend) | averages_of(backend), losses[case.updates :]


def interrupted(case: Case, directory: Path) -> tuple[dict[str, Tensor], list[float]]:
    """The same, saved after half of it and taken up by a new backend; training goes on before the files are written."""
    saved(case, directory)
    return resumed(case, directory)


def saved(case: Case, directory: Path) -> None:
    """Save a checkpoint after half of the training."""
    backend, layout, *_ = trained(case, range(case.updates))
    write = backend.stage(str(directory), "actor")
    continued(backend, layout, case, range(case.updates, case.updates + 1))
    write()
    if dist.is_initialized():
        dist.barrier()


def resumed(case: Case, directory: Path) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of the other half, from a checkpoint."""
    model = saved_model(case.model_config(), directory / "actor")
    settings = {key: value for key, value in vars(model).items() if key != "path"}
    backend, layout = backend_of(dataclasses.replace(case, model=Path(str(model.path)), model_settings=settings))
    backend.restore(str(directory), "actor")
    losses, _ = continued(backend, layout, case, range(case.updates, 2 * case.updates))
    return weights_of(backend) | averages_of(backend), losses


def gathered(case: Case) -> tuple[Batch, list[int], Batch, int, int]:
    """Gathered rows, which are this rank's, this rank's rows, data-parallel ranks by the backend and by the layout."""
    backend, layout = backend_of(case)
    local = share_of(batch_of(case, 0), layout)
    found = backend.gather_rows(local)
    return found.batch, list(found.local), local, backend.data_parallel_size, layout.dp_size


def outputs_on_the_way(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What an update's pass gives, and what a pass before it gave."""
    backend, layout = backend_of(case)
    batch = share_of(batch_of(case, 0), layout)
    before = backend.infer_batch(batch, with_entropy=True)
    outputs = Outputs(batch.ragged("response_ids"))
    backend.train_batch(batch, objective_of(case), step=0, with_entropy=True, outputs_seen=outputs)
    return tuple({name: column.values for name, column in columns.items()} for columns in (outputs.columns(), before))  # type: ignore[return-value]


class Infinite:
    """An objective whose gradient is not finite."""

    def __call__(self, outputs: Any, batch: Batch, totals: Any) -> Any:
        return outputs["log_probs"].values.sum() * float("inf"), {}


def skipped(case: Case) -> tuple[bool, dict[str, Tensor], dict[str, Tensor], tuple[list[float], list[float]]]:
    """Whether an update of a gradient that is not finite was made, the weights before and after, and the next updates."""
    backend, layout = backend_of(case)
    before = weights_of(backend)
    result = backend.train_batch(share_of(batch_of(case, 0), layout), Infinite(), step=0)
    return result.applied, before, weights_of(backend), continued(backend, layout, case, range(case.updates))


def frozen(case: Case) -> tuple[Tensor, float]:
    """Log-probs and learning rate of a backend without an optimizer, which refuses to train."""
    backend, layout = backend_of(dataclasses.replace(case, kind="frozen"))
    with pytest.raises(RuntimeError):
        backend.train_batch(share_of(batch_of(case, 0), layout), objective_of(case), step=0, with_entropy=True)
    with pytest.raises(RuntimeError):
        backend.restore("nowhere", "actor")
    return backend.infer_batch(batch_of(case, 0))["log_probs"].values, backend.learning_rate(3)


def clock_and_schedule(case: Case) -> tuple[float, float, list[float]]:
    """Busy seconds of some updates, of nothing, and learning rates."""
    backend, *_ = trained(case, range(case.updates))
    busy, idle = backend.take_busy_seconds(), backend.take_busy_seconds()
    return busy, idle, [backend.learning_rate(step) for step in (0, 1, 2, 9)]


def no_rows(case: Case) -> tuple[int, dict[str, int]]:
    """With all rows on the first data-parallel rank: this rank's rows, and the length of every column that it infers."""
    backend, layout = backend_of(case)
    rank = dist.get_rank() if dist.is_initialized() else 0
    batch = batch_of(case, 0)
    local = batch.reorder(list(range(len(batch))) if layout.dp_rank(rank) == 0 else [])
    columns = backend.infer_batch(local, with_entropy=True)
    return len(local), {name: len(column) for name, column in columns.items()}
