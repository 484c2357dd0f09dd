"""A base in 4 bits: where it is refused, what a checkpoint of it fits, and what the plan counts."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.preflight import SMALL_MODEL, change

from hone.config import RLConfig, SFTConfig, load_config
from hone.models import four_bits
from hone.models.registry import CacheSize
from hone.preflight import Stage, findings
from hone.preflight.plan.devices import device_named
from hone.preflight.plan.fit import Fitter
from hone.preflight.plan.memory import memory_of
from hone.preflight.plan.model import ModelShape
from hone.preflight.plan.work import work_of

MODEL, ROLLOUT, ACTOR = (f"actor_rollout_ref.{name}" for name in ("model", "rollout", "actor"))
SHAPE = ModelShape(
    "llama", 8_030_261_248, 32, 4096, 32, 8, 128, 14336, 128256, tied=False, cache=CacheSize(131072)
)  # of Llama 3 8B


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bits, "find_spec", lambda name: find_spec("torch"))


def problems_of(config: Any, *codes: str) -> list[Any]:
    found = [each.error for each in findings(config, (Stage.ARITHMETIC, Stage.FILES))]
    return [each for each in found if each.code in codes]


@pytest.fixture
def packed(rl: RLConfig) -> RLConfig:
    return change(rl, {f"{MODEL}.quantization": "nf4", f"{MODEL}.lora_rank": 16})


def test_an_adapter_on_one_process_is_taken(packed: RLConfig, sft: SFTConfig) -> None:
    assert problems_of(packed, "R94") == []
    assert problems_of(change(sft, {"model.quantization": "nf4", "model.lora_rank": 8}), "R94") == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trainer.runtime": "ray", "trainer.n_gpus_per_node": 2}, ("2 processes", "strategy=fsdp2")),
        ({f"{ACTOR}.strategy": "megatron"}, ("strategy=megatron",)),
        ({f"{ROLLOUT}.name": "vllm"}, ("'vllm'", "processes of its own")),
        ({f"{ROLLOUT}.name": "sglang", f"{MODEL}.lora_rank": 4}, ("'sglang'",)),
        ({f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.engine_url": "unix:/tmp/x"}, ("'vllm'",)),
        ({"trainer.runtime": "ray", f"{ROLLOUT}.enable_resource_pool": True}, ("its own devices",)),
    ],
    ids=str,
)
def test_other_layouts_are_refused_in_one_message(packed: RLConfig, changes: dict, says: tuple[str, ...]) -> None:
    (problem,) = problems_of(change(packed, changes), "R94")
    assert all(word in problem.what for word in (f"{MODEL}.quantization=nf4", *says)), problem.what
    assert problem.fix.endswith(f"{MODEL}.quantization=none")


def test_experts_are_refused_before_weights_are_read(packed: RLConfig, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**SMALL_MODEL, "num_experts": 4}))
    (problem,) = problems_of(packed, "R94")
    assert "num_experts=4" in problem.what


def test_an_adapter_of_a_packed_base_is_not_taken_for_another(rl: RLConfig, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "peft_type": "LORA"}))
    (adapter / four_bits.RECORD).write_text(json.dumps({"method": "nf4", "block": 64, "weights": ["a.weight"]}))
    (problem,) = problems_of(change(rl, {f"{MODEL}.lora_adapter_path": str(adapter)}), "R94")
    assert problem.fix == f"{MODEL}.quantization=nf4"
    assert problems_of(change(rl, {f"{MODEL}.quantization": "nf4"}), "R94") == []


@pytest.mark.parametrize("was", ["none", "nf4", "int8"])
@pytest.mark.parametrize("now", ["none", "nf4"])
def test_a_resumed_run_keeps_its_base(packed: RLConfig, was: str, now: str) -> None:
    folder = Path(packed.trainer.default_local_dir) / "checkpoints/step_4"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/adapter_config.json").write_text(json.dumps({"r": 16}))
    if was != "none":
        (folder / "actor" / four_bits.RECORD).write_text(
            json.dumps({"method": was, "block": 64, "weights": ["a.weight"]})
        )
    (folder / "checkpoint.json").write_text(json.dumps({"format": 2, "step": 4, "files": {}}))
    (folder / "state.json").write_text(json.dumps({"step": 4}))
    found = problems_of(change(packed, {f"{MODEL}.quantization": now}), "R55")
    assert [f"quantization={now}" in each.what for each in found] == [True] * (was != now)


def planned(*words: str) -> Any:
    keys = [f"{MODEL}.path=x", "data.train_files=y", f"{MODEL}.lora_rank=16", *words]
    return load_config(RLConfig, keys, preset="grpo")


@pytest.mark.parametrize("bfloat16", [True, False])
def test_the_plan_counts_packed_weights(bfloat16: bool) -> None:
    held = {}
    for kind in ("none", "nf4", "int8"):
        work = work_of(planned(f"{MODEL}.quantization={kind}"), SHAPE, on_cpu=False, bfloat16=bfloat16)
        held[kind] = memory_of(work, work.main).phases[-1].size("weights")
    matrices, ends = SHAPE.layers * SHAPE.matrices, SHAPE.embedding
    adapter, rest = 4 * SHAPE.adapter(16), SHAPE.parameters - matrices - 2 * ends
    narrow = 2 if bfloat16 else 4
    assert held["none"] == narrow * (matrices + ends) + 4 * (ends + rest) + adapter
    assert held["int8"] - held["nf4"] == 0.5 * matrices
    assert held["nf4"] == 0.5625 * matrices + narrow * ends + 4 * (ends + rest) + adapter


def test_an_8b_model_fits_a_card_of_24_gb_in_4_bits_alone() -> None:
    fitter = Fitter(device_named("RTX4090-24GB"), SHAPE, {})
    fitting = fitter.fit(planned())
    assert fitting.fits and f"{MODEL}.quantization=nf4" in [knob.setting for knob in fitting.knobs]
    assert fitter.fit(planned(f"{MODEL}.quantization=nf4")).fits
    served = fitter.fit(planned(f"{ROLLOUT}.name=vllm"))
    assert f"{MODEL}.quantization=nf4" not in [knob.setting for knob in served.knobs]
