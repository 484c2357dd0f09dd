"""Bytes of a model's optimizer, and of the average of its weights.

AdamW has two moments a parameter. Muon has one for the matrices of the layers, and orthogonalises each of them in every step, which
takes copies of the largest one; every rank computes whole matrices.
"""

from __future__ import annotations

from hone.config.limits import ADAM_BYTES, FROZEN_BYTES, GRADIENT_BYTES, ORTHOGONALISED_NUMBERS
from hone.config.model import OptimConfig
from hone.preflight.plan.work import TrainedModel

MUON = "Muon"
_EIGHT_BIT_BYTES = 2 * (1 + 4 / 256)
"""Two moments of a byte a number, with a float32 scale for 256 numbers."""
_MOMENTS = {"Adagrad": 1, "RMSprop": 1, "SGD": 0, MUON: 1}
"""Numbers of optimizer state per parameter; 2 for optimizers of Adam's kind."""


def moment_bytes(optim: OptimConfig) -> float:
    """Return the bytes of an optimizer's state per parameter; of Muon, per parameter of a layer's matrix."""
    if optim.optimizer == "AdamW8bit":
        return _EIGHT_BIT_BYTES
    moments = _MOMENTS.get(optim.optimizer.rpartition(":")[2].rpartition(".")[2], 2)
    return GRADIENT_BYTES * (moments + bool(optim.override_optimizer_config.get("momentum") and not moments))


def state_bytes(model: TrainedModel) -> float:
    """Return the bytes of a model's optimizer state and of the average of its weights, over all ranks."""
    optim, count = model.optim, model.trained_parameters
    matrices = _matrix_parameters(model) if optim.optimizer == MUON else count
    return moment_bytes(optim) * matrices + ADAM_BYTES * (count - matrices) + average_bytes(model)


def average_bytes(model: TrainedModel) -> float:
    """Return the bytes of the average of a model's weights, over all ranks."""
    return 0.0 if model.optim.ema_decay is None else FROZEN_BYTES * model.trained_parameters


def step_bytes(model: TrainedModel, *, divided: bool, on_cpu: bool) -> float:
    """Return the bytes that a step of the optimizer takes besides its state, on each rank.

    Args:
        divided: whether the model is divided over ranks, so that a matrix is all-gathered first.
        on_cpu: whether matrices are orthogonalised in float32 instead of bfloat16.
    """
    if model.optim.optimizer != MUON:
        return 0.0
    shape, number = model.shape, 4 if on_cpu else 2
    if model.lora_rank:
        matrix = model.lora_rank * max(shape.hidden, shape.width, shape.queries)
    else:
        matrix = shape.hidden * max(shape.width, shape.queries)
        if shape.experts:  # the matrices that read the residual stream are one
            matrix = min(2 * matrix * shape.experts, max(2 * matrix, ORTHOGONALISED_NUMBERS))
    # the direction, the whole matrix, an iteration's input and output, and the result
    return matrix * (4 + 4 * divided + 3 * number + 4)


def _matrix_parameters(model: TrainedModel) -> int:
    return model.trained_parameters if model.lora_rank else model.shape.layers * model.shape.matrices
