"""Always-on invariants of a run: what stops it, what is tolerated, and the state between steps.

A broken invariant raises :class:`~hone.errors.InvariantError` with the offending sample. Tolerated violations are logged with
their sample and counted; :meth:`Invariants.report` moves the counts to ``invariant/<id>`` in the metrics.

    | id       | tolerated                                        | stops the run                                      |
    |----------|--------------------------------------------------|----------------------------------------------------|
    | D-ratio  | max > 1e-3 in float32, > 0.05 in bfloat16        | mean > 0.05                                        |
    | D-finite | the update is skipped, the batch dumped          | three times in a row                               |
    | D-mask, D-ids, D-uid, D-version | never                     | always                                             |
    | D-sync   | never                                            | gap > 10 x that of the first sync; engine unchanged|

The invariants, each a pure function of its inputs:

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
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.types import Trajectory
from hone.errors import InvariantError
from hone.insight.metrics import MetricStore

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


__all__ = ["MASKED_GRADIENT", "RATIO_MAX", "RATIO_MEAN", "Invariants", "Violation", "token_hash"]

logger = logging.getLogger(__name__)

RATIO_MAX, RATIO_MEAN = "ratio/max_abs_log", "ratio/mean_abs_log"
"""Statistics of an update that :meth:`Invariants.check_first_ratio` reads."""
MASKED_GRADIENT = "gradient/max_masked"
"""Statistic of an update that :meth:`Invariants.check_updates` reads: largest gradient of a token with response mask 0."""

CANARY_FACTOR = 10.0
CANARY_FLOOR = {"float32": 1e-4, "bfloat16": 5e-3, "float16": 1e-3}
"""Mean |log-prob gap| that rounding alone explains; smaller baselines are raised to this."""


class Update(Protocol):
    """Result of an optimizer update: see ``hone.training.objectives.UpdateResult``."""

    @property
    def grad_norm(self) -> float: ...
    @property
    def applied(self) -> bool: ...
    @property
    def overflow(self) -> bool: ...
    @property
    def statistics(self) -> Sequence[Mapping[str, tuple[Any, float]]]: ...


@dataclass(frozen=True)
class Violation:
    """A tolerated violation."""

    code: str
    message: str  # description with numbers
    where: str = ""  # sample concerned


class Invariants:
    """Check a run's invariants and keep their state between steps.

    >>> invariants = Invariants("float32")
    >>> invariants.check_groups(["a", "a", "b", "b"], n=2)

    Args:
        dtype: compute dtype of the policy, ``float32`` or ``bfloat16``; it decides how much rounding may explain.
        decode: token ids to text, for messages; None shows ids.
        dump: called with a name and the batch when a value is not finite; writes it and returns the path.
        max_nonfinite: number of consecutive non-finite results of one stage that stops the run.
    """

    def __init__(
        self,
        dtype: str = "float32",
        *,
        decode: Decode | None = None,
        dump: Callable[[str, Batch], Path] | None = None,
        max_nonfinite: int = 3,
    ) -> None:
        self._ratio_warning, self._canary_floor = RATIO_WARNING[dtype], CANARY_FLOOR[dtype]
        self._decode, self._dump, self._max_nonfinite = decode, dump, max_nonfinite
        self._nonfinite: Counter[str] = Counter()
        self._baseline: float | None = None
        self._anchor: tuple[Tensor, Tensor] | None = None
        self._counts: Counter[str] = Counter()

    # every step, before the update -----------------------------------------------------------------------------------

    def check_groups(self, uids: Sequence[str], n: int) -> None:
        require_groups(uids, n)

    def check_mask(self, batch: Batch) -> None:
        require_masks(batch, self._decode)

    def check_ids(self, batch: Batch, emitted: Sequence[str] | None = None) -> None:
        """Check D-ids and D-mask before an update: the rows hold the sampled tokens, and only these are in the loss.

        ``emitted``: :func:`token_hash` of prompt and response of each row, taken where they were sampled; None takes it
        from the ``trajectory`` column, which then guards the path from trajectory to batch and through it.
        """
        if emitted is None:
            emitted = [token_hash([*t.prompt_ids, *t.response_ids]) for t in batch.objects("trajectory")]
        require_ids(batch, emitted, self._decode)
        require_sampled(batch, self._decode)

    def check_finite(self, stage: str, values: Tensor | Ragged | float, batch: Batch | None = None) -> Violation | None:
        """Check D-finite: the values of a stage have no nan and no infinity.

        Args:
            stage: name of the check; consecutive failures are counted per name.
            values: one row per sample, or a single number.

        Returns:
            None if all values are finite, else the violation: the caller must then skip the update.

        Raises:
            InvariantError: this is the ``max_nonfinite``-th consecutive failure.
        """
        places = nonfinite_places(values if isinstance(values, Ragged) else torch.as_tensor(values))
        if not places:
            self._nonfinite[stage] = 0
            return None
        row, position = places[0]
        where = describe_sample(batch, row, position, self._decode) if batch is not None else stage
        return self._not_finite(stage, f"{len(places)} values of {stage} are not finite", where, batch)

    # the update ------------------------------------------------------------------------------------------------------

    def check_first_ratio(self, update: Update, metrics: MetricStore) -> Violation | None:
        """Check D-ratio on the statistics of the first update; logs ``actor/first_ratio_max_abs_log``."""
        largest = [float(statistics[RATIO_MAX][0]) for statistics in update.statistics if RATIO_MAX in statistics]
        means = [
            (float(statistics[RATIO_MEAN][0]), statistics[RATIO_MEAN][1])
            for statistics in update.statistics
            if RATIO_MEAN in statistics
        ]
        if not largest or not means:
            raise ValueError(f"the update has no statistics {RATIO_MAX} and {RATIO_MEAN}")
        for value in largest:
            metrics.add("actor/first_ratio_max_abs_log", value)
        mean = sum(value * weight for value, weight in means) / sum(weight for _, weight in means)
        worst = float(torch.tensor(largest).max())
        if not mean <= RATIO_ERROR:
            raise InvariantError(
                f"|log ratio| is {mean:.3g} on average (largest {worst:.3g}) on the first update, not 0",
                code="D-ratio",
                why="the updated policy is not the one that sampled: tokens, masks, temperature or weights differ",
                fix="see training/rollout_probs_diff_mean: if it is large, check the engine, else the trainer",
            )
        limit = self._ratio_warning
        if worst <= limit:
            return None
        message = f"|log ratio| reaches {worst:.3g} on the first update (mean {mean:.3g}); expected <= {limit}"
        return self._tolerate(Violation("D-ratio", message, ""))

    def check_updates(self, role: str, updates: Sequence[Update], batch: Batch | None = None) -> None:
        """Check D-finite and D-mask: count updates skipped for a non-finite loss or gradient; no masked token gets a gradient.

        Raises:
            InvariantError: ``max_nonfinite`` consecutive updates of this role were skipped, or a masked token got a gradient.
        """
        for update in updates:
            for statistics in update.statistics:
                if MASKED_GRADIENT in statistics:
                    require_no_masked_gradient(float(statistics[MASKED_GRADIENT][0]))
            if update.applied:
                self._nonfinite[role] = 0
            elif not update.overflow:  # one that a smaller scale of the loss avoids is counted as a metric
                message = f"the gradient norm of the {role} is {update.grad_norm}; the update was skipped"
                self._not_finite(role, message, role, batch)

    # the weight sync -------------------------------------------------------------------------------------------------

    def check_canary(
        self,
        engine: Ragged,
        trainer: Ragged,
        batch: Batch | None = None,
        *,
        mask: Ragged | None = None,
        fixed: bool = False,
    ) -> float:
        """Check D-sync: engine and trainer agree on log-probs about as well as after the first sync.

        Args:
            trainer: log-probs that the trainer computes with the weights that the engine should have.
            batch: samples; ``batch.response_mask`` selects the tokens unless ``mask`` is given.
            fixed: whether the rows are the same fixed prompts at every call. Then an engine whose numbers do not change in the
                last bit while the trainer's do has not received the weights, however small the gap still is.

        Returns:
            The mean |gap| in nats.

        Raises:
            InvariantError: the gap is more than 10 times the first one (and more than rounding explains), or, with
                ``fixed``, the engine's numbers do not change.
        """
        if mask is None:
            mask = (
                batch.ragged("response_mask")
                if batch is not None
                else engine.with_values(torch.ones_like(engine.values))
            )
        gap = log_prob_gap(engine, trainer, mask)
        if self._baseline is None:
            self._baseline = gap.mean
        limit = CANARY_FACTOR * max(self._baseline, self._canary_floor)
        if not gap.mean <= limit:
            raise InvariantError(
                f"engine and trainer differ by {gap.mean:.3g} nats per token (largest {gap.largest:.3g}); "
                f"after the first weight sync it was {self._baseline:.3g}, the limit is {limit:.3g}",
                code="D-sync",
                where=describe_sample(batch, gap.row, gap.position, self._decode),
                why="the engine samples from weights that are not the trainer's",
                fix="check that every weight is published after each update, and that temperature and dtype agree",
            )
        if fixed:
            self._check_moving(engine.values.detach().cpu().double(), trainer.values.detach().cpu().double())
        return gap.mean

    def _check_moving(self, engine: Tensor, trainer: Tensor) -> None:
        if self._anchor is None or not torch.equal(engine, self._anchor[0]):
            self._anchor = (engine.clone(), trainer.clone())
            return
        moved = float((trainer - self._anchor[1]).abs().max())
        if moved > self._canary_floor:
            raise InvariantError(
                f"the trainer's log-probs of the canary prompts moved by {moved:.3g} nats, the engine's by 0",
                code="D-sync",
                why="the engine still samples from old weights",
                fix="check that load_weights runs after each update and covers every parameter",
            )

    # state -----------------------------------------------------------------------------------------------------------

    def report(self, metrics: MetricStore) -> None:
        """Add the tolerated violations since the last call as ``invariant/<id>``."""
        for code, count in sorted(self._counts.items()):
            metrics.add(f"invariant/{code}", count)
        self._counts.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain JSON values."""
        return {
            "nonfinite": {stage: count for stage, count in sorted(self._nonfinite.items()) if count},
            "baseline": self._baseline,
            "anchor": None if self._anchor is None else [side.tolist() for side in self._anchor],
            "counts": dict(sorted(self._counts.items())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._nonfinite = Counter(state["nonfinite"])
        self._baseline = state["baseline"]
        anchor = state["anchor"]
        self._anchor = None if anchor is None else (_column(anchor[0]), _column(anchor[1]))
        self._counts = Counter(state["counts"])

    # judging ---------------------------------------------------------------------------------------------------------

    def _not_finite(self, stage: str, message: str, where: str, batch: Batch | None) -> Violation:
        self._nonfinite[stage] += 1
        if batch is not None and self._dump is not None:
            message += f"; the batch was written to {self._dump(stage, batch)}"
        if self._nonfinite[stage] >= self._max_nonfinite:
            raise InvariantError(
                f"{message} ({self._nonfinite[stage]} times in a row)",
                code="D-finite",
                where=where,
                why="no update has been applied since; the run would continue without learning",
                fix="lower the learning rate, look for extreme rewards, or compute in float32",
            )
        return self._tolerate(Violation("D-finite", message, where))

    def _tolerate(self, finding: Violation) -> Violation:
        self._counts[finding.code] += 1
        logger.warning("%s %s%s", finding.code, f"{finding.where}: " if finding.where else "", finding.message)
        return finding


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
