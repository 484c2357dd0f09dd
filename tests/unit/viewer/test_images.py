"""Images on the page: their places in texts, their files, and nothing else from the disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.image_models import BLUE, RED, drawn

from hone.apps.lab.viewer.episodes import names_in, picture, pictures_by_place, shown_message
from hone.apps.lab.viewer.tokens import token_texts
from hone.data.images import IMAGE_MARK, REST_OF_IMAGE, token_ids
from hone.errors import HoneError
from hone.insight.run_directory import RunDirectory

pytestmark = pytest.mark.application("hone/apps/lab/viewer", "hone/insight", "hone/apps/lab", "hone/rewards")


def archived(folder: Path) -> Any:
    return SimpleNamespace(index=SimpleNamespace(archive=SimpleNamespace(folder=folder)))


def test_each_image_has_one_mark() -> None:
    ids = [1, *token_ids(2**43, 3), 0, *token_ids(5, 1), 9]
    texts = token_texts(ids, ["a", "b"])
    assert texts == ["b", IMAGE_MARK, REST_OF_IMAGE, REST_OF_IMAGE, "a", IMAGE_MARK, "\u27e89\u27e9"]
    assert token_texts(ids[1:3], None) == [IMAGE_MARK, REST_OF_IMAGE]
    assert names_in(ids) == ["80000000000", "00000000005"]
    assert pictures_by_place(ids) == {1: "80000000000", 5: "00000000005"}


def test_the_names_of_tokens_are_those_of_the_files(tmp_path: Path) -> None:
    run, red = RunDirectory(tmp_path), drawn(RED)
    run.write_images([red, drawn(BLUE), red], run.rollouts)
    names = names_in([5, *token_ids(red.key, 4), 7])
    assert picture(archived(run.rollouts), names[0]).content == red.content
    assert picture(archived(run.rollouts), names[0]).media_type == "image/png"
    assert len(list((run.rollouts / "images").iterdir())) == 2


@pytest.mark.parametrize(
    "name", ["", "0000000000g", "../secret", "..%2fsecret", "/etc/passwd", "00000000001.png", "00000000001\n", "0" * 12]
)
def test_no_other_file_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "secret.png").write_bytes(drawn(RED).content)
    (tmp_path / "images/00000000001.png").write_bytes(drawn(RED).content)
    with pytest.raises(HoneError) as error:
        picture(archived(tmp_path), name)
    assert error.value.code == "E-view-address"


def test_a_file_with_other_content_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/00000000001.png").write_bytes(b"<svg onload='alert(1)'>")
    with pytest.raises(HoneError):
        picture(archived(tmp_path), "00000000001")


def test_images_of_messages_are_named_by_the_prompt_or_by_themselves() -> None:
    prompt = iter(["a" * 11])
    text = {"type": "text", "text": "look"}
    message, names = shown_message({"role": "user", "content": [{"type": "image"}, text]}, prompt)
    assert (message["content"], names) == ("<image>look", ["a" * 11])
    message, names = shown_message({"role": "tool", "content": [text, {"type": "image", "key": "b" * 11}]}, prompt)
    assert (message["content"], names) == ("look<image>", ["b" * 11])
    assert shown_message({"role": "user", "content": "<image>"}, prompt) == ({"role": "user", "content": "<image>"}, [])
