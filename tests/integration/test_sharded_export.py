"""Whole weights out of a divided model, whatever the size of the buckets; with an adapter apart, or worked in."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from support.backend_cases import Case, bucketed
from support.ranks import Ranks

from hone.config.model import ModelConfig
from hone.models.loading import load_policy

pytestmark = pytest.mark.long("hone/training/export.py", "hone/training/export_stream.py", "hone/training/backends")

TENSOR = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 10**9])
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("odd", {}),  # 63 tokens over two ranks: shards of unequal size
        ("tied", TENSOR),
        ("experts", {"expert_parallel_size": 2}),
        ("tied", {"fsdp_config": {"fsdp_size": 1}}),
        ("tied", {"fsdp_config": {"param_offload": True}}),
    ],
)
def test_buckets_are_what_single_gathering_gives(bucket_bytes, model, parallel, two_ranks: Ranks, tiny_models):
    case = Case(tiny_models[model], parallel=parallel, updates=1)
    for found, singly in two_ranks.run(bucketed, case, "whole", bucket_bytes):
        assert list(found) == list(singly)
        for name, value in singly.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("parallel", [{}, TENSOR])
def test_merged_weights_are_those_that_peft_merges(parallel: dict[str, Any], two_ranks: Ranks, tiny_models):
    settings = {"lora_rank": 4, "lora_alpha": 12}
    case = Case(tiny_models["tied"], parallel=parallel, model_settings=settings, updates=2)
    for merged, whole in two_ranks.run(bucketed, case, "merged", 5000):
        peft = load_policy(ModelConfig(path=str(case.model), **settings), device=torch.device("cpu"), seed=0)
        peft.load_state_dict(whole, strict=False)
        assert isinstance(peft, PeftModel)
        expected = dict(peft.merge_and_unload().named_parameters())
        assert merged.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(merged[name], value.detach(), atol=1e-6, rtol=0)


def test_an_adapter_goes_alone(two_ranks: Ranks, tiny_models):
    case = Case(tiny_models["tied"], model_settings={"lora_rank": 4}, updates=1)
    for adapter, whole in two_ranks.run(bucketed, case, "adapter", 5000):
        assert adapter.keys() == {name for name in whole if ".lora_" in name}
        assert all(torch.equal(adapter[name], whole[name]) for name in adapter)


@pytest.mark.parametrize("model", ["odd", "tied"])
def test_gathering_in_bfloat16_is_gathering_and_then_casting(model: str, two_ranks: Ranks, tiny_models):
    """Matrices; vectors stay float32. With an adapter the sum is in float32 and is cast at last."""
    settings = {"lora_rank": 4} if model == "tied" else {}
    case = Case(tiny_models[model], model_settings=settings, updates=1)
    exact = two_ranks.run(bucketed, case, "merged", 5000)
    narrow = two_ranks.run(bucketed, case, "merged", 5000, torch.bfloat16)
    for (whole, _), (cast, _) in zip(exact, narrow, strict=True):
        assert list(whole) == list(cast)
        for name, value in whole.items():
            expected = value.to(torch.bfloat16) if value.dim() > 1 else value
            assert cast[name].dtype == expected.dtype and torch.equal(cast[name], expected), name
