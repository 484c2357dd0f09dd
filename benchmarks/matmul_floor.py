"""Estimate the time of a GRPO step on this machine, if only matmuls with weight matrices took time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from hone.models.kernels.cpu.matmul import fast_float32_matmuls


class Floor(NamedTuple):
    """Matmuls of one step with weight matrices.

    Attributes:
        gigaflops: of all of them.
        rate: gigaflops a second of the fastest of them.
    """

    gigaflops: float
    rate: float

    @property
    def seconds(self) -> float:
        """Return the seconds at that rate."""
        return self.gigaflops / self.rate


def floor(model_dir: Path, prompts: int, responses: int, rows: int, dtype: str) -> Floor:
    """Return the operations of a step with one update, and the machine's speed in such matmuls.

    A matrix takes two operations a parameter and token in each of four passes: generation, and the update's forward pass and its
    gradients of inputs and of weights. The output layer counts where a response token is predicted.

    Args:
        model_dir: a Hugging Face directory.
        prompts: tokens of the different prompts.
        responses: tokens of all responses.
        rows: number of rows that are decoded together.
        dtype: float32 or bfloat16.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    head = model.get_output_embeddings().weight
    matrices = [module.weight for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    operations = 8 * ((prompts + responses) * sum(matrix.numel() for matrix in matrices) + responses * head.numel())
    compute = torch.float32 if dtype == "float32" else torch.bfloat16
    kinds = {matrix.shape: matrix.to(compute) for matrix in matrices}.values()
    with torch.no_grad(), fast_float32_matmuls(torch.device("cpu")):
        rates = [_rate(matrix, tokens) for matrix in kinds for tokens in (rows, 4096)]
    return Floor(operations / 1e9, max(rates))


def _rate(matrix: torch.Tensor, tokens: int) -> float:
    """Return gigaflops a second of the fastest of the three matmuls that training does with a matrix and this number of tokens."""
    states, grads = (torch.randn(tokens, width).to(matrix.dtype) for width in reversed(matrix.shape))
    products = (lambda: states @ matrix.t(), lambda: grads @ matrix, lambda: grads.t() @ states)
    taken = []
    for product in products * 30:
        began = time.perf_counter()
        product()
        taken.append(time.perf_counter() - began)
    return 2 * tokens * matrix.numel() / min(taken) / 1e9
