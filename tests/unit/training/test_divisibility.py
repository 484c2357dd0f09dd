"""A model that cannot be divided as asked is told with its numbers."""

from typing import Any, cast

import pytest
import torch
from support.models import tiny_model
from support.sharded_cases import EXPERTS, SHAPE
from transformers import AutoConfig, AutoModelForCausalLM

from hone.errors import ModelError
from hone.training.expert_parallel import apply_expert_parallel, experts_of
from hone.training.sequence_parallel import check_heads
from hone.training.tensor_parallel import apply_tensor_parallel


class Mesh:
    """As many ranks as it says; nothing is divided over it before the checks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


def model_of(arch: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **SHAPE | EXPERTS | changes))


def test_heads_over_tensor_parallel_ranks():
    with pytest.raises(ModelError, match="4 attention heads cannot be divided over 3 tensor-parallel ranks"):
        apply_tensor_parallel(cast(Any, tiny_model()), cast(Any, Mesh(3)))
    with pytest.raises(ModelError, match="2 key-value heads cannot be divided over 4"):
        apply_tensor_parallel(cast(Any, tiny_model()), cast(Any, Mesh(4)))


def test_a_model_without_a_plan():
    with pytest.raises(ModelError, match="has no tensor-parallel plan"):
        apply_tensor_parallel(model_of("gpt_oss"), cast(Any, Mesh(2)))


def test_experts_over_ranks():
    with pytest.raises(ModelError, match="4 experts cannot be divided over 3 ranks"):
        apply_expert_parallel(model_of("qwen3_moe"), cast(Any, Mesh(3)))
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no experts to divide over 2 ranks"):
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
    with pytest.raises(ModelError, match=f"{heads} attention heads with {key_value} key-value heads"):
        check_heads(heads, key_value, ranks)
