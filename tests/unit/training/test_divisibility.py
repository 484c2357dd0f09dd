"""A model that cannot be divided as asked is told with its numbers."""

from typing import Any, cast

import pytest
import torch
from support.backend_cases import EXPERTS, SHAPE
from support.messages import raises
from support.models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from hone.errors import ModelError
from hone.training.backends.fsdp2.backend import apply_expert_parallel, experts_of
from hone.training.backends.fsdp2.sequence_parallel import check_heads
from hone.training.backends.fsdp2.tensor_parallel import apply_tensor_parallel


class Mesh:
    """As many ranks as it says; nothing is divided over it before the checks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


TENSOR = "actor_rollout_ref.actor.tensor_model_parallel_size"
EXPERT = "actor_rollout_ref.actor.expert_parallel_size"


def model_of(arch: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **SHAPE | EXPERTS | changes))


def test_heads_over_tensor_parallel_ranks():
    with raises(ModelError, "4 attention heads", 3, where=TENSOR):
        apply_tensor_parallel(cast(Any, tiny_model()), cast(Any, Mesh(3)))
    with raises(ModelError, "2 key-value heads", 4, where=TENSOR):
        apply_tensor_parallel(cast(Any, tiny_model()), cast(Any, Mesh(4)))


@pytest.mark.parametrize("plan", [None, {}, {"embed_tokens": "embedding_rowwise"}])  # the last: transformers 5.24
def test_a_model_without_a_plan_for_its_layers(plan):
    model = model_of("gpt_oss")
    model.config.base_model_tp_plan = plan
    with raises(ModelError, "GptOssForCausalLM", f"{TENSOR}=1", where=TENSOR):
        apply_tensor_parallel(model, cast(Any, Mesh(2)))


def test_experts_over_ranks():
    with raises(ModelError, "4 experts", 3, where=EXPERT):
        apply_expert_parallel(model_of("qwen3_moe"), cast(Any, Mesh(3)))
    with raises(ModelError, "Qwen3ForCausalLM", 2, f"{EXPERT}=1", where=EXPERT):
        apply_expert_parallel(tiny_model(), cast(Any, Mesh(2)))


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_experts_of_every_layer_are_found(arch):
    model = model_of(arch)
    assert len(experts_of(model)) == model.config.num_hidden_layers


@pytest.mark.parametrize(("heads", "key_value", "ranks", "fits"), [(8, 2, 4, True), (8, 4, 2, True), (8, 8, 8, True),
    (6, 2, 4, False), (12, 3, 2, False), (4, 2, 8, False)])  # fmt: skip
def test_heads_over_sequence_parallel_ranks(heads, key_value, ranks, fits):
    if fits:
        check_heads(heads, key_value, ranks)
        return
    ring = f"context_parallel_size={ranks}"
    with raises(ModelError, f"{heads} attention heads", f"{key_value} key-value heads", ranks, ring):
        check_heads(heads, key_value, ranks)
