"""Every box of the course: the model solution passes, nothing and wrong solutions are refused for the reason that they have."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from support.forked_python import Forks

from hone.apps.learn.texts import PARTS, boxes

pytestmark = [pytest.mark.learn("hone/apps/learn", "docs/learn"), pytest.mark.timeout(3600)]


@pytest.mark.parametrize("part", PARTS)
def test_every_box_of_a_part(part: str, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from playing import Learner, commands

    plays = importlib.import_module(part).PLAYS
    listed = [name for name, box in boxes().items() if box.part == part]
    assert listed == list(plays), "each box needs a model solution, in the order of the texts"
    learner = Learner(tmp_path, forks)
    assert learner.hone("learn", "start", "new").code == 0
    if part != "first_run":
        learner.shell(commands("data_and_model"))
    for name in listed:
        learner.play(name, plays[name])
