"""Batches for comparing Hone's functions with those of other libraries, and the process in which theirs run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.environments import wheel_folder
from torch import Tensor

from hone.algorithms import policy_losses

FOREIGN = Path(__file__).parent / "foreign"
GROUPS = [name for name, size in zip("abcd", (4, 4, 3, 1), strict=True) for _ in range(size)]
ROWS, WIDTH = len(GROUPS), 9


class Case(NamedTuple):
    """A call of verl, and the same of Hone."""

    kind: str  # function of the foreign program
    name: str  # of the method
    tensors: dict[str, Any]  # arguments of verl's function
    options: dict[str, Any]
    ours: Callable[[], Sequence[Tensor]]


def batch(seed: int, *, holes: bool) -> dict[str, Tensor]:
    """Columns ``[B, T]`` that are finite everywhere; the mask is a prefix of each row, or has holes."""
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)

    mask = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (ROWS, 1), generator=draw)
    if holes:
        mask &= torch.rand(ROWS, WIDTH, generator=draw) < 0.7
        mask[:, 0] = True
    last = WIDTH - 1 - mask.flip(-1).int().argmax(-1, keepdim=True)
    rewards = torch.zeros_like(normal()).scatter(1, last, torch.randint(0, 3, (ROWS, 1), generator=draw).double())
    old = -normal().abs() - 0.01
    return {
        "response_mask": mask.double(),
        "token_level_rewards": rewards,
        "values": normal(),
        "returns": normal(),
        "advantages": normal() * mask,
        "old_log_probs": old,
        "log_probs": (old + normal(0.4)).clamp(max=-1e-3),
        "sum_pi_squared": old.exp() ** 2 + (1 - old.exp()) ** 2 * normal().sigmoid(),
        "rollout_is_weights": normal(0.3).exp(),
        "ref_log_probs": (old + normal(0.3)).clamp(max=-1e-3),
        "entropies": normal().abs(),
    }


def loss_and_gradient(name: str, tensors: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    columns = {**tensors, "log_probs": tensors["log_probs"].clone().requires_grad_()}
    value, _ = policy_losses.get(name)(**columns, **options)
    return [value.detach(), torch.autograd.grad(value, columns["log_probs"])[0]]


def numbers_of(program: str, requirement: str, cases: Sequence[Case], folder: Path) -> list[Any]:
    """What a foreign program computes for the cases, with a wheel; the text of an error where it raises."""
    fields = ("kind", "name", "tensors", "options")
    torch.save([{field: getattr(case, field) for field in fields} for case in cases], folder / "cases")
    places = [str(FOREIGN / program), str(wheel_folder(requirement)), str(folder / "cases"), str(folder / "results")]
    ended = subprocess.run([sys.executable, *places], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return torch.load(folder / "results", weights_only=True)


def gaps_of(case: Case, found: Any, mask: Tensor) -> list[str]:
    """The outputs of a case that differ within the mask."""
    assert not isinstance(found, str), f"{case.options}: {found}"
    gaps = []
    for number, values in enumerate(zip(case.ours(), found, strict=True)):
        mine, their = (mask * torch.as_tensor(value, dtype=torch.float64) for value in values)
        if not torch.allclose(mine.expand_as(their), their, rtol=2e-5, atol=2e-6):
            gaps.append(f"{case.name} {case.options}, output {number}: {float((mine - their).abs().max()):.3g}")
    return gaps
