"""AdamW's groups and the schedule, against their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises
from transformers.optimization import (
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from hone.config.model import OptimConfig
from hone.errors import ConfigError
from hone.training.optimizer import ScheduledOptimizer, build_optimizer, learning_rate


def _transformers_rates(config, total):
    """Rates of the schedules of Transformers after the warm-up, whose steps are one behind Hone's: the first has a rate of 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    warmup = config.lr_warmup_steps
    if config.lr_scheduler_type == "wsd":
        style = {"minus_sqrt": "1-sqrt"}.get(config.lr_wsd_decay_style, config.lr_wsd_decay_style)
        decay = min(config.lr_wsd_decay_steps, total - warmup)
        given = {"num_decay_steps": decay, "num_stable_steps": total - warmup - decay, "decay_type": style}
        schedule = get_wsd_schedule(optimizer, warmup, min_lr_ratio=config.min_lr_ratio, **given)
    elif config.lr_scheduler_type == "cosine":
        settings = {"min_lr_rate": config.min_lr_ratio}
        schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, total, **settings)
    else:
        schedule = get_linear_schedule_with_warmup(optimizer, warmup, total)
    rates = []
    for _ in range(total):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return rates[warmup:]


@given(
    total=st.integers(1, 200),
    warmup=st.integers(0, 50),
    decay=st.integers(0, 60),
    floor=st.floats(0, 1),
    shape=st.sampled_from(["linear", "cosine", "wsd linear", "wsd cosine", "wsd minus_sqrt"]),
)
def test_schedules_are_those_of_transformers(total, warmup, decay, floor, shape):
    name, *style = shape.split()
    warmup, floor = min(warmup, total), 0.0 if name == "linear" else floor  # its linear schedule has no floor
    settings = {"lr_wsd_decay_style": style[0], "lr_wsd_decay_steps": decay} if style else {}
    config = OptimConfig(lr=2.0, lr_scheduler_type=name, lr_warmup_steps=warmup, min_lr_ratio=floor, **settings)
    rates = [learning_rate(config, step, total) for step in range(total)]
    assert rates[:warmup] == pytest.approx([2.0 * (step + 1) / warmup for step in range(warmup)])
    assert rates[warmup:] == pytest.approx(_transformers_rates(config, total), abs=1e-12)
    assert all(rate > 2.0 * floor for rate in rates[warmup:]) or floor > 1 - 1e-9


def test_wsd_decays_over_a_share_of_the_steps_after_warm_up():
    settings = {"lr_wsd_decay_style": "exponential", "min_lr_ratio": 0.5}
    config = OptimConfig(lr=1.0, lr_scheduler_type="wsd", lr_warmup_steps=10, **settings)
    rates = [learning_rate(config, step, 110) for step in range(110)]
    assert rates[9:101] == [1.0] * 92
    assert rates[100:] == pytest.approx([0.5 + 0.5 * (2 ** (1 - step / 10) - 1) for step in range(10)])


def test_linear_falls_by_equal_steps():
    config = OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=1, min_lr_ratio=0.2)
    assert [learning_rate(config, step, 5) for step in range(5)] == pytest.approx([1, 1, 0.8, 0.6, 0.4])


def test_a_group_has_its_own_rate_and_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    entries = [{"params": r"^0\.", "lr_mult": 0.1}, {"params": "weight", "lr_mult": 3, "weight_decay": 0.5}]
    config = OptimConfig(lr=1.0, weight_decay=0.25, lr_warmup_steps=2, param_groups=entries)
    scheduled = ScheduledOptimizer(model, config, 10)
    before = {name: value.clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    scheduled.step(0, 1.0)
    factors = {"0.weight": 1 - 0.5 * 0.1 * 0.25, "1.weight": 1 - 0.5 * 3 * 0.5, "2.weight": 1 - 0.5 * 3 * 0.5}
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), before[name] * factors.get(name, 1.0))


@pytest.mark.parametrize(
    ("entries", "mentions", "where"),
    [
        ([{"params": "embeddings"}], ("embeddings", "6"), "[0].params"),
        ([{"params": "0"}, {"params": "0.bias"}], ("0.bias", "1"), "[1].params"),
        ([{"params": "0("}], ("0(",), "[0].params"),
        ([{"lr_mult": 1}], ("params",), "[0]"),
        ([{"params": "0", "lr_mul": 2}], ("lr_mul", "lr_mult"), "[0]"),
        ([{"params": "0", "lr_mult": -1}], ("lr_mult", "-1"), "[0].lr_mult"),
        ([{"params": "0", "weight_decay": True}], ("weight_decay", "True"), "[0].weight_decay"),
    ],
)
def test_an_entry_without_parameters_or_with_a_mistake_is_refused(entries, mentions, where):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    with raises(ConfigError, *mentions, where=f"optim.param_groups{where}"):
        build_optimizer(model, OptimConfig(param_groups=entries))


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
