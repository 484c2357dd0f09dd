"""The RL trainer: one loop for every algorithm, engine and reward.

A step is a list of stages; this is the whole algorithm (``*`` where the algorithm may not need it):

    generate -> score -> greedy baseline* -> old log-probs* -> rollout correction* -> reference log-probs* -> values*
             -> KL in reward* -> advantages -> update critic* -> update actor -> publish weights -> validate* -> log
             -> checkpoint*

Estimators, losses, rewards and engines come from registries: adding one never edits this file. Synchronous training is
asynchronous training with a staleness bound of zero; the bound lives in :mod:`hone.trainers.group_buffer`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch

from hone.algorithms import advantage_estimators, apply_kl_penalty, kl_controller
from hone.cluster.local import LocalRuntime, run_tokenizer
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.sampler import EpochSampler
from hone.data.seeding import derive_seed
from hone.data.trajectories import to_batch
from hone.insight import activity
from hone.insight.invariants import Invariants
from hone.insight.metrics import MetricStore
from hone.rewards.manager import RewardManager
from hone.trainers.baselines import greedy_baselines
from hone.trainers.estimates import estimate, needed_columns, suppliers
from hone.trainers.group_buffer import GroupBuffer
from hone.trainers.group_filter import GroupFilter
from hone.trainers.inputs import prompt_dataset, training_sampling
from hone.trainers.judged_rewards import JudgedRewards
from hone.trainers.reporting import (
    batch_metrics,
    memory_metrics,
    overhead_metrics,
    rollout_records,
    sample_record,
    update_metrics,
)
from hone.trainers.rollouter import Rollouter
from hone.trainers.scoring import TrainingRewards
from hone.trainers.session import RunSession, prepare_torch, session_steps
from hone.trainers.stages import Stage, check_stages, run_stages
from hone.trainers.update_view import correct, update_view
from hone.trainers.validation import Validator
from hone.training.correction import correction_settings
from hone.training.preferences import own_pairs

SAMPLED = ("uid", "trajectory", "response_ids", "response_mask", "rollout_log_probs")
SCORED = ("score", "token_level_scores", "token_level_rewards")


def train(config: RLConfig) -> int:
    """Run `hone train`: build the run, train it to its last step, and return the exit code."""
    trainer = RLTrainer(config)
    try:
        return asyncio.run(trainer.fit())
    finally:
        trainer.rewards.close()


class RLTrainer:
    """Everything that one run holds, and its stages.

    Args:
        config: the resolved configuration.

    Raises:
        HoneError: anything the user can mend, before the first token is generated.
    """

    def __init__(self, config: RLConfig) -> None:
        self.config = config
        self.session = RunSession(config)
        device = prepare_torch(config.trainer)
        resume = self.session.resumed_from
        self.tokenizer = run_tokenizer(config)
        self.estimator = advantage_estimators.get(config.algorithm.adv_estimator)
        self.bypass: bool = correction_settings(config.algorithm.rollout_correction)["bypass_mode"]
        squares = config.actor_rollout_ref.actor.calculate_sum_pi_squared
        self.with_sum_pi_squared = "sum_pi_squared" in self.estimator.needs if squares is None else squares
        self.kl_ctrl = kl_controller(**vars(config.algorithm.kl_ctrl))
        self.invariants = Invariants(
            config.actor_rollout_ref.actor.dtype,
            decode=lambda ids: str(self.tokenizer.decode(ids)),
            dump=self._dump_batch,
        )
        self.metrics = MetricStore()
        self.step = resume.step if resume else 0

        dataset = prompt_dataset(config.data, config.data.train_files, self.tokenizer, config.data.train_max_samples)
        self.sampler = EpochSampler(
            len(dataset),
            config.data.train_batch_size,
            shuffle=config.data.shuffle,
            seed=config.trainer.seed if config.data.seed is None else config.data.seed,
        )
        self.total_steps = session_steps(config.trainer, self.sampler.steps_per_epoch)
        self.runtime = LocalRuntime(
            config, device, self.tokenizer, total_steps=self.total_steps, resume=resume.path if resume else None
        )
        judge = self.runtime.reward_model
        self.rewards = RewardManager(config.reward) if judge is None else JudgedRewards(config.reward, judge)
        self.scoring = TrainingRewards(self.rewards, config.reward.overlong_buffer, config.data.max_response_length)
        self.actor, self.reference, self.critic = self.runtime.actor, self.runtime.reference, self.runtime.critic
        self.validator = Validator(config, self.runtime.engine, self.tokenizer, self.rewards)
        self.rewards.check(dataset.data_sources() + self.validator.data_sources())
        self.buffer = GroupBuffer(config.data.train_batch_size)
        filtering = config.algorithm.filter_groups
        self.group_filter = (
            GroupFilter(filtering, self.scoring.score, config.data.train_batch_size) if filtering.enable else None
        )
        self.rollouter = Rollouter(
            dataset,
            self.sampler,
            self.runtime.engine,
            self.tokenizer,
            self.buffer,
            training_sampling(config, self.tokenizer),
            n=config.actor_rollout_ref.rollout.n,
            seed=config.trainer.seed,
            group_filter=self.group_filter,
        )
        check_stages(self.stages())
        if resume is not None:
            self._load_state(resume.state)

    # the algorithm ---------------------------------------------------------------------------------------------------

    def stages(self) -> list[Stage]:
        """One step, in order."""
        in_reward, greedy = self.config.algorithm.use_kl_in_reward, "greedy_baseline" in self.estimator.needs
        kl = ("ref_log_probs",) if self.config.actor_rollout_ref.actor.use_kl_loss else ()
        squares = ("sum_pi_squared",) if self.with_sum_pi_squared else ()
        learn_policy = self.critic is None or not 0 < self.step <= self.config.trainer.critic_warmup
        return [
            Stage("gen", self.generate, adds=SAMPLED),
            Stage("reward", self.score, needs=("response_ids",), adds=SCORED),
            Stage("gen_max", self.greedy_baseline, adds=("reward_baselines",), when=greedy),
            Stage("old_log_prob", self.old_log_probs, needs=("response_ids",), adds=("old_log_probs", *squares)),
            Stage("rollout_corr", self.correct, needs=("old_log_probs",), when=not self.bypass),
            Stage("ref", self.reference_log_probs, adds=("ref_log_probs",), when=self.reference is not None),
            Stage("values", self.values, adds=("values",), when=self.critic is not None),
            Stage("kl_in_reward", self.kl_in_reward, needs=("old_log_probs", "ref_log_probs"), when=in_reward),
            Stage(
                "adv",
                self.advantages,
                needs=needed_columns(self.estimator),
                adds=("advantages", "returns"),
                supplied_by=suppliers(self.estimator),
            ),
            Stage("update_critic", self.update_critic, needs=("values", "returns"), when=self.critic is not None),
            Stage("update_actor", self.update_actor, needs=("old_log_probs", "advantages", *kl), when=learn_policy),
            Stage("update_weights", self.publish),
        ]

    async def generate(self, batch: Batch) -> Batch:
        """Play ``rollout.n`` episodes of each prompt of the next batch."""
        groups = await self.rollouter.next_batch(self.step)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self.metrics.add("training/staleness", max(self.buffer.staleness(group) for group in groups))
        batch = to_batch(trajectories)
        if self.group_filter is not None:
            self.group_filter.report(self.metrics)
            batch = batch.with_columns(score=[score for group in groups for score in group.scores])
        self.invariants.check_groups(batch.objects("uid"), self.rollouter.n)
        self.invariants.check_mask(batch)
        return batch

    async def score(self, batch: Batch) -> Batch:
        """Score every trajectory, unless dynamic sampling has; the reward stands on its last token."""
        scores = batch.objects("score") if "score" in batch else await self.scoring.score(batch.objects("trajectory"))
        mask = batch.ragged("response_mask")
        totals = torch.tensor([score.total for score in scores], dtype=torch.float32)
        rewards = mask.with_values(torch.zeros(len(mask.values)))
        rewards.values[mask.offsets[1:] - 1] = totals
        batch = batch.with_columns(token_level_scores=rewards, token_level_rewards=rewards, score=scores, reward=totals)
        self.invariants.check_finite("reward", totals, batch)
        return batch

    async def greedy_baseline(self, batch: Batch) -> Batch:
        """Score the greedy response to every prompt."""
        baselines = await greedy_baselines(
            [trajectory.sample for trajectory in batch.objects("trajectory")],
            self.runtime.engine,
            self.tokenizer,
            self.rollouter.sampling,
            self.scoring.score,
        )
        return batch.with_columns(reward_baselines=baselines)

    def old_log_probs(self, batch: Batch) -> Batch:
        """Log-probs of the policy that sampled: the trainer's, or (bypass) as the engine reported them."""
        rollout = batch.ragged("rollout_log_probs")
        if self.bypass:
            return batch.with_columns(old_log_probs=rollout)
        columns = self.actor.log_probs(batch, with_entropy=True, with_sum_pi_squared=self.with_sum_pi_squared)
        old = columns.pop("log_probs")
        self.invariants.check_canary(rollout, old, batch)
        return batch.with_columns(old_log_probs=old, **columns)

    def correct(self, batch: Batch) -> Batch:
        """Measure, and where asked correct, the gap between the engine that sampled and the trainer."""
        return correct(batch, self.config.algorithm, self.metrics)

    def reference_log_probs(self, batch: Batch) -> Batch:
        """Log-probs of the reference policy."""
        assert self.reference is not None
        return batch.with_columns(ref_log_probs=self.reference.log_probs(batch))

    def values(self, batch: Batch) -> Batch:
        """The critic's values."""
        assert self.critic is not None
        return batch.with_columns(values=self.critic.values(batch))

    def kl_in_reward(self, batch: Batch) -> Batch:
        """Subtract the KL penalty from the token rewards, and let the controller adapt."""
        scores, mask = batch.ragged("token_level_scores"), batch.ragged("response_mask")
        rewards, mean_kl = apply_kl_penalty(
            scores.to_padded(),
            batch.ragged("old_log_probs").to_padded(),
            batch.ragged("ref_log_probs").to_padded(),
            mask.to_padded(),
            self.kl_ctrl.value,
            self.config.algorithm.kl_penalty,
        )
        self.metrics.add("actor/reward_kl_penalty", mean_kl)
        self.metrics.add("actor/reward_kl_penalty_coeff", self.kl_ctrl.value)
        self.kl_ctrl.update(float(mean_kl), len(batch))
        return batch.with_columns(token_level_rewards=Ragged.from_padded(rewards, mask.lengths))

    def advantages(self, batch: Batch) -> Batch:
        """Run the advantage estimator over the whole batch."""
        advantages, returns = estimate(self.estimator, batch, self.config.algorithm)
        self.invariants.check_finite("advantages", advantages, batch)
        return batch.with_columns(advantages=advantages, returns=returns)

    def update_critic(self, batch: Batch) -> Batch:
        """Fit the critic to the returns."""
        assert self.critic is not None
        results = self.critic.update(self.update_view(batch), self.step - 1)
        update_metrics(self.metrics, results, "critic", self.critic.engine.learning_rate(self.step - 1))
        self.invariants.check_updates("critic", results, batch)
        return batch

    def update_actor(self, batch: Batch) -> Batch:
        """Improve the policy."""
        self.invariants.check_ids(batch)
        view, preference = self.update_view(batch), self.config.actor_rollout_ref.actor.preference_loss
        if preference.loss_mode is not None:
            view = own_pairs(view, preference.margin)
            self.metrics.add("actor/preference_pairs", len(view) // 2)
        results = self.actor.update(view, self.step - 1)
        update_metrics(self.metrics, results, "actor", self.actor.engine.learning_rate(self.step - 1))
        if results and any(results[0].statistics):  # a mini-batch may be rejected as a whole, or give no pair
            self.invariants.check_first_ratio(results[0], self.metrics)
        self.invariants.check_updates("actor", results, batch)
        return batch

    def update_view(self, batch: Batch) -> Batch:
        """What the updates learn from: tokens not rejected, and with PF-PPO rows drawn anew."""
        config = self.config
        return update_view(batch, config.algorithm, n=self.rollouter.n, seed=config.trainer.seed, step=self.step)

    async def publish(self, batch: Batch) -> Batch:
        """Hand the new weights to the engine; the groups trained on give their slots back."""
        await self.runtime.engine.load_weights(self.actor.engine.export_weights(), self.step)
        self.buffer.release(self.step)
        return batch

    # the loop --------------------------------------------------------------------------------------------------------

    async def fit(self) -> int:
        """Train to the last step, or until told to stop; return the exit code."""
        trainer, session = self.config.trainer, self.session
        with session.running(self.total_steps):
            if self.step == 0 and trainer.val_before_train:
                metrics = await self.validate()
                if metrics:
                    session.log(0, metrics)
            while self.step < self.total_steps and not session.stop_requested:
                self.step += 1
                with activity.doing(f"step {self.step}"):
                    session.log(self.step, await self.train_step())
                if session.save_due(self.step):
                    self.save()
            if session.last_save_due:
                self.save()
            session.completed(self.step)
        return session.exit_code

    async def train_step(self) -> dict[str, float]:
        """One step: the stages, then validation when due. Returns the metrics of the step."""
        started, trainer = time.perf_counter(), self.config.trainer
        torch.manual_seed(derive_seed(trainer.seed, "step", self.step))
        self.metrics = MetricStore()
        batch = await run_stages(self.stages(), self.metrics)
        data = self.config.data
        batch_metrics(
            self.metrics, batch, max_prompt_length=data.max_prompt_length, max_response_length=data.max_response_length
        )
        if trainer.rollout_dump_freq and (self.step == 1 or self.step % trainer.rollout_dump_freq == 0):
            self.session.directory.write_rollouts(self.step, rollout_records(batch))
        self.metrics.add("training/global_step", self.step)
        self.metrics.add("training/epoch", self.sampler.epoch)
        self.invariants.report(self.metrics)
        memory_metrics(self.metrics)
        overhead_metrics(self.metrics, time.perf_counter() - started, self.actor, self.reference, self.critic)
        metrics = self.metrics.reduce()
        if self.session.due(trainer.test_freq, self.step):
            metrics |= await self.validate()
        return metrics

    async def validate(self) -> dict[str, float]:
        """Answer the validation prompts with the present weights; returns their metrics (none without a dataset)."""
        started = time.perf_counter()
        evaluation = await self.validator.run()
        if evaluation is None:
            return {}
        shown = self.config.trainer.log_val_generations
        pairs = list(zip(evaluation.trajectories, evaluation.scores, strict=True))[:shown]
        if pairs:
            self.session.directory.write_validation(self.step, [sample_record(t, score) for t, score in pairs])
        return {**evaluation.metrics, "timing_s/testing": time.perf_counter() - started}

    # state -----------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of this step: everything that an exact resume needs."""
        state: dict[str, Any] = {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "rollouter": self.rollouter.state_dict(),
            "kl_ctrl": self.kl_ctrl.state_dict(),
            "invariants": self.invariants.state_dict(),
        }

        def write(directory: Path) -> None:
            self.actor.save(directory, self.tokenizer)
            if self.critic is not None:
                self.critic.save(directory)

        self.session.save(self.step, state, write)

    def _dump_batch(self, name: str, batch: Batch) -> Path:
        """Keep a batch that broke an invariant, for whoever looks into it."""
        directory = self.session.directory
        return directory.write_records(directory.path / "dumps" / f"{name}.jsonl", rollout_records(batch))

    def _load_state(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.rollouter.load_state_dict(state["rollouter"])
        self.kl_ctrl.load_state_dict(state["kl_ctrl"])
        self.invariants.load_state_dict(state["invariants"])
        self.buffer.release(self.step)
