"""Always-on invariants of a run: what stops it, what is tolerated, and the state between steps.

A broken invariant raises :class:`~hone.errors.InvariantError` with the offending sample. Tolerated violations are logged with
their sample and counted; :meth:`Invariants.report` moves the counts to ``invariant/<id>`` in the metrics.

    | id       | tolerated                                        | stops the run                                      |
    |----------|--------------------------------------------------|----------------------------------------------------|
    | D-ratio  | max > 1e-3 in float32, > 0.05 in bfloat16        | mean > 0.05                                        |
    | D-finite | the update is skipped, the batch dumped          | three times in a row                               |
    | D-mask, D-ids, D-uid, D-version | never                     | always                                             |
    | D-sync   | never                                            | gap > 10 x that of the first sync; engine unchanged|
"""

from __future__ import annotations

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
from hone.errors import InvariantError
from hone.insight.invariant_checks import (
    RATIO_ERROR,
    RATIO_WARNING,
    Decode,
    describe_sample,
    log_prob_gap,
    nonfinite_places,
    require_groups,
    require_ids,
    require_masks,
    require_no_masked_gradient,
    require_sampled,
    token_hash,
)
from hone.insight.metrics import MetricStore

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
    """Result of an optimizer update: see ``hone.training.updates.UpdateResult``."""

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

    def check_ratio(self, new: Ragged, old: Ragged, mask: Ragged, batch: Batch | None = None) -> Violation | None:
        """Check D-ratio on log-probs of the first update and of the rollout, aligned with ``mask``."""
        gap = log_prob_gap(new, old, mask)
        return self._judge_ratio(gap.largest, gap.mean, describe_sample(batch, gap.row, gap.position, self._decode))

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
        return self._judge_ratio(float(torch.tensor(largest).max()), mean, "")

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

    def _judge_ratio(self, largest: float, mean: float, where: str) -> Violation | None:
        if not mean <= RATIO_ERROR:
            raise InvariantError(
                f"|log ratio| is {mean:.3g} on average (largest {largest:.3g}) on the first update, not 0",
                code="D-ratio",
                where=where,
                why="the updated policy is not the one that sampled: tokens, masks, temperature or weights differ",
                fix="see training/rollout_probs_diff_mean: if it is large, check the engine, else the trainer",
            )
        if largest <= self._ratio_warning:
            return None
        limit = self._ratio_warning
        message = f"|log ratio| reaches {largest:.3g} on the first update (mean {mean:.3g}); expected <= {limit}"
        return self._tolerate(Violation("D-ratio", message, where))

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
