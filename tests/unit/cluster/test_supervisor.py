"""The supervisor: objects from the start of a run are excluded from garbage collections until its end."""

import gc
from pathlib import Path

import pytest

from hone.cluster import supervisor
from hone.cluster.supervisor import Supervisor
from hone.config import RLConfig, load_config


class Ended:
    """A runtime of no roles."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def unfrozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_collections_leave_out_what_a_run_starts_with(unfrozen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    runtime = Ended()
    monkeypatch.setattr(supervisor, "build_runtime", lambda *_, **__: runtime)
    held = Supervisor(tmp_path, 0)
    before = [[number] for number in range(1000)]
    assert held.runtime(load_config(RLConfig, []), [], total_steps=1, resume=None) is runtime
    assert gc.get_freeze_count() >= len(before)
    held.close()
    assert runtime.closed and gc.get_freeze_count() == 0
