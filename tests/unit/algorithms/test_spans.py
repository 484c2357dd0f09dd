"""Distances of spans of tokens: those of a plain loop, and of single tokens where every span has one."""

from __future__ import annotations

import math

import pytest
import torch

from hone.algorithms import distillation_advantages
from hone.algorithms.distillation import distillation_token_loss, span_sums
from hone.errors import ConfigError

SAMPLED = ("k1", "abs", "k2", "k3")
SPANS = torch.tensor([[0, 0, 1, 2, 2, 2], [0, 1, 1, 1, -1, -1]])


def drawn(seed: int) -> torch.Tensor:
    return -torch.rand(2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow(student: torch.Tensor, teacher: torch.Tensor, mode: str) -> torch.Tensor:
    """Each span by itself."""
    result = torch.zeros_like(student)
    for row in range(2):
        for span in range(3):
            places = [t for t in range(6) if SPANS[row, t] == span]
            if not places:
                continue
            gap = sum(float(student[row, t] - teacher[row, t]) for t in places)
            distance = {"k1": gap, "abs": abs(gap), "k2": gap * gap / 2, "k3": math.exp(-gap) - 1 + gap}[mode]
            for t in places:
                result[row, t] = distance / len(places)
    return result


@pytest.mark.parametrize("mode", SAMPLED)
def test_a_span_has_the_distance_of_its_sums(mode: str) -> None:
    student, teacher = drawn(1), drawn(2)
    found = distillation_token_loss(student, teacher, mode, spans=SPANS)
    inside = SPANS >= 0
    torch.testing.assert_close(found[inside], slow(student, teacher, mode)[inside])


@pytest.mark.parametrize("mode", SAMPLED)
def test_spans_of_one_token_change_nothing(mode: str) -> None:
    student, teacher = drawn(3).requires_grad_(), drawn(4)
    each = torch.arange(6).expand(2, 6)
    plain, by_span = (distillation_token_loss(student, teacher, mode, spans=spans) for spans in (None, each))
    assert torch.equal(plain, by_span)
    (one,), (other,) = (torch.autograd.grad(loss.sum(), student) for loss in (plain, by_span))
    assert torch.equal(one, other)
    mask = torch.ones(2, 6)
    assert torch.equal(
        distillation_advantages(student, teacher, mask, loss_mode=mode),
        distillation_advantages(student, teacher, mask, loss_mode=mode, spans=each),
    )


def test_the_sum_of_a_span_has_a_gradient_in_each_of_its_tokens() -> None:
    values = drawn(5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: span_sums(x, SPANS)[0], values)


def test_spans_do_not_compare_distributions() -> None:
    many = drawn(6)[..., None].expand(2, 6, 3)
    with pytest.raises(ConfigError, match="spans of text"):
        distillation_token_loss(many, many, "reverse_kl_topk", spans=SPANS)
