"""What a rank does in the tests of a vocabulary in parts."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hone.algorithms.logits import chunked_log_probs, chunked_sum_pi_squared
from hone.algorithms.support import Supports, support_log_probs
from hone.models.heads import fused_log_probs


def inputs(seed: int, rows: int, vocabulary: int, bias: bool) -> dict[str, Tensor | None]:
    """Random hidden states, output embedding, targets, and gradients of what is computed from them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "hidden": normal(rows, 6),
        "weight": normal(vocabulary, 6),
        "bias": normal(vocabulary) if bias else None,
        "targets": torch.randint(0, vocabulary, (rows,), generator=generator),
        "grad_log_probs": normal(rows),
        "grad_entropy": normal(rows),
    }


def supports_in_parts(seed: int, sizes: list[int], vocabulary: int, **settings: float) -> dict[str, Tensor]:
    """Values and gradients of log-probs over supports, by this rank's part of the vocabulary."""
    given = inputs(seed, len(sizes), vocabulary, bias=True)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = slice(rank * vocabulary // ranks, (rank + 1) * vocabulary // ranks)
    hidden, weight, bias = (given[name].clone().requires_grad_() for name in ("hidden", "weight", "bias"))  # type: ignore[union-attr]
    targets: Tensor = given["targets"]  # type: ignore[assignment]
    local_weight, local_bias = weight[part].detach().requires_grad_(), bias[part].detach().requires_grad_()
    log_probs, squares = support_log_probs(
        hidden,
        local_weight,
        targets,
        supports_around(seed, targets, sizes, vocabulary),
        bias=local_bias,
        group=dist.group.WORLD,
        start=part.start,
        **settings,  # type: ignore[arg-type]
    )
    (log_probs * given["grad_log_probs"]).sum().backward()
    gradients = {"hidden": hidden.grad, "weight": local_weight.grad, "bias": local_bias.grad}
    return {"log_probs": log_probs.detach(), "squares": squares} | gradients  # type: ignore[return-value]


def supports_around(seed: int, targets: Tensor, sizes: list[int], vocabulary: int) -> Supports:
    """Random supports of these sizes, each with its target; 0 is the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for target, size in zip(targets.tolist(), sizes, strict=True):
        others = [token for token in torch.randperm(vocabulary, generator=generator).tolist() if token != target]
        rows.append(sorted([target, *others[: size - 1]]) if size else [])
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Supports.from_sizes(lengths, ids, all_restricted=all(sizes))


def in_parts(
    seed: int, rows: int, vocabulary: int, bias: bool, with_entropy: bool, fused: bool, **settings: float
) -> dict[str, Tensor]:
    """Values and gradients of this rank's part of the vocabulary, by the operators for CUDA (``fused``) or by chunks of rows."""
    given = inputs(seed, rows, vocabulary, bias)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = slice(rank * vocabulary // ranks, (rank + 1) * vocabulary // ranks)
    hidden = given["hidden"].clone().requires_grad_()  # type: ignore[union-attr]
    weight = given["weight"][part].clone().requires_grad_()  # type: ignore[index]
    own_bias = given["bias"][part].clone().requires_grad_() if bias else None  # type: ignore[index]
    group = dist.group.WORLD
    assert group is not None
    compute = fused_log_probs if fused else partial(chunked_log_probs, chunk_size=3)
    log_probs, entropy = compute(
        hidden,
        weight,
        given["targets"],  # type: ignore[arg-type]
        group=group,
        start=part.start,
        bias=own_bias,
        with_entropy=with_entropy,
        **settings,  # type: ignore[arg-type]
    )
    loss = (log_probs * given["grad_log_probs"]).sum()
    if entropy is not None:
        loss = loss + (entropy * given["grad_entropy"]).sum()
    loss.backward()
    found = {
        "log_probs": log_probs.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
        "squares": chunked_sum_pi_squared(hidden, weight, group=group, bias=own_bias, chunk_size=3, **settings),  # type: ignore[arg-type]
    }
    if entropy is not None:
        found["entropy"] = entropy.detach()
    if own_bias is not None:
        found["bias"] = own_bias.grad
    return found  # type: ignore[return-value]
