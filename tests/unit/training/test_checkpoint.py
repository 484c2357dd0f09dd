"""Checkpoints appear whole or not at all, whatever happens while they are written."""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hone.errors import CheckpointError
from hone.training.checkpoint import Checkpoint, CheckpointStore

CONFIG = {"trainer": {"seed": 1}}


def writer(value: float):
    def write(directory: Path) -> None:
        (directory / "actor").mkdir()
        save_file({"w": torch.full((1000,), value)}, directory / "actor/model.safetensors")

    return write


def save(store: CheckpointStore, step: int, write=None) -> Path:
    return store.save(step, {"step": step}, CONFIG, write or writer(step))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_the_newest_k_are_kept_and_read_back(store):
    assert store.latest() is None
    for step in (1, 2, 10):
        save(store, step)
    assert store.steps() == [2, 10]
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.state, latest.config) == (10, {"step": 10}, CONFIG)
    assert load_file(latest.path / "actor/model.safetensors")["w"][0] == 10
    assert sorted(entry.name for entry in store.root.iterdir()) == ["step_10", "step_2"]


def test_a_step_saved_again_replaces_the_first(store):
    save(store, 1)
    save(store, 1, writer(7))
    assert load_file(store.root / "step_1/actor/model.safetensors")["w"][0] == 7


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # what tokenizers raises
    ],
    ids=["python", "safetensors", "tokenizers"],
)
def test_a_full_disk_is_one_message_and_harms_nothing(store, error):
    save(store, 1)

    def write(directory: Path) -> None:
        writer(2)(directory)
        raise error

    with pytest.raises(CheckpointError, match="disk is full") as caught:
        save(store, 2, write)
    assert "step_1" in caught.value.why
    assert [entry.name for entry in store.root.iterdir()] == ["step_1"]
    assert store.latest().step == 1
    save(store, 2)
    assert store.steps() == [1, 2]


def test_other_failures_are_no_user_errors_and_leave_nothing_behind(store):
    def write(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(store, 1, write)
    assert list(store.root.iterdir()) == []


def test_an_unwritable_place(store):
    store.root.parent.mkdir(exist_ok=True)
    store.root.write_text("a file stands where the folder should be")
    with pytest.raises(CheckpointError, match="cannot save the checkpoint of step 1"):
        save(store, 1)


@pytest.mark.parametrize("moment", ["writing", "syncing", "replacing", "retiring"])
def test_a_process_killed_at_any_moment_leaves_whole_checkpoints(store, moment, monkeypatch):
    save(store, 1)
    save(store, 2)
    step = 2 if moment == "replacing" else 3

    def die(*_args, **_kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        if moment == "writing":
            save(store, step, lambda directory: (writer(9)(directory), die()))
        monkeypatch.setattr("os.fsync" if moment == "syncing" else "shutil.rmtree", die)
        save(store, step, writer(9))
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    latest = store.latest()
    assert latest is None or latest.step in (1, 2, 3)
    for found in store.steps():
        Checkpoint.open(store.root / f"step_{found}")
    assert 1 in store.steps() or moment == "retiring"
    save(store, 4)
    assert store.latest().step == 4
    assert not list(store.root.glob(".partial-*")), "what a killed process left is cleared away"


@pytest.mark.parametrize("harm", ["missing", "short", "no manifest"])
def test_a_damaged_checkpoint_is_refused(store, harm):
    path = save(store, 1)
    file = path / "actor/model.safetensors"
    if harm == "missing":
        file.unlink()
    elif harm == "short":
        file.write_bytes(file.read_bytes()[:-4])
    else:
        (path / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="damaged|not a checkpoint"):
        store.latest()


def test_later_checkpoints_are_set_aside_when_an_earlier_one_goes_on(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    for step in (1, 2, 3):
        save(store, step)
    assert store.set_aside_after(1) == [2, 3]
    assert store.steps() == [1]
    save(store, 2)
    assert store.set_aside_after(1) == [2], "a second time replaces what was set aside before"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["abandoned_step_2", "abandoned_step_3", "step_1"]
