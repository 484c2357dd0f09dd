"""What is said about a process that is lost, and about memory that runs out."""

from pathlib import Path

import pytest
import torch

from hone.cluster.failures import (
    OutOfMemory,
    PeersUnreachable,
    is_out_of_memory,
    log_tail,
    memory_knob,
    memory_numbers,
    out_of_memory,
    worker_lost,
)
from hone.config import RLConfig, load_config
from hone.config.limits import CPU_MICRO_BATCH_TOKENS
from hone.config.offline import SFTConfig
from hone.errors import EXIT_FAILED, ProcessError
from hone.insight import activity
from hone.insight.activity import Record, Span


def config(*overrides: str) -> RLConfig:
    return load_config(
        RLConfig, ["data.train_files=x", "actor_rollout_ref.model.path=m", "trainer.device=cpu", *overrides]
    )


RECORD = Record("main", 1, 4711, "node7", 0, spans=(Span("actor.update", 0.0),))


def test_a_lost_worker_is_named_with_its_stage_and_its_last_words():
    error = worker_lost("main[1]", RECORD, "was killed", config=config(), log="first\nlast words")
    assert error.exit_code == EXIT_FAILED and error.names == ("main[1]",)
    shown = error.render()
    assert "main[1] (pid 4711 on node7) was killed, in 'actor.update'" in shown
    assert "    first\n    last words" in shown and "trainer.max_restarts=1" in shown
    assert worker_lost("main[0]", None, "was killed", config=config()).names == ("main[0]",)


def test_for_memory_the_plan_and_the_first_knob_are_named():
    given = config("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4000", "data.max_response_length=500")
    shown = worker_lost("main[1]", RECORD, "was killed", config=given, out_of_memory=True).render()
    assert memory_numbers(given) in shown and "up to 4000 tokens" in shown
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2000" in shown


KNOBS = {
    "half the micro-batch": (
        ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000"],
        "ppo_max_token_len_per_gpu=1500",
    ),
    "not below the longest": (
        ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=900"],
        "ppo_max_token_len_per_gpu=768",
    ),
    "then checkpointing": (
        ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=768"],
        "enable_gradient_checkpointing=true",
    ),
    "then shorter responses": (
        [
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=768",
            "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        ],
        "data.max_response_length=128",
    ),
}


@pytest.mark.parametrize("case", KNOBS)
def test_the_first_knob_of_an_update(case: str):
    overrides, expected = KNOBS[case]
    given = config("data.max_prompt_length=512", "data.max_response_length=256", *overrides)
    assert memory_knob(given, "step 3 > update_actor").endswith(expected)


def test_the_knob_depends_on_the_stage():
    given = config("actor_rollout_ref.rollout.max_cache_tokens=80000", "critic.ppo_max_token_len_per_gpu=2048")
    assert memory_knob(given, "step 1 > gen > rollout.generate") == "actor_rollout_ref.rollout.max_cache_tokens=40000"
    assert memory_knob(given, "step 1 > update_critic").startswith("critic.ppo_max_token_len_per_gpu=")
    assert memory_knob(given, "").startswith("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=")
    sft = load_config(SFTConfig, ["data.train_files=x", "model.path=m", "trainer.device=cpu", "data.max_length=100"])
    assert (
        memory_knob(sft, "step 1") == f"data.max_token_len_per_gpu={CPU_MICRO_BATCH_TOKENS // 2}"
    )  # the limit of a CPU micro-batch


def test_refused_allocations_are_recognised():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value) and is_out_of_memory(MemoryError())
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = refused.value
    assert is_out_of_memory(wrapped) and not is_out_of_memory(ValueError("shape"))
    with pytest.raises(RuntimeError) as staged, activity.doing("step 2"), activity.doing("update_actor"):
        torch.empty(2**60, dtype=torch.uint8)
    assert activity.stage_of(staged.value) == "step 2 > update_actor"
    error = out_of_memory(staged.value, config(), activity.stage_of(staged.value))
    assert isinstance(error, OutOfMemory) and "'step 2 > update_actor'" in error.what


def test_the_end_of_a_log(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {k}" for k in range(100)) + "\n\n")
    assert log_tail(log, 3) == "line 97\nline 98\nline 99"
    assert log_tail(tmp_path / "none") == log_tail(None) == ""


def test_a_death_explains_a_group_that_could_not_be_made() -> None:
    from ray.exceptions import RayActorError

    from hone.cluster.ray.runtime import _rank, may_be_echo

    unreachable = PeersUnreachable("main[1] cannot connect to the others")
    assert may_be_echo(unreachable)
    assert _rank(RayActorError()) < _rank(unreachable)
    assert _rank(ProcessError("another mistake")) < _rank(RayActorError())
