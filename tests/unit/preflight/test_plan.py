"""The plan's arithmetic, the knobs that make a run fit, and the search for a placement."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.preflight import change

from hone.config import RLConfig, SFTConfig
from hone.data.ragged import Ragged
from hone.errors import ConfigError, ModelError
from hone.models.registry import CacheSize
from hone.preflight.evidence import Evidence
from hone.preflight.plan import memory as engines
from hone.preflight.plan.devices import GIB, Device, device_named, known_devices, parse_cluster, planned
from hone.preflight.plan.fit import TIGHT, Fitter
from hone.preflight.plan.memory import Memory, Phase, memory_of
from hone.preflight.plan.model import ModelShape
from hone.preflight.plan.plan import (
    as_json,
    model_shape,
    plan_of,
    render,
    rows_at_once,
    run_settings,
    search,
    step_time,
)
from hone.preflight.plan.work import Work, largest_micro_batch, work_of
from hone.training.packing import plan_micro_batches

SEVEN_BILLION = ModelShape(
    "qwen2", 7_615_616_512, 28, 3584, 28, 4, 128, 18944, 152064, tied=False, cache=CacheSize(28 * 2 * 4 * 128)
)
SEVEN_BILLION_FROZEN = 4 * SEVEN_BILLION.parameters - 2 * (28 * SEVEN_BILLION.matrices + SEVEN_BILLION.embedding)
"""Bytes of a frozen copy: matrices, the output layer among them, in bfloat16."""
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def gpu(gib: float) -> Device:
    return replace(device_named("H100"), memory=gib * GIB)


@pytest.fixture
def big(rl: RLConfig) -> RLConfig:
    """GRPO of a model of seven billion parameters."""
    rl.data.train_batch_size, rl.data.max_prompt_length, rl.data.max_response_length = 64, 512, 1024
    change(rl, {f"{ACTOR}.ppo_mini_batch_size": 64, f"{ACTOR}.dtype": "bfloat16", f"{ROLLOUT}.n": 8})
    return rl


def of(config: RLConfig | SFTConfig, shape: ModelShape = SEVEN_BILLION, *, on_cpu: bool = False) -> tuple[Work, Memory]:
    found = work_of(config, shape, on_cpu=on_cpu)
    return found, memory_of(found, found.main)


def phases(config: RLConfig | SFTConfig, **options: Any) -> dict[str, Phase]:
    return {phase.name: phase for phase in of(config, **options)[1].phases}


# --------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("arch", ["qwen3", "llama", "mistral", "qwen3_moe", "gemma2", "phi3"])
def test_shapes_are_those_of_the_models(arch: str) -> None:
    """Layers and embeddings of a shape are the parameters of the modules."""
    import torch
    from transformers import AutoModelForCausalLM

    from hone.models.loading import layers_of
    from hone.models.registry import ARCHITECTURES, Shape

    class Words:
        eos_token_id = pad_token_id = bos_token_id = 0

        def __len__(self) -> int:
            return 320

    from hone.models import init as init_model

    settings = init_model._config(ARCHITECTURES.get(arch), Shape(3, 64, 160, 16), Words(), 128)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    shape = ModelShape.from_settings(settings.to_dict(), model.num_parameters())
    assert shape is not None
    layer = sum(parameter.numel() for parameter in layers_of(model)[0].parameters())
    assert shape.layer == pytest.approx(layer, rel=0.01)
    assert shape.embedding == model.get_input_embeddings().weight.numel()
    assert 0.98 * layer <= shape.matrices <= layer


def test_what_is_no_decoder_has_no_shape(rl: RLConfig, model: Path) -> None:
    assert ModelShape.from_settings({"hidden_size": 3}, 10) is None
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json. is not valid JSON"):
        model_shape(rl)
    assert Evidence(rl).work(on_cpu=True) is None


def test_adapters_are_counted_as_peft_makes_them() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    numbers: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(**numbers, num_attention_heads=4, num_key_value_heads=2, head_dim=12)
    shape = ModelShape.from_settings(config.to_dict(), 0)
    model: Any = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules="all-linear"))
    assert shape is not None and shape.adapter(4) == sum(p.numel() for p in model.parameters() if p.requires_grad)


# ------------------------------------------------------------------------------------------------------------ arithmetic


@given(
    groups=st.integers(1, 6),
    samples=st.integers(1, 5),
    prompt=st.integers(1, 30),
    response=st.integers(1, 30),
    budget=st.integers(1, 400),
    most=st.none() | st.integers(1, 12),
)
def test_micro_batches_are_filled_as_the_engine_fills_them(
    groups: int, samples: int, prompt: int, response: int, budget: int, most: int | None
) -> None:
    import torch

    rows = groups * samples
    prompts = Ragged.from_rows([[row // samples] * prompt for row in range(rows)], torch.int64)
    responses = Ragged.from_rows([[1000 + row] * response for row in range(rows)], torch.int64)
    plan = plan_micro_batches(prompts, responses, budget, most)
    tokens = [len(part) * response + len({row // samples for row in part}) * prompt for part in plan]
    found = largest_micro_batch(rows, samples, prompt, response, budget, most)
    assert found.rows == max(map(len, plan)) and found.tokens <= max(tokens)
    assert found.tokens >= max(tokens) - prompt, "a micro-batch may begin inside a group, and bring one prompt more"


def test_parts_of_a_dense_model(big: RLConfig) -> None:
    found = phases(big)
    update, parameters = found["update"], SEVEN_BILLION.parameters
    assert update.size("weights") == 4 * parameters and update.size("optimizer") == 8 * parameters
    assert update.size("gradients") == 4 * parameters, "several micro-batches add up"
    tokens = found["generation"].size("KV cache") / (28 * 2 * 512 * 2)
    assert tokens == 256 * 1024 + 32 * 512, "max_num_seqs responses, and the prompts they continue, once each"
    assert update.size("KV cache") == 0, "it is freed"
    change(big, {f"{ROLLOUT}.free_cache_engine": False})
    assert phases(big)["update"].size("KV cache") == found["generation"].size("KV cache"), "it stays"
    assert sum(update.parts.values()) == update.total


def test_what_is_smaller_with_which_key(big: RLConfig) -> None:
    def less(phase: str, part: str, **changes: Any) -> float:
        before = phases(big)[phase].size(part)
        changed = copy.deepcopy(big)
        change(changed, {key.replace("__", "."): value for key, value in changes.items()})
        return phases(changed)[phase].size(part) / before

    assert less("update", "activations", **{f"{ACTOR}.ppo_max_token_len_per_gpu": 8192}) == pytest.approx(0.5, abs=0.03)
    assert less("update", "activations", **{f"{MODEL}.enable_gradient_checkpointing": True}) < 0.14
    assert less("update", "optimizer", **{f"{ACTOR}.optim.optimizer": "SGD"}) == 0
    assert less("update", "gradients", **{f"{MODEL}.lora_rank": 16}) < 0.01
    assert less("generation", "KV cache", **{f"{ROLLOUT}.max_num_seqs": 64}) == 0.25
    split = {"trainer.runtime": "ray", "trainer.n_gpus_per_node": 8}
    assert less("update", "weights", **split) == less("update", "optimizer", **split) == 1 / 8
    tensor = {**split, f"{ACTOR}.tensor_model_parallel_size": 4}
    assert less("update", "weights", **tensor) == 1 / 8
    stages = {**split, f"{ACTOR}.strategy": "megatron", f"{ACTOR}.pipeline_model_parallel_size": 2}
    assert less("update", "weights", **stages) == less("update", "gradients", **stages) == 1 / 2
    assert less("update", "optimizer", **stages) == 1 / 8
    change(big, split)
    sequence = {f"{ACTOR}.ulysses_sequence_parallel_size": 4}
    assert less("update", "activations", **sequence) == pytest.approx(0.25, abs=0.02)
    rings = {f"{ACTOR}.context_parallel_size": 2, f"{ACTOR}.ulysses_sequence_parallel_size": 2}
    assert less("update", "activations", **rings) == pytest.approx(0.25, abs=0.02)


def test_reference_critic_and_reward_model(big: RLConfig) -> None:
    assert "reference" not in of(big)[1].peak.parts
    change(big, {f"{ACTOR}.use_kl_loss": True, "algorithm.adv_estimator": "gae", f"{ROLLOUT}.n": 1})
    found = phases(big)
    assert found["update"].size("reference") == SEVEN_BILLION_FROZEN
    assert found["critic update"].size("optimizer") == 16 * SEVEN_BILLION.parameters
    change(big, {f"{MODEL}.lora_rank": 16})
    assert phases(big)["update"].size("reference") == 0, "the base model is the reference"


def test_the_reference_is_offloaded_by_itself(big: RLConfig) -> None:
    change(big, {f"{ACTOR}.use_kl_loss": True, "trainer.runtime": "ray", "trainer.n_gpus_per_node": 4})
    held = phases(big)["update"].size("reference")
    assert held == SEVEN_BILLION.parameters, "4 bytes over 4 shards"
    big.actor_rollout_ref.ref.fsdp_config.param_offload = True
    assert phases(big)["update"].size("reference") == 0
    assert phases(big)["update"].size("weights") == held, "the actor's stay"
    change(big, {f"{ACTOR}.fsdp_config.param_offload": True})
    big.actor_rollout_ref.ref.fsdp_config.param_offload = False
    assert phases(big)["update"].size("reference") == held


def test_a_reward_model_in_a_pool_of_its_own_scores_there(big: RLConfig) -> None:
    block = "reward.reward_model"
    change(big, {f"{block}.enable": True, f"{block}.enable_resource_pool": True, f"{block}.n_gpus_per_node": 2})
    work = work_of(big, SEVEN_BILLION, on_cpu=False)
    pool = work.pool_of("reward_model")
    assert pool is not None and pool.world == 2 and pool.replicated
    (scoring,) = memory_of(work, pool).phases
    head = 2 * SEVEN_BILLION.embedding  # it is counted with the policy's shape, but has one output
    assert scoring.size("reward model") == SEVEN_BILLION_FROZEN + head and scoring.size("activations") > 0


def test_engines_of_divided_models_hold_a_copy(big: RLConfig) -> None:
    change(big, {"trainer.runtime": "ray", "trainer.n_gpus_per_node": 4})
    found = phases(big)
    assert found["generation"].size("engine's own weights") == 4 * SEVEN_BILLION.parameters
    assert "weight sync" in found
    change(big, {f"{ROLLOUT}.enable_resource_pool": True, f"{ROLLOUT}.n_gpus_per_node": 2})
    whole = work_of(big, SEVEN_BILLION, on_cpu=False)
    main, served = (memory_of(whole, process) for process in whole.pools)
    assert "generation" not in {phase.name for phase in main.phases} and main.peak.size("engine's own weights") == 0
    assert [phase.name for phase in served.phases] == ["generation", "weight sync"]
    assert served.peak.size("weights") == 0 and served.peak.size("engine's own weights") > 0


def test_both_ends_of_a_broadcast_hold_two_buckets(big: RLConfig) -> None:
    change(big, {"trainer.runtime": "ray", "trainer.n_gpus_per_node": 4, f"{ROLLOUT}.enable_resource_pool": True})
    size = max(512 * 2**20, 2 * SEVEN_BILLION.embedding)
    gathered = 3 * max(256 * 2**20, 2 * SEVEN_BILLION.embedding)

    def in_transfer(way: str, *, on_cpu: bool) -> list[float]:
        change(big, {f"{ROLLOUT}.checkpoint_engine.between_workers": way})
        work = work_of(big, SEVEN_BILLION, on_cpu=on_cpu)
        return [
            sum(
                phase.size("weights in transfer")
                for phase in memory_of(work, pool).phases
                if phase.name == "weight sync"
            )
            for pool in work.pools
        ]

    assert (
        in_transfer("auto", on_cpu=False) == in_transfer("broadcast", on_cpu=False) == [2 * size + gathered, 2 * size]
    )
    assert in_transfer("object_store", on_cpu=False) == [0, 0]
    assert in_transfer("auto", on_cpu=True) == [0, 0] and in_transfer("broadcast", on_cpu=True) != [0, 0]


# ------------------------------------------------------------------------------------- engines in processes of their own


def test_constants_of_engines_are_those_of_the_code() -> None:
    from hone.generation.server import sglang_backend, vllm_backend

    assert engines.VLLM_CPU_CACHE_BYTES == vllm_backend._CPU_CACHE_BYTES
    assert engines.SGLANG_CPU_CACHE_TOKENS == sglang_backend._CPU_CACHE_TOKENS


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("sleeps", [True, False])
def test_an_engine_has_its_share_of_a_gpu_while_it_is_awake(big: RLConfig, name: str, sleeps: bool) -> None:
    change(big, {f"{ACTOR}.recompute_old_log_probs": True})
    own = phases(big)
    keys = {"name": name, "gpu_memory_utilization": 0.4, "free_cache_engine": None if sleeps else False}
    change(big, {f"{ROLLOUT}.{key}": value for key, value in keys.items()})
    found = work_of(big, SEVEN_BILLION, on_cpu=False)
    alone, together = memory_of(found, found.main), memory_of(found, found.main, capacity=80 * GIB)
    assert [phase.name for phase in together.phases] == [
        "generation",
        "log-probs",
        "update",
        "weight sync",
        "checkpoint",
    ][:4]
    for phase, trainers in zip(together.phases, alone.phases, strict=True):
        share = 0.0 if sleeps and phase.name in ("log-probs", "update") else 0.4 * 80 * GIB
        assert phase.size("colocated engine") == pytest.approx(share) and trainers.size("colocated engine") == 0
        assert phase.total == pytest.approx(trainers.total + share)
        assert phase.size("KV cache") == 0, "the trainer has none"
    generating = together.phases[0]
    assert generating.size("weights") == 4 * SEVEN_BILLION.parameters, "held once more by the engine, in its share"
    assert engines.least_bytes(found, 0) > 2 * SEVEN_BILLION.parameters
    assert generating.size("copies of weights") == generating.size("logits") == generating.size("activations") == 0
    assert own["update"].size("gradients") == together.phases[2].size("gradients")
    change(big, {f"{ROLLOUT}.num_replicas": 2})
    twice = work_of(big, SEVEN_BILLION, on_cpu=False)
    assert engines.engine_bytes(twice, twice.main, 80 * GIB, 0) == pytest.approx(0.8 * 80 * GIB)
    change(big, {f"{ROLLOUT}.engine_url": "tcp://other:7777"})
    elsewhere = work_of(big, SEVEN_BILLION, on_cpu=False)
    assert engines.engine_bytes(elsewhere, elsewhere.main, 80 * GIB, 0) == 0


def test_engines_in_a_pool_of_their_own_have_no_training_beside_them(big: RLConfig) -> None:
    change(big, {"trainer.runtime": "ray", "trainer.n_gpus_per_node": 4, f"{ROLLOUT}.name": "vllm"})
    change(big, {f"{ROLLOUT}.enable_resource_pool": True, f"{ROLLOUT}.n_gpus_per_node": 2})
    change(big, {f"{ROLLOUT}.gpu_memory_utilization": 0.9})
    main, served = plan_of(big, gpu(80), shape=SEVEN_BILLION).memories
    assert all(phase.size("colocated engine") == 0 for phase in main.phases)
    assert "generation" not in {phase.name for phase in main.phases}
    assert {name for phase in served.phases for name in phase.parts} == {
        *("colocated engine", "process", "weights in transfer")
    }
    assert served.phases[0].size("colocated engine") == pytest.approx(0.9 * 80 * GIB)


@pytest.mark.parametrize(("share", "wanted"), [(0.1, "raised"), (0.95, "lowered")])
def test_the_share_is_proposed_with_which_the_run_fits(big: RLConfig, share: float, wanted: str) -> None:
    big.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 2048
    change(big, {f"{MODEL}.lora_rank": 32, f"{MODEL}.enable_gradient_checkpointing": True})
    change(big, {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.gpu_memory_utilization": share})
    found = plan_of(big, gpu(80), shape=SEVEN_BILLION)
    assert not found.fits and found.fitting.fits
    (knob,) = found.fitting.knobs
    key, _, value = knob.setting.partition("=")
    assert key == f"{ROLLOUT}.gpu_memory_utilization" and (float(value) > share) == (wanted == "raised")
    device = gpu(80)
    assert float(value) >= engines.least_share(found.work, device.memory, device.overhead) - 1e-9
    assert knob.setting in render(found)
    change(big, {key: float(value)})
    assert plan_of(big, device, shape=SEVEN_BILLION).fits


SMALL = ModelShape(
    "qwen3", 596_049_920, 28, 1024, 16, 8, 128, 3072, 151936, tied=True, cache=CacheSize(28 * 2 * 8 * 128)
)
"""Qwen3 0.6B."""


def test_pages_take_what_their_share_of_a_gpu_leaves(big: RLConfig) -> None:
    """256 rows of 2,560 tokens would be 70 GiB; the engine's pages are half of the GPU less its weights, in all phases but training's."""
    device = gpu(80)
    change(big, {"data.max_prompt_length": 512, "data.max_response_length": 2048})
    held, rows = {}, {}
    for share in (0.3, 0.5, 0.7):
        change(big, {f"{ROLLOUT}.gpu_memory_utilization": share})
        found = plan_of(big, device, shape=SMALL)
        assert found.fits, render(found)
        (memory,) = found.memories
        held[share] = memory.phases[0].size("KV cache")
        rows[share] = rows_at_once(found.work, found.work.main, device)
        allowed = share * device.memory - 6 * SMALL.parameters
        assert 0.97 * allowed < held[share] <= allowed
        assert f"{rows[share]} of 256 sequences" in render(found)
        assert rows[share] * (2048 + 512 / 8) * engines.token_bytes(found.work) == pytest.approx(held[share], rel=0.02)
    assert rows[0.3] < rows[0.5] < rows[0.7] < 256
    change(big, {f"{ROLLOUT}.gpu_memory_utilization": 0.04})
    short = plan_of(big, device, shape=SMALL)
    assert not short.fits and short.fitting.fits
    (knob,) = short.fitting.knobs
    assert knob.setting == f"{ROLLOUT}.gpu_memory_utilization=0.05"


def test_a_larger_share_answers_more_sequences_at_once(big: RLConfig) -> None:
    change(big, {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.max_num_seqs": 1024, "data.train_batch_size": 512})
    device, rows, seconds = gpu(80), [], []
    for share in (0.35, 0.6, 0.9):
        change(big, {f"{ROLLOUT}.gpu_memory_utilization": share})
        found = work_of(big, SEVEN_BILLION, on_cpu=False)
        rows.append(engines.served_rows(found, device.memory, device.overhead))
        seconds.append(step_time(found, device).generation)
    assert rows[0] < rows[1] < rows[2] <= 1024 and seconds[0] > seconds[1] > seconds[2]
    held = rows[1] * (big.data.max_response_length + big.data.max_prompt_length / 8) * engines.token_bytes(found)
    assert held <= 0.6 * device.memory - 2 * SEVEN_BILLION.parameters


@pytest.mark.parametrize(("name", "cache"), [("vllm", 2 * GIB), ("sglang", None), ("native", None)])
def test_engines_on_a_cpu_add_what_they_hold(big: RLConfig, name: str, cache: float | None) -> None:
    change(big, {f"{ROLLOUT}.name": name, f"{ROLLOUT}.num_replicas": 2})
    found = work_of(big, SEVEN_BILLION, on_cpu=True)
    held = engines.engine_bytes(found, found.main, 0, GIB)
    if name == "native":
        assert held > 2 * (2 * SEVEN_BILLION.parameters + GIB) + engines.cache_bytes(found, found.main)
    else:
        cache = cache or 65536 * engines.token_bytes(found)
        assert held == pytest.approx(2 * (2 * SEVEN_BILLION.parameters + GIB + cache))
    kept = memory_of(found, found.main).phases[0].size("weights kept for engines")
    assert kept == 4 * SEVEN_BILLION.parameters


def test_other_commands(sft: SFTConfig) -> None:
    sft.data.max_length, sft.data.train_batch_size, sft.data.max_token_len_per_gpu = 1024, 64, 4096
    found = phases(sft)
    assert set(found) == {"update"} and found["update"].size("KV cache") == 0
    sft.trainer.save_freq = -1
    assert set(phases(sft, on_cpu=True)) == {"update", "checkpoint"}, "on a CPU the copies are in the same memory"


# ------------------------------------------------------------------------------------------------------------- what fits


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(big: RLConfig) -> None:
    fitter = Fitter(gpu(280), SEVEN_BILLION, {})
    budget = fitter.largest_budget(big)
    assert budget is not None and budget % 256 == 0
    change(big, {f"{ACTOR}.ppo_max_token_len_per_gpu": budget})
    assert fitter.peak(big) <= TIGHT * 280 * GIB
    change(big, {f"{ACTOR}.ppo_max_token_len_per_gpu": budget + 2048})
    assert fitter.peak(big) > TIGHT * 280 * GIB


def test_a_weight_sync_sends_half_the_bytes_in_bfloat16(big: RLConfig) -> None:
    pool = {f"{ROLLOUT}.enable_resource_pool": True, f"{ROLLOUT}.nnodes": 1, f"{ROLLOUT}.n_gpus_per_node": 1}
    change(big, {"trainer.runtime": "ray", **pool})
    device, seconds = device_named("H100"), {}
    for dtype in ("float32", "bfloat16"):
        change(big, {f"{ROLLOUT}.dtype": dtype})
        seconds[dtype] = step_time(work_of(big, SEVEN_BILLION, on_cpu=False), device).messages
    assert seconds["float32"] == 2 * seconds["bfloat16"] == pytest.approx(4 * SEVEN_BILLION.parameters / device.link)


@pytest.mark.parametrize(("name", "bf16"), [("H100", True), ("V100", False)])
def test_auto_is_planned_in_the_dtype_of_the_device(big: RLConfig, name: str, bf16: bool) -> None:
    """A device that computes in bfloat16 is planned as if that were set, weights and time included."""
    resolved, device = "bfloat16" if bf16 else "float32", device_named(name)
    plans = {}
    for dtype in ("auto", resolved):
        change(big, {f"{ACTOR}.dtype": dtype})
        plans[dtype] = as_json(plan_of(big, device, shape=SEVEN_BILLION))
    source = plans["auto"].pop("dtype")
    assert source["value"] == plans[resolved].pop("dtype")["value"] == resolved
    assert source["source"].startswith(f"{ACTOR}.dtype=auto")
    assert plans["auto"] == plans[resolved]
    change(big, {f"{ACTOR}.dtype": "auto", "critic.enable": True, "critic.dtype": "auto"})
    work = work_of(big, SEVEN_BILLION, on_cpu=False, bfloat16=bf16)
    assert work.critic is not None and (work.critic.bf16, work.rollout_bf16) == (bf16, bf16)
    assert not work_of(big, SEVEN_BILLION, on_cpu=True).actor.bf16


@pytest.mark.parametrize(("name", "first"), [("H100", True), ("V100", False)])
def test_bfloat16_is_the_first_knob_of_a_gpu_that_has_it(big: RLConfig, name: str, first: bool) -> None:
    change(big, {f"{ACTOR}.dtype": "float32"})
    knobs = Fitter(device_named(name), SEVEN_BILLION, {}).fit_with_offloading(big).knobs
    assert (knobs[0].setting == f"{ACTOR}.dtype=bfloat16") == first
    assert not any("bfloat16" in knob.setting for knob in knobs[1:])


@pytest.mark.parametrize(
    ("gib", "knobs"),
    [
        (400, []),
        (200, ["ppo_max_token_len_per_gpu"]),
        (150, ["enable_gradient_checkpointing"]),
        (100, ["enable_gradient_checkpointing", "optim.optimizer=AdamW8bit"]),
        (80, ["lora_rank"]),
    ],
)
def test_knobs_in_the_order_of_tuning(big: RLConfig, gib: int, knobs: list[str]) -> None:
    fitting = Fitter(gpu(gib), SEVEN_BILLION, {}).fit(big)
    assert fitting.fits
    turned = [knob.setting for knob in fitting.knobs]
    assert len(turned) >= len(knobs) and all(any(name in setting for setting in turned) for name in knobs), turned
    peaks = [knob.peak for knob in fitting.knobs]
    assert peaks == sorted(peaks, reverse=True)
    assert big.actor_rollout_ref.model.lora_rank == 0, "what was asked for is not touched"


def test_a_run_that_nothing_makes_fit(big: RLConfig) -> None:
    fitting = Fitter(gpu(20), SEVEN_BILLION, {}).fit(big)
    assert not fitting.fits and fitting.largest_budget is None
    plan = plan_of(big, gpu(20), shape=SEVEN_BILLION)
    assert "too much in" in render(plan) and not as_json(plan)["fits"]


# ------------------------------------------------------------------------------------------------------------- placement


def test_clusters_by_a_word() -> None:
    found = parse_cluster("2x8xH100-80GB")
    assert (found.nodes, found.per_node, found.device.name) == (2, 8, "H100-80GB")
    assert parse_cluster("4xh200") == replace(parse_cluster("1x4xH200-141GB"))
    assert {parse_cluster(f"1x1x{name}").device.name for name in known_devices()} == set(known_devices())
    for wrong, words in [
        ("8", "does not describe"),
        ("8xA100", "2 GPUs"),
        ("0x8xH100", "does not"),
        ("8xQ100", "no GPU"),
    ]:
        with pytest.raises(ConfigError, match=words):
            parse_cluster(wrong)


def test_the_best_placement_is_the_fastest_that_fits(big: RLConfig) -> None:
    change(big, {f"{ROLLOUT}.gpu_memory_utilization": 0.7})
    plan = search(big, parse_cluster("2x8xH100-80GB"), shape=SEVEN_BILLION)
    assert plan.fits and len(plan.placements) > 10
    best, fitter = plan.placements[0], Fitter(plan.device, SEVEN_BILLION, {})
    fitting = [placement for placement in plan.placements if placement.fitting.fits]
    unchanged = [p for p in fitting if not any("lora" in knob.setting for knob in p.fitting.knobs)]
    assert best.time.total == min(placement.time.total for placement in unchanged)
    for placement in plan.placements:
        worlds = [process.world for process in placement.fitting.work.pools]
        assert sum(worlds) <= 16
        assert placement.fitting.fits == all(m.peak.total <= plan.limit for m in placement.fitting.memories)
    from hone.config import load_config

    words = [f"{MODEL}.path=x", "data.train_batch_size=64", "data.max_response_length=1024", f"{ACTOR}.dtype=bfloat16"]
    words += [f"{ACTOR}.ppo_mini_batch_size=64", f"{ROLLOUT}.n=8", f"{ROLLOUT}.gpu_memory_utilization=0.7"]
    again = load_config(RLConfig, [*words, *run_settings(best)])
    assert fitter.peak(again) <= plan.limit, "the overrides that are shown make what is shown"
    text = render(plan)
    assert "placements compared" in text and "run it with:" in text and "slower by" in text


def test_nothing_fits_where_no_device_holds_the_engines_copy(big: RLConfig) -> None:
    plan = search(big, parse_cluster("4x8xA100-40GB"), shape=SEVEN_BILLION)
    assert not plan.fits and not any(placement.fitting.fits for placement in plan.placements)
    assert "engine's own weights 28.4 GiB" in render(plan)
    assert json.loads(json.dumps(as_json(plan)))["placements"][0]["fits"] is False


def test_offloading_makes_room_and_takes_time(big: RLConfig) -> None:
    change(big, {"trainer.runtime": "ray", "trainer.n_gpus_per_node": 8})
    before, device = work_of(big, SEVEN_BILLION, on_cpu=False), device_named("H100")
    at_rest, seconds = memory_of(before, before.main).phases[0], step_time(before, device).update
    fsdp = f"{ACTOR}.fsdp_config"
    change(big, {f"{fsdp}.param_offload": True, f"{fsdp}.optimizer_offload": True})
    work = work_of(big, SEVEN_BILLION, on_cpu=False)
    found = memory_of(work, work.main)
    share = SEVEN_BILLION.parameters / 8
    assert found.phases[0].name == "generation" and at_rest.total - found.phases[0].total == 12 * share
    assert next(phase for phase in found.phases if phase.name == "update").size("weights") == 4 * share, "in use"
    assert step_time(work, device).update > seconds


def test_a_step_takes_longer_with_more_to_do(big: RLConfig) -> None:
    device = device_named("H100")
    change(big, {f"{ACTOR}.recompute_old_log_probs": True})
    base = step_time(work_of(big, SEVEN_BILLION, on_cpu=False), device)
    assert base.generation > 0 and base.update > base.log_probs > 0 and base.messages == 0
    change(big, {f"{MODEL}.enable_gradient_checkpointing": True})
    assert step_time(work_of(big, SEVEN_BILLION, on_cpu=False), device).update > base.update
    change(big, {"trainer.runtime": "ray", "trainer.n_gpus_per_node": 8})
    eight = step_time(work_of(big, SEVEN_BILLION, on_cpu=False), device)
    assert eight.messages > 0 and eight.update < base.update / 4


def test_the_record_of_a_run_is_in_gib(rl: RLConfig) -> None:
    (record,) = planned(rl)
    assert {"pool", "roles", "phases", "peak_phase", "peak_gib", "layout"} <= set(record) and "peak" not in record
    assert record["peak_gib"] == record["phases"][record["peak_phase"]]["total"] < 1


@pytest.mark.parametrize("kind", ["gpt2", "gptj", "bloom", "codegen", "mpt"])
def test_sizes_under_the_names_of_a_family(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    settings = CONFIG_MAPPING[kind]()
    shape = ModelShape.from_settings(json.loads(settings.to_json_string(use_diff=False)), 10**8)
    assert shape is not None and shape.tied == settings.tie_word_embeddings
    sizes = settings.num_hidden_layers, settings.hidden_size, settings.num_attention_heads, settings.vocab_size
    assert (shape.layers, shape.hidden, shape.heads, shape.vocabulary) == sizes


@pytest.mark.parametrize(
    ("policy", "critic", "expected"), [(True, None, True), (False, True, True), (True, False, False)]
)
def test_the_critic_offloads_as_configured_else_as_the_policy(
    policy: bool, critic: bool | None, expected: bool
) -> None:
    changes = {f"{MODEL}.enable_activation_offload": policy, "critic.model.enable_activation_offload": critic}
    work, _ = of(change(RLConfig(), {"algorithm.adv_estimator": "gae", **changes}))
    assert work.critic is not None and work.critic.on_host == expected and work.actor.on_host == policy
