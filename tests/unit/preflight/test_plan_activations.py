"""What the plan says a forward pass keeps, against what autograd keeps, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hone.config.model import ModelConfig, TiledMlpConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.generation.native import forward
from hone.preflight.plan.activations import Computation, Held, head_kept, layer_kept, outside_kept
from hone.preflight.plan.model import LLAMA_SHAPED, ModelShape
from hone.training import fused
from hone.training.heads import PolicyHead, autocast
from hone.training.model import prepare
from hone.training.packing import pack

VOCABULARY, PROMPT, RESPONSE = 97, 8, 12
CPU = torch.device("cpu")


def build(kind: str, layers: int, how: Computation, **shape: int) -> torch.nn.Module:
    numbers: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        **shape,
    }
    model: Any = (
        Qwen3ForCausalLM(Qwen3Config(**numbers)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**numbers))
    )
    if how.adapter_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=how.adapter_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    tiles = TiledMlpConfig(enabled=how.tiles > 1, num_shards=how.tiles)
    prepare(model, ModelConfig(path="x", enable_gradient_checkpointing=how.recompute, tiled_mlp=tiles))
    return model.train()


def batch(prompts: int, samples: int) -> Batch:
    rows = [[(7 * row + place) % VOCABULARY for place in range(PROMPT)] for row in range(prompts)]
    answers = [[(row + 3 * place) % VOCABULARY for place in range(RESPONSE)] for row in range(prompts * samples)]
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([rows[row // samples] for row in range(prompts * samples)], torch.int64),
            "response_ids": Ragged.from_rows(answers, torch.int64),
        }
    )


def kept_bytes(model: torch.nn.Module, samples: int, how: Computation) -> tuple[int, int, int]:
    """Bytes of all storages that autograd keeps, parameters apart; packed tokens; response tokens."""
    packed = pack(batch(2, samples), CPU)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    narrow = autocast(CPU, "bfloat16" if how.narrow else "float32")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), narrow:
        PolicyHead()(model, packed, with_entropy=False)
    sizes = sum(tensor.untyped_storage().nbytes() for pointer, tensor in alive.items() if pointer not in own)
    return sizes, packed.input_ids.shape[1], len(packed.targets)


def measured_layer(kind: str, how: Computation, **shape: int) -> Held:
    """One layer's share: from models that differ in layers only, and batches that differ in tokens only."""
    found = {}
    for samples in (1, 2):
        few, tokens, _ = kept_bytes(build(kind, 1, how, **shape), samples, how)
        more, _, _ = kept_bytes(build(kind, 3, how, **shape), samples, how)
        found[tokens] = (more - few) / 2
    (short, small), (long, large) = sorted(found.items())
    slope = (large - small) / (long - short)
    return Held(slope, small - slope * short)


def shape_of(kind: str, layers: int, numbers: dict[str, int]) -> ModelShape:
    config = {"model_type": kind, "vocab_size": VOCABULARY, "num_hidden_layers": layers, "tie_word_embeddings": True}
    shape = ModelShape.of({**config, **numbers}, 0)
    assert shape is not None
    return shape


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
WAYS = {
    "float32": Computation(on_cpu=True, narrow=False),
    "bfloat16": Computation(on_cpu=True, narrow=True),
    "adapters": Computation(on_cpu=True, narrow=False, adapter_rank=4),
    "adapters in bfloat16": Computation(on_cpu=True, narrow=True, adapter_rank=4),
    "recomputed": Computation(on_cpu=True, narrow=False, recompute=True),
    "tiled": Computation(on_cpu=True, narrow=False, tiles=2),
}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS.keys())
def test_a_layer_keeps_what_the_plan_says(kind: str, how: Computation) -> None:
    found = measured_layer(kind, how, **SHAPE)
    assert (found.a_token, found.weights) == _exactly(layer_kept(shape_of(kind, 1, SHAPE), how))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_layer_of_the_models_own_module(kind: str, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of other kinds go through their module: the same arithmetic without the fused path."""
    monkeypatch.setattr(fused, "fits", lambda causal: False)
    how = Computation(on_cpu=True, narrow=narrow)
    found = measured_layer(kind, how, **SHAPE)
    monkeypatch.setattr(Computation, "fused", lambda self, shape: False)
    assert (found.a_token, found.weights) == _exactly(layer_kept(shape_of(kind, 1, SHAPE), how))


@examples(8)
@given(
    groups=st.integers(1, 3),
    keys=st.integers(1, 3),
    head=st.sampled_from([8, 16]),
    hidden=st.integers(2, 6),
    width=st.integers(1, 9),
)
def test_layers_of_any_shape(groups: int, keys: int, head: int, hidden: int, width: int) -> None:
    shape = {
        "hidden_size": 16 * hidden,
        "intermediate_size": 16 * width,
        "num_attention_heads": groups * keys,
        "num_key_value_heads": keys,
        "head_dim": head,
    }
    how = WAYS["float32"]
    found = measured_layer("qwen3", how, **shape)
    assert (found.a_token, found.weights) == _exactly(layer_kept(shape_of("qwen3", 1, shape), how))


@pytest.mark.parametrize("how", [WAYS["float32"], WAYS["bfloat16"]], ids=["float32", "bfloat16"])
def test_a_whole_model(how: Computation) -> None:
    shape = shape_of("qwen3", 2, SHAPE)
    size, tokens, responses = kept_bytes(build("qwen3", 2, how, **SHAPE), 4, how)
    said = layer_kept(shape, how).times(2).of(tokens) + outside_kept(shape, how).of(tokens)
    assert said + head_kept(shape, how).of(responses) == pytest.approx(size, rel=0.005)


def test_the_kinds_that_are_computed_here() -> None:
    assert set(LLAMA_SHAPED) == {getattr(kind.config_class, "model_type", "") for kind in forward.LLAMA_SHAPED}


def _exactly(held: Held) -> Any:
    return pytest.approx((held.a_token, held.weights), rel=1e-9)
