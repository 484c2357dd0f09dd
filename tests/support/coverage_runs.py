"""Fates of invented draws, for tests of the coverage report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from hone.insight.coverage import CoverageLedger, EndedDraw, Fate
from hone.insight.run_directory import RunDirectory

Drop = Callable[[np.random.Generator, EndedDraw], str | None]
"""Function of a trained draw that returns the fate to give it instead, or None."""


def invented(seed: int, drop: Drop, *, rows: int = 300, epochs: int = 1, growth: float = 1.0) -> list[EndedDraw]:
    """Return draws whose response length grows by ``growth`` in log scale over the run; ``drop`` chooses some to drop."""
    random = np.random.default_rng(seed)
    prompt_tokens, sources = random.integers(20, 400, rows), random.choice(["sums", "code", "text"], rows)
    draws: list[EndedDraw] = []
    for epoch in range(epochs):
        for row in random.permutation(rows).tolist():
            number = len(draws)
            tokens = float(random.lognormal(4 + growth * number / (rows * epochs), 0.6))
            trained = EndedDraw(
                *(1 + number // 16, number, row, epoch, f"train:{row}", str(sources[row]), "trained", 0, None),
                *(float(random.binomial(8, 0.5)) / 8, tokens, int(prompt_tokens[row])),
            )
            fate = drop(random, trained)
            draws.append(trained if fate is None else changed(trained, fate))
    return draws


def changed(trained: EndedDraw, fate: str, reason: str = "timeout") -> EndedDraw:
    """Return a trained draw with another fate."""
    fields = {name: getattr(trained, name) for name in EndedDraw.__slots__}
    with_reason = fate in (Fate.FILTERED, Fate.FAILED)
    return EndedDraw(**{**fields, "fate": fate, "lag": None, "reason": reason if with_reason else None})


def write_run(path: Path, draws: Iterable[EndedDraw]) -> RunDirectory:
    """Write a run directory with these draws, in order, by the ledger."""
    run = RunDirectory(path)
    run.start(seed=1, config_yaml="trainer: {seed: 1}\n", command=["hone", "train"])
    ledger, step = CoverageLedger(run.coverage), 1
    for ended in draws:
        if ended.step > step:
            ledger.write(step)
            step = ended.step
        draw = ledger.draw(ended.row, ended.epoch)
        ledger.admit(draw, ended.uid, ended.source, ended.prompt_tokens)
        ledger.finish(draw)
        match Fate(ended.fate):
            case Fate.TRAINED:
                ledger.trained(draw, ended.lag or 0, ended.reward, ended.tokens)
            case Fate.FILTERED:
                ledger.filtered(draw, str(ended.reason), ended.reward, ended.tokens)
            case Fate.FAILED:
                ledger.failed(draw, str(ended.reason), ended.reward, ended.tokens)
            case Fate.TOO_OLD:
                ledger.too_old(draw, ended.lag, ended.reward, ended.tokens)
    ledger.write(step)
    run.close()
    return run
