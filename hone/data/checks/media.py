"""Check that rows are text: images, video and sound would be left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hone.data.files import Row
from hone.data.media import media_error, media_of
from hone.errors import Finding


def media(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield one finding for all rows with images, video or sound."""
    with_media = [(row.where, kinds) for row in rows if (kinds := media_of(row.values))]
    if with_media:
        total = sum((kinds for _, kinds in with_media), Counter[str]())
        yield Finding(media_error(total, with_media[0][0], f"{len(with_media)} of {len(rows)} rows have"), stops=True)
