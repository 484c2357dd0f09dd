"""AdamW's groups and the schedule, against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hone.config.model import OptimConfig
from hone.training.optimizer import build_optimizer, learning_rate


@given(total=st.integers(1, 200), warmup=st.integers(0, 50), floor=st.floats(0, 1))
def test_cosine_rises_linearly_and_ends_at_the_floor(total, warmup, floor):
    config = OptimConfig(lr=2.0, lr_scheduler_type="cosine", lr_warmup_steps=warmup, min_lr_ratio=floor)
    rates = [learning_rate(config, step, total) for step in range(total)]
    for step in range(min(warmup, total)):
        assert rates[step] == pytest.approx(2.0 * (step + 1) / warmup)
    after = rates[warmup:]
    assert after == sorted(after, reverse=True)
    if len(after) > 1:
        assert after[0] == pytest.approx(2.0)
        assert after[-1] == pytest.approx(2.0 * floor, abs=1e-9)
        middle = (len(after) - 1) / 2
        if middle.is_integer():
            assert after[int(middle)] == pytest.approx(2.0 * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi / 2))))


def test_constant_and_share_of_warm_up():
    config = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.1)
    assert [learning_rate(config, step, 20) for step in (0, 1, 2, 19)] == [0.5, 1.0, 1.0, 1.0]
    assert learning_rate(OptimConfig(lr=1.0), 0, 1) == 1.0


def test_weight_decay_acts_on_matrices_only_and_frozen_weights_have_no_state():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    before = {name: value.clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name == "0.weight" else 1.0
        torch.testing.assert_close(value.detach(), before[name] * factor)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
