"""The complete algorithm of RL training: the stages of a step, in order (``*`` marks optional ones).

    generate -> score -> greedy baseline* -> engines sleep* -> old log-probs* -> rollout correction* -> reference log-probs*
             -> teachers* -> values* -> forked turns* -> KL in reward* -> averages of roles* -> advantages -> update critic*
             -> update actor -> publish weights

Estimators, losses, rewards and engines come from registries: adding one never edits this file. Stages call roles and never touch a
token. With ``trainer.runtime=local`` the roles are objects in this process and a batch holds its columns; with ``ray`` they are
processes on a cluster and a batch holds references. The code is the same for both.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from hone.algorithms import advantage_estimators
from hone.cluster.dispatch import RowGroups
from hone.cluster.handles import TEACHER_RESPONSES, AnyBatch, RoleUpdate, Rollout, Work, concat_batches, rows_of
from hone.cluster.runtime import Roles
from hone.cluster.weight_sync import WeightSync
from hone.config.derived import OldLogProbs, RunSpec
from hone.config.tree import RLConfig
from hone.data.prompts import EpochSampler, PromptDataset
from hone.data.seeding import derive_seed
from hone.data.types import Sample
from hone.errors import ConfigError
from hone.generation.protocol import SamplingParams
from hone.insight.coverage import CoverageLedger
from hone.trainers.archiving import Archiving
from hone.trainers.estimates import KEPT, needed_columns, suppliers
from hone.trainers.group_filter import GroupFilter
from hone.trainers.inputs import quarantined_rows
from hone.trainers.rollouter import GroupBuffer, Rollouter, Score
from hone.trainers.stages import SAMPLED, SCORED, Stage, StepState
from hone.trainers.step_metrics import update_metrics

if TYPE_CHECKING:
    from hone.agents.forking import ForkPoint


class TurnForks:
    """Continues recorded episodes from some of their turns, to value these.

    Args:
        score: function that returns a batch with its scores.
        engines_sleep: whether the engines free their memory before the log-probs are known.

    Raises:
        ConfigError: they do, so none could continue an episode.
    """

    def __init__(
        self,
        config: RLConfig,
        rollout: Rollout,
        work: Work,
        score: Score,
        sampling: SamplingParams,
        *,
        engines_sleep: bool,
    ) -> None:
        if engines_sleep:
            raise ConfigError(
                "the engines free their memory before turns are forked",
                why=f"adv_estimator={config.algorithm.adv_estimator} continues episodes after their log-probs are known",
                fix="actor_rollout_ref.rollout.free_cache_engine=false",
                where="actor_rollout_ref.rollout.free_cache_engine",
            )
        self._samples, self._seed = config.algorithm.forks.samples, config.trainer.seed
        self._rollout, self._work, self._score, self._sampling = rollout, work, score, sampling

    async def add_values(self, state: StepState) -> StepState:
        """Add the column ``turn_values``: for each row, the mean reward of continuations from the forked turns of its episode.

        The batch is scored, and has entropies.
        """
        work, samples = self._work, self._samples
        points = await work.fork_points(state.batch, state.step)
        rewards: dict[str, list[float]] = {}
        if points:
            played = await self._play(points, state.step)
            rewards = await work.fork_rewards(await self._score(played))
            state.metrics.add("forks/no_verdict_rate", 1 - sum(map(len, rewards.values())) / (samples * len(points)))
            state.metrics.add("forks/continued_tokens", await work.sampled_tokens(played))
        state.metrics.add("forks/turns", len(points))
        return state.add(await work.turn_values(state.batch, points, rewards))

    async def _play(self, points: list[ForkPoint], step: int) -> AnyBatch:
        seeding = (self._seed, "forks", step)
        return await self._rollout.play_forks(points, self._sampling, n=self._samples, seeding=seeding)


async def answer_greedily(rollout: Rollout, samples: Sequence[Sample], sampling: SamplingParams) -> AnyBatch:
    """Return the greedy answer to every prompt, with the training limits on length and stop strings.

    A greedy answer has the most likely token of the full distribution at every position.
    """
    prompts = list({sample.uid: sample for sample in samples}.values())
    greedy = dataclasses.replace(sampling, temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0, report_support=False)
    return await rollout.play(prompts, greedy, n=1, seeding=(0,))


def learnt_tokens(batch: Any) -> Any:
    """Return the batch (of either runtime) with the kept tokens as its loss mask."""
    return batch.updated(batch.select(KEPT).rename({KEPT: "response_mask"})) if KEPT in batch else batch


def mini_batches(uids: Sequence[str], prompts: int, epochs: int, seed: int | None) -> RowGroups:
    """Split a batch into mini-batches of ``prompts`` prompt groups, ``epochs`` times; shuffled if a seed is given.

    Args:
        uids: prompt group of each row.
    """
    members = list(rows_of(uids).values())
    minis: list[list[int]] = []
    for epoch in range(epochs):
        order = list(range(len(members)))
        if seed is not None:
            generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
            order = torch.randperm(len(members), generator=generator).tolist()
        for start in range(0, len(order), prompts):
            minis.append([row for group in order[start : start + prompts] for row in members[group]])
    return RowGroups(minis)


STREAMED_PARTS = 4
"""Parts into which a streamed batch is divided."""


class Algorithm:
    """The stages of a step, over the roles of a run. :class:`~hone.trainers.rl.RLTrainer` runs the steps.

    Args:
        sampling: sampling parameters of training.
        ledger: record of the fate of every prompt that is drawn.
        total_steps: steps of the run.

    Raises:
        ConfigError: settings that do not go together.
    """

    step: int
    """Number of the step under way; 0 before the first."""

    def __init__(
        self,
        config: RLConfig,
        roles: Roles,
        dataset: PromptDataset,
        sampler: EpochSampler,
        sampling: SamplingParams,
        ledger: CoverageLedger,
        total_steps: int,
    ) -> None:
        self.config, self.spec = config, RunSpec(config)
        self.actor, self.reference, self.critic, self.teacher = (
            roles.actor,
            roles.reference,
            roles.critic,
            roles.teacher,
        )
        self.rollout, self.work, self._reward_model = roles.rollout, roles.work, roles.reward_model
        self._under_way: Counter[int] = Counter()  # groups by rollout worker
        self.sampler, self.sampling, self.total_steps = sampler, sampling, total_steps
        self.estimator = advantage_estimators.get(config.algorithm.adv_estimator)
        self.weight_sync = WeightSync(config, roles.actor, roles.rollout, dataset[0])
        self.archive = Archiving(config.trainer, dataset, roles.work)
        batch_size, keys = config.data.train_batch_size, config.trainer.async_training
        self.group_filter = None
        if config.algorithm.filter_groups.enable:
            filtering = config.algorithm.filter_groups
            self.group_filter = GroupFilter(filtering, self.judged, roles.work.values_of, batch_size)
        self.rollouter = Rollouter(
            dataset,
            sampler,
            self.play,
            GroupBuffer(batch_size, keys.max_staleness, ready_first=keys.order == "ready_first"),
            ledger,
            n=config.actor_rollout_ref.rollout.n,
            seed=config.trainer.seed,
            means=roles.work.group_means,
            group_filter=self.group_filter,
            too_few_in=self.too_few_in,
            max_no_verdict_rate=config.reward.max_no_verdict_rate,
            score=self.scored if self.spec.asynchronous else None,
            quarantine=quarantined_rows(config.data, dataset),
            partial_rollouts=keys.partial_rollouts,
            leave_out=self.archive.leave_out,
        )
        self.forks = None
        if "turn_values" in self.estimator.needs:
            sleep = self.weight_sync.sleeps
            self.forks = TurnForks(config, roles.rollout, roles.work, self.judged, sampling, engines_sleep=sleep)

    def stages(self) -> list[Stage]:
        """Return the stages of a step, in order."""
        if self.spec.streams:
            return self._streamed_stages()
        config, learn_policy = self.config, self._learns_policy(self.step)
        actor = config.actor_rollout_ref.actor
        compared = actor.use_kl_loss or actor.preference_loss.loss_mode is not None
        weighed = self.spec.corrects and self.spec.old_log_probs.value is OldLogProbs.OWN_PASS
        used = (*(("ref_log_probs",) if compared else ()), *(("rollout_is_weights",) if weighed else ()))
        judged, read = ("process_rewards", ("ref_log_probs",)) if self.spec.rewards_process else ("values", ())
        before_update, from_update, after_update = self._old_log_prob_stages(learn_policy=learn_policy)
        teaches, by_advantage = config.distillation.enable, config.distillation.by_advantage
        taught = ("teacher",) if teaches and by_advantage else ()
        used = (*used, *(("teacher",) if teaches and not by_advantage else ()))
        judge = "reward_model" if config.reward.reward_model.enable else "work"
        return [
            Stage("gen", self.generate, adds=SAMPLED, role="rollout"),
            Stage("reward", self.score, needs=("response_ids",), adds=SCORED, role=judge),
            Stage(
                "gen_max",
                self.greedy_baseline,
                adds=("reward_baselines",),
                when="greedy_baseline" in self.estimator.needs,
                role="rollout",
            ),
            Stage("sleep", self.free_engines, when=self.weight_sync.sleeps, role="rollout"),
            *before_update,
            Stage(
                "ref",
                self.reference_log_probs,
                needs=("response_ids",),
                adds=("ref_log_probs",),
                when=self.reference is not None,
                role="reference",
            ),
            Stage(
                "teacher",
                self.teach,
                needs=("response_ids",),
                adds=("teacher",),
                when=config.distillation.enable,
                role="teacher",
            ),
            Stage(
                "values",
                self.values,
                needs=("response_ids", *read),
                adds=(judged,),
                when=self.critic is not None,
                role="critic",
            ),
            Stage(
                "fork",
                self.fork_turns,
                needs=("score", "old_log_probs"),
                adds=("turn_values",),
                when=self.forks is not None,
                role="rollout",
            ),
            Stage(
                "kl_in_reward",
                self.kl_in_reward,
                needs=("token_level_scores", "old_log_probs", "ref_log_probs"),
                adds=("token_level_rewards",),
                when=config.algorithm.use_kl_in_reward,
            ),
            Stage(
                "role_baselines",
                self.role_baselines,
                needs=("token_level_rewards",),
                adds=("turn_baselines",),
                when="turn_baselines" in self.estimator.needs,
            ),
            Stage(
                "adv",
                self.advantages,
                needs=(*needed_columns(self.estimator), *taught, *self._entropy),
                adds=("advantages", "returns"),
                supplied_by=suppliers(self.estimator),
            ),
            Stage(
                "update_critic",
                self.update_critic,
                needs=("response_ids", "returns", *(read or ("values",))),
                when=self.critic is not None,
                role="critic",
            ),
            Stage(
                "update_actor",
                self.update_actor,
                needs=("response_ids", "advantages", *used, *(() if from_update else ("old_log_probs",))),
                adds=("old_log_probs",) if from_update else (),
                when=learn_policy,
                role="actor",
            ),
            *after_update,
            Stage("update_weights", self.publish, role="actor"),
        ]

    @classmethod
    def planned(cls, config: RLConfig) -> list[Stage]:
        """Return the stages of a step of a run that is not built, after `critic_warmup`: to be read, not run.

        Whether engines sleep is that of ``free_cache_engine``; without the key a run asks its device.
        """
        run, spec = cls.__new__(cls), RunSpec(config)
        roles = {role.name: cast("Any", role) for role in spec.roles}
        run.config, run.spec, run.step = config, spec, config.trainer.critic_warmup + 1
        run.estimator = advantage_estimators.get(config.algorithm.adv_estimator)
        run.reference, run.critic = roles.get("reference"), roles.get("critic")
        run.forks = cast("Any", spec) if "turn_values" in run.estimator.needs else None
        sleeps = spec.engines_take_turns and bool(config.actor_rollout_ref.rollout.free_cache_engine)
        run.weight_sync = cast("Any", SimpleNamespace(sleeps=sleeps))
        return run.stages()

    def _learns_policy(self, step: int) -> bool:
        return self.critic is None or not 0 < step <= self.config.trainer.critic_warmup

    @property
    def _entropy(self) -> tuple[str, ...]:
        """Column of entropies, where tokens are chosen by them."""
        return () if self.config.algorithm.top_entropy_share is None else ("entropy",)

    def _correction(self) -> Stage:
        adds = ("rollout_is_weights",) if self.spec.corrects else ()
        return Stage("rollout_corr", self.correct, needs=("old_log_probs", "rollout_log_probs"), adds=adds)

    def _old_log_prob_stages(self, *, learn_policy: bool) -> tuple[list[Stage], bool, list[Stage]]:
        """Return the stages that supply the old log-probs: those before the update, whether it adds them, and those after it."""
        source = self.spec.old_log_probs.value
        if (
            source is OldLogProbs.UPDATE_PASS and not learn_policy
        ):  # only the critic learns: there is no pass to take them from
            source = OldLogProbs.OWN_PASS
        own_pass = Stage(
            "old_log_prob",
            self.old_log_probs,
            needs=("response_ids",),
            adds=("old_log_probs", *(("sum_pi_squared",) if self.spec.sum_pi_squared else ()), *self._entropy),
            when=source is OldLogProbs.OWN_PASS,
            switch="actor_rollout_ref.actor.recompute_old_log_probs=true",
            role="actor",
        )
        correct = self._correction()
        if source is OldLogProbs.OWN_PASS:
            return [own_pass, correct], False, []
        if source is OldLogProbs.ENGINE:
            needs, adds = ("rollout_log_probs",), ("old_log_probs",)
            return [Stage("old_log_prob", self.engine_log_probs, needs=needs, adds=adds)], False, []
        return [own_pass], True, [correct]

    # episodes and rewards --------------------------------------------------------------------------------------------

    async def generate(self, state: StepState) -> StepState:
        """Play ``rollout.n`` episodes of each prompt of the next batch."""
        state.groups = await self.rollouter.next_batch(state.step)
        self._report_groups(state)
        state.batch = concat_batches([group.batch for group in state.groups])
        await self.work.check_sampled(state.batch)
        return state

    def _report_groups(self, state: StepState) -> None:
        """Add metrics of the batch's groups: their age, and how many were replaced."""
        buffer = self.rollouter.buffer
        state.metrics.add("training/staleness", max(buffer.staleness(group) for group in state.groups))
        if self.group_filter is not None:
            self.group_filter.report(state.metrics)
        state.metrics.add("training/no_verdict_groups", self.rollouter.dropped)

    async def play(self, samples: Sequence[Sample], seeding: tuple[Any, ...]) -> AnyBatch:
        """Play ``rollout.n`` episodes of each sample; in asynchronous training in the worker with the fewest groups under way.

        Rows are in the order of the samples. ``seeding`` determines the random streams.
        """
        n = self.config.actor_rollout_ref.rollout.n
        if not self.spec.asynchronous:
            return await self.rollout.play(samples, self.sampling, n=n, seeding=seeding)
        worker = min(range(self.rollout.dp_size), key=self._under_way.__getitem__)
        self._under_way[worker] += 1
        try:
            return await self.rollout.play_here(worker, samples, self.sampling, n=n, seeding=seeding)
        finally:
            self._under_way[worker] -= 1

    async def judged(self, batch: AnyBatch, *, training: bool = True) -> AnyBatch:
        """Add the reward model's scores and the final scores; in training, with the length penalty."""
        if self._reward_model is not None:
            batch = batch.updated(await self._reward_model.score(batch))
        return batch.updated(await self.work.score(batch, training=training))

    async def scored(self, batch: AnyBatch) -> AnyBatch:
        """Score every trajectory, and report the rewards to a sampler that learns from them."""
        batch = await self.judged(batch)
        if self.sampler.learns:
            values, _ = await self.work.values_of(batch, None)
            pairs = [(uid, value) for uid, value in zip(batch.uids, values, strict=True) if value is not None]
            self.rollouter.report([uid for uid, _ in pairs], [value for _, value in pairs])
        return batch

    async def too_few_in(self, batch: AnyBatch) -> list[str]:
        """Return the groups of a scored batch with too few verdicts."""
        return (await self.work.verdicts(batch.select("uid", "part", "verdict")))[2]

    async def score(self, state: StepState) -> StepState:
        """Score every trajectory, unless its group has been scored already; rows without a verdict leave the batch.

        In synchronous training, groups with too few verdicts are replaced here by those of other prompts, until there are none. In
        asynchronous training they have been replaced as they finished. The reward is placed on the last token that was sampled, but for
        those of turns and tokens.
        """
        if "score" not in state.batch:
            state.batch = await self.scored(state.batch)
            while replaced := await self.rollouter.replace(state.batch, state.step):
                dropped, groups = replaced
                rows = rows_of(state.batch.uids)
                state.left_out.append(state.batch.reorder([row for uid in dropped for row in rows[uid]]))
                kept = [row for uid in rows if uid not in dropped for row in rows[uid]]
                state.groups = [group for group in state.groups if group.uid not in dropped] + groups
                played = concat_batches([group.batch for group in groups])
                await self.work.check_sampled(played)
                rescored = await self.scored(played)
                state.batch = concat_batches([state.batch.reorder(kept), rescored]) if kept else rescored
            state.metrics.add("training/no_verdict_groups", self.rollouter.dropped)
        with_verdict, without, _ = await self.work.verdicts(state.batch.select("uid", "part", "verdict"))
        if without:
            state.left_out.append(state.batch.reorder(without))
            state.batch = state.batch.reorder(with_verdict)
        return state.add(await self.work.place_rewards(state.batch))

    async def greedy_baseline(self, state: StepState) -> StepState:
        """Score the greedy response to every prompt."""
        greedy = await answer_greedily(self.rollout, [group.sample for group in state.groups], self.sampling)
        return state.add(await self.work.baselines(state.batch, await self.judged(greedy)))

    async def free_engines(self, state: StepState) -> StepState:
        """Let the engines free their memory until the next weight sync."""
        await self.weight_sync.free_engines()
        return state

    async def fork_turns(self, state: StepState) -> StepState:
        """Value turns by continuations of their episodes."""
        assert self.forks is not None
        return await self.forks.add_values(state)

    # models ----------------------------------------------------------------------------------------------------------

    async def old_log_probs(self, state: StepState) -> StepState:
        """Compute the log-probs of the policy before this step's updates."""
        sums = self.spec.sum_pi_squared
        columns = await self.actor.log_probs(state.batch, with_entropy=True, with_sum_pi_squared=sums)
        state.add(columns.rename({"log_probs": "old_log_probs"}))
        await self._check_engine(state.batch)
        return state

    async def engine_log_probs(self, state: StepState) -> StepState:
        """Take the engine's log-probs as the old ones (bypass mode)."""
        return state.add(state.batch.select("rollout_log_probs").rename({"rollout_log_probs": "old_log_probs"}))

    async def correct(self, state: StepState) -> StepState:
        """Measure the gap between engine and trainer, and correct it if configured."""
        return state.add(await self.work.correct(state.batch, self._version))

    async def _check_engine(self, batch: AnyBatch) -> None:
        await self.work.check_engine(batch, self._version)

    @property
    def _version(self) -> int | None:
        """Version of the weights that are trained; None if all tokens have it."""
        return self.rollouter.buffer.version if self.spec.asynchronous else None

    async def reference_log_probs(self, state: StepState) -> StepState:
        """Compute the log-probs of the reference policy."""
        assert self.reference is not None
        return state.add(await self.reference.log_probs(state.batch))

    async def teach(self, state: StepState) -> StepState:
        """Let the teachers score the batch."""
        settings = self.config.distillation
        inputs = state.batch.updated(await self.work.teacher_inputs(state.batch))
        if len(settings.models) > 1:
            state.batch = inputs
        if self.teacher is not None:
            said = await self.teacher.teach(inputs)
            if TEACHER_RESPONSES in inputs:
                said = await self.work.teacher_spans(inputs.updated(said))
            state.add(said)
            inputs = inputs.updated(said)
        return state.add(await self.work.served_teachers(inputs)) if settings.addresses else state

    async def values(self, state: StepState) -> StepState:
        """Compute the critic's values."""
        assert self.critic is not None
        return state.add(await self.critic.values(state.batch))

    # advantages and updates ------------------------------------------------------------------------------------------

    async def kl_in_reward(self, state: StepState) -> StepState:
        """Subtract the KL penalty from the token rewards, and adapt its coefficient."""
        return state.add(await self.work.kl_in_reward(state.batch))

    async def role_baselines(self, state: StepState) -> StepState:
        """Take the returns of roles into their moving averages, the baselines of the step."""
        return state.add(await self.work.turn_baselines(state.batch))

    async def advantages(self, state: StepState) -> StepState:
        """Run the advantage estimator over the complete batch."""
        return state.add(await self.work.advantages(state.batch))

    async def update_critic(self, state: StepState) -> StepState:
        """Fit the critic to the returns."""
        assert self.critic is not None
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        size, epochs = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs or actor.ppo_epochs
        view = await self._update_view(state, pairs=False)
        minis = self._minis(
            view, size, epochs, derive_seed(self.config.trainer.seed, "critic-mini-batches", state.step - 1)
        )
        await self._record("critic", await self.critic.update(view, minis, state.step - 1), state)
        return state

    async def update_actor(self, state: StepState) -> StepState:
        """Update the policy; missing old log-probs are taken from the forward pass of the only update."""
        actor = self.config.actor_rollout_ref.actor
        from_update, by_pairs = "old_log_probs" not in state.batch, actor.preference_loss.loss_mode is not None
        await self.work.check_ids(state.batch)
        view = await self._update_view(state, pairs=by_pairs)
        seed = derive_seed(self.config.trainer.seed, "mini-batches", state.step - 1)
        minis = self._minis(view, actor.ppo_mini_batch_size, actor.ppo_epochs, seed)
        same_rows = not by_pairs and not self.config.algorithm.use_pf_ppo
        keep_last = same_rows and self.archive.whole(state.step)
        pending = self.actor.update(
            view,
            minis,
            state.step - 1,
            gives_old_log_probs=from_update,
            keep_last=keep_last,
            entropy_coeff=await self._entropy_coeff(),
        )
        state.metrics.update(pending.balance())
        outputs = await pending
        update = outputs.meta.pop("update")
        if from_update:
            state.add(outputs.rename({"log_probs": "old_log_probs"}))
            await self._check_engine(state.batch)
        elif keep_last:
            state.add(outputs)
        await self._record("actor", update, state)
        return state

    async def _entropy_coeff(self) -> float | None:
        """Return the weight of the entropy bonus in this step; None for the configured one."""
        if self.config.actor_rollout_ref.actor.entropy_target is None:
            return None
        return await self.work.entropy_weight()

    async def _update_view(self, state: StepState, *, pairs: bool) -> AnyBatch:
        """Return the rows and tokens for the updates: not rejected, resampled (PF-PPO), or paired."""
        view = learnt_tokens(state.batch)
        if pairs or self.config.algorithm.use_pf_ppo:
            return await self.work.update_view(view, state.step, pairs=pairs)
        return view

    def _minis(self, view: AnyBatch, prompts: int, epochs: int, seed: int) -> RowGroups:
        """Return the mini-batches of a role's updates in this step."""
        shuffle = self.config.actor_rollout_ref.actor.shuffle
        return mini_batches(view.uids, prompts, epochs, seed if shuffle else None)

    async def _record(self, role: str, update: RoleUpdate, state: StepState) -> None:
        update_metrics(state.metrics, update.results, role, update.learning_rate)
        skipped = any(not result.applied for result in update.results)
        await self.work.check_update(state.batch if skipped else None, role, update)

    # weights ---------------------------------------------------------------------------------------------------------

    async def publish(self, state: StepState) -> StepState:
        """Send the new weights to the engines, and free the slots of the trained groups."""
        means, left = await self.work.group_means(state.batch), self.total_steps - state.step
        begun = time.perf_counter()

        async def send() -> None:
            if self.spec.asynchronous:
                state.metrics.add("timing_s/update_weights_drain", time.perf_counter() - begun)
            await self.send_weights(state)

        await self.rollouter.publish(state.step, send, means, left=left)
        return state

    async def send_weights(self, state: StepState) -> None:
        """Send the weights as the version of the step, and check the engines' answers to the canary."""
        canary = await self.weight_sync.sync(state.step)
        for part, seconds in self.weight_sync.seconds.items():
            state.metrics.add(f"timing_s/update_weights_{part}", seconds)
        if canary is not None:
            await self.work.check_published(canary)

    # streaming -------------------------------------------------------------------------------------------------------

    def _streamed_stages(self) -> list[Stage]:
        """Return the stages of a step whose groups are trained on as they finish, while the same weights generate the others."""
        computed = ("advantages", "returns", "old_log_probs")
        return [
            Stage("stream", self.stream, adds=(*SAMPLED, *SCORED, *computed), role="rollout"),
            self._correction(),
            Stage("update_weights", self.publish, role="actor"),
        ]

    async def stream(self, state: StepState) -> StepState:
        """Compute the gradients of groups as they finish, then apply those of the whole batch in one update.

        The gradients of the parts add up to those of the whole batch, up to rounding.
        """
        size, parts = -(-self.rollouter.buffer.groups_per_batch // STREAMED_PARTS), list[AnyBatch]()
        async for groups in self.rollouter.parts(size):
            state.groups += groups
            state.batch = concat_batches([group.batch for group in groups])
            await self.work.check_sampled(state.batch)
            state = await self.score(state)
            if self.reference is not None:
                state = await self.reference_log_probs(state)
            if self.config.distillation.enable:
                state = await self.teach(state)
            if "turn_baselines" in self.estimator.needs:
                state = await self.role_baselines(state)
            state = await self.advantages(state)
            await self.work.check_ids(state.batch)
            with state.metrics.timer("update_actor"):
                outputs = await self.actor.accumulate(
                    state.batch, state.step - 1, first=not parts, entropy_coeff=await self._entropy_coeff()
                )
            part = state.batch.updated(outputs.rename({"log_probs": "old_log_probs"}))
            if self.archive.whole(state.step):
                part = part.updated(part.select("old_log_probs").rename({"old_log_probs": "new_log_probs"}))
            parts.append(part)
        with state.metrics.timer("update_actor"):
            update = await self.actor.apply_gradients(state.step - 1)
        state.batch = concat_batches(parts)
        self._report_groups(state)
        await self._check_engine(state.batch)
        await self._record("actor", update, state)
        return state
