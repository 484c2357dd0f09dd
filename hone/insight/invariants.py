"""The always-on invariants of a run: what stops it, what is tolerated, and what is remembered between steps.

A broken invariant raises :class:`~hone.errors.InvariantError` with the offending sample. What the table tolerates is
logged with its sample and counted; :meth:`Invariants.report` moves the counts to ``invariant/<id>`` in the metrics.

    | id       | tolerated                                        | stops the run                                      |
    |----------|--------------------------------------------------|----------------------------------------------------|
    | D-ratio  | max > 1e-3 in float32, > 0.05 in bfloat16        | mean > 0.05                                        |
    | D-finite | the update is skipped, the batch dumped          | three times in a row                               |
    | D-mask, D-ids, D-uid | never                                | always                                             |
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
    token_hash,
)
from hone.insight.metrics import MetricStore

__all__ = ["RATIO_MAX", "RATIO_MEAN", "Finding", "Invariants", "require_no_masked_gradient", "token_hash"]

logger = logging.getLogger(__name__)

RATIO_MAX, RATIO_MEAN = "ratio/max_abs_log", "ratio/mean_abs_log"
"""Statistics of an update that :meth:`Invariants.check_first_ratio` reads."""

CANARY_FACTOR = 10.0
CANARY_FLOOR = {"float32": 1e-4, "bfloat16": 5e-3}
"""Mean |log-prob gap| that rounding alone explains; a smaller baseline counts as this much."""


class Update(Protocol):
    """What an optimizer update left: see ``hone.training.engine.UpdateResult``."""

    @property
    def grad_norm(self) -> float: ...
    @property
    def applied(self) -> bool: ...
    @property
    def statistics(self) -> Sequence[Mapping[str, tuple[Any, float]]]: ...


@dataclass(frozen=True)
class Finding:
    """A tolerated violation.

    Attributes:
        code: of the invariant.
        message: what was seen, with numbers.
        where: the sample concerned.
    """

    code: str
    message: str
    where: str = ""


class Invariants:
    """Checks a run's invariants and remembers what they need between steps.

    >>> invariants = Invariants("float32")
    >>> invariants.check_groups(["a", "a", "b", "b"], n=2)

    Args:
        dtype: compute dtype of the policy, ``float32`` or ``bfloat16``; it decides what rounding may explain.
        decode: token ids to text, for messages; None shows ids.
        dump: called with a name and the batch when something is not finite; writes it and returns the path.
        max_nonfinite: how many times in a row one stage may be not finite before the run stops.
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
        """D-uid: every prompt group has n members."""
        require_groups(uids, n)

    def check_mask(self, batch: Batch) -> None:
        """D-mask: see :func:`~hone.insight.invariant_checks.require_masks`."""
        require_masks(batch, self._decode)

    def check_ids(self, batch: Batch, emitted: Sequence[str] | None = None) -> None:
        """D-ids: the rows hold the tokens that were sampled.

        Args:
            batch: with ``prompt_ids`` and ``response_ids``.
            emitted: :func:`token_hash` of prompt and response of each row, taken where they were sampled; None takes it
                from the ``trajectory`` column, which then guards the path from trajectory to batch and through it.
        """
        if emitted is None:
            emitted = [token_hash([*t.prompt_ids, *t.response_ids]) for t in batch.objects("trajectory")]
        require_ids(batch, emitted, self._decode)

    def check_finite(self, stage: str, values: Tensor | Ragged | float, batch: Batch | None = None) -> Finding | None:
        """D-finite: no nan and no infinity in what a stage computed.

        Args:
            stage: names the check; repetitions are counted by it.
            values: one row a sample, or a single number.
            batch: the samples, for the message and the dump.

        Returns:
            None when all is finite, else the finding: the update must then be skipped.

        Raises:
            InvariantError: it happened ``max_nonfinite`` times in a row.
        """
        places = nonfinite_places(values if isinstance(values, Ragged) else torch.as_tensor(values))
        if not places:
            self._nonfinite[stage] = 0
            return None
        row, position = places[0]
        where = describe_sample(batch, row, position, self._decode) if batch is not None else stage
        return self._not_finite(stage, f"{len(places)} values of {stage} are not finite", where, batch)

    # the update ------------------------------------------------------------------------------------------------------

    def check_ratio(self, new: Ragged, old: Ragged, mask: Ragged, batch: Batch | None = None) -> Finding | None:
        """D-ratio, from log-probs of the first update and of the rollout, aligned with ``mask``."""
        gap = log_prob_gap(new, old, mask)
        return self._judge_ratio(gap.largest, gap.mean, describe_sample(batch, gap.row, gap.position, self._decode))

    def check_first_ratio(self, update: Update, metrics: MetricStore) -> Finding | None:
        """D-ratio, from the statistics of the first update; logs ``actor/first_ratio_max_abs_log``."""
        largest = [float(seen[RATIO_MAX][0]) for seen in update.statistics if RATIO_MAX in seen]
        means = [(float(seen[RATIO_MEAN][0]), seen[RATIO_MEAN][1]) for seen in update.statistics if RATIO_MEAN in seen]
        if not largest or not means:
            raise ValueError(f"the update has no statistics {RATIO_MAX} and {RATIO_MEAN}")
        for value in largest:
            metrics.add("actor/first_ratio_max_abs_log", value)
        mean = sum(value * weight for value, weight in means) / sum(weight for _, weight in means)
        return self._judge_ratio(float(torch.tensor(largest).max()), mean, "")

    def check_updates(self, role: str, updates: Sequence[Update], batch: Batch | None = None) -> None:
        """D-finite: count updates that were skipped because loss or gradient was not finite.

        Raises:
            InvariantError: ``max_nonfinite`` updates of this role in a row were skipped.
        """
        for update in updates:
            if update.applied:
                self._nonfinite[role] = 0
            else:
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
        """D-sync: engine and trainer give the same tokens the same log-probs, as far as they did after the first sync.

        Args:
            engine: log-probs as the engine reports them.
            trainer: log-probs as the trainer computes them with the weights that the engine should have.
            batch: the samples; its ``response_mask`` chooses the tokens unless ``mask`` does.
            mask: 1 on tokens to compare.
            fixed: the rows are the same fixed prompts at every call; then an engine whose numbers stay the same to the
                last bit while the trainer's move has not received the weights, however small the gap still is.

        Returns:
            The mean |gap| in nats.

        Raises:
            InvariantError: the gap is more than 10 times the first one (and more than rounding explains), or, with
                ``fixed``, the engine stands still.
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
                f"engine and trainer differ by {gap.mean:.3g} nats a token (largest {gap.largest:.3g}); "
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
                f"the trainer's log-probs of the canary prompts moved by {moved:.3g} nats, the engine's not at all",
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
        """What a resumed run must remember, as plain JSON values."""
        return {
            "nonfinite": {stage: count for stage, count in sorted(self._nonfinite.items()) if count},
            "baseline": self._baseline,
            "anchor": None if self._anchor is None else [side.tolist() for side in self._anchor],
            "counts": dict(sorted(self._counts.items())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up :meth:`state_dict`."""
        self._nonfinite = Counter(state["nonfinite"])
        self._baseline = state["baseline"]
        anchor = state["anchor"]
        self._anchor = None if anchor is None else (_column(anchor[0]), _column(anchor[1]))
        self._counts = Counter(state["counts"])

    # judging ---------------------------------------------------------------------------------------------------------

    def _judge_ratio(self, largest: float, mean: float, where: str) -> Finding | None:
        if not mean <= RATIO_ERROR:
            raise InvariantError(
                f"|log ratio| is {mean:.3g} on average (largest {largest:.3g}) on the first update, not 0",
                code="D-ratio",
                where=where,
                why="the policy updated is not the one that sampled: tokens, masks, temperature or weights differ",
                fix="look at training/rollout_probs_diff_mean: if it is large the engine is at fault, else the trainer",
            )
        if largest <= self._ratio_warning:
            return None
        limit = self._ratio_warning
        message = f"|log ratio| reaches {largest:.3g} on the first update (mean {mean:.3g}); expected <= {limit}"
        return self._tolerate(Finding("D-ratio", message, where))

    def _not_finite(self, stage: str, message: str, where: str, batch: Batch | None) -> Finding:
        self._nonfinite[stage] += 1
        if batch is not None and self._dump is not None:
            message += f"; the batch is in {self._dump(stage, batch)}"
        if self._nonfinite[stage] >= self._max_nonfinite:
            raise InvariantError(
                f"{message} ({self._nonfinite[stage]} times in a row)",
                code="D-finite",
                where=where,
                why="no update has been applied since; the run would burn time and learn nothing",
                fix="lower the learning rate, look for extreme rewards, or compute in float32",
            )
        return self._tolerate(Finding("D-finite", message, where))

    def _tolerate(self, finding: Finding) -> Finding:
        self._counts[finding.code] += 1
        logger.warning("%s %s%s", finding.code, f"{finding.where}: " if finding.where else "", finding.message)
        return finding


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
