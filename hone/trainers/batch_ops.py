"""Batch ops: the role that computes on tokens without a model, in the process that has the columns.

With one process that is the current one; on a cluster it is one of the workers, and the driver sees only names and numbers. The role
keeps the state between steps: the KL controller, the averages of roles and the invariants.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hone.agents.forking import ForkPoint, fork_points, fork_rewards, values_by_row
from hone.algorithms import EntropyController, advantage_estimators, apply_kl_penalty, kl_controller
from hone.algorithms.advantages.roles import RoleBaselines
from hone.cluster.columns import TOKENS
from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Split, dispatch
from hone.cluster.handles import GroupMeans, RoleUpdate, rows_of
from hone.cluster.reward_model import JUDGED, JUDGEMENT
from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.data.batch import Batch, same_column, to_batch
from hone.data.episode_log import CallRecord, CallStatus, EpisodeEnd, EpisodeLog
from hone.data.images import ImageData
from hone.data.ragged import Ragged
from hone.data.tokenizer import decoded, outside_tokenizer, token_texts
from hone.data.types import Sample, StopReason, Trajectory
from hone.insight.archive.read import table_records
from hone.insight.archive.schema import BY_NAME, FLOATS, IDS, INTS
from hone.insight.archive.write import BackgroundWriter, to_table, write_vocabulary
from hone.insight.invariants import Invariants, require_version
from hone.insight.metrics import MetricStore
from hone.insight.records import episode_record
from hone.insight.run_directory import RunDirectory
from hone.models.devices import dtype_on
from hone.models.loading import saved_settings
from hone.rewards.doctor import EnvironmentDoctor
from hone.rewards.manager import JudgedRewards, share_rewards, token_rewards
from hone.rewards.score import Score
from hone.rewards.worker import no_verdict_metrics
from hone.trainers.archiving import TRAINED
from hone.trainers.estimates import KEPT, correct, estimate, turn_baselines, undecided_tokens, update_view
from hone.trainers.reporting import age_metrics, batch_metrics, prompt_text, score_values
from hone.trainers.teacher_inputs import TeacherInputs, mixed_advantages, span_columns
from hone.trainers.validation import Evaluation, evaluate_answers
from hone.training.checkpoints.storage import Storage
from hone.training.objectives import UPDATED_ENTROPY
from hone.training.preferences import own_pairs
from hone.training.served_teacher import ServedTeachers


class BatchOps:
    """Batch ops of a step: rewards, estimates, checks and reports."""

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        self.config = config = context.config
        self._context = context
        self.directory = RunDirectory(Path(config.trainer.default_local_dir))
        self.tokenizer, self.archive = context.tokenizer, BackgroundWriter()
        self.rewards = JudgedRewards(
            config.reward,
            required=RunSpec(config).learns_from_reward,
            max_response_length=config.data.max_response_length,
        )
        self.estimator = advantage_estimators.get(config.algorithm.adv_estimator)
        self.kl_ctrl = kl_controller(**vars(config.algorithm.kl_ctrl))
        actor = config.actor_rollout_ref.actor
        self.entropy = EntropyController(
            actor.entropy_coeff, actor.entropy_target, actor.entropy_coeff_delta, actor.entropy_coeff_max
        )
        self.role_baselines = RoleBaselines(config.algorithm.role_baseline_decay)
        dtype = dtype_on(context.device, config.actor_rollout_ref.actor.dtype)
        self.invariants = Invariants(
            dtype,
            decode=self._decode,
            dump=self._dump,
        )
        self.published = Invariants(dtype)
        self.metrics = MetricStore()
        self.doctor = None
        if config.reward.doctor.enable:
            may_probe = self.rewards.may_probe and not config.reward.reward_model.enable
            self.doctor = EnvironmentDoctor(config.reward, self.directory.path, probes=may_probe)

    @functools.cached_property
    def _outside(self) -> Tensor:
        """Marks of the ids that the tokenizer lacks, ``[ids + 1]`` bool; the last one is for all beyond."""
        return outside_tokenizer(self.tokenizer, max(self.tokenizer.get_vocab().values()) + 2)

    def close(self) -> None:
        """Stop the processes of reward functions, and finish the archive."""
        self.archive.close()
        if self.doctor is not None:
            self.doctor.close()
        self.rewards.close()

    # scores ----------------------------------------------------------------------------------------------------------

    @dispatch(Split.ZERO)
    def check_rewards(
        self, data_sources: Mapping[str, int], self_scored: frozenset[str] = frozenset()
    ) -> dict[str, str]:
        """Check that every data source can be scored; return the scorers with hashes of their code.

        See :meth:`RewardManager.check`.
        """
        self.rewards.check(data_sources, self_scored)
        return self.rewards.identity(data_sources)

    @dispatch(Split.ZERO, objects=True)
    async def score(self, batch: Batch, *, training: bool) -> Batch:
        """Return ``score`` of every episode, equal for all its segments, and ``verdict`` (1 or 0); in training with the length penalty."""
        judged = batch.tensor(JUDGED).tolist() if JUDGED in batch else None
        judgements = batch.objects(JUDGEMENT) if JUDGEMENT in batch else None
        trajectories = batch.objects("trajectory")
        scores = await self.rewards.score(trajectories, judged, judgements=judgements, training=training)
        scores = share_rewards(trajectories, scores)
        if training:
            answers = [score for score, trajectory in zip(scores, trajectories, strict=True) if trajectory.part == 0]
            for name, value in no_verdict_metrics(answers).items():
                self.metrics.add(name, value, **({"weight": len(answers)} if name.endswith("rate") else {}))
        return scored(scores)

    @dispatch(Split.ZERO)
    def verdicts(self, batch: Batch) -> tuple[list[int], list[int], list[str]]:
        """Return the rows with and without a verdict, and the groups with too few; see :func:`~hone.trainers.batch_ops.sort_rows`."""
        return sort_rows(batch, max(min(2, self.config.actor_rollout_ref.rollout.n), self.estimator.min_group))

    @dispatch(Split.ZERO, objects=True)
    def values_of(self, batch: Batch, metric: str | None) -> tuple[list[float | None], list[str] | None]:
        """Return the values that dynamic sampling compares; see :func:`values_of`."""
        return values_of(batch, metric)

    @dispatch(Split.ZERO, objects=True)
    def group_means(self, batch: Batch) -> dict[str, GroupMeans]:
        """Return mean reward (None before scoring) and mean response length of each group."""
        return group_means(batch)

    @dispatch(Split.ZERO, objects=True)
    def place_rewards(self, batch: Batch) -> Batch:
        """Place each reward on the last sampled token of its response, except turn and token rewards."""
        mask, scores = batch.ragged("response_mask"), batch.objects("score")
        totals = torch.tensor([score.total for score in scores], dtype=torch.float32)
        rewards = mask.with_values(torch.zeros(len(mask.values)))
        for row, score in enumerate(scores):
            begin = int(mask.offsets[row])
            for token, reward in token_rewards(score, mask.row(row).tolist()).items():
                rewards.values[begin + token] = reward
        self.invariants.check_finite("reward", totals, batch)
        return Batch({"token_level_scores": rewards, "token_level_rewards": rewards, "reward": totals})

    @dispatch(Split.ZERO, objects=True)
    def baselines(self, batch: Batch, greedy: Batch) -> Batch:
        """Return ``reward_baselines``: the reward of the greedy response to each row's prompt (ReMax)."""
        return Batch({"reward_baselines": baselines(batch, greedy)})

    @dispatch(Split.ZERO, objects=True)
    def validation(
        self, batch: Batch, n: int, shown: int, version: int | None
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics of scored answers, ``n`` per prompt, and the first ``shown`` records. Their images are written.

        Args:
            batch: scored answers.
            n: answers per prompt.
            shown: number of records.
            version: version of the weights that must have sampled all answers; None checks nothing.

        Raises:
            InvariantError: an answer is by another version.
        """
        if version is not None:
            require_version(batch.objects("trajectory"), version)
        evaluation: Evaluation = evaluate_answers(batch.objects("trajectory"), batch.objects("score"), n)
        records = evaluation.records(shown)
        archived = {record["uid"] for record in records}
        kept = [trajectory for trajectory in batch.objects("trajectory") if trajectory.uid in archived]
        self.directory.write_images(
            (image for trajectory in kept for image in trajectory.images), self.directory.validation
        )
        return evaluation.metrics, records

    # columns ---------------------------------------------------------------------------------------------------------

    @dispatch(Split.ZERO)
    def correct(self, batch: Batch, version: int | None = None) -> Batch:
        """Measure the gap between engine and trainer, and correct it if configured; by age, if the weights' version is given."""
        if version is not None:
            self.metrics.update(age_metrics(batch, version))
        corrected = correct(batch, self.config.algorithm, self.metrics)
        return corrected.select(*(name for name in corrected.names() if name not in batch))

    @dispatch(Split.ZERO)
    def kl_in_reward(self, batch: Batch) -> Batch:
        """Subtract the KL penalty from the token rewards, and adapt its coefficient."""
        mask = batch.ragged("response_mask")
        rewards, mean_kl = apply_kl_penalty(
            batch.ragged("token_level_scores").to_padded(),
            batch.ragged("old_log_probs").to_padded(),
            batch.ragged("ref_log_probs").to_padded(),
            mask.to_padded(),
            self.kl_ctrl.value,
            self.config.algorithm.kl_penalty,
        )
        self.metrics.add("actor/reward_kl_penalty", mean_kl)
        self.metrics.add("actor/reward_kl_penalty_coeff", self.kl_ctrl.value)
        self.kl_ctrl.update(float(mean_kl), len(batch))
        return Batch({"token_level_rewards": Ragged.from_padded(rewards, mask.lengths)})

    @dispatch(Split.ZERO, objects=True)
    def teacher_inputs(self, batch: Batch) -> Batch:
        """Return the teacher and the teacher's prompt of each row; see :class:`~hone.trainers.teacher_inputs.TeacherInputs`."""
        return self._teacher_inputs(batch)

    @dispatch(Split.ZERO)
    def teacher_spans(self, batch: Batch) -> Batch:
        """Return what teachers with other tokenizers say, by the policy's tokens; see :func:`~hone.trainers.teacher_inputs.span_columns`."""
        return span_columns(batch, self.metrics)

    @functools.cached_property
    def _teacher_inputs(self) -> TeacherInputs:
        return TeacherInputs(self.config, self.tokenizer, self._context.image_processor)

    @dispatch(Split.ZERO)
    async def served_teachers(self, batch: Batch) -> Batch:
        """Return what teachers behind a server say; see :class:`~hone.training.served_teacher.ServedTeachers`."""
        return await self._served_teachers.columns(batch)

    @functools.cached_property
    def _served_teachers(self) -> ServedTeachers:
        settings = saved_settings(self.config.actor_rollout_ref.model).get_text_config()
        return ServedTeachers(self.config.distillation, settings.vocab_size)

    @dispatch(Split.ZERO, objects=True)
    def advantages(self, batch: Batch) -> Batch:
        """Run the advantage estimator over the complete batch."""
        advantages, returns = estimate(self.estimator, batch, self.config.algorithm)
        if self.config.distillation.enable and self.config.distillation.by_advantage:
            advantages = mixed_advantages(advantages, batch, self.config.distillation, self.metrics)
        self.invariants.check_finite("advantages", advantages, batch)
        if (share := self.config.algorithm.top_entropy_share) is not None:
            self.metrics.add("actor/least_learnt_entropy", undecided_tokens(batch, share)[1])
        return Batch({"advantages": advantages, "returns": returns})

    @dispatch(Split.ZERO)
    def update_view(self, batch: Batch, step: int, *, pairs: bool) -> Batch:
        """Return the training rows: resampled (PF-PPO), or with ``pairs`` the best and worst answer to each prompt, adjacent."""
        config = self.config
        n, seed = config.actor_rollout_ref.rollout.n, config.trainer.seed
        view = update_view(batch, config.algorithm, n=n, seed=seed, step=step)
        if pairs:
            view = own_pairs(view, config.actor_rollout_ref.actor.preference_loss.margin)
            self.metrics.add("actor/preference_pairs", len(view) // 2)
        return view

    @dispatch(Split.ZERO, objects=True)
    def fork_points(self, batch: Batch, step: int) -> list[ForkPoint]:
        """Return the turns to fork; see :func:`~hone.agents.forking.fork_points`."""
        return fork_points(batch, self.config.algorithm.forks, (self.config.trainer.seed, "choice", step))

    @dispatch(Split.ZERO, objects=True)
    def fork_rewards(self, batch: Batch) -> dict[str, list[float]]:
        """Return the rewards of continuations with a verdict, by the uid of their turn."""
        return fork_rewards(batch)

    @dispatch(Split.ZERO)
    def sampled_tokens(self, batch: Batch) -> int:
        """Return the number of tokens that the policy sampled."""
        return int(batch.ragged("response_mask").values.sum())

    @dispatch(Split.ZERO)
    def turn_values(self, batch: Batch, points: Sequence[ForkPoint], rewards: Mapping[str, Sequence[float]]) -> Batch:
        """Return the column ``turn_values``: the value of each forked turn of a row's episode."""
        return Batch({"turn_values": values_by_row(len(batch), points, rewards)})

    @dispatch(Split.ZERO, objects=True)
    def turn_baselines(self, batch: Batch) -> Batch:
        """Return the column ``turn_baselines``; see :func:`~hone.trainers.estimates.turn_baselines`."""
        column = turn_baselines(batch, self.role_baselines)
        for role, value in self.role_baselines.values.items():
            self.metrics.add(f"critic/role_baseline/{role}", value)
        return Batch({"turn_baselines": column})

    # checks ----------------------------------------------------------------------------------------------------------

    @dispatch(Split.ZERO)
    def check_sampled(self, batch: Batch) -> None:
        """Check that groups are complete and masks fit their responses."""
        segment_numbers = batch.tensor("part").tolist()
        episodes = [uid for uid, part in zip(batch.uids, segment_numbers, strict=True) if part == 0]
        self.invariants.check_groups(episodes, self.config.actor_rollout_ref.rollout.n)
        self.invariants.check_mask(batch)

    @dispatch(Split.ZERO)
    def check_engine(self, batch: Batch, version: int | None = None) -> None:
        """Check that engine and trainer agree on the log-probs of sampled tokens, those of weights ``version`` if it is given."""
        mask = batch.ragged("response_mask")
        if version is not None:
            mask = mask.with_values(mask.values * (batch.ragged("token_versions").values == version))
        if mask.values.any():
            engine, trainer = batch.ragged("rollout_log_probs"), batch.ragged("old_log_probs")
            self.invariants.check_canary(engine, trainer, batch, mask=mask)

    @dispatch(Split.ZERO)
    def check_published(self, batch: Batch) -> None:
        """Check that engine and trainer agree on the canary prompts after a weight sync."""
        gap = self.published.check_canary(
            batch.ragged("rollout_log_probs"), batch.ragged("log_probs"), batch, fixed=True
        )
        self.metrics.add("rollout/canary_gap", gap)

    @dispatch(Split.ZERO, objects=True)
    def check_ids(self, batch: Batch) -> None:
        """Check that the tokens to train on are the sampled ones."""
        self.invariants.check_ids(batch)

    @dispatch(Split.ZERO, objects=True)
    def check_update(self, batch: Batch | None, role: str, update: RoleUpdate) -> None:
        """Check that gradients are finite, and that the actor's first update has ratio 1 to the rollout policy.

        Args:
            batch: batch for the dump; None if no update was skipped.
        """
        results = update.results
        if role == "actor" and results and any(results[0].statistics):
            self.invariants.check_first_ratio(results[0], self.metrics)  # a mini-batch may be rejected or have no pairs
        self.invariants.check_updates(role, results, batch)
        parts = [part[UPDATED_ENTROPY] for one in results for part in one.statistics if UPDATED_ENTROPY in part]
        if parts:
            self.entropy.update(
                sum(float(value) * weight for value, weight in parts) / sum(weight for _, weight in parts)
            )

    @dispatch(Split.ZERO)
    def entropy_weight(self) -> float:
        """Return the weight of the entropy bonus in the next update."""
        return self.entropy.weight

    # reports ---------------------------------------------------------------------------------------------------------

    @dispatch(Split.ZERO, objects=True)
    def report(self, batch: Batch, left_out: Batch | None, step: int) -> MetricStore:
        """Return all metrics of the batch and those collected during the step, and let the environment doctor see it."""
        metrics, self.metrics, data = self.metrics, MetricStore(), self.config.data
        batch_metrics(
            metrics,
            batch,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            prices=self.config.reward.episode_prices,
            left_out=left_out.objects("trajectory") if left_out is not None else (),
        )
        sampled = batch.ragged("response_ids").values[batch.ragged("response_mask").values > 0]
        metrics.add("rollout/ids_outside_tokenizer", self._outside[sampled.clamp(max=len(self._outside) - 1)].sum())
        self.invariants.report(metrics)
        if self.doctor is not None:
            seen = [part for part in (batch, left_out) if part is not None]
            trajectories = [trajectory for part in seen for trajectory in part.objects("trajectory")]
            scores = [score for part in seen for score in part.objects("score")]
            self.doctor.observe(step, trajectories, scores)  # no metric: its probes end at any time
        return metrics

    @dispatch(Split.ZERO)
    def write_vocabulary(self) -> None:
        """Begin to write the text of every token id to the archive."""
        texts = token_texts(self.tokenizer)
        self.archive.submit(lambda: write_vocabulary(self.directory.rollouts, texts))

    @dispatch(Split.ZERO, objects=True)
    def write_rollouts(
        self, batch: Batch | None, left_out: Batch | None, step: int, *, fates: Sequence[str], rows: int
    ) -> None:
        """Begin to write sequences of the step to the archive, in a thread.

        Args:
            batch: trained rows.
            left_out: other rows.
            fates: fate of each of the other rows.
            rows: number of sequences of the step; more than those given if only some prompts are archived.

        Raises:
            HoneError: the file before could not be written.
        """
        parts = self._parts(batch, left_out, fates)
        trajectories = [trajectory for rows_of_part, *_ in parts for trajectory in rows_of_part.objects("trajectory")]
        images = [image for trajectory in trajectories for image in trajectory.images]

        def write() -> None:
            self.directory.write_images(images, self.directory.rollouts)
            self.directory.write_rollouts(step, _table(parts, step), rows=rows)

        self.archive.submit(write)

    @dispatch(Split.ZERO)
    def wait_for_archive(self) -> None:
        """Wait until the last file of the archive is written.

        Raises:
            HoneError: it could not be written.
        """
        self.archive.wait()

    @dispatch(Split.ZERO, objects=True)
    def records(self, batch: Batch, left_out: Batch | None, step: int) -> list[dict[str, Any]]:
        """Return every sample of the step as a record of the archive, those without a verdict last."""
        fates = ["failed"] * (0 if left_out is None else len(left_out))
        return list(table_records(_table(self._parts(batch, left_out, fates), step)))

    def _parts(self, batch: Batch | None, left_out: Batch | None, fates: Sequence[str]) -> list[_Part]:
        """Return trained and other rows, each with fates and prompts; a tokenizer is not used in a thread."""
        trained = [] if batch is None else [(batch, [TRAINED] * len(batch))]
        others = [] if left_out is None else [(left_out, fates)]
        return [(rows, row_fates, prompt_texts(rows, self._decode)) for rows, row_fates in [*trained, *others]]

    def _decode(self, ids: list[int]) -> str:
        return decoded(self.tokenizer, ids)

    def _dump(self, name: str, batch: Batch) -> Path:
        """Write a batch that violated an invariant to ``dumps/``."""
        records = table_records(_table(self._parts(batch, None, ()), 0))
        return self.directory.write_records(self.directory.path / "dumps" / f"{name}.jsonl", records)

    @dispatch(Split.ZERO, objects=True)
    def save_groups(self, batch: Batch, location: str) -> None:
        """Write finished groups to the checkpoint at ``location``."""
        save_groups(location, batch)

    @dispatch(Split.ZERO)
    def load_groups(self, location: str, samples: Mapping[str, Sample]) -> Batch:
        """Return the finished groups of a checkpoint, given the sample of every uid."""
        return load_groups(location, samples, reads_images=self._context.image_processor is not None)

    # state -----------------------------------------------------------------------------------------------------------

    @dispatch(Split.ZERO)
    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run as plain JSON values."""
        return {
            "kl_ctrl": self.kl_ctrl.state_dict(),
            "entropy": self.entropy.state_dict(),
            "invariants": self.invariants.state_dict(),
            "published": self.published.state_dict(),
            "role_baselines": self.role_baselines.values,
        }

    @dispatch(Split.ZERO)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        self.kl_ctrl.load_state_dict(state["kl_ctrl"])
        self.entropy.load_state_dict(state.get("entropy", {}))
        self.invariants.load_state_dict(state["invariants"])
        self.published.load_state_dict(state["published"])
        self.role_baselines.values = dict(state.get("role_baselines", {}))


_Part = tuple[Batch, Sequence[str], Mapping[str, str]]
"""Rows, their fates, and the prompt of each group."""


def _table(parts: Sequence[_Part], step: int) -> pa.Table:
    return pa.concat_tables([rollout_table(batch, fates, step, prompts) for batch, fates, prompts in parts])


def values_of(batch: Batch, metric: str | None) -> tuple[list[float | None], list[str] | None]:
    """Return the reward (without length penalty) or the term ``metric`` of each row; None without a verdict.

    If no score has that term, also return the names of the existing ones, else None.
    """
    scores = batch.objects("score")
    values = [
        None if score.error is not None else score.quality if metric is None else score.terms.get(metric, 0.0)
        for score in scores
    ]
    valid = [score for score in scores if score.error is None]
    if metric is None or not valid or any(metric in score.terms for score in valid):
        return values, None
    return values, sorted({name for score in valid for name in score.terms})


def group_means(batch: Batch) -> dict[str, GroupMeans]:
    """Return mean reward (None without a verdict) and mean response length of each group."""
    scores = batch.objects("score") if "score" in batch else [None] * len(batch)
    rewards = [None if score is None or score.error is not None else score.quality for score in scores]
    lengths = batch.ragged("response_ids").lengths.tolist()
    return {
        uid: GroupMeans(_mean([rewards[row] for row in members]), fmean(lengths[row] for row in members))
        for uid, members in rows_of(batch.uids).items()
    }


def _mean(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def baselines(batch: Batch, greedy: Batch) -> Tensor:
    """Return the reward of the greedy response to each row's prompt, ``[B]``.

    Without a verdict on it the mean of the other prompts' is the baseline: unbiased too, because it depends on no sampled response.
    """
    pairs = zip(greedy.uids, greedy.objects("score"), strict=True)
    totals = {uid: score.total for uid, score in pairs if score.error is None}
    mean = fmean(totals.values()) if totals else 0.0
    return torch.tensor([totals.get(uid, mean) for uid in batch.uids], dtype=torch.float32)


def scored(scores: Sequence[Score]) -> Batch:
    """Return the columns ``score`` and ``verdict`` (1 or 0) of every row."""
    verdicts = torch.tensor([score.error is None for score in scores], dtype=torch.int64)
    return Batch({"score": list(scores), "verdict": verdicts})


def sort_rows(batch: Batch, fewest: int) -> tuple[list[int], list[int], list[str]]:
    """Sort the rows of a scored batch by their verdicts.

    A response without a verdict is as if it had never been sampled: baselines, group statistics and pass rates are those of the others.
    Whether a verdict is missing must not depend on the response; then every estimate keeps its expectation.

    Args:
        batch: with the columns ``uid``, ``part`` and ``verdict``.
        fewest: smallest number of verdicts with which a group is trained on.

    Returns:
        Rows with a verdict and rows without, and the uids of groups with too few verdicts, all in order.
    """
    verdicts = batch.tensor("verdict").tolist()
    counts = Counter(dict.fromkeys(batch.uids, 0))
    for uid, part, verdict in zip(batch.uids, batch.tensor("part").tolist(), verdicts, strict=True):
        counts[uid] += verdict and part == 0
    small = [uid for uid, count in counts.items() if count < fewest]
    rows = range(len(batch))
    return [row for row in rows if verdicts[row]], [row for row in rows if not verdicts[row]], small


FILE = "groups.jsonl.gz"


def save_groups(location: str, batch: Batch) -> None:
    """Write scored trajectories to the checkpoint at ``location``."""
    pairs = zip(batch.objects("trajectory"), batch.objects("score"), strict=True)
    with Storage(location).create(FILE) as file, gzip.open(file, "wt", compresslevel=1, encoding="utf-8") as lines:
        for trajectory, score in pairs:
            lines.write(json.dumps(_record(trajectory, score), default=_plain) + "\n")


def load_groups(location: str, samples: Mapping[str, Sample], *, reads_images: bool = False) -> Batch:
    """Return the batch that :func:`save_groups` wrote, given the sample of every uid; ``reads_images`` as for :func:`to_batch`."""
    with Storage(location).open(FILE) as file, gzip.open(file, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    scores = [_score(record.pop("score")) for record in records]
    batch = to_batch([_trajectory(record, samples[record["uid"]]) for record in records], reads_images=reads_images)
    return batch.updated(scored(scores))


def _record(trajectory: Trajectory, score: Score) -> dict[str, Any]:
    values = {name: value for name, value in vars(trajectory).items() if name not in ("sample", "episode")}
    values |= {name: list(values[name]) for name in ("prompt_ids", *TOKENS)}
    later = trajectory.images[len(trajectory.sample.images) :]
    values["images"] = [base64.b64encode(image.content).decode() for image in later]
    episode = None if trajectory.episode is None else dataclasses.asdict(trajectory.episode)
    return {**values, "episode": episode, "score": dataclasses.asdict(score)}


def _plain(value: Any) -> Any:
    """Return a value of the user's that JSON lacks as numbers, lists or text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _trajectory(record: dict[str, Any], sample: Sample) -> Trajectory:
    episode = record["episode"] and _episode(record["episode"])
    later = tuple(ImageData(base64.b64decode(content)) for content in record.pop("images"))
    values = {**record, "stop_reason": StopReason(record["stop_reason"]), "episode": episode}
    return Trajectory(**values, sample=sample, images=sample.images + later)


def _episode(record: dict[str, Any]) -> EpisodeLog:
    calls = [CallRecord(**{**call, "status": CallStatus(call["status"])}) for call in record["calls"]]
    return EpisodeLog(**{**record, "end": EpisodeEnd(record["end"]), "calls": calls})


def _score(record: dict[str, Any]) -> Score:
    return Score(**{**record, "placed": {int(token): reward for token, reward in record["placed"].items()}})


_SOURCES = {
    **{name: name for name in ("prompt_ids", "response_ids", "response_mask", "token_versions", "old_log_probs")},
    **{name: name for name in ("new_log_probs", "ref_log_probs", "entropy", "values", "advantages", "returns")},
    **{name: name for name in ("sum_pi_squared", "process_rewards")},
    "token_rewards": "token_level_rewards",
    "correction": "rollout_is_weights",
}
"""Column of the archive to column of the batch."""


def prompt_texts(batch: Batch, decode: Callable[[list[int]], str]) -> dict[str, str]:
    """Return the text of the prompt of each group; prompts that are not messages are decoded."""
    texts: dict[str, str] = {}
    for trajectory in batch.objects("trajectory"):
        if trajectory.uid not in texts:
            text = prompt_text(trajectory)
            texts[trajectory.uid] = decode(list(trajectory.prompt_ids)) if text is None else text
    return texts


def rollout_table(batch: Batch, fates: Sequence[str], step: int, prompts: Mapping[str, str]) -> pa.Table:
    """Return the rows of a batch as a table of the archive.

    Args:
        batch: rows with ``trajectory``; columns that the step did not compute are null.
        fates: fate of each row. The loss mask is of batches whose rows were all trained.
        prompts: see :func:`prompt_texts`.
    """
    trajectories = batch.objects("trajectory")
    scores = batch.objects("score") if "score" in batch else [None] * len(batch)
    records = [
        {
            "step": step,
            "fate": fate,
            **episode_record(trajectory, prompt_text=prompts[trajectory.uid], **score_values(score)),
        }
        for trajectory, score, fate in zip(trajectories, scores, fates, strict=True)
    ]
    for record, extra in zip(records, _by_sequence(batch), strict=True):
        record.update(extra)
    columns = {name: _lists(batch.ragged(source), name) for name, source in _SOURCES.items() if source in batch}
    if all(fate == TRAINED for fate in fates):
        columns["loss_mask"] = _lists(batch.ragged(KEPT if KEPT in batch else "response_mask"), "loss_mask")
    if "token_level_scores" in batch and not same_column(batch["token_level_scores"], batch["token_level_rewards"]):
        columns["token_scores"] = _lists(batch.ragged("token_level_scores"), "token_scores")
    return to_table(records, columns | _engine_log_probs(batch, trajectories))


def _by_sequence(batch: Batch) -> list[dict[str, Any]]:
    """Return the inputs of estimators that have one value per sequence."""
    rows: list[dict[str, Any]] = [{} for _ in range(len(batch))]
    if "reward_baselines" in batch:
        for row, baseline in zip(rows, batch.tensor("reward_baselines").tolist(), strict=True):
            row["baseline"] = baseline
    if "turn_values" in batch:
        for row, values in zip(rows, batch.objects("turn_values"), strict=True):
            row["turn_values"] = values
    if "turn_baselines" in batch:
        for row, pairs in zip(rows, batch.objects("turn_baselines"), strict=True):
            row["turn_baselines"] = pairs
    return rows


def _engine_log_probs(batch: Batch, trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    """Return the columns of the engine's log-probs; that of the distribution sampled from only where it is another one."""
    if all(trajectory.sampling_log_probs == trajectory.rollout_log_probs for trajectory in trajectories):
        return {"rollout_log_probs": _lists(batch.ragged("rollout_log_probs"), "rollout_log_probs")}
    responses = batch.ragged("response_ids")
    columns = {}
    for name in ("rollout_log_probs", "sampling_log_probs"):
        rows: list[Any] = [np.asarray(getattr(trajectory, name), np.float32) for trajectory in trajectories]
        columns[name] = _lists(responses.with_values(torch.from_numpy(np.concatenate(rows))), name)
    return columns


def _lists(column: Ragged, name: str) -> pa.Array:
    dtype = {IDS: torch.int64, INTS: torch.int32, FLOATS: torch.float32}[BY_NAME[name].kind]
    values = column.values.detach().to("cpu", dtype).contiguous().numpy()
    return pa.ListArray.from_arrays(pa.array(column.offsets.numpy().astype(np.int32)), pa.array(values))
