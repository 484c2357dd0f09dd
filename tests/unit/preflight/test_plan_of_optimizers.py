"""Bytes of Muon and of an average of the weights, by the plan."""

from __future__ import annotations

import pytest

from hone.config import RLConfig, load_config
from hone.models.registry import CacheSize
from hone.preflight.plan.memory import Phase, checkpoint_bytes, memory_of, step_bytes
from hone.preflight.plan.model import ModelShape
from hone.preflight.plan.work import Work, work_of

OPTIM, MODEL = "actor_rollout_ref.actor.optim", "actor_rollout_ref.model"
SHAPE = ModelShape("qwen3", 8_190_735_360, 36, 4096, 32, 8, 128, 12288, 151936, tied=False, cache=CacheSize(147456))
EXPERTS = ModelShape(
    "qwen3_moe",
    30_532_122_624,
    48,
    2048,
    32,
    4,
    128,
    768,
    151936,
    tied=False,
    experts=128,
    chosen=8,
    cache=CacheSize(49152),
)


def planned(shape: ModelShape, *words: str) -> tuple[Work, Phase]:
    """The work of a run in bfloat16 with these settings, and its update on one GPU."""
    config = load_config(RLConfig, [f"{MODEL}.path=x", "data.train_files=y", *words], preset="grpo")
    work = work_of(config, shape, on_cpu=False, bfloat16=True)
    phases = memory_of(work, work.main).phases
    return work, next(phase for phase in phases if phase.name == "update")


@pytest.mark.parametrize("ema", ["null", "0.99"])
@pytest.mark.parametrize("lora", [0, 16])
def test_state_and_checkpoints(lora: int, ema: str) -> None:
    work, update = planned(SHAPE, f"{OPTIM}.optimizer=Muon", f"{OPTIM}.ema_decay={ema}", f"{MODEL}.lora_rank={lora}")
    trained = SHAPE.adapter(lora) if lora else SHAPE.parameters
    averaged = 0 if ema == "null" else 4 * trained
    momentum = 4 * trained if lora else 8 * trained - 4 * SHAPE.layers * SHAPE.matrices
    assert update.size("optimizer") == momentum + averaged
    assert checkpoint_bytes(work) == 4 * trained + momentum + 2 * averaged


def test_a_step_takes_copies_of_the_largest_matrix() -> None:
    (muon, _), (adamw, _) = planned(SHAPE, f"{OPTIM}.optimizer=Muon"), planned(SHAPE)
    sizes = {
        divided: [step_bytes(work.actor, divided=divided, on_cpu=False) for work in (muon, adamw)]
        for divided in (False, True)
    }
    assert sizes[False] == [4096 * 12288 * (4 + 3 * 2 + 4), 0]
    assert sizes[True] == [4096 * 12288 * (4 + 4 + 3 * 2 + 4), 0]


def test_stacks_of_experts_are_orthogonalised_in_parts() -> None:
    work, _ = planned(EXPERTS, f"{OPTIM}.optimizer=Muon")
    assert step_bytes(work.actor, divided=False, on_cpu=True) == (1 << 26) * (4 + 3 * 4 + 4)


def test_the_moment_of_the_step_has_the_copies_and_an_offloaded_state() -> None:
    offloaded = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"
    checkpointed = f"{MODEL}.enable_gradient_checkpointing=true"
    few = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024"
    words = ("trainer.runtime=ray", "trainer.n_gpus_per_node=2", offloaded, checkpointed, few)
    work, update = planned(SHAPE, f"{OPTIM}.optimizer=Muon", *words)
    assert update.size("orthogonalised matrix") == step_bytes(work.actor, divided=True, on_cpu=False)
