"""Check that rows have no media that would be left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from hone.data.files import Row
from hone.data.media import KINDS, media_error, media_of
from hone.errors import Finding


def media(rows: Sequence[Row], refused: Collection[str] = KINDS) -> Iterator[Finding]:
    """Yield one finding for all rows with media of the refused kinds."""
    counted = [(row.where, media_of(row.values)) for row in rows]
    kept = [(where, Counter({kind: n for kind, n in kinds.items() if kind in refused})) for where, kinds in counted]
    with_media = [(where, kinds) for where, kinds in kept if kinds]
    if with_media:
        total = sum((kinds for _, kinds in with_media), Counter[str]())
        yield Finding(media_error(total, with_media[0][0], f"{len(with_media)} of {len(rows)} rows have"), stops=True)
