"""Feed-forward layers in tiles compute the same and keep less; what goes to the host comes back as it was."""

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from support.models import random_batch, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from hone.config.model import ModelConfig, OptimConfig, TiledMlpConfig
from hone.errors import ModelError
from hone.models.activations import ATTENTION_OPERATORS, tile_mlps
from hone.models.attention.packed import PackedContext
from hone.models.heads import PolicyHead
from hone.models.loading import layers_of, prepare
from hone.models.offload import ActivationOffload
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import imitation_objective

CPU = torch.device("cpu")


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    engine = LocalBackend(model, PolicyHead(), TrainSettings(CPU, optim=OptimConfig(lr=0.1, optimizer="SGD")))
    for step in range(2):
        engine.train_batch(random_batch(6, seed=step), imitation_objective(), step=step)
    return dict(model.named_parameters())


@pytest.mark.parametrize("tiles", [1, 3, 500])  # more tiles than tokens: empty ones are left out
def test_tiles_change_nothing(tiles):
    plain, tiled = tiny_model(), tiny_model()
    prepare(tiled, ModelConfig(tiled_mlp=TiledMlpConfig(enabled=True, num_shards=tiles)))
    expected = trained(plain)
    for name, value in trained(tiled).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)


def test_tiles_keep_less_for_the_backward_pass():
    def kept(model: torch.nn.Module) -> int:
        mlp = layers_of(model)[0].mlp
        sizes = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            mlp(torch.randn(1, 64, 32, requires_grad=True))
        return sum(sizes)

    tiled = tiny_model()
    tile_mlps(layers_of(tiled), 4)
    assert kept(tiled) < 0.5 * kept(tiny_model())


def test_a_model_without_plain_layers_is_refused():
    with pytest.raises(ModelError, match="no layer of the model has a plain feed-forward part"):
        tile_mlps([torch.nn.Linear(2, 2)], 2)


def test_on_the_cpu_nothing_is_copied():
    """Offload is for devices with memory of their own: on a CPU the loop saves tensors as usual."""
    model = tiny_model()
    engine = LocalBackend(model, PolicyHead(), TrainSettings(CPU, optim=OptimConfig(), offload_activations=True))
    assert engine._loop._offload is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_activations_wait_on_the_host():
    device = torch.device("cuda")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(device)
    x, offload = torch.randn(4096, 1024, device=device), ActivationOffload(device, in_flight=2**24)

    def gradients(enabled: bool) -> tuple[list[torch.Tensor], int]:
        layers.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with offload.saving() if enabled else contextlib.nullcontext():
            loss = torch.nn.functional.gelu(layers(x)).square().mean()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return [parameter.grad.clone() for parameter in layers.parameters()], held

    (expected, plain), (found, offloaded) = gradients(False), gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert offloaded < 0.2 * plain


class Attentions(TorchDispatchMode):
    """Counts the attention operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.calls[name] += name in ATTENTION_OPERATORS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bfloat16", [False, True])
def test_kept_attention_is_not_recomputed_and_gradients_are_the_same(bfloat16, monkeypatch):
    """With SDPA in padded tiles, which a CPU computes by one operator as a GPU does."""
    monkeypatch.setattr(PackedContext, "_within", lambda context, window: False)
    dtype, gradients, runs = "bfloat16" if bfloat16 else "float32", {}, {}
    for keeps in ("nothing", "attention"):
        model = tiny_model()
        prepare(model, ModelConfig(enable_gradient_checkpointing=True, gradient_checkpointing_keeps=keeps))
        engine = LocalBackend(model, PolicyHead(), TrainSettings(CPU, optim=OptimConfig(lr=0.0), dtype=dtype))
        monkeypatch.setattr(engine.optimizer, "step", lambda step, norm: True)
        with Attentions() as attentions:
            engine.train_batch(random_batch(6, seed=0), imitation_objective(), step=0)
        gradients[keeps] = {name: parameter.grad for name, parameter in model.named_parameters()}
        runs[keeps] = attentions.calls.total()
    assert runs["nothing"] == 2 * runs["attention"] > 0
    for name, gradient in gradients["attention"].items():
        assert torch.equal(gradient, gradients["nothing"][name]), name
