"""Options of one kind of server are refused by the other, before a model is loaded."""

from __future__ import annotations

import pytest

from hone.cli.main import main


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--train", "--engine", "vllm"], "--engine"),
        (["--train", "--replicas", "2"], "--replicas"),
        (["--train", "--chat-template", "x"], "--chat-template"),
        (["--out", "weights"], "--out"),
        (["--max-rank", "8"], "--max-rank"),
    ],
)
def test_options_without_effect(words: list[str], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "no-model", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"E-config {option}: ")
