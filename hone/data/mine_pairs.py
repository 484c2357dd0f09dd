"""Preference pairs from the rollouts of a run: answers to one prompt whose scores differ."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.data.seeding import derive_seed
from hone.errors import DataError, did_you_mean

FORMS = ("messages", "tokens")
"""How pairs are written: chat messages, for any model; or the very tokens sampled, for models with the run's tokenizer."""

_STEP = re.compile(r"step_(\d+)\.jsonl")


@dataclass
class Mined:
    """What was found.

    Attributes:
        train: pairs to train on, one object a pair.
        val: held-out pairs, of other prompts.
        samples: answers read.
        prompts: different prompts among them.
        left_out: answers that could not be used, by reason.
    """

    train: list[dict[str, Any]] = field(default_factory=list)
    val: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    prompts: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def mine_pairs(
    run: Path,
    *,
    margin: float = 0.0,
    val_share: float = 0.1,
    per_prompt: int = 4,
    form: str | None = None,
    seed: int = 1,
) -> Mined:
    """Pair good with bad answers among the rollouts that a run has written (``trainer.rollout_dump_freq``).

    Of each prompt the best answer is paired with the worst, the second best with the second worst, and so on, as long as
    their scores differ by ``margin`` at least (and at all). Equal answers to a prompt count once. Prompts, not pairs, are
    divided between training and validation.

    Args:
        run: run directory.
        margin: least difference of scores in a pair.
        val_share: share of the prompts that go to validation, at least one of them when above 0.
        per_prompt: most pairs of one prompt.
        form: of :data:`FORMS`; None takes messages where the run's prompts are messages and its episodes one answer, else
            tokens. Answers cut off by the length limit can be written as tokens only: as a message they would end. So can
            episodes of several turns, with a mask of what the policy wrote: their messages alone do not say which tools
            the prompt showed.
        seed: of the division.

    Raises:
        DataError: no rollouts, no pair, too few prompts for a validation share, or an option out of bounds.
    """
    _check_options(margin, val_share, per_prompt, form)
    records = list(_records(run))
    plain = all(record.get("messages") and all(record["response_mask"]) for record in records)
    form = form or ("messages" if plain else "tokens")
    in_parts = {(record["uid"], record.get("index")) for record in records if record.get("part")}
    mined = Mined(samples=len(records))
    groups: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {}
    for record in records:
        reason = _unusable(record, form, in_parts)
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
    _check_found(mined, len(fruitful), run, margin, val_share)
    held_out = max(1, round(val_share * len(fruitful))) if val_share > 0 else 0
    mined.val = [pair for _, pairs in fruitful[:held_out] for pair in pairs]
    mined.train = [pair for _, pairs in fruitful[held_out:] for pair in pairs]
    return mined


def write_pairs(mined: Mined, out: Path) -> list[Path]:
    """Write ``out/train.parquet`` and, when there are held-out pairs, ``out/val.parquet``.

    Columns: ``prompt``, ``chosen``, ``rejected`` (messages, or token ids with ``chosen_mask`` and ``rejected_mask``, 1 where the
    policy wrote the token), ``score_chosen``, ``score_rejected``, ``margin``
    (their difference), ``data_source``, ``uid``.

    Raises:
        DataError: the folder cannot be written.
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
                path.unlink(missing_ok=True)  # of an earlier division, whose prompts may be training prompts now
    except OSError as error:
        raise DataError(f"cannot write: {error}", where=str(out), fix="choose another folder with --out") from error
    return written


def _check_options(margin: float, val_share: float, per_prompt: int, form: str | None) -> None:
    if not 0 <= val_share < 1:
        raise DataError(f"--val-share {val_share} is not a share from 0 to below 1", fix="--val-share 0.1")
    if not margin >= 0:
        raise DataError(f"--margin {margin} is below 0", why="the worse answer would be chosen", fix="--margin 0.5")
    if per_prompt < 1:
        raise DataError(f"--per-prompt {per_prompt} leaves no pair", fix="--per-prompt 4")
    if form is not None and form not in FORMS:
        raise DataError(f"unknown form '{form}'", where="--as", fix=did_you_mean(form, FORMS))


def _records(run: Path) -> Iterator[dict[str, Any]]:
    """The samples of all dumped steps, in order."""
    folder = run / "rollouts"
    files = [(int(match[1]), path) for path in folder.glob("*.jsonl") if (match := _STEP.fullmatch(path.name))]
    if not files:
        raise DataError(
            f"'{run}' has no rollouts",
            why="pairs are made of the answers that a run has written down",
            fix="name a run directory of `hone train`, and let it write samples: trainer.rollout_dump_freq=1",
        )
    for _, path in sorted(files):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"not JSON: {error}", where=f"{path}, line {number + 1}", fix="remove the line"
                ) from error


def _unusable(record: dict[str, Any], form: str, in_parts: set[tuple[str, int | None]]) -> str:
    """Why a sample cannot stand in a pair; empty when it can. ``in_parts`` names episodes that left several samples."""
    if record.get("error") or not isinstance(record.get("score"), int | float):
        return "not scored"
    if not record["response_ids"]:
        return "empty"
    if (record["uid"], record.get("index")) in in_parts:
        return "one of several parts of an episode whose history was rewritten"
    if form == "messages" and not all(record["response_mask"]):
        return "of several turns, which --as tokens can write"
    if form == "messages" and not record.get("messages"):
        return "its prompt is not messages"
    if form == "messages" and record["stop_reason"] != "stop":
        return "cut off"
    return ""


def _pairs(answers: list[dict[str, Any]], margin: float, most: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    ranked = sorted(answers, key=lambda record: -record["score"])
    for better, worse in list(zip(ranked, reversed(ranked), strict=True))[: min(most, len(ranked) // 2)]:
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


def _check_found(mined: Mined, fruitful: int, run: Path, margin: float, val_share: float) -> None:
    reasons = "".join(f"; {count} answers left out: {reason}" for reason, count in mined.left_out.items())
    numbers = f"{mined.samples} answers to {mined.prompts} prompts{reasons}"
    if not fruitful:
        raise DataError(
            f"no prompt has two answers whose scores differ by {margin:g} or more ({numbers})",
            where=str(run),
            fix="a smaller --margin, --as tokens where answers are cut off, more dumped steps "
            "(trainer.rollout_dump_freq=1) or more answers a prompt (actor_rollout_ref.rollout.n)",
        )
    if val_share > 0 and fruitful < 2:
        raise DataError(
            f"only one prompt gives pairs ({numbers})",
            where=str(run),
            why="training and validation pairs must be of different prompts",
            fix="--val-share 0, or a run with more prompts",
        )
