"""Checkpoints of an RL run: its state is collected in one moment, and restored for an exact resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.cluster.any_batch import concat_batches
from hone.cluster.runtime import Roles
from hone.data.sampler import EpochSampler
from hone.trainers.archiving import Archiving
from hone.trainers.inputs import report_contract
from hone.trainers.rollouter import Rollouter
from hone.trainers.session import RunSession


@dataclass(frozen=True)
class RunState:
    """All parts of a run that have a state."""

    session: RunSession
    roles: Roles
    sampler: EpochSampler
    rollouter: Rollouter
    archive: Archiving

    async def save(self, step: int) -> None:
        """Write a checkpoint of this step: all state for an exact resume. Files are written in the background."""
        await self.archive.wait()  # a resumed run does not write the files of earlier steps
        location = self.session.begin_save(step)
        if location is None:
            return
        learning = [role for role in (self.roles.actor, self.roles.critic) if role is not None]
        for role in learning:
            await role.stage(location)
        # together and without waiting: in asynchronous training groups finish at any time
        sampler, rollouter = self.sampler.state_dict(), self.rollouter.state_dict()
        finished = self.rollouter.finished_groups()
        validation = self.rollouter.validation
        validating = validation is not None and validation.step == step and not validation.has_ended
        if finished:
            await self.roles.work.save_groups(concat_batches([group.batch for group in finished]), location)
        state: dict[str, Any] = {
            "step": step,
            "sampler": sampler,
            "rollouter": rollouter,
            "validating": validating,
            "agent_contract": self.session.agent_contract,
            **await self.roles.work.state_dict(),
        }

        def write() -> None:
            for writing in [role.write() for role in learning]:
                writing.result()

        self.session.finish_save(step, state, write, validating=validating)

    def load(self, step: int, state: Mapping[str, Any]) -> bool:
        """Restore what :meth:`save` wrote at this step; return whether its validation had not ended."""
        report_contract(state.get("agent_contract", {}), self.session.agent_contract, "the run resumes")
        self.sampler.load_state_dict(state["sampler"])
        self.rollouter.buffer.release(step)
        location, work = str(self.session.resumed_from), self.roles.work
        self.rollouter.load_state_dict(state["rollouter"], lambda samples: work.load_groups(location, samples).result())
        work.load_state_dict(state).result()
        return state.get("validating", False)
