"""Checkpoints of an RL run: its state is collected in one moment, and restored for an exact resume.

``trainer`` is the :class:`~hone.trainers.rl.RLTrainer` whose state it is.
"""

from __future__ import annotations

from typing import Any

from hone.trainers.episodes import concat_batches
from hone.trainers.inputs import report_contract


async def save_run(trainer: Any) -> None:
    """Write a checkpoint of this step: all state for an exact resume. Files are written in the background."""
    await trainer.archive.wait()  # a resumed run does not write the files of earlier steps
    location = trainer.session.begin_save(trainer.step)
    if location is None:
        return
    roles = [role for role in (trainer.actor, trainer.critic) if role is not None]
    for role in roles:
        await role.stage(location)
    # together and without waiting: in asynchronous training groups finish at any time
    sampler, rollouter = trainer.sampler.state_dict(), trainer.rollouter.state_dict()
    validating = (
        trainer.validation is not None and trainer.validation.step == trainer.step and not trainer.validation.has_ended
    )
    finished = trainer.rollouter.finished_groups()
    if finished:
        await trainer.batch_ops.save_groups(concat_batches([group.batch for group in finished]), location)
    state: dict[str, Any] = {
        "step": trainer.step,
        "sampler": sampler,
        "rollouter": rollouter,
        "validating": validating,
        "agent_contract": trainer.session.agent_contract,
        **await trainer.batch_ops.state_dict(),
    }

    def write() -> None:
        for writing in [role.write() for role in roles]:
            writing.result()

    trainer.session.finish_save(trainer.step, state, write, validating=validating)


def load_run(trainer: Any, state: dict[str, Any]) -> None:
    """Restore the state of :func:`save_run` into a trainer at its resumed step."""
    report_contract(state.get("agent_contract", {}), trainer.session.agent_contract, "the run resumes")
    trainer.validation_missing = state.get("validating", False)
    trainer.sampler.load_state_dict(state["sampler"])
    trainer.buffer.release(trainer.step)
    location = str(trainer.session.resumed_from)
    trainer.rollouter.load_state_dict(
        state["rollouter"], lambda samples: trainer.batch_ops.load_groups(location, samples).result()
    )
    trainer.batch_ops.load_state_dict(state).result()
