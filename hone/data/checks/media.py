"""Check that rows are text: images, video and sound would be left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hone.data.files import Row
from hone.data.media import media_error, media_of
from hone.errors import Finding


def media(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield one finding for all rows with images, video or sound."""
    found = [(row.where, kinds) for row in rows if (kinds := media_of(row.values))]
    if found:
        total = sum((kinds for _, kinds in found), Counter[str]())
        yield Finding(media_error(total, found[0][0], f"{len(found)} of {len(rows)} rows have"), stops=True)
