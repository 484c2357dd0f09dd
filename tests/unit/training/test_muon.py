"""Muon: torch's as its oracle, singular values near 1, and matrices of layers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.backend_cases import save_model
from support.messages import raises
from support.models import random_batch, tiny_model

from hone.config.model import ModelConfig, OptimConfig
from hone.errors import ConfigError
from hone.models.heads import PolicyHead
from hone.models.loading import load_policy
from hone.preflight.plan.memory import state_bytes
from hone.preflight.plan.model import ModelShape
from hone.preflight.plan.work import TrainedModel
from hone.training import optimizer as muon
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import imitation_objective
from hone.training.optimizer import LR_MULT, build_optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def named_groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), stack=st.none() | st.integers(1, 3), seed=st.integers(0, 99)
)
def test_singular_values_become_1_and_their_vectors_stay(rows: int, columns: int, stack: int | None, seed: int) -> None:
    shape = (rows, columns) if stack is None else (stack, rows, columns)
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    left, values, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    result = muon.orthogonalised(matrices, COEFFICIENTS, 10)
    rotated = left.mT @ result.double() @ right.mT
    found = rotated.diagonal(dim1=-2, dim2=-1)
    large = values > 0.01 * values.amax(-1, keepdim=True)
    assert ((found[large] > 0.6) & (found[large] < 1.25)).all()
    assert (rotated - torch.diag_embed(found)).abs().max() < 1e-3


@pytest.mark.parametrize(("steps", "sound"), [(0, False), (1, True), (99, True), (100, False)])
def test_the_number_of_iterations_is_bounded(steps: int, sound: bool) -> None:
    parameters = [{"params": [torch.nn.Parameter(torch.ones(2, 2))]}]
    if sound:
        muon.Muon(parameters, ns_steps=steps)
    else:
        with raises(ValueError, f"ns_steps={steps}"):
            muon.Muon(parameters, ns_steps=steps)


def test_a_stack_is_its_matrices_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([muon.orthogonalised(matrix, COEFFICIENTS, 5) for matrix in matrices])
    torch.testing.assert_close(muon.orthogonalised(matrices, COEFFICIENTS, 5), expected)
    monkeypatch.setattr(muon, "ORTHOGONALISED_NUMBERS", 50)
    torch.testing.assert_close(muon.orthogonalised(matrices, COEFFICIENTS, 5), expected)


@pytest.mark.parametrize("arguments", [{}, {"nesterov": False, "momentum": 0.8}, {"ns_steps": 3}])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_steps_are_those_of_torch(adjust: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "computes_bfloat16", lambda device: True)  # torch's is always in bfloat16
    start = torch.randn(24, 10, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    settings = {"lr": 0.1, "weight_decay": 0.2}
    mine = muon.Muon([{"params": [ours], muon.ORTHOGONAL: True, **settings}], adjust_lr_fn=adjust, **arguments)
    oracle = torch.optim.Muon([theirs], **settings, adjust_lr_fn=adjust, **arguments)
    for step in range(4):
        gradient = torch.randn(24, 10, generator=torch.Generator().manual_seed(1 + step))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        oracle.step()
    moved = (theirs - start).abs().max()
    assert (ours - theirs).abs().max() < 0.01 * moved
    torch.testing.assert_close(mine.state[ours]["momentum_buffer"], oracle.state[theirs]["momentum_buffer"])


def test_other_parameters_are_updated_by_adamw() -> None:
    models = tiny_model(), tiny_model()
    config = {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-4, "weight_decay": 0.3}
    ours = build_optimizer(models[0], OptimConfig(optimizer="Muon", **config))
    theirs = build_optimizer(models[1], OptimConfig(**config))
    for seed in range(3):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            generator = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    matrices = {id(parameter) for parameter in muon.layer_matrices(models[0])}
    others = dict(models[1].named_parameters())
    for name, parameter in models[0].named_parameters():
        assert torch.equal(parameter, others[name]) == (id(parameter) not in matrices), name
        state = ours.state[parameter]
        assert set(state) == ({"momentum_buffer"} if id(parameter) in matrices else {"step", "exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_matrices_of_layers_and_experts(arch: str, tmp_path: Path) -> None:
    model = load_policy(ModelConfig(path=str(save_model(tmp_path, arch))), device=torch.device("cpu"), seed=0)
    matrices = muon.layer_matrices(model)
    chosen = {name: parameter for name, parameter in model.named_parameters() if parameter in matrices}
    assert all(".layers." in name and not name.endswith("bias") and "norm" not in name for name in chosen)
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert projections <= {name.split(".")[-2] for name in chosen}
    assert {parameter.dim() for parameter in chosen.values()} == ({2} if arch == "qwen3" else {2, 3})
    assert all(
        p.dim() < 2 or "embed" in n or "lm_head" in n or "bias" in n
        for n, p in model.named_parameters()
        if p not in matrices
    )


def test_groups_divide_both_parts() -> None:
    model = tiny_model()
    entries = [{"params": r"layers\.0\.", "lr_mult": 0.5}, {"params": "norm", "weight_decay": 0.7}]
    groups = named_groups(model, build_optimizer(model, OptimConfig(optimizer="Muon", param_groups=entries)))
    assert groups.keys() == dict(model.named_parameters()).keys()
    for name, group in groups.items():
        assert group[LR_MULT] == (0.5 if "layers.0." in name else 1.0)
        assert group[muon.ORTHOGONAL] == ("_proj" in name)
        if "norm" in name and "layers.0." not in name:
            assert group["weight_decay"] == 0.7


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ({"momentum": 1.5}, "1.5"),
        ({"ns_steps": 0}, "ns_steps=0"),
        ({"adjust_lr_fn": "none"}, "none"),
        ({"rank": 1}, "rank"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], number: str) -> None:
    with raises(ConfigError, "Muon", number, where="optim.optimizer"):
        build_optimizer(tiny_model(), OptimConfig(optimizer="Muon", override_optimizer_config=arguments))


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_state_has_the_bytes_of_the_plan(ema: float | None) -> None:
    optim = OptimConfig(optimizer="Muon", ema_decay=ema)
    model = tiny_model()
    shape = ModelShape.from_settings(model.config.to_dict(), sum(p.numel() for p in model.parameters()))  # type: ignore[union-attr,operator]
    engine = LocalBackend(model, PolicyHead(), TrainSettings(torch.device("cpu"), optim=optim))
    engine.train_batch(random_batch(4, seed=0), imitation_objective(), step=0)
    optimizer = engine.optimizer
    assert shape is not None and optimizer is not None
    tensors = [t for state in optimizer.inner.state.values() for key, t in state.items() if key != "step"]
    tensors += [] if optimizer.average is None else optimizer.average.values.values()
    trained = TrainedModel(shape, optim, False, 64, 4, 1, False)
    assert state_bytes(trained) == sum(tensor.nbytes for tensor in tensors)
