"""Comparison of two versions of a reward on the rollouts that a run has stored, scored again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hone.algorithms.advantages.base import Groups
from hone.algorithms.advantages.group_relative import normalised
from hone.apps.lab.compare import find_run
from hone.config.reward import RewardConfig
from hone.data.episode_log import CallRecord, CallStatus, EpisodeEnd, EpisodeLog
from hone.data.prompts import samples_by_uid
from hone.data.seeding import derive_seed
from hone.data.types import Sample, StopReason, Trajectory, row_of
from hone.errors import DataError, did_you_mean
from hone.insight.archive.read import images_of, require_archive
from hone.rewards.manager import RewardManager, share_rewards
from hone.rewards.score import Score

log = logging.getLogger(__name__)


def stored_episodes(
    folder: Path, files: Sequence[str], *, reward_fn_key: str, prompt_key: str
) -> Iterator[tuple[int, dict[str, Any], Trajectory]]:
    """Yield step, record and trajectory of every stored segment, in order.

    The dataset ``files`` have the rows' ``extra_info``, which ``rollouts/`` does not hold. Without them it is empty, with a warning.
    """
    archive = require_archive(folder)
    try:
        rows = samples_by_uid(files, reward_fn_key=reward_fn_key, prompt_key=prompt_key)
    except DataError as error:
        log.warning("the rows' extra_info is missing, because the dataset cannot be read: %s", error.what)
        rows = {}
    for step in archive.steps():
        for record in archive.records(step, _COLUMNS):
            yield step, record, stored_trajectory(record, rows)


IDS = ("prompt_ids", "response_ids")
_COLUMNS = (
    "step", "uid", "index", "part", "data_source", "prompt", "messages", "text", "ground_truth", "stop_reason",
    "seconds", "score", "unshaped", "terms", "extra", "error", "episode",
    "prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "sampling_log_probs",
)  # fmt: skip


def stored_trajectory(record: Mapping[str, Any], rows: Mapping[str, Sample], archive: Path | None = None) -> Trajectory:
    """Return the trajectory of a record of the archive; without the ``archive``'s folder images are left out.

    ``rows`` are the dataset's by uid, for their ``extra_info``.
    """
    prompt, response = (() if archive is None else images_of(archive, record[name] or []) for name in IDS)
    row = rows.get(row_of(record["uid"]))
    sample = Sample(
        record["uid"],
        record["prompt_ids"] or [],
        record["messages"],
        record["data_source"] or "",
        record["ground_truth"],
        {} if row is None else row.extra_info,
        None if row is None else row.agent_name,
        images=prompt,
        text=None if row is None else row.text,
    )
    return Trajectory(
        record["uid"],
        record["index"],
        record["prompt_ids"] or [],
        record["response_ids"] or [],
        record["response_mask"] or [],
        record["rollout_log_probs"] or [],
        record["sampling_log_probs"] or record["rollout_log_probs"] or [],
        record["text"],
        StopReason(record["stop_reason"] or StopReason.STOP),
        sample,
        seconds=record["seconds"] or 0.0,
        episode=record["episode"] and _episode(record["episode"]),
        part=record["part"],
        images=prompt + response,
    )


def _episode(record: Mapping[str, Any]) -> EpisodeLog:
    """Return the log of :meth:`EpisodeLog.record`; what a record of another program lacks has the value of an empty log."""
    calls = [CallRecord(**{**call, "status": CallStatus(call["status"])}) for call in record.get("tool_calls", ())]
    names = (
        "messages",
        "assistant_turns",
        "user_turns",
        "turn_rewards",
        "turn_roles",
        "reward",
        "facts",
        "error",
        "tokenization",
        "retries",
        "generate_seconds",
        "tool_seconds",
    )
    known = {name: record[name] for name in names if name in record}
    return EpisodeLog(
        end=EpisodeEnd(record.get("end", EpisodeEnd.ANSWER)),
        calls=calls,
        conversations=record.get("conversations", []),
        **known,
    )


EPSILON = 1e-6
"""Differences of advantages up to this count as rounding."""


@dataclass(frozen=True)
class ScoredTwice:
    """One stored episode with its score under the old and the new reward; None without a verdict."""

    step: int
    uid: str
    index: int
    tokens: int  # number of sampled tokens
    text: str
    old: float | None
    new: float | None
    old_right: bool | None  # whether the episode passes
    new_right: bool | None

    @property
    def flipped(self) -> bool:
        """True if the two verdicts differ, or only one of them exists."""
        return self.old_right != self.new_right


@dataclass(frozen=True)
class Difference:
    """Effect of a change of the reward on an episode: GRPO advantages before and after it."""

    episode: ScoredTwice
    old_advantage: float | None
    new_advantage: float | None

    @property
    def change(self) -> float:
        """Absolute change of the advantage; a missing one counts as 0, because the episode is left out."""
        return abs((self.new_advantage or 0.0) - (self.old_advantage or 0.0))

    def as_json(self) -> dict[str, Any]:
        return {**vars(self.episode), "old_advantage": self.old_advantage, "new_advantage": self.new_advantage}


@dataclass(frozen=True)
class Comparison:
    """Differences between two rewards over the groups of a run."""

    episodes: int
    groups: int
    flipped: float  # share of episodes whose verdict differs
    reordered_pairs: float  # share of the pairs of a group whose order differs; a tie on one side counts as different
    reordered_groups: float  # share of groups with such a pair
    advantage_signs: float  # share of episodes whose GRPO advantage has another sign
    tokens: float  # share of the sampled tokens whose advantage differs
    # sum over tokens of the advantages' absolute change, relative to the sum of both advantages' sizes: 0 if the past
    # updates would be the same, 1 if no part of them would
    gradient: float
    differences: list[Difference]  # episodes whose advantage or verdict differs, the largest change first

    def shares(self) -> dict[str, float]:
        names = ("flipped", "reordered_pairs", "reordered_groups", "advantage_signs", "tokens", "gradient")
        return {name: getattr(self, name) for name in names}


def compare(episodes: Sequence[ScoredTwice]) -> Comparison:
    """Compare the two scores of every episode, within the groups of each step."""
    groups: dict[tuple[int, str], list[ScoredTwice]] = defaultdict(list)
    for episode in episodes:
        groups[episode.step, episode.uid].append(episode)
    every: list[Difference] = []
    pairs = reordered = touched = 0
    for group in groups.values():
        old, new = advantages([e.old for e in group]), advantages([e.new for e in group])
        every += [Difference(*values) for values in zip(group, old, new, strict=True)]
        judged = [e for e in group if e.old is not None and e.new is not None]
        moved = [_order(a.old, b.old) != _order(a.new, b.new) for a, b in combinations(judged, 2)]
        pairs, reordered, touched = pairs + len(moved), reordered + sum(moved), touched + any(moved)
    tokens = max(1, sum(d.episode.tokens for d in every))
    sizes = sum(d.episode.tokens * (abs(d.old_advantage or 0.0) + abs(d.new_advantage or 0.0)) for d in every)
    changed = [d for d in every if d.change > EPSILON]
    return Comparison(
        len(every),
        len(groups),
        _share(sum(d.episode.flipped for d in every), len(every)),
        _share(reordered, pairs),
        _share(touched, len(groups)),
        _share(sum(_sign(d.old_advantage) != _sign(d.new_advantage) for d in every), len(every)),
        _share(sum(d.episode.tokens for d in changed), tokens),
        _share(sum(d.episode.tokens * d.change for d in every), sizes),
        sorted((d for d in every if d.change > EPSILON or d.episode.flipped), key=lambda d: -d.change),
    )


def advantages(scores: Sequence[float | None]) -> list[float | None]:
    """Return GRPO's advantages of a group, from those with a verdict; None for the others and where only one has a verdict."""
    present = torch.tensor([score for score in scores if score is not None], dtype=torch.float64)
    if len(present) < 2:
        return [None] * len(scores)
    group = Groups.from_ids([0] * len(present), torch.ones(len(present), 1))
    values = iter(normalised(present, group, by_std=True, epsilon=EPSILON).tolist())
    return [None if score is None else next(values) for score in scores]


def _order(first: float | None, second: float | None) -> int:
    assert first is not None and second is not None
    return (first > second) - (first < second)


def _sign(value: float | None) -> int:
    return 0 if value is None or abs(value) <= EPSILON else (1 if value > 0 else -1)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


STORED = "stored"
"""Name of the scores that the run itself gave."""


def rescore_run(run: str, root: Path, old: RewardConfig | None, new: RewardConfig | None) -> list[ScoredTwice]:
    """Score the stored training episodes of a run, by its directory or name below ``root``, with two rewards; None: the stored scores."""
    chosen = find_run(run, root)
    files = [str(file) for file in _listed(chosen.config.get("data.train_files"))]
    key = str(chosen.config.get("data.reward_fn_key") or "data_source")
    prompt_key = str(chosen.config.get("data.prompt_key") or "prompt")
    rows = list(stored_episodes(chosen.path / "rollouts", files, reward_fn_key=key, prompt_key=prompt_key))
    # a prompt that returns in a later step has its uid again, and the segments of an episode are joined by uid
    trajectories = [replace(trajectory, uid=f"{trajectory.uid} step {step}") for step, _, trajectory in rows]
    recorded = [_recorded(record) for _, record, _ in rows]
    columns = [recorded if config is None else scores_of(config, trajectories) for config in (old, new)]
    return [
        ScoredTwice(
            step,
            record["uid"],
            trajectory.index,
            sum(trajectory.response_mask),
            trajectory.text,
            first.verdict,
            second.verdict,
            None if first.error is not None else first.passes,
            None if second.error is not None else second.passes,
        )
        for (step, record, trajectory), first, second in zip(rows, *columns, strict=True)
        if trajectory.part == 0
    ]


def scores_of(config: RewardConfig, trajectories: Sequence[Trajectory]) -> list[Score]:
    """Return the score of every trajectory; the segments of an episode share one.

    Raises:
        RewardError: the reward cannot be loaded, or a data source has no scorer.
    """
    manager = RewardManager(replace(config, max_no_verdict_rate=1.0))
    try:
        return share_rewards(trajectories, asyncio.run(manager.score(trajectories)))
    finally:
        manager.close()


def _recorded(record: dict) -> Score:
    return Score(record["score"] or 0.0, record["terms"], error=record["error"])


def _listed(files: object) -> list[object]:
    return list(files) if isinstance(files, list | tuple) else [files] if files else []


FORMS = ("messages", "tokens")
"""Forms of a written pair: chat messages, for any model; or the sampled tokens, for models with the run's tokenizer."""

_PAIR_COLUMNS = (
    "uid", "index", "part", "data_source", "prompt", "messages", "text", "stop_reason", "score", "error",
    "prompt_ids", "response_ids", "response_mask",
)  # fmt: skip


@dataclass
class MinedPairs:
    """Pairs that were built, and counts of their sources."""

    train: list[dict[str, Any]] = field(default_factory=list)
    val: list[dict[str, Any]] = field(default_factory=list)  # held-out pairs, of other prompts
    samples: int = 0  # number of answers read
    prompts: int = 0  # number of different prompts among them
    left_out: Counter[str] = field(default_factory=Counter)  # number of answers that could not be used, by reason


def mine_pairs(
    run: Path,
    *,
    margin: float = 0.0,  # smallest difference of scores in a pair
    val_share: float = 0.1,  # share of the prompts that go to validation; above 0, at least one prompt
    per_prompt: int = 4,  # largest number of pairs per prompt
    # a name of :data:`FORMS`; None selects messages if the run's prompts are messages and its episodes single answers,
    # else tokens. Answers cut off by the length limit can only be written as tokens: as a message they would end. The
    # same holds for episodes of several turns, written with a mask of the policy's tokens: their messages alone do not
    # contain the tools of the prompt
    form: str | None = None,
    seed: int = 1,  # seed of the division
) -> MinedPairs:
    """Pair good with bad answers from the rollouts of a run (``trainer.rollout_dump_freq``).

    For each prompt the best answer is paired with the worst, the second best with the second worst, and so on, while their
    scores differ by at least ``margin`` (and differ at all). Equal answers to a prompt count once. Prompts, not pairs, are
    divided between training and validation.
    """
    _check_options(margin, val_share, per_prompt, form)
    records = list(_records(run))
    plain = all(record["messages"] and all(record["response_mask"] or ()) for record in records)
    form = form or ("messages" if plain else "tokens")
    segmented = {(record["uid"], record["index"]) for record in records if record["part"]}
    mined = MinedPairs(samples=len(records))
    groups: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {}
    for record in records:
        reason = _unusable(record, form, segmented)
        if reason:
            mined.left_out[reason] += 1
        else:
            groups.setdefault(record["uid"], {}).setdefault(tuple(record["response_ids"]), record)
    prompts: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for answers in groups.values():
        pairs = [_row(*pair, form) for pair in _pairs(list(answers.values()), margin, per_prompt)]
        prompts.setdefault(tuple(next(iter(answers.values()))["prompt_ids"]), []).extend(pairs)
    mined.prompts = len(prompts)
    fruitful = sorted(
        ((ids, pairs) for ids, pairs in prompts.items() if pairs),
        key=lambda entry: derive_seed(seed, "preference-split", *entry[0]),
    )
    _check_pairs(mined, len(fruitful), run, margin, val_share)
    held_out = max(1, round(val_share * len(fruitful))) if val_share > 0 else 0
    mined.val = [pair for _, pairs in fruitful[:held_out] for pair in pairs]
    mined.train = [pair for _, pairs in fruitful[held_out:] for pair in pairs]
    return mined


def write_pairs(mined: MinedPairs, out: Path) -> list[Path]:
    """Write ``out/train.parquet``, and ``out/val.parquet`` if there are held-out pairs.

    Columns: ``prompt``, ``chosen``, ``rejected`` (messages, or token ids with ``chosen_mask`` and ``rejected_mask``, 1 on
    tokens of the policy), ``score_chosen``, ``score_rejected``, ``margin`` (their difference), ``data_source``, ``uid``.
    """
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, rows in (("train", mined.train), ("val", mined.val)):
            path = out / f"{name}.parquet"
            if rows:
                pq.write_table(pa.Table.from_pylist(rows), path)
                written.append(path)
            else:
                path.unlink(missing_ok=True)  # left by an earlier division, whose prompts may be training prompts now
    except OSError as error:
        raise DataError(
            f"the pairs cannot be written: {error}", where=str(out), fix="choose another folder with --out"
        ) from error
    return written


def _check_options(margin: float, val_share: float, per_prompt: int, form: str | None) -> None:
    if not 0 <= val_share < 1:
        raise DataError(f"--val-share {val_share} is not a share from 0 to below 1", fix="--val-share 0.1")
    if not margin >= 0:
        raise DataError(f"--margin {margin} is below 0", why="the worse answer would be chosen", fix="--margin 0.5")
    if per_prompt < 1:
        raise DataError(f"--per-prompt {per_prompt} is below 1 pair", fix="--per-prompt 4")
    if form is not None and form not in FORMS:
        raise DataError(f"unknown form '{form}'", where="--as", fix=did_you_mean(form, FORMS))


def _records(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of all archived steps, in order."""
    archive = require_archive(run)
    for step in archive.steps():
        yield from archive.records(step, _PAIR_COLUMNS)


def _unusable(record: dict[str, Any], form: str, segmented: set[tuple[str, int]]) -> str:
    """Return why a sample cannot be in a pair, or ""; ``segmented`` has uid and index of episodes with several samples."""
    if record["error"] or not isinstance(record.get("score"), int | float):
        return "not scored"
    if record["response_ids"] is None:
        return "no token ids (imported as text, or hidden with a credential)"
    if not record["response_ids"]:
        return "empty"
    if (record["uid"], record["index"]) in segmented:
        return "one of several segments of an episode whose history was rewritten"
    if form == "messages" and not all(record["response_mask"]):
        return "several turns (use --as tokens)"
    if form == "messages" and not record["messages"]:
        return "the prompt is not messages"
    if form == "messages" and record["stop_reason"] != "stop":
        return "cut off by the length limit"
    return ""


def _pairs(answers: list[dict[str, Any]], margin: float, limit: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    ranked = sorted(answers, key=lambda record: -record["score"])
    for better, worse in list(zip(ranked, reversed(ranked), strict=True))[: min(limit, len(ranked) // 2)]:
        gap = better["score"] - worse["score"]
        if gap > 0 and gap >= margin:
            yield better, worse


def _row(better: dict[str, Any], worse: dict[str, Any], form: str) -> dict[str, Any]:
    def side(record: dict[str, Any]) -> Sequence[Any]:
        if form == "tokens":
            return record["response_ids"]
        return [{"role": "assistant", "content": record["text"]}]

    masks = {"chosen_mask": better["response_mask"], "rejected_mask": worse["response_mask"]}
    return {
        **(masks if form == "tokens" else {}),
        "prompt": better["prompt_ids"] if form == "tokens" else better["messages"],
        "chosen": side(better),
        "rejected": side(worse),
        "score_chosen": float(better["score"]),
        "score_rejected": float(worse["score"]),
        "margin": float(better["score"] - worse["score"]),
        "data_source": better["data_source"],
        "uid": better["uid"],
    }


def _check_pairs(mined: MinedPairs, fruitful: int, run: Path, margin: float, val_share: float) -> None:
    reasons = "".join(f"; {count} answers left out: {reason}" for reason, count in mined.left_out.items())
    numbers = f"{mined.samples} answers to {mined.prompts} prompts{reasons}"
    if not fruitful:
        raise DataError(
            f"no prompt has two answers whose scores differ by {margin:g} or more ({numbers})",
            where=str(run),
            fix="use a smaller --margin, --as tokens if answers are cut off, more dumped steps "
            "(trainer.rollout_dump_freq=1) or more answers per prompt (actor_rollout_ref.rollout.n)",
        )
    if val_share > 0 and fruitful < 2:
        raise DataError(
            f"only one prompt gives pairs ({numbers})",
            where=str(run),
            why="training and validation pairs must be of different prompts",
            fix="--val-share 0, or a run with more prompts",
        )
