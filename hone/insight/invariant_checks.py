"""Always-on invariants as pure functions of their inputs. :mod:`hone.insight.invariants` holds their state.

D-ratio   on the first update after a rollout the ratio is 1
D-finite  rewards, advantages, log-probs, losses and gradient norms are finite
D-mask    a mask covers its response exactly and has at least one sampled token; masked tokens get no gradient
D-ids     the tokens trained on are the tokens the engine emitted
D-uid     every prompt group has n members
D-version all answers of a validation are by one version of the weights
D-sync    engine and trainer agree on log-probs as well as after the first weight sync (the canary)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.types import Trajectory
from hone.errors import InvariantError

Decode = Callable[[list[int]], str]

RATIO_WARNING = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}
"""Largest |log ratio| on the first update that raises no warning, by compute dtype."""
RATIO_ERROR = 0.05  # mean |log ratio| on the first update above which the run stops
_EXCERPT_TOKENS = 12


@dataclass(frozen=True)
class Gap:
    """Difference of two columns of log-probs on masked tokens."""

    largest: float  # max |a - b|; nan if either is nan
    mean: float  # mean |a - b|
    row: int  # row of the largest difference
    position: int  # position of the largest difference within its row


def token_hash(ids: Sequence[int] | Tensor) -> str:
    """Return a 128-bit fingerprint of token ids, as hexadecimal text; equal for a list and a tensor of any integer type."""
    values = torch.as_tensor(ids, dtype=torch.int64).cpu().contiguous()
    return hashlib.blake2b(values.numpy().astype("<i8").tobytes(), digest_size=16).hexdigest()


def log_prob_gap(a: Ragged, b: Ragged, mask: Ragged) -> Gap:
    """Compare two columns of log-probs where ``mask`` is 1. Rows must have equal lengths."""
    difference = (a.values.double().cpu() - b.values.double().cpu()).abs()
    chosen = mask.values.cpu().bool()
    if not bool(chosen.any()):
        return Gap(0.0, 0.0, 0, 0)
    # nan counts as the largest difference, so that it is reported
    ranked = torch.where(chosen, difference.nan_to_num(nan=torch.inf), -1.0)
    worst = int(ranked.argmax())
    row = int(torch.searchsorted(a.offsets, worst, right=True)) - 1
    return Gap(float(difference[chosen].max()), float(difference[chosen].mean()), row, worst - int(a.offsets[row]))


def describe_sample(batch: Batch | None, row: int, position: int | None = None, decode: Decode | None = None) -> str:
    """Name a sample in an error message: uid, index, and the tokens around ``position``, decoded if possible."""
    if batch is None:
        return f"row {row}"
    parts = [f"row {row}"]
    parts += [f"{name} {batch.objects(name)[row]}" for name in ("uid", "index") if name in batch]
    if "response_ids" in batch:
        ids = batch.ragged("response_ids").row(row).tolist()
        start = max(0, (position or 0) - _EXCERPT_TOKENS // 2)
        excerpt = ids[start : start + _EXCERPT_TOKENS]
        excerpt_text = repr(decode(excerpt)) if decode else str(excerpt)
        parts.append(f"tokens {start} to {start + len(excerpt)} of {len(ids)}: {excerpt_text}")
    return ", ".join(parts)


def require_groups(uids: Sequence[str], n: int) -> None:
    """Raise InvariantError, with the first ones, unless every uid occurs n times (D-uid)."""
    wrong_counts = {uid: count for uid, count in Counter(uids).items() if count != n}
    if wrong_counts:
        raise InvariantError(
            f"{len(wrong_counts)} prompt groups do not have n={n} members, e.g. "
            + ", ".join(f"{uid}: {count}" for uid, count in list(wrong_counts.items())[:3]),
            code="D-uid",
            why="group baselines would mix or lose samples",
            fix="give every dataset row a unique uid; if they are unique, report this as a bug",
        )


def require_version(trajectories: Sequence[Trajectory], version: int) -> None:
    """Raise InvariantError, with the first answer, unless every sampled token is by ``version`` of the weights
    (D-version).
    """
    for trajectory in trajectories:
        if set(trajectory.token_versions) - {-1, version}:
            first, last = trajectory.weight_versions
            raise InvariantError(
                f"answer {trajectory.index} to validation row {trajectory.uid} is by weights of version {first} to {last}, "
                f"not of {version}",
                why="the validation would mix two policies; this is an error of the program, not of the configuration",
                fix="report it with the log of the run; trainer.async_training.validation_share=0 validates between the steps",
                code="D-version",
            )


def require_masks(batch: Batch, decode: Decode | None = None) -> None:
    """Check D-mask: a mask has its response's length, only 0 and 1, and at least one 1; log-probs have the same length.

    ``batch``: columns ``response_ids``, ``response_mask`` and, when present, ``rollout_log_probs``, which must be
    aligned with the response, and ``token_versions`` (:func:`require_sampled`).

    Raises InvariantError: a sample breaks the rule; the message names the first one.
    """
    ids, mask = batch.ragged("response_ids"), batch.ragged("response_mask")
    for row in torch.nonzero(ids.lengths != mask.lengths).flatten().tolist():
        _mask_error(
            f"the mask has {int(mask.lengths[row])} entries, the response {int(ids.lengths[row])}",
            batch,
            row,
            None,
            decode,
        )
    values = mask.values.cpu()
    for place in torch.nonzero((values != 0) & (values != 1)).flatten().tolist():
        row, position = locate(mask, place)
        _mask_error(f"the mask contains {values[place].item()}, not 0 or 1", batch, row, position, decode)
    sums = torch.zeros(len(mask), dtype=torch.int64).index_add_(0, row_numbers(mask), values.long())
    for row in torch.nonzero(sums == 0).flatten().tolist():
        _mask_error("no token of the response was sampled by the policy", batch, row, None, decode)
    if "rollout_log_probs" in batch:
        log_probs = batch.ragged("rollout_log_probs")
        for row in torch.nonzero(ids.lengths != log_probs.lengths).flatten().tolist():
            count = int(log_probs.lengths[row])
            _mask_error(f"{count} log-probs for {int(ids.lengths[row])} tokens", batch, row, None, decode)
    require_sampled(batch, decode)


def require_sampled(batch: Batch, decode: Decode | None = None) -> None:
    """Check D-mask: no token that the policy did not sample is in the loss.

    ``batch``: columns ``response_ids`` and ``response_mask``; ``token_versions``, where present, is -1 on tokens of
    tools, users and templates.

    Raises InvariantError: such a token has mask 1; the message counts them and shows the first.
    """
    if "token_versions" not in batch:
        return
    mask, versions = batch.ragged("response_mask"), batch.ragged("token_versions")
    given = (mask.values.cpu() == 1) & (versions.values.cpu() < 0)
    places = torch.nonzero(given).flatten().tolist()
    if places:
        rows = {locate(mask, place)[0] for place in places}
        row, position = locate(mask, places[0])
        what = f"{len(places)} tokens in {len(rows)} rows are in the loss and were not sampled by the policy: tool results, user turns "
        _mask_error(what + "or template tokens", batch, row, position, decode)


def _mask_error(what: str, batch: Batch, row: int, position: int | None, decode: Decode | None) -> None:
    raise InvariantError(
        what,
        code="D-mask",
        where=describe_sample(batch, row, position, decode),
        why="the loss would count tokens that the policy did not sample, or none",
        fix="check the agent loop or the engine that produced this sample",
    )


def require_no_masked_gradient(largest: float) -> None:
    """Check D-mask: no token with response mask 0 gets a gradient.

    ``largest``: largest absolute gradient of the loss with respect to the log-prob of such a token, over an update.

    Raises InvariantError: it is above 0.
    """
    if largest > 0:
        raise InvariantError(
            f"masked tokens have a gradient of up to {largest:.3g}",
            code="D-mask",
            why="tool output and padding would be trained on",
            fix="multiply the loss by the mask before aggregating, with finite values under it",
        )


def require_ids(batch: Batch, emitted: Sequence[str], decode: Decode | None = None) -> None:
    """Check D-ids: prompt and response ids of each row hash to the engine's tokens (:func:`token_hash` of both together).

    Raises InvariantError: a sample differs; the message names the first one.
    """
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    for row, expected in enumerate(emitted):
        if token_hash(torch.cat([prompts.row(row), responses.row(row)])) != expected:
            raise InvariantError(
                "the tokens of the batch are not those that were sampled",
                code="D-ids",
                where=describe_sample(batch, row, None, decode),
                why="log-probs, masks and rewards would belong to other tokens",
                fix="do not re-tokenize text between generation and training; keep the columns of a row together",
            )


def nonfinite_places(values: Tensor | Ragged) -> list[tuple[int, int]]:
    """Return (row, position) of every nan and infinity; position is 0 for a vector of one value per row."""
    if isinstance(values, Ragged):
        return [locate(values, place) for place in torch.nonzero(~values.values.isfinite()).flatten().tolist()]
    flat = values.reshape(len(values), -1) if values.dim() else values.reshape(1, 1)
    return [(row, position) for row, position in torch.nonzero(~flat.isfinite()).tolist()]


def row_numbers(column: Ragged) -> Tensor:
    return torch.arange(len(column)).repeat_interleave(column.lengths)


def locate(column: Ragged, place: int) -> tuple[int, int]:
    row = int(torch.searchsorted(column.offsets, place, right=True)) - 1
    return row, place - int(column.offsets[row])
