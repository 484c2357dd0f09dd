"""Importers of the rollouts of other programs into the archive."""

from __future__ import annotations

from pathlib import Path

from hone.apps.lab.importers.base import Importer
from hone.apps.lab.importers.jsonl import JSONL
from hone.apps.lab.importers.prime_rl import PRIME_RL
from hone.apps.lab.importers.slime import SLIME
from hone.apps.lab.importers.trl import TRL
from hone.apps.lab.importers.verl import VERL
from hone.errors import DataError, did_you_mean

IMPORTERS = {importer.name: importer for importer in (VERL, TRL, PRIME_RL, SLIME, JSONL)}
"""Importers by the name of their format, in the order in which a source is tried; the last takes any JSON lines."""
ALIASES = {"miles": "slime"}
AUTO = "auto"


def choose_importer(source: Path, name: str) -> tuple[Importer, list[Path]]:
    """Return the importer of a source, and the files that it reads; ``auto`` finds the format out."""
    name = ALIASES.get(name, name)
    if not source.exists():
        raise DataError(f"'{source}' does not exist", where="SRC", fix="name a file or folder with rollouts")
    if name != AUTO and name not in IMPORTERS:
        known = [AUTO, *IMPORTERS, *ALIASES]
        raise DataError(f"unknown format '{name}'", where="--format", fix=did_you_mean(name, known))
    tried = list(IMPORTERS.values()) if name == AUTO else [IMPORTERS[name]]
    for importer in tried:
        if files := importer.files(source):
            return importer, files
    formats = "; ".join(importer.about for importer in tried)
    raise DataError(
        f"no file of the format '{name}' in {source}", where="SRC", fix=f"the files of a format are: {formats}"
    )
