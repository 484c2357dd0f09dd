"""RL trainer: one loop for every algorithm, engine, reward and runtime.

A step runs the stages of :mod:`hone.trainers.algorithm`, then validation and checkpoint where they are due. In asynchronous training
the stage ``gen`` returns groups that were played during earlier steps; :mod:`hone.trainers.rollouter` bounds their age. Validation
is then a task that runs during the next step (:class:`~hone.trainers.validator.ValidationTask`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pkgutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from hone.cluster.context import RoleSpec, run_tokenizer
from hone.cluster.handles import Computing, Rollout, concat_batches
from hone.cluster.plan import model_roles
from hone.cluster.runtime import Roles
from hone.cluster.supervisor import Supervisor
from hone.config.tree import RLConfig
from hone.data.seeding import derive_seed
from hone.errors import ConfigError, HoneError
from hone.generation import is_served
from hone.insight import activity
from hone.insight.coverage import CoverageLedger, coverage_metrics
from hone.insight.metrics import MetricStore
from hone.insight.stop_requests import (
    ReplicaAnswer,
    ReplicaRequest,
    take_request,
    withdraw_request,
    write_answer,
)
from hone.together import watched
from hone.trainers.algorithm import Algorithm
from hone.trainers.attempts import supervised
from hone.trainers.inputs import (
    prompt_dataset,
    report_contract,
    run_contract,
    self_scored,
    show_first_prompt,
    training_sampling,
)
from hone.trainers.session import RunSession, session_steps
from hone.trainers.stages import StepState, check_stages, data_flow, run_stages
from hone.trainers.step_metrics import memory_metrics, overhead_metrics
from hone.trainers.validator import ValidationTask, Validator, suites_of

PERIOD = 1.0
"""Seconds between two looks at the run directory."""

log = logging.getLogger("hone")


def replica_requests(config: RLConfig, run: Path, rollout: Rollout) -> AbstractAsyncContextManager[None]:
    """Return a block within which requests are answered; it does nothing for an engine without replicas."""
    served = is_served(config.actor_rollout_ref.rollout)
    return ReplicaControl(run, rollout).watching() if served else contextlib.nullcontext()


class ReplicaControl:
    """Answers requests about the replicas of a run while it trains."""

    def __init__(self, run: Path, rollout: Rollout) -> None:
        self._run, self._rollout = run, rollout

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Answer requests within this block. One from before belongs to an earlier process of the run, and is dropped."""
        withdraw_request(self._run)
        watch = asyncio.create_task(self._watch(), name="requests about replicas")
        try:
            yield
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            try:
                request = take_request(self._run)
                if request is not None:
                    write_answer(self._run, await self.answer(request))
            except HoneError as error:  # training continues
                log.warning("a request about the engines failed: %s", error)

    async def answer(self, request: ReplicaRequest) -> ReplicaAnswer:
        """Carry a request out, or refuse it."""
        limit, reason = await self._rollout.replica_limit()
        refused: dict[str, str] = {}
        if request.replicas is not None:
            try:
                check_count(request.replicas, limit, reason)
                await self._rollout.resize(request.replicas)
                log.info("%d replicas per rollout worker from now on", request.replicas)
            except ConfigError as error:
                refused = {"what": error.what, "why": error.why, "fix": error.fix}
        wanted, reports = await self._rollout.replicas(), await self._rollout.replica_reports()
        return ReplicaAnswer(request.key, wanted, limit, reports, refused)


def check_count(replicas: int, limit: int, reason: str) -> None:
    """Check that a number of replicas can be placed.

    Raises:
        ConfigError: it cannot.
    """
    if not 1 <= replicas <= limit:
        raise ConfigError(
            f"--replicas {replicas}: the number of a rollout worker's replicas can be 1 to {limit}",
            why=reason if replicas > limit else "a run without engines cannot generate",
            fix=f"--replicas {limit if replicas > limit else 1}",
        )


_WORK = "hone.trainers.batch_ops:BatchOps"  # by path, as in hone.cluster.plan: the driver knows only its handle


def train(config: RLConfig, program: type[RLTrainer] | None = None) -> int:
    """Run `hone train`: build the run, train it to its last step, and return the exit code.

    Args:
        program: trainer class with other stages or roles; None means :class:`RLTrainer`.
    """
    trainer = program or RLTrainer
    return supervised(config, lambda config, supervisor: asyncio.run(trainer(config, supervisor).fit()))


class RLTrainer(Algorithm):
    """Trainer of one RL run: it builds the roles, and runs the steps of the algorithm.

    Args:
        supervisor: owner of the run's processes across restarts; None for a run without restarts.

    Raises:
        HoneError: any mistake of the user, before the first token is generated.
    """

    def __init__(self, config: RLConfig, supervisor: Supervisor | None = None) -> None:
        from hone.data.curriculum import make_sampler  # not read with the loop: the sampler is one of many

        self.config, self.supervisor = config, supervisor or Supervisor(Path(), 0)
        suites = suites_of(config)
        self.session = RunSession(config, on_hang=self.supervisor.on_hang)
        resume, tokenizer = self.session.resumed_from, run_tokenizer(config)
        self.step = resume.step if resume else 0
        dataset = prompt_dataset(config, config.data.train_files, tokenizer, config.data.train_max_samples)
        show_first_prompt(dataset, tokenizer)
        seed = config.trainer.seed if config.data.seed is None else config.data.seed
        sampler = make_sampler(config.data, dataset, seed)
        total_steps = session_steps(config.trainer, sampler.steps_per_epoch)
        self.session.require_steps(total_steps)
        self.runtime = self.supervisor.runtime(
            config, self.roles(), total_steps=total_steps, resume=str(resume) if resume else None
        )
        roles, ledger = Roles(self.runtime), CoverageLedger(self.session.directory.coverage)
        super().__init__(config, roles, dataset, sampler, training_sampling(config, tokenizer), ledger, total_steps)
        self.validator = Validator(
            config, tokenizer, self.rollout, self.work, self.judged, self.session.directory, suites
        )
        share = config.trainer.async_training.validation_share
        if self.spec.asynchronous and share and self.validator.has_work:
            limit = self.rollout.limit_validation
            self.rollouter.validation = ValidationTask(self._validate_and_log, limit, share)
        sources = dataset.data_sources() + self.validator.data_sources()
        self_scored_sources = self_scored(config, tokenizer, dataset, self.validator.dataset)
        self.session.rewards = self.work.check_rewards(sources, self_scored_sources).result()
        self.session.agent_contract = run_contract(config, tokenizer)
        stages = self.stages()
        check_stages(stages)
        self.session.flow = data_flow(config, stages)
        self._lacks_validation = False  # the validation of this step was cut short, or had not ended at its checkpoint
        if resume is not None:
            with resume.loading_state() as state:
                self._load(state)

    def roles(self) -> list[RoleSpec]:
        """Return the roles of the run in order of creation."""
        return [*model_roles(self.config), RoleSpec("work", pkgutil.resolve_name(_WORK))]

    # the loop --------------------------------------------------------------------------------------------------------

    async def fit(self) -> int:
        """Train to the last step, or until a stop request; return the exit code."""
        session = self.session
        with session.running(self.total_steps, self.sampler.steps_per_epoch):
            async with replica_requests(self.config, session.directory.path, self.rollout):
                try:
                    await self._train()
                finally:
                    await self.rollouter.close()
                await self.rollouter.end_validation()
                await self.archive.wait()
            session.completed(self.step, self.runtime.memory())
        return session.exit_code

    async def _train(self) -> None:
        """Train and save until the last step, or until a stop request."""
        trainer, session = self.config.trainer, self.session
        if self.weight_sync.copies or self.step:  # a resumed engine that shares the weights does not know their version
            await self.send_weights(StepState(self.step, MetricStore()))
        await self.archive.begin()
        lacks_validation = self._lacks_validation and not self.validator.is_logged(self.step)
        if (self.step == 0 and trainer.val_before_train) or lacks_validation:
            await self._begin_validation()
        while self.step < self.total_steps and not session.stop_requested:
            self.step += 1
            self._lacks_validation = False
            with activity.doing(f"step {self.step}"):
                session.log(self.step, await self.train_step())
            if self.rollouter.validation is not None and session.due(trainer.test_freq, self.step):
                await self._begin_validation()
            if session.save_due(self.step):
                await self.save()
        if session.last_save_due and self.step:
            await self.save()

    async def train_step(self) -> dict[str, float]:
        """Run the stages of a step, then validation if due and not a task of its own; return the metrics."""
        started, trainer = time.perf_counter(), self.config.trainer
        self.runtime.begin_step(derive_seed(trainer.seed, "step", self.step))
        metrics = MetricStore()
        state = await run_stages(self.stages(), StepState(self.step, metrics))
        batch, left_out = state.batch, state.rows_left_out
        metrics.merge(await self.work.report(batch, left_out, self.step))
        if left_out is not None:
            self.archive.leave_out(left_out, "failed")
        await self.archive.write(self.step, batch)
        if self.session.wants_samples:
            self.session.samples(await self.work.records(batch, left_out, self.step))
        self.rollouter.ledger.write(self.step)
        metrics.update(coverage_metrics(self.rollouter.ledger))
        metrics.add("training/global_step", self.step)
        metrics.add("training/epoch", self.sampler.epoch)
        metrics.update(self.sampler.metrics())
        memory_metrics(metrics)
        rollout = self.config.actor_rollout_ref.rollout
        if is_served(rollout) or rollout.speculative.method is not None:  # other engines have no metrics of their own
            metrics.update(await self.rollout.take_engine_metrics())
        overhead_metrics(metrics, time.perf_counter() - started, await self._busy_seconds())
        logged = metrics.reduce()
        if self.rollouter.validation is None and self.session.due(trainer.test_freq, self.step):
            logged |= await self.validate(self.step)
        return logged

    async def _busy_seconds(self) -> dict[str, float]:
        """Return the seconds in which the model of each role computed in this step."""
        roles: dict[str, Computing | None] = {
            "actor": self.actor, "reference": self.reference, "critic": self.critic, "teacher": self.teacher
        }  # fmt: skip
        pending = {name: role.take_busy_seconds() for name, role in roles.items() if role is not None}
        return {name: await seconds for name, seconds in pending.items()}

    async def validate(self, step: int) -> dict[str, float]:
        """Answer the validation prompts with the weights of a step; return the metrics, empty without any work or after a stop."""
        if not self.validator.has_work:
            return {}
        version, during = step if self.weight_sync.copies else None, self.rollouter.validation is not None
        metrics = None
        with self.session.cancelling("validating", len(self.validator)):
            work = self.validator.run(step, version=version, during_training=during)
            metrics = await watched(work, lambda: self.session.stop_requested)
        self._lacks_validation = metrics is None
        return metrics or {}

    async def _validate_and_log(self, step: int) -> None:
        metrics = await self.validate(step)
        if metrics:
            self.session.log_validation(step, metrics)

    async def _begin_validation(self) -> None:
        """Begin to validate the current weights; wait for the end unless validation is a task of its own."""
        if self.rollouter.validation is None:
            await self._validate_and_log(self.step)
        else:
            await self.rollouter.begin_validation(self.step)

    def close(self) -> None:
        """Stop the processes that the run has started."""
        self.supervisor.close()

    async def save(self) -> None:
        """Write a checkpoint of this step: all state for an exact resume. Files are written in the background."""
        await self.archive.wait()  # a resumed run does not write the files of earlier steps
        location = self.session.begin_save(self.step)
        if location is None:
            return
        learning = [role for role in (self.actor, self.critic) if role is not None]
        for role in learning:
            await role.stage(location)
        # together and without waiting: in asynchronous training groups finish at any time
        sampler, rollouter = self.sampler.state_dict(), self.rollouter.state_dict()
        finished = self.rollouter.finished_groups()
        validation = self.rollouter.validation
        validating = validation is not None and validation.step == self.step and not validation.has_ended
        if finished:
            await self.work.save_groups(concat_batches([group.batch for group in finished]), location)
        state: dict[str, Any] = {
            "step": self.step,
            "sampler": sampler,
            "rollouter": rollouter,
            "validating": validating or self._lacks_validation,
            "agent_contract": self.session.agent_contract,
            **await self.work.state_dict(),
        }

        def write() -> None:
            for writing in [role.write() for role in learning]:
                writing.result()

        self.session.finish_save(self.step, state, write, validating=validating)

    def _load(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`save` wrote at this step."""
        report_contract(state.get("agent_contract", {}), self.session.agent_contract, "the run resumes")
        self.sampler.load_state_dict(state["sampler"])
        self.rollouter.buffer.release(self.step)
        location = str(self.session.resumed_from)
        self.rollouter.load_state_dict(
            state["rollouter"], lambda samples: self.work.load_groups(location, samples).result()
        )
        self.work.load_state_dict(state).result()
        self._lacks_validation = state.get("validating", False)
