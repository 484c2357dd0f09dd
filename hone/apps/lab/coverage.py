"""Reports about the coverage ledger of a run, bias by dropped prompts, and their pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hone.insight.coverage import EQUAL_ANSWERS, Coverage, EndedDraw, Fate, Stage, shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes


CHARACTERISTICS = ("prompt_tokens", "tokens", "reward", "source")
PERMUTATIONS = 10_000
SIGNIFICANT = 0.01
"""Largest corrected p-value of a bias."""
MODERATE_DELTA = 0.33
"""Smallest |Cliff's delta| of a bias (Romano et al. 2006: medium)."""
MODERATE_VARIATION = 0.2
"""Smallest total variation of a bias in sources, beyond that of random drops."""
DROPPED = "dropped"
"""All fates but trained, together."""
FEWEST_ROWS = 5
"""Fewest dropped, and trained, rows for a test."""
_PERIOD, _MOST_PERIODS = 64, 50  # draws per period at least; number of periods at most
_MOST_DRAWS = 2_000  # draws of rows with and without a dropped draw, each, that a test uses
_AT_A_TIME = 500  # permutations in memory at a time
_ENOUGH_EXTREME = 100  # permutations as extreme as the data after which a test stops


@dataclass(frozen=True)
class Comparison:
    """One characteristic of dropped and trained prompts."""

    fate: str  # fate of the dropped draws compared; :data:`DROPPED` for all of them
    characteristic: str  # ``prompt_tokens``, ``tokens``, ``reward`` or ``source``
    dropped: int  # number of dropped draws compared
    trained: int  # number of trained draws compared
    dropped_mean: float | None  # mean of the dropped draws; None for sources
    trained_mean: float | None  # mean of the trained draws; None for sources
    # Cliff's delta, positive if dropped draws have larger values; for sources the total variation beyond chance
    effect: float
    p: float  # p-value after Holm's correction
    biased: bool  # significant and at least of moderate size
    # mean of the dropped draws by fate; for sources the share in dropped minus the share in trained draws
    details: dict[str, float]


@dataclass(frozen=True)
class BiasReport:
    """Result of all comparisons."""

    dropped: int  # number of dropped draws
    trained: int  # number of trained draws
    comparisons: list[Comparison]  # characteristics with enough values for a test
    by_design: int  # number of draws that dynamic sampling filtered by their reward


def compare_dropped(draws: Sequence[EndedDraw], *, permutations: int = PERMUTATIONS, seed: int = 0) -> BiasReport:
    """Compare dropped with trained draws in prompt length, response length, reward and source.

    All dropped draws are compared together, and those of each fate alone: a bias of one fate can vanish among the others.
    Three things make the permutation test safe on real runs:

    - Values are compared within periods of consecutive draws, by rank. So a trend of the run, such as answers that grow while
      fewer prompts fail, is not a difference.
    - All draws of one row are permuted together. So a prompt that meets the same fate in every epoch counts once.
    - A difference is a bias only if it is significant after Holm's correction and at least of moderate size.

    The result is deterministic.
    """
    ordered = sorted(draws, key=lambda ended: ended.draw)
    trained = sum(ended.fate == Fate.TRAINED for ended in ordered)
    fates = sorted({ended.fate for ended in ordered} - {Fate.TRAINED.value})
    by_design = [ended.reward for ended in ordered if ended.reason == EQUAL_ANSWERS]
    # differences that dynamic sampling makes are by design: draws with the reward of a filtered one are left out
    left_out = {"reward": set(by_design)}
    tested: list[tuple[str, str, list[EndedDraw], float, float]] = []
    for side, name in product([DROPPED, *fates] if len(fates) > 1 else [DROPPED], CHARACTERISTICS):
        unusable = {None} | left_out.get(name, set())
        sides = {Fate.TRAINED.value, *(fates if side == DROPPED else [side])}
        chosen = [ended for ended in ordered if ended.fate in sides and getattr(ended, name) not in unusable]
        table = _Table.build(name, chosen, np.random.default_rng([seed, len(tested)]))
        if table is not None:
            tested.append((side, name, chosen, *table.test(permutations)))
    corrected = _holm([p for *_, p in tested])
    comparisons = [
        _comparison(side, name, chosen, effect, p)
        for (side, name, chosen, effect, _), p in zip(tested, corrected, strict=True)
    ]
    return BiasReport(len(ordered) - trained, trained, comparisons, len(by_design))


class _Table:
    """Values of one characteristic, ready for permutations: one line per draw, the draws of a row together.

    ``labels [N]`` are 1 for dropped draws. ``values [N, C]`` are the rank within its period, or one column per source, centred
    in each period. ``starts`` is the first line of each row, then N.
    """

    def __init__(self, labels: np.ndarray, values: np.ndarray, starts: np.ndarray, rng: np.random.Generator) -> None:
        self.labels, self.values, self.starts, self.rng = labels, values, starts, rng

    @classmethod
    def build(cls, name: str, chosen: list[EndedDraw], rng: np.random.Generator) -> _Table | None:
        """Return the table; None if too few rows were dropped or trained, or all values are equal."""
        labels = np.array([ended.fate != Fate.TRAINED for ended in chosen], dtype=bool)
        rows = np.array([ended.row for ended in chosen], dtype=np.int64)
        periods = np.arange(len(chosen)) * max(1, min(_MOST_PERIODS, len(chosen) // _PERIOD)) // max(1, len(chosen))
        values = np.zeros((len(chosen), 1))
        categories: np.ndarray | None = None
        if name == "source":
            categories = np.unique([ended.source for ended in chosen], return_inverse=True)[1]
            values = np.eye(int(categories.max(initial=-1)) + 1)[categories]
        else:
            values[:, 0] = [getattr(ended, name) for ended in chosen]
        kept = np.zeros(len(chosen), dtype=bool)
        for period in np.unique(periods):
            inside = periods == period
            if labels[inside].any() and not labels[inside].all():
                kept |= inside
                values[inside] = _centred(values[inside], ranked=categories is None)
        kept &= _sampled_rows(rows, labels, kept, rng)
        if min(len(np.unique(rows[kept & side])) for side in (labels, ~labels)) < FEWEST_ROWS:
            return None
        if np.ptp(values[kept], axis=0).max(initial=0.0) == 0.0:
            return None
        order = np.flatnonzero(kept)[np.argsort(rows[kept], kind="stable")]
        starts = np.flatnonzero(np.diff(rows[order], prepend=-1, append=-1))
        return cls(labels[order], values[order], starts, rng)

    def test(self, permutations: int) -> tuple[float, float]:
        """Return effect and p-value; stop early once it is certain that p is not small (Besag and Clifford 1991)."""
        observed = self._statistic(self.labels.astype(np.float64)[None] @ self.values)[0]
        null = np.zeros(0)
        extreme = 0
        while len(null) < permutations and extreme < _ENOUGH_EXTREME:
            sums = self._permuted_sums(min(_AT_A_TIME, permutations - len(null)))
            null = np.concatenate([null, self._statistic(sums)])
            extreme = int((np.abs(null) >= abs(observed) * (1 - 1e-9)).sum())  # equal up to rounding counts as well
        p = extreme / len(null) if extreme >= _ENOUGH_EXTREME else (1 + extreme) / (1 + len(null))
        chance = float(null.mean()) if self.values.shape[1] > 1 else 0.0
        return float(observed) - chance, p

    def _statistic(self, sums: np.ndarray) -> np.ndarray:
        """Return the difference of the means, or the total variation, of sums over dropped draws. Shape [B, C] to [B]."""
        count, total = int(self.labels.sum()), self.values.sum(axis=0)
        difference = sums / count - (total - sums) / (len(self.labels) - count)
        return difference[:, 0] if difference.shape[1] == 1 else np.abs(difference).sum(axis=1) / 2

    def _permuted_sums(self, permutations: int) -> np.ndarray:
        """Return the sums of the values under permuted labels.

        Rows with the same number of draws exchange their labels, which are then shuffled within each row. Shape [B, C].
        """
        sums = np.zeros((permutations, self.values.shape[1]))
        sizes = np.diff(self.starts)
        for size in np.unique(sizes):
            lines = self.starts[:-1][sizes == size][:, None] + np.arange(size)
            labels, values = self.labels[lines].astype(np.uint8), self.values[lines.ravel()]
            if size == 1:
                exchanged = self.rng.permuted(np.tile(labels[:, 0], (permutations, 1)), axis=1)
            else:
                order = self.rng.permuted(np.tile(np.arange(len(lines), dtype=np.int32), (permutations, 1)), axis=1)
                exchanged = self.rng.permuted(labels[order], axis=2)
            sums += exchanged.reshape(permutations, -1).astype(np.float64) @ values
        return sums


def _centred(values: np.ndarray, *, ranked: bool) -> np.ndarray:
    """Return values of a period minus their mean; ranked: mid-ranks scaled so that a difference of means is Cliff's delta."""
    if ranked:
        _, inverse, counts = np.unique(values[:, 0], return_inverse=True, return_counts=True)
        middle = np.cumsum(counts) - (counts - 1) / 2
        values = (2.0 * middle[inverse] / len(values))[:, None]
    return values - values.mean(axis=0)


def _sampled_rows(rows: np.ndarray, labels: np.ndarray, kept: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the lines of a random choice of whole rows: bounded numbers of rows with and without a dropped draw."""
    with_dropped = np.unique(rows[kept & labels])
    chosen = []
    for group in (with_dropped, np.setdiff1d(rows[kept], with_dropped)):
        shuffled = rng.permutation(group)
        line_counts = np.unique(rows[kept & np.isin(rows, group)], return_counts=True)[1]
        sizes = dict(zip(group.tolist(), line_counts.tolist(), strict=True))
        total = np.cumsum([sizes[row] for row in shuffled.tolist()])
        chosen.append(shuffled[: max(1, int(np.searchsorted(total, _MOST_DRAWS, side="right")))])
    return np.isin(rows, np.concatenate(chosen))


def _holm(p_values: Sequence[float]) -> list[float]:
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def _comparison(side: str, name: str, draws: Sequence[EndedDraw], effect: float, p: float) -> Comparison:
    dropped = [ended for ended in draws if ended.fate != Fate.TRAINED]
    trained = [ended for ended in draws if ended.fate == Fate.TRAINED]
    moderate = MODERATE_VARIATION if name == "source" else MODERATE_DELTA
    biased = p < SIGNIFICANT and abs(effect) >= moderate
    if name == "source":
        shares = [Counter(ended.source for ended in side) for side in (dropped, trained)]
        excess = {
            source: shares[0][source] / len(dropped) - shares[1][source] / len(trained)
            for source in sorted(set(shares[0]) | set(shares[1]))
        }
        return Comparison(side, name, len(dropped), len(trained), None, None, effect, p, biased, excess)
    by_fate: dict[str, list[float]] = {}
    for ended in dropped:
        by_fate.setdefault(ended.fate, []).append(getattr(ended, name))
    means = [float(np.mean([getattr(ended, name) for ended in side])) for side in (dropped, trained)]
    details = {fate: float(np.mean(values)) for fate, values in sorted(by_fate.items())}
    return Comparison(side, name, len(dropped), len(trained), means[0], means[1], effect, p, biased, details)


NAMES = {
    "prompt_tokens": "prompt length",
    "tokens": "response length",
    "reward": "reward",
    "source": "source",
}
"""Characteristics in words."""
_HIGHER_AND_LOWER = {
    "prompt_tokens": ("are longer", "are shorter"),
    "tokens": ("have longer responses", "have shorter responses"),
    "reward": ("have higher rewards (they are easier)", "have lower rewards (they are harder)"),
}
_FATES = {Fate.TRAINED: "trained", Fate.FILTERED: "filtered", Fate.FAILED: "failed", Fate.TOO_OLD: "too old"}
_MOST_UIDS = 20


def coverage_report(coverage: Coverage) -> dict[str, Any]:
    bias = compare_dropped(coverage.draws)
    lags = Counter(ended.lag for ended in coverage.draws if ended.fate == Fate.TRAINED)
    reasons = Counter((ended.fate, ended.reason) for ended in coverage.draws if ended.reason is not None)
    return {
        "step": max(coverage.steps),
        "counts": coverage.counts,
        "token_shares": shares(tokens_by_fate(coverage)),
        "by_epoch": fates_by_epoch(coverage),
        "lags": {str(lag): count for lag, count in sorted(lags.items(), key=lambda item: item[0] or 0)},
        "reasons": [{"fate": fate, "reason": why, "count": count} for (fate, why), count in reasons.most_common()],
        "never_trained": never_trained(coverage),
        "bias": {"comparisons": [asdict(comparison) for comparison in bias.comparisons], "words": bias_words(bias)},
        "problem": coverage.problem,
    }


def tokens_by_fate(coverage: Coverage) -> dict[str, float]:
    """Return the sum of the groups' mean response lengths by fate."""
    tokens: dict[str, float] = {}
    for ended in coverage.draws:
        tokens[ended.fate] = tokens.get(ended.fate, 0.0) + (ended.tokens or 0.0)
    return tokens


def fates_by_epoch(coverage: Coverage) -> dict[str, dict[str, int]]:
    """Return the counts of each epoch, with its number as text."""
    ended = Counter((ended.epoch, ended.fate) for ended in coverage.draws)
    table = {}
    for epoch in sorted({number for number, _ in ended} | set(coverage.open_by_epoch)):
        stages = coverage.open_by_epoch.get(epoch, {})
        row = {stage.value: stages.get(stage, 0) for stage in Stage} | {
            fate.value: ended[epoch, fate.value] for fate in Fate
        }
        table[str(epoch)] = {"drawn": sum(row.values()), **row}
    return table


def never_trained(coverage: Coverage) -> list[dict[str, Any]]:
    """Return for each completed epoch the prompts that it drew and never trained.

    An epoch is complete when a later one has begun and none of its draws is open.
    """
    by_epoch: dict[int, dict[int, list[EndedDraw]]] = {}
    for ended in coverage.draws:
        by_epoch.setdefault(ended.epoch, {}).setdefault(ended.row, []).append(ended)
    last = max([*by_epoch, *coverage.open_by_epoch], default=0)
    result = []
    for epoch, rows in sorted(by_epoch.items()):
        if epoch == last or any(coverage.open_by_epoch.get(epoch, {}).values()):
            continue
        missed = [ends for ends in rows.values() if all(ended.fate != Fate.TRAINED for ended in ends)]
        result.append(
            {
                "epoch": epoch,
                "prompts": len(rows),
                "never_trained": len(missed),
                "fates": dict(Counter(ends[-1].fate for ends in missed)),
                "uids": sorted(ends[0].uid.partition("~")[0] for ends in missed)[:_MOST_UIDS],
            }
        )
    return result


def bias_words(bias: BiasReport) -> list[str]:
    """Return the result of the comparisons in sentences; a single one if nothing is wrong."""
    if not bias.dropped:
        return ["no prompt was dropped"]
    together = {c.characteristic for c in bias.comparisons if c.fate == DROPPED and c.biased}
    named = [c for c in bias.comparisons if c.biased and (c.fate == DROPPED or c.characteristic not in together)]
    words = [_words(comparison) for comparison in named]
    if not bias.comparisons:
        words = [
            f"no test yet: a test needs {FEWEST_ROWS} dropped and {FEWEST_ROWS} trained prompts with different values"
        ]
    elif not words:
        names = ", ".join(dict.fromkeys(NAMES[comparison.characteristic] for comparison in bias.comparisons))
        words = [f"no difference between dropped and trained prompts in {names}"]
    if bias.by_design:
        words.append(
            f"{bias.by_design} prompts were filtered because all answers are equally good; their difference in reward is by "
            "design and is not counted as a bias"
        )
    return words


def _words(comparison: Comparison) -> str:
    name = "dropped" if comparison.fate == DROPPED else _FATES[Fate(comparison.fate)]
    certainty = f"corrected p = {comparison.p:.2g}"
    if comparison.characteristic == "source":
        source, excess = max(comparison.details.items(), key=lambda item: item[1])
        return (
            f"{name} prompts come from other sources than trained ones: the share of '{source}' is {excess * 100:.0f} points "
            f"higher (total variation {comparison.effect:.2f} beyond chance, {certainty})"
        )
    higher, lower = _HIGHER_AND_LOWER[comparison.characteristic]
    by_fate = ", ".join(f"{_FATES[Fate(fate)]} {mean:.4g}" for fate, mean in comparison.details.items())
    return (
        f"{name} prompts {higher if comparison.effect > 0 else lower} than trained ones: mean {comparison.dropped_mean:.4g} "
        f"against {comparison.trained_mean:.4g} (Cliff's delta {comparison.effect:+.2f}, {certainty}"
        + (f"; {by_fate})" if len(comparison.details) > 1 else ")")
    )


_COLOURS = {Fate.TRAINED: "C0", Fate.FILTERED: "C7", Fate.FAILED: "C3", Fate.TOO_OLD: "C1"}
_MOST_BARS = 120
_BINS = 24


def draw_coverage(path: str | Path, coverage: Coverage, *, title: str = "") -> Path:
    """Draw a PNG: stacked fates by step, and one panel per known characteristic of dropped and trained prompts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [name for name in NAMES if any(getattr(ended, name) is not None for ended in coverage.draws)]
    figure = Figure(figsize=(12, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, max(1, len(panels)))
    _draw_fates(figure.add_subplot(grid[0, :]), coverage)
    for column, name in enumerate(panels):
        _draw_characteristic(figure.add_subplot(grid[1, column]), coverage, name, legend=column == 0)
    if title:
        figure.suptitle(title, fontsize=12)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _draw_fates(axes: Axes, coverage: Coverage) -> None:
    """Draw one stacked bar per step, or per block of steps in a long run."""
    steps = sorted(coverage.steps)
    width = -(-(steps[-1] - steps[0] + 1) // _MOST_BARS)
    bars = sorted({step - step % width for step in steps})
    counts = Counter((ended.step - ended.step % width, ended.fate) for ended in coverage.draws)
    bottom = [0] * len(bars)
    for fate, colour in _COLOURS.items():
        heights = [counts[bar, fate.value] for bar in bars]
        if any(heights):
            label = fate.value.replace("_", " ")
            middles = [bar + (width - 1) / 2 for bar in bars]
            axes.bar(middles, heights, width=0.9 * width, bottom=bottom, color=colour, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    _style(axes, "prompts by fate", "step" if width == 1 else f"step (blocks of {width})")
    if coverage.draws:
        axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))


def _draw_characteristic(axes: Axes, coverage: Coverage, name: str, *, legend: bool) -> None:
    """Draw the shares of values of dropped and of trained prompts."""
    import numpy as np

    sides: dict[str, list[Any]] = {"trained": [], "dropped": []}
    for ended in coverage.draws:
        if (value := getattr(ended, name)) is not None:
            sides["trained" if ended.fate == Fate.TRAINED else "dropped"].append(value)
    everything = [value for values in sides.values() for value in values]
    if name == "source":
        labels = [source for source, _ in Counter(everything).most_common(8)]
        for number, (side, values) in enumerate(sides.items()):
            shares = [values.count(label) / max(1, len(values)) for label in labels]
            places = np.arange(len(labels)) + (number - 0.5) * 0.4
            axes.bar(places, shares, width=0.4, color=("C0", "C3")[number], label=side)
        axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    else:
        edges = np.histogram_bin_edges(everything, bins=_BINS)
        for number, (side, values) in enumerate(sides.items()):
            if values:
                weights = np.full(len(values), 1 / len(values))
                axes.hist(
                    values, bins=edges.tolist(), weights=weights, alpha=0.5, color=("C0", "C3")[number], label=side
                )
    _style(axes, NAMES[name], "" if name == "source" else "tokens" if "tokens" in name else "mean of the group")
    if legend:
        axes.legend(fontsize=8, frameon=False)


def _style(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
