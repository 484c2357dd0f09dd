"""The coefficients of the plan against what autograd keeps, and the measured micro-batch that replaces them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.plan_cases import plan_config, save_plan_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hone.config.model import ModelConfig, TiledMlpConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import PolicyHead, autocast
from hone.models.llama import cuda, train
from hone.models.loading import prepare
from hone.preflight.plan import devices as local
from hone.preflight.plan.devices import device_named
from hone.preflight.plan.model import ModelShape, Passes
from hone.preflight.plan.plan import plan_of
from hone.training.packing import pack

VOCABULARY, PROMPT, RESPONSE = 97, 8, 12
CPU = torch.device("cpu")


def build(kind: str, layers: int, how: dict[str, Any], **shape: int) -> torch.nn.Module:
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
    if how.get("lora_rank"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=how["lora_rank"], target_modules="all-linear", task_type="CAUSAL_LM")
        )
    tiles = TiledMlpConfig(enabled="tiles" in how, num_shards=how.get("tiles", 1))
    prepare(model, ModelConfig(path="x", enable_gradient_checkpointing="checkpointing" in how, tiled_mlp=tiles))
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


def kept_bytes(model: torch.nn.Module, samples: int, how: dict[str, Any]) -> tuple[int, int, int]:
    """Return the bytes of all storages that autograd keeps without parameters, the packed tokens and the response tokens."""
    packed = pack(batch(2, samples), CPU)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    narrow = autocast(CPU, "bfloat16" if how["bf16"] else "float32")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), narrow:
        PolicyHead()(model, packed, with_entropy=False)
    sizes = sum(tensor.untyped_storage().nbytes() for pointer, tensor in alive.items() if pointer not in own)
    return sizes, packed.input_ids.shape[1], len(packed.targets)


def measured_layer(kind: str, how: dict[str, Any]) -> tuple[float, float]:
    """Return one layer's bytes per token and its bytes per layer: from models and batches of two sizes."""
    sizes = {}
    for samples in (1, 2):
        few, tokens, _ = kept_bytes(build(kind, 1, how, **SHAPE), samples, how)
        more, _, _ = kept_bytes(build(kind, 3, how, **SHAPE), samples, how)
        sizes[tokens] = (more - few) / 2
    (short, small), (long, large) = sorted(sizes.items())
    slope = (large - small) / (long - short)
    return slope, small - slope * short


def shape_of(kind: str, layers: int) -> ModelShape:
    config = {"model_type": kind, "vocab_size": VOCABULARY, "num_hidden_layers": layers, "tie_word_embeddings": True}
    shape = ModelShape.from_settings({**config, **SHAPE}, 0)
    assert shape is not None
    return shape


SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False},
    "bfloat16": {"bf16": True},
    "adapters": {"bf16": False, "lora_rank": 1},
    "adapters in bfloat16": {"bf16": True, "lora_rank": 1},
    "checkpointing": {"bf16": False, "checkpointing": True},
    "tiled": {"bf16": False, "tiles": 2},
}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_keeps_what_the_table_says(kind: str, way: str) -> None:
    per_token, weights = measured_layer(kind, WAYS[way])
    passes = Passes(shape_of(kind, 1), on_cpu=True, **WAYS[way])
    assert passes.layer_kept == pytest.approx(per_token, rel=0.01)
    assert passes.weight_copies * (way != "checkpointing") == pytest.approx(weights, rel=0.03)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("way", ["float32", "bfloat16"])
def test_a_layer_of_the_models_own_module(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "supports_training", lambda causal: False)
    per_token, weights = measured_layer(kind, WAYS[way])
    monkeypatch.setattr(Passes, "executor", "module")
    passes = Passes(shape_of(kind, 1), on_cpu=True, **WAYS[way])
    assert passes.layer_kept == pytest.approx(per_token, rel=0.01)
    assert passes.weight_copies == pytest.approx(weights, rel=0.03)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("way", ["float32", "bfloat16", "checkpointing", "checkpointing in bfloat16"])
def test_a_fused_layer_of_cuda(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the references of its operators; attention keeps inputs and output on a CPU, too, if they come in its dtype."""
    how = {"bf16": True, "checkpointing": True} if way.endswith("in bfloat16") else WAYS[way]
    monkeypatch.setattr(train, "supports_training", lambda causal: False)
    monkeypatch.setattr(cuda, "supports_training", cuda.is_supported_model)
    per_token, weights = measured_layer(kind, how)
    passes = Passes(shape_of(kind, 1), on_cpu=False, **how)
    assert passes.executor == "cuda" and passes.layer_kept == pytest.approx(per_token, rel=0.01)
    assert passes.weight_copies * ("checkpointing" not in how) == pytest.approx(weights, rel=0.01)
    kept = Passes(shape_of(kind, 1), on_cpu=False, keeps_attention=True, **how).layer_kept - passes.layer_kept
    numbers = 4 * 48 * passes.number + 4 * 4  # outputs of four heads, and a float32 number of each
    assert kept == (numbers if "checkpointing" in how else 0)


@pytest.mark.parametrize("way", ["float32", "bfloat16"])
def test_a_whole_model(way: str) -> None:
    size, tokens, responses = kept_bytes(build("qwen3", 2, WAYS[way], **SHAPE), 4, WAYS[way])
    passes = Passes(shape_of("qwen3", 2), True, tokens=tokens, responses=responses, **WAYS[way])
    kept = tokens * (2 * passes.layer_kept + passes.outside_kept) + passes.weight_copies + passes.log_probs_kept
    assert kept == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_measured_micro_batch_scales_the_estimate(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_plan_model(tmp_path, hidden_size=64, num_hidden_layers=2, intermediate_size=176, head_dim=16)
    config = plan_config(model, 2, f"actor_rollout_ref.actor.dtype={dtype}")
    assert local.measured_scale(config) == pytest.approx(1, abs=0.05)
    estimate: Any = Passes._layer
    monkeypatch.setattr(Passes, "_layer", property(lambda passes: estimate.fget(passes) / 2))
    scale = local.measured_scale(config)
    assert scale == pytest.approx(2, abs=0.1), "the measurement corrects the table"
    device = device_named("H100")
    once, twice = (plan_of(config, device, activation_scale=scale).memories[0] for scale in (1, 2))
    first, second = (memory.phases[2].size("activations") for memory in (once, twice))
    assert 1.5 * first < second < 2 * first
    (model / "model.safetensors").unlink()
    assert local.measured_scale(config) == 1, "there are no weights to measure with"
