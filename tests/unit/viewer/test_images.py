"""Tokens of images on the page: one mark for each image, and no number that the page cannot hold."""

from __future__ import annotations

from hone.data.images import IMAGE_MARK, REST_OF_IMAGE, token_ids
from hone.viewer.tokens import token_texts


def test_each_image_has_one_mark() -> None:
    ids = [1, *token_ids(2**43, 3), 0, *token_ids(5, 1), 9]
    texts = token_texts(ids, ["a", "b"])
    assert texts == ["b", IMAGE_MARK, REST_OF_IMAGE, REST_OF_IMAGE, "a", IMAGE_MARK, "\u27e89\u27e9"]
    assert token_texts(ids[1:3], None) == [IMAGE_MARK, REST_OF_IMAGE]
