"""Names of the hub: ORG/NAME[:SUBSET[:SPLIT]][@REVISION]."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?::(?P<subset>[\w.-]*))?(?::(?P<split>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
_FILE_ENDINGS = (".parquet", ".json", ".jsonl", ".arrow", ".csv", ".gguf", ".safetensors", ".yaml", ".py")


@dataclass(frozen=True)
class HubName:
    """A repository of the hub, with the part of a dataset and the revision to use.

    Attributes:
        repository: ORG/NAME.
        subset: configuration of a dataset; None means its default.
        split: split of a dataset; None means the only one, or the one the key is for.
        revision: branch, tag or commit; None means the main branch.
    """

    repository: str
    subset: str | None = None
    split: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        part = f":{self.subset or ''}:{self.split}" if self.split else f":{self.subset}" if self.subset else ""
        return self.repository + part + (f"@{self.revision}" if self.revision else "")


def parse_hub_name(text: str) -> HubName | None:
    """Return the hub name in a text, or None where the text is a local path.

    A text is a local path if it exists, if its first folder exists, or if it ends like a file.
    """
    match = _NAME.fullmatch(text)
    if match is None or text.endswith(_FILE_ENDINGS):
        return None
    if Path(text).exists() or Path(text.partition("/")[0]).exists():
        return None
    return HubName(
        match["repository"], subset=match["subset"] or None, split=match["split"], revision=match["revision"]
    )
