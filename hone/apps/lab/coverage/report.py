"""Report of a run's coverage: fates by epoch, lags, reasons, prompts never trained, and bias in plain words."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from hone.apps.lab.coverage.bias import DROPPED, FEWEST_ROWS, BiasReport, Comparison, compare_dropped
from hone.insight.coverage.ledger import Fate, Stage, shares
from hone.insight.coverage.reading import Coverage, EndedDraw

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
