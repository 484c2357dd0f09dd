"""Garbage is collected seldom while a command imports, and as usual once it computes."""

import gc
from collections.abc import Iterator

import pytest

from hone import startup
from hone.cli.main import main
from hone.cluster.context import prepare_torch
from hone.config.run import RunConfig


@pytest.fixture(autouse=True)
def threshold() -> Iterator[int]:
    before = gc.get_threshold()
    gc.set_threshold(startup._USUAL)  # a command that an earlier test ran in this process may have left it raised
    yield startup._USUAL
    gc.set_threshold(*before)


def test_a_command_begins_with_few_collections_and_computes_with_the_usual_ones(threshold: int) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert gc.get_threshold()[0] > threshold
    prepare_torch(RunConfig(device="cpu", num_threads=1))
    assert gc.get_threshold()[0] == threshold


def test_a_threshold_of_the_user_is_left_alone() -> None:
    gc.set_threshold(1234)
    startup.collect_as_usual()
    assert gc.get_threshold()[0] == 1234
