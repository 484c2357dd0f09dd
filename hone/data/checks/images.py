"""Check the images of rows: whether they can be read and have their places, and how large they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.data.files import Row
from hone.data.media import KINDS, media_error, media_of
from hone.data.messages import check_messages, plain
from hone.data.row_images import PlaceError, RowImages
from hone.errors import DataError, Finding


@dataclass
class ImageCheck:
    """Images of the rows of a dataset."""

    rows: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)  # width and height of each image, in pixels
    tokens: list[int] = field(default_factory=list)  # tokens of each image; empty without a model
    misplaced: list[DataError] = field(default_factory=list)  # errors of rows with another number of places than images
    unreadable: list[DataError] = field(default_factory=list)  # errors of rows with an image that cannot be read
    # messages with a part at the place of each image, by row number
    placed: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    # tokens that a row's images take besides their placeholders, by row number
    extra_tokens: dict[int, int] = field(default_factory=dict)

    def measured(self) -> dict[str, list[int]]:
        """Return width, height and tokens of the images, by name; without what is not known."""
        widths, heights = [width for width, _ in self.sizes], [height for _, height in self.sizes]
        values = {"image_width": widths, "image_height": heights, "tokens_per_image": self.tokens}
        return {name: numbers for name, numbers in values.items() if numbers}

    def findings(self) -> Iterator[Finding]:
        """Yield one finding for each kind of problem; each stops a run."""
        for what, problems in (
            ("have other numbers of places than images", self.misplaced),
            ("have an image that cannot be read", self.unreadable),
        ):
            if problems:
                first = problems[0]
                yield Finding(
                    DataError(
                        f"{len(problems)} of {self.rows} rows with images {what}; the first: {first.what}",
                        why=first.why,
                        fix=first.fix,
                        where=first.where,
                        code=PlaceError.code,
                    ),
                    stops=True,
                )


def check_images(rows: Sequence[Row], columns: Sequence[str], images: RowImages) -> ImageCheck:
    """Read the images of all rows that have some. ``columns``: columns of messages, in which places are counted
    together.
    """
    check = ImageCheck()
    for number, row in enumerate(rows):
        messages = _messages(row.values, columns)
        if messages is None or not (media_of(row.values)["image"] or plain(row.values.get(images.key))):
            continue
        check.rows += 1
        try:
            check.placed[number], shown = images.place(messages, row)
            check.sizes += [image.open().size for image in shown]
        except PlaceError as problem:
            check.misplaced.append(problem)
        except DataError as problem:
            check.unreadable.append(DataError(problem.what, why=problem.why, fix=problem.fix, where=row.where))
        else:
            if images.processor is not None:
                tokens = [len(images.processor.tokens(image)) for image in shown]
                check.tokens += tokens
                check.extra_tokens[number] = sum(tokens) - len(tokens)
    return check


def _messages(values: Mapping[str, Any], columns: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the messages of the columns; None if a column has malformed ones, which another check reports."""
    messages: list[dict[str, Any]] = []
    try:
        for column in columns:
            value = plain(values.get(column))
            if isinstance(value, list) and value and isinstance(value[0], dict):
                messages += check_messages(value, where="", column=column)
    except DataError:
        return None
    return messages or None


def media(rows: Sequence[Row], refused: Collection[str] = KINDS) -> Iterator[Finding]:
    """Yield one finding for all rows with media of the refused kinds."""
    counted = [(row.where, media_of(row.values)) for row in rows]
    kept = [(where, Counter({kind: n for kind, n in kinds.items() if kind in refused})) for where, kinds in counted]
    with_media = [(where, kinds) for where, kinds in kept if kinds]
    if with_media:
        total = sum((kinds for _, kinds in with_media), Counter[str]())
        yield Finding(media_error(total, with_media[0][0], f"{len(with_media)} of {len(rows)} rows have"), stops=True)
