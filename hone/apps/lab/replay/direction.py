"""Gradients of a stored step by the weights that it began with."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from hone.apps.lab.replay.stored import StoredStep, require_stored_inputs
from hone.cluster.context import WorkerContext
from hone.cluster.roles import PolicyWorker
from hone.data.batch import Batch
from hone.data.images import IMAGES
from hone.data.ragged import Ragged
from hone.errors import HoneError
from hone.models.devices import run_device
from hone.training.backends.local import LocalBackend
from hone.training.checkpoints.checkpoint import complete_steps
from hone.training.checkpoints.storage import Storage
from hone.training.updates import PartialLoss, Statistics, Totals

LARGEST_EXACT = 500_000_000
"""Trained parameters up to which all gradients are compared; beyond it, those of the last layer."""
_DERIVATIVE = "token_gradient"
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class WeightGradients:
    """Gradients of a step by the weights before it.

    The loss is linear in the log-probs at its point: its gradient is that of the sum of log-prob x derivative.
    """

    def __init__(self, stored: StoredStep) -> None:
        require_stored_inputs(stored.config, weights=True, code="E-what-if", fix="--no-weights, or a run without it")
        names = ("prompt_ids", "response_ids", "response_mask", IMAGES)
        self._batch = stored.batch.select(*(name for name in names if name in stored.batch))
        device = run_device(stored.config.trainer.device)
        worker = PolicyWorker(WorkerContext(stored.config, device, resume=checkpoint_before(stored)))
        engine = worker.engine
        if not isinstance(engine, LocalBackend):
            raise HoneError(
                f"{type(engine).__name__} does not have all gradients in this process",
                fix="--no-weights",
                code="E-what-if",
            )
        self._engine = engine
        trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
        # whether all trained parameters are compared, not only those of the last layer
        self.exact = sum(parameter.numel() for parameter in trained) <= LARGEST_EXACT
        self._parameters = trained if self.exact else _last_layer(engine.model)
        if not self.exact:
            kept = set(map(id, self._parameters))
            for parameter in trained:
                parameter.requires_grad_(id(parameter) in kept)

    def gradient(self, token_gradient: Ragged) -> Tensor:
        """Return the gradient for derivatives by the log-probs of the batch's tokens, as one float32 vector."""
        self._engine.begin_update()
        self._engine.accumulate(self._batch.with_columns(**{_DERIVATIVE: token_gradient}), PartialLoss(_linear, None))
        gradients = [parameter.grad for parameter in self._parameters]
        flat = [
            torch.zeros(parameter.numel()) if gradient is None else gradient.detach().float().flatten().cpu()
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        return torch.cat(flat)


def checkpoint_before(stored: StoredStep) -> str | None:
    """Return the checkpoint of the weights that a step began with; None for the model that the run began with."""
    if stored.step == 1:
        return None
    root = checkpoints(stored)
    if stored.step - 1 not in complete_steps(root):
        raise HoneError(
            f"there is no checkpoint of step {stored.step - 1}",
            why=f"the gradient is that of the weights with which step {stored.step} began",
            where=str(root),
            fix=f"--no-weights, or a run with trainer.save_steps_for_replay=[{stored.step}]",
            code="E-what-if",
        )
    return str(root / f"step_{stored.step - 1}")


def checkpoints(stored: StoredStep) -> Storage:
    """Return the folder of the run's checkpoints, a path or a URL."""
    return Storage(stored.config.trainer.checkpoint_dir or stored.run / "checkpoints")


def _linear(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
    log_probs = outputs["log_probs"].values
    return (log_probs * batch.ragged(_DERIVATIVE).values.to(log_probs)).sum(), {}


def _last_layer(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters of the last layer."""
    numbered = [
        (int(match[1]), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (match := _LAYER.search(name))
    ]
    last = max(number for number, _ in numbered)
    return [parameter for number, parameter in numbered if number == last]
