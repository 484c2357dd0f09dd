"""Build preference pairs from the rollouts of a run: answers to one prompt whose scores differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.data.seeding import derive_seed
from hone.errors import DataError, did_you_mean
from hone.insight.archive.read import require_archive

FORMS = ("messages", "tokens")
"""Forms of a written pair: chat messages, for any model; or the sampled tokens, for models with the run's tokenizer."""

_COLUMNS = (
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
        yield from archive.records(step, _COLUMNS)


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
