"""Coverage of a run: the fate of every prompt that the sampler drew.

    waiting --admit--> in flight --finish--> finished --> trained | filtered | failed | too old
       ^                   |                    |
       +----- returned ----+--------------------+

A *draw* is one row taken from the sampler. Every draw ends in exactly one fate, or is still open: waiting, in flight or finished.
So the fates and the open draws always add up to the number of draws.

:mod:`.ledger` records them in ``coverage.jsonl`` of the run directory, :mod:`.reading` reads the file and checks it;
:mod:`hone.apps.lab.coverage` compares dropped with trained prompts, and shows the result.
"""

from hone.insight.coverage.ledger import (
    EQUAL_ANSWERS,
    NO_VERDICT,
    QUARANTINED,
    CoverageLedger,
    Fate,
    OpenDraw,
    Stage,
    coverage_metrics,
)

__all__ = [
    "EQUAL_ANSWERS",
    "NO_VERDICT",
    "QUARANTINED",
    "CoverageLedger",
    "Fate",
    "OpenDraw",
    "Stage",
    "coverage_metrics",
]
