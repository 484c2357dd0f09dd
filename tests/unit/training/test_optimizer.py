"""AdamW's groups and the schedule, against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises

from hone.config.model import OptimConfig
from hone.errors import ConfigError
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


def test_an_optimizer_by_name_gets_what_it_takes():
    model = torch.nn.Linear(3, 3)
    sgd = build_optimizer(model, OptimConfig(lr=0.1, optimizer="SGD", override_optimizer_config={"momentum": 0.9}))
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.defaults["momentum"] == 0.9
    assert {group["weight_decay"] for group in sgd.param_groups} == {0.01, 0.0}
    nadam = build_optimizer(model, OptimConfig(optimizer="NAdam", betas=[0.8, 0.9], eps=1e-6))
    assert nadam.defaults["betas"] == (0.8, 0.9)
    assert nadam.defaults["eps"] == 1e-6


def test_an_optimizer_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "sign_descent.py").write_text(
        "import torch\n"
        "class SignDescent(torch.optim.Optimizer):\n"
        "    def __init__(self, params, lr, scale=1.0):\n"
        "        super().__init__(params, {'lr': lr, 'scale': scale})\n"
        "    @torch.no_grad()\n"
        "    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            for p in group['params']:\n"
        "                p.sub_(group['lr'] * group['scale'] * p.grad.sign())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = torch.nn.Linear(2, 1, bias=False)
    config = OptimConfig(lr=0.5, optimizer="sign_descent:SignDescent", override_optimizer_config={"scale": 2.0})
    optimizer = build_optimizer(model, config)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 1.0)


@pytest.mark.parametrize(
    ("changes", "mentions"),
    [
        ({"optimizer": "AdanW"}, ("AdanW", "AdamW")),
        ({"optimizer": "torch:Tensor"}, ("torch:Tensor", "torch.optim")),
        ({"optimizer": "SGD", "override_optimizer_config": {"velocity": 1}}, ("SGD", "velocity")),
    ],
)
def test_an_unknown_optimizer_or_argument_is_refused(changes, mentions):
    with raises(ConfigError, *mentions, where="optim.optimizer"):
        build_optimizer(torch.nn.Linear(2, 2), OptimConfig(**changes))
