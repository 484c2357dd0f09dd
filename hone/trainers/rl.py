"""RL trainer: one loop for every algorithm, engine, reward and runtime.

A step is a list of stages; this is the complete algorithm (``*`` marks optional stages):

    generate -> score -> greedy baseline* -> engines sleep* -> old log-probs* -> rollout correction* -> reference log-probs*
             -> teachers* -> values* -> forked turns* -> KL in reward* -> advantages -> update critic* -> update actor
             -> publish weights -> validate* -> log -> checkpoint*

Estimators, losses, rewards and engines come from registries: adding one never edits this file. In asynchronous
training the stage ``gen`` returns groups that were played during earlier steps; :mod:`hone.trainers.group_buffer` bounds their age.
Validation is then a task that runs during the next step (:mod:`hone.trainers.validation_task`).

The trainer calls roles and never touches a token. With ``trainer.runtime=local`` the roles are objects in this process and a batch
holds its columns; with ``ray`` they are processes on a cluster and a batch holds references. The code is the same for both.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from hone.algorithms import advantage_estimators
from hone.cluster.any_batch import AnyBatch
from hone.cluster.context import RoleSpec, run_tokenizer
from hone.cluster.dispatch import RowGroups
from hone.cluster.plan import model_roles
from hone.cluster.roles import RoleUpdate, mini_batches
from hone.cluster.runtime import Group, Runtime
from hone.cluster.supervisor import Supervisor
from hone.cluster.weight_sync import WeightSync
from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.data.curriculum import make_sampler
from hone.data.seeding import derive_seed
from hone.data.types import Sample
from hone.generation import is_served
from hone.insight import activity
from hone.insight.coverage import CoverageLedger, coverage_metrics
from hone.insight.metrics import MetricStore
from hone.trainers.archiving import Archiving
from hone.trainers.attempts import supervised
from hone.trainers.batch_ops import BatchOps
from hone.trainers.distillation import distillation_stages
from hone.trainers.episodes import Episodes, concat_batches
from hone.trainers.estimates import needed_columns, suppliers
from hone.trainers.group_buffer import GroupBuffer
from hone.trainers.group_filter import GroupFilter
from hone.trainers.inputs import (
    prompt_dataset,
    quarantined_rows,
    run_contract,
    self_scored,
    training_sampling,
)
from hone.trainers.old_log_probs import old_log_prob_stages
from hone.trainers.replica_control import replica_requests
from hone.trainers.reporting import memory_metrics, overhead_metrics, update_metrics
from hone.trainers.rollouter import Rollouter
from hone.trainers.saving import load_run, save_run
from hone.trainers.session import RunSession, session_steps
from hone.trainers.stages import SAMPLED, SCORED, Stage, check_stages, run_stages
from hone.trainers.streaming import streamed_stages
from hone.trainers.turn_values import check_forks, fork_turns
from hone.trainers.update_view import learnt_tokens
from hone.trainers.validation_task import ValidationTask
from hone.trainers.validator import Validator
from hone.trainers.verdicts import too_few_in, with_verdicts


def train(config: RLConfig, program: type[RLTrainer] | None = None) -> int:
    """Run `hone train`: build the run, train it to its last step, and return the exit code.

    Args:
        config: resolved configuration.
        program: trainer class with other stages or roles; None means :class:`RLTrainer`.
    """
    trainer = program or RLTrainer
    return supervised(config, lambda config, supervisor: asyncio.run(trainer(config, supervisor).fit()))


class RLTrainer:
    """Trainer of one RL run: its roles, state and stages.

    Args:
        config: resolved configuration.
        supervisor: owner of the run's processes across restarts; None for a run without restarts.

    Raises:
        HoneError: any mistake of the user, before the first token is generated.
    """

    def __init__(self, config: RLConfig, supervisor: Supervisor | None = None) -> None:
        self.config, self.supervisor = config, supervisor or Supervisor(Path(), 0)
        self.session = RunSession(config, on_hang=self.supervisor.on_hang)
        resume = self.session.resumed_from
        self.tokenizer = run_tokenizer(config)
        self.estimator = advantage_estimators.get(config.algorithm.adv_estimator)
        self.spec = RunSpec(config)
        self.metrics = MetricStore()
        self.step = resume.step if resume else 0
        dataset = prompt_dataset(config, config.data.train_files, self.tokenizer, config.data.train_max_samples)
        self.sampler = make_sampler(
            config.data, dataset, config.trainer.seed if config.data.seed is None else config.data.seed
        )
        self.total_steps = session_steps(config.trainer, self.sampler.steps_per_epoch)
        self.runtime: Runtime = self.supervisor.runtime(
            config, self.roles(), total_steps=self.total_steps, resume=str(resume) if resume else None
        )
        self.actor, self.batch_ops = self.runtime.group("actor"), self.runtime.group("work")
        self.reference, self.critic = self._optional("reference"), self._optional("critic")
        self.teacher = self._optional("teacher")
        self.episodes = Episodes(self.runtime.group("rollout"), self.batch_ops, self._optional("reward_model"))
        self.weight_sync = WeightSync(config, self.actor, self.runtime.group("rollout"), dataset[0])
        self.validator = Validator(config, self.tokenizer, self.episodes, self.session.directory)
        sources = dataset.data_sources() + self.validator.data_sources()
        self_scored_sources = self_scored(config, self.tokenizer, dataset, self.validator.dataset)
        self.session.rewards = self.batch_ops.check_rewards(sources, self_scored_sources).result()
        self.session.agent_contract = run_contract(config, self.tokenizer)
        self.sampling = training_sampling(config, self.tokenizer)
        keys = config.trainer.async_training
        self.buffer = GroupBuffer(
            config.data.train_batch_size, keys.max_staleness, ready_first=keys.order == "ready_first"
        )
        filtering = config.algorithm.filter_groups
        self.group_filter = None
        if filtering.enable:
            batch_size, values_of = config.data.train_batch_size, self.batch_ops.values_of
            self.group_filter = GroupFilter(filtering, self.episodes.score, values_of, batch_size)
        self.validation: ValidationTask | None = None
        if self.spec.asynchronous and keys.validation_share and self.validator.dataset is not None:
            limit = self.episodes.limit_validation
            self.validation = ValidationTask(self._validate_and_log, limit, keys.validation_share)
        self.left_out: list[AnyBatch] = []  # rows of the step without a verdict
        self.archive = Archiving(config.trainer, dataset, self.batch_ops)
        self.validation_missing = False  # the checkpoint is of a step whose validation had not ended
        self.rollouter = Rollouter(
            dataset,
            self.sampler,
            self._play,
            self.buffer,
            CoverageLedger(self.session.directory.coverage),
            n=config.actor_rollout_ref.rollout.n,
            seed=config.trainer.seed,
            means=self.batch_ops.group_means,
            group_filter=self.group_filter,
            too_few_in=functools.partial(too_few_in, self.batch_ops),
            max_no_verdict_rate=config.reward.max_no_verdict_rate,
            score=self.scored if self.spec.asynchronous else None,
            quarantine=quarantined_rows(config.data, dataset),
            partial_rollouts=keys.partial_rollouts,
            validation=self.validation,
            leave_out=self.archive.leave_out,
        )
        check_stages(self.stages())
        check_forks(self)
        if resume is not None:
            with resume.loading_state() as state:
                load_run(self, state)

    def roles(self) -> list[RoleSpec]:
        """Return the roles of the run in order of creation."""
        return [*model_roles(self.config), RoleSpec("work", BatchOps)]

    async def _play(self, samples: Sequence[Sample], seeding: tuple[Any, ...]) -> AnyBatch:
        """Play ``rollout.n`` episodes of each sample."""
        n = self.config.actor_rollout_ref.rollout.n
        if self.spec.asynchronous:
            (sample,) = samples
            return await self.episodes.play_group(sample, self.sampling, n=n, seeding=seeding)
        return await self.episodes.play(samples, self.sampling, n=n, seeding=seeding)

    async def scored(self, batch: AnyBatch) -> AnyBatch:
        """Score every trajectory, and report the rewards to a sampler that learns from them."""
        batch = await self.episodes.score(batch)
        if self.sampler.learns:
            values, _ = await self.batch_ops.values_of(batch, None)
            pairs = [(uid, value) for uid, value in zip(batch.uids, values, strict=True) if value is not None]
            self.rollouter.report([uid for uid, _ in pairs], [value for _, value in pairs])
        return batch

    def _optional(self, role: str) -> Group | None:
        return self.runtime.group(role) if role in self.runtime else None

    # the algorithm ---------------------------------------------------------------------------------------------------

    def stages(self) -> list[Stage]:
        """Return the stages of a step, in order."""
        if self.spec.streams:
            return streamed_stages(self)
        in_reward, greedy = self.config.algorithm.use_kl_in_reward, "greedy_baseline" in self.estimator.needs
        kl = ("ref_log_probs",) if self.config.actor_rollout_ref.actor.use_kl_loss else ()
        learn_policy = self.critic is None or not 0 < self.step <= self.config.trainer.critic_warmup
        before_update, from_update, after_update = old_log_prob_stages(self, learn_policy=learn_policy)
        taught = ("teacher",) if self.config.distillation.enable else ()
        return [
            Stage("gen", self.generate, adds=SAMPLED),
            Stage("reward", self.score, needs=("response_ids",), adds=SCORED),
            Stage("gen_max", self.greedy_baseline, adds=("reward_baselines",), when=greedy),
            Stage("sleep", self.weight_sync.free_engines, when=self.weight_sync.sleeps),
            *before_update,
            Stage("ref", self.reference_log_probs, adds=("ref_log_probs",), when=self.reference is not None),
            *distillation_stages(self),
            Stage("values", self.values, adds=("values",), when=self.critic is not None),
            Stage(
                "fork",
                functools.partial(fork_turns, self),
                needs=("score", "old_log_probs"),
                adds=("turn_values",),
                when="turn_values" in self.estimator.needs,
            ),
            Stage("kl_in_reward", self.kl_in_reward, needs=("old_log_probs", "ref_log_probs"), when=in_reward),
            Stage(
                "adv",
                self.advantages,
                needs=(*needed_columns(self.estimator), *taught),
                adds=("advantages", "returns"),
                supplied_by=suppliers(self.estimator),
            ),
            Stage("update_critic", self.update_critic, needs=("values", "returns"), when=self.critic is not None),
            Stage(
                "update_actor",
                self.update_actor,
                needs=("advantages", *kl, *(() if from_update else ("old_log_probs",))),
                adds=("old_log_probs",) if from_update else (),
                when=learn_policy,
            ),
            *after_update,
            Stage("update_weights", self.publish),
        ]

    async def generate(self, batch: AnyBatch) -> AnyBatch:
        """Play ``rollout.n`` episodes of each prompt of the next batch."""
        self.groups = await self.rollouter.next_batch(self.step)
        self.report_groups()
        batch = concat_batches([group.batch for group in self.groups])
        await self.batch_ops.check_sampled(batch)
        return batch

    def report_groups(self) -> None:
        """Add metrics of the batch's groups: their age, and how many were replaced."""
        self.metrics.add("training/staleness", max(self.buffer.staleness(group) for group in self.groups))
        if self.group_filter is not None:
            self.group_filter.report(self.metrics)
        self.metrics.add("training/no_verdict_groups", self.rollouter.dropped)

    async def score(self, batch: AnyBatch) -> AnyBatch:
        """Score every trajectory, unless its group has been scored already; rows without a verdict leave the batch.

        The reward is placed on a response's last token.
        """
        batch, left_out = await with_verdicts(self, batch)
        self.left_out += left_out
        return batch.updated(await self.batch_ops.place_rewards(batch))

    async def greedy_baseline(self, batch: AnyBatch) -> AnyBatch:
        """Score the greedy response to every prompt."""
        greedy = await self.episodes.answer_greedily([group.sample for group in self.groups], self.sampling)
        return batch.updated(await self.batch_ops.baselines(batch, greedy))

    async def old_log_probs(self, batch: AnyBatch) -> AnyBatch:
        """Compute the log-probs of the policy that sampled, under the trainer's weights."""
        columns = await self.actor.log_probs(batch, with_entropy=True, with_sum_pi_squared=self.spec.sum_pi_squared)
        batch = batch.updated(columns.rename({"log_probs": "old_log_probs"}))
        await self.check_engine(batch)
        return batch

    async def check_engine(self, batch: AnyBatch) -> None:
        await self.batch_ops.check_engine(batch, self._version)

    @property
    def _version(self) -> int | None:
        """Version of the weights that are trained; None if all tokens have it."""
        return self.buffer.version if self.spec.asynchronous else None

    async def engine_log_probs(self, batch: AnyBatch) -> AnyBatch:
        """Take the engine's log-probs as the old ones (bypass mode)."""
        return batch.updated(batch.select("rollout_log_probs").rename({"rollout_log_probs": "old_log_probs"}))

    async def correct(self, batch: AnyBatch) -> AnyBatch:
        """Measure the gap between engine and trainer, and correct it if configured."""
        return batch.updated(await self.batch_ops.correct(batch, self._version))

    async def reference_log_probs(self, batch: AnyBatch) -> AnyBatch:
        """Compute the log-probs of the reference policy."""
        assert self.reference is not None
        return batch.updated(await self.reference.log_probs(batch))

    async def values(self, batch: AnyBatch) -> AnyBatch:
        """Compute the critic's values."""
        assert self.critic is not None
        return batch.updated(await self.critic.values(batch))

    async def kl_in_reward(self, batch: AnyBatch) -> AnyBatch:
        """Subtract the KL penalty from the token rewards, and adapt its coefficient."""
        return batch.updated(await self.batch_ops.kl_in_reward(batch))

    async def advantages(self, batch: AnyBatch) -> AnyBatch:
        """Run the advantage estimator over the complete batch."""
        return batch.updated(await self.batch_ops.advantages(batch))

    async def update_critic(self, batch: AnyBatch) -> AnyBatch:
        """Fit the critic to the returns."""
        assert self.critic is not None
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        size, epochs = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs or actor.ppo_epochs
        view = await self.update_view(batch, pairs=False)
        minis = self._minis(view, size, epochs, "critic-mini-batches")
        await self.record("critic", await self.critic.update(view, minis, self.step - 1), batch)
        return batch

    async def update_actor(self, batch: AnyBatch) -> AnyBatch:
        """Update the policy; missing old log-probs are taken from the forward pass of the only update."""
        actor = self.config.actor_rollout_ref.actor
        from_update = "old_log_probs" not in batch
        await self.batch_ops.check_ids(batch)
        view = await self.update_view(batch, pairs=actor.preference_loss.loss_mode is not None)
        minis = self._minis(view, actor.ppo_mini_batch_size, actor.ppo_epochs, "mini-batches")
        same_rows = actor.preference_loss.loss_mode is None and not self.config.algorithm.use_pf_ppo
        keep_last = same_rows and self.archive.whole(self.step)
        pending = self.actor.update(view, minis, self.step - 1, keep_outputs=from_update, keep_last=keep_last)
        self.metrics.update(pending.balance())
        outputs = await pending
        update = outputs.meta.pop("update")
        if from_update:
            batch = batch.updated(outputs.rename({"log_probs": "old_log_probs"}))
            await self.check_engine(batch)
        elif keep_last:
            batch = batch.updated(outputs)
        await self.record("actor", update, batch)
        return batch

    async def update_view(self, batch: AnyBatch, *, pairs: bool) -> AnyBatch:
        """Return the rows and tokens for the updates: not rejected, resampled (PF-PPO), or paired."""
        if pairs or self.config.algorithm.use_pf_ppo:
            return await self.batch_ops.update_view(batch, self.step, pairs=pairs)
        return learnt_tokens(batch)

    def _minis(self, view: AnyBatch, prompts: int, epochs: int, purpose: str) -> RowGroups:
        """Return the mini-batches of a role's updates in this step."""
        shuffle, seed = self.config.actor_rollout_ref.actor.shuffle, self.config.trainer.seed
        return mini_batches(view.uids, prompts, epochs, derive_seed(seed, purpose, self.step - 1) if shuffle else None)

    async def record(self, role: str, update: RoleUpdate, batch: AnyBatch) -> None:
        update_metrics(self.metrics, update.results, role, update.learning_rate)
        skipped = any(not result.applied for result in update.results)
        await self.batch_ops.check_update(batch if skipped else None, role, update)

    async def publish(self, batch: AnyBatch) -> AnyBatch:
        """Send the new weights to the engines, and free the slots of the trained groups."""
        means, left = await self.batch_ops.group_means(batch), self.total_steps - self.step
        begun = time.perf_counter()

        async def send() -> None:
            if self.spec.asynchronous:
                self.metrics.add("timing_s/update_weights_drain", time.perf_counter() - begun)
            await self._publish()

        await self.rollouter.publish(self.step, send, means, left=left)
        return batch

    async def _publish(self) -> None:
        canary = await self.weight_sync.sync(self.step)
        for part, seconds in self.weight_sync.seconds.items():
            self.metrics.add(f"timing_s/update_weights_{part}", seconds)
        if canary is not None:
            await self.batch_ops.check_published(canary)

    # the loop --------------------------------------------------------------------------------------------------------

    async def fit(self) -> int:
        """Train to the last step, or until a stop request; return the exit code."""
        session = self.session
        with session.running(self.total_steps, self.sampler.steps_per_epoch):
            async with replica_requests(self.config, session.directory.path, self.runtime.group("rollout")):
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
            await self._publish()
        await self.archive.begin()
        lacks_validation = self.validation_missing and not self.validator.is_logged(self.step)
        if (self.step == 0 and trainer.val_before_train) or lacks_validation:
            await self._begin_validation()
        while self.step < self.total_steps and not session.stop_requested:
            self.step += 1
            with activity.doing(f"step {self.step}"):
                session.log(self.step, await self.train_step())
            if self.validation is not None and session.due(trainer.test_freq, self.step):
                await self._begin_validation()
            if session.save_due(self.step):
                await self.save()
        if session.last_save_due:
            await self.save()

    async def train_step(self) -> dict[str, float]:
        """Run the stages of a step, then validation if due and not a task of its own; return the metrics."""
        started, trainer = time.perf_counter(), self.config.trainer
        self.runtime.begin_step(derive_seed(trainer.seed, "step", self.step))
        self.metrics, self.left_out = MetricStore(), []
        batch = await run_stages(self.stages(), self.metrics)
        left_out = concat_batches(self.left_out) if self.left_out else None
        self.metrics.merge(await self.batch_ops.report(batch, left_out, self.step))
        if left_out is not None:
            self.archive.leave_out(left_out, "failed")
        await self.archive.write(self.step, batch)
        if self.session.wants_samples:
            self.session.samples(await self.batch_ops.records(batch, left_out, self.step))
        self.rollouter.ledger.write(self.step)
        self.metrics.update(coverage_metrics(self.rollouter.ledger))
        self.metrics.add("training/global_step", self.step)
        self.metrics.add("training/epoch", self.sampler.epoch)
        self.metrics.update(self.sampler.metrics())
        memory_metrics(self.metrics)
        rollout = self.config.actor_rollout_ref.rollout
        if is_served(rollout) or rollout.speculative.method is not None:
            self.metrics.update(await self.runtime.group("rollout").take_engine_metrics())
        overhead_metrics(self.metrics, time.perf_counter() - started, await self._busy_seconds())
        metrics = self.metrics.reduce()
        if self.validation is None and self.session.due(trainer.test_freq, self.step):
            metrics |= await self.validate(self.step)
        return metrics

    async def _busy_seconds(self) -> dict[str, float]:
        """Return the seconds in which the model of each role computed in this step."""
        roles = {"actor": self.actor, "reference": self.reference, "critic": self.critic, "teacher": self.teacher}
        pending: dict[str, Awaitable[float]] = {
            name: role.take_busy_seconds() for name, role in roles.items() if role is not None
        }
        return {name: await seconds for name, seconds in pending.items()}

    async def validate(self, step: int) -> dict[str, float]:
        """Answer the validation prompts with the weights of a step; return the metrics, empty without a dataset."""
        version = step if self.weight_sync.copies else None
        return await self.validator.run(step, version=version, during_training=self.validation is not None)

    async def _validate_and_log(self, step: int) -> None:
        metrics = await self.validate(step)
        if metrics:
            self.session.log_validation(step, metrics)

    async def _begin_validation(self) -> None:
        """Begin to validate the current weights; wait for the end unless validation is a task of its own."""
        if self.validation is None:
            await self._validate_and_log(self.step)
        else:
            await self.rollouter.begin_validation(self.step)

    def close(self) -> None:
        """Stop the processes that the run has started."""
        self.supervisor.close()

    # state -----------------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Write a checkpoint of this step: all state for an exact resume. Files are written in the background."""
        await save_run(self)
