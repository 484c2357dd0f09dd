"""Checkpoints appear whole or not at all, whatever happens while they are written, on a disk and in an object store."""

import errno
import json
import os
import random
import signal
import threading
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from support.messages import raises
from support.patience import SOON

from hone.errors import CheckpointError
from hone.extras import install_command
from hone.training.checkpoints.checkpoint import Checkpoint, find_checkpoint
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.store import CheckpointStore
from hone.training.checkpoints.tensor_files import TensorSpec, write_tensors

CONFIG = {"trainer": {"seed": 1}}


def fill(directory: Storage, value: float) -> None:
    weights = torch.full((1000,), float(value))
    with (directory / "actor").create("model.safetensors") as file:
        write_tensors(file, {"w": TensorSpec.from_tensor(weights)}, lambda _name: weights)


def save(store: CheckpointStore, step: int, write=None, value: float | None = None) -> None:
    directory = store.begin(step)
    write = write or (lambda: fill(directory, step))
    store.publish(step, {"step": step}, CONFIG, write, metric="reward", value=value)


def weight(checkpoint: Checkpoint) -> float:
    with (checkpoint.storage / "actor").open("model.safetensors") as file:
        return float(load(file.read())["w"][0])


def below(root: Storage) -> list[str]:
    return sorted(root.names())


@pytest.fixture(params=["disk", "object store"])
def root(request, tmp_path: Path):
    if request.param == "disk":
        yield tmp_path / "checkpoints"
        return
    bucket = f"memory://{uuid.uuid4().hex}/run"
    yield bucket
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def store(root) -> CheckpointStore:
    return CheckpointStore(root, keep=2, background=False)


@pytest.fixture
def disk(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2, background=False)


def test_the_newest_k_are_kept_and_read_back(store):
    assert store.latest() is None
    for step in (1, 2, 10):
        save(store, step)
    assert store.steps() == [2, 10]
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.state, latest.config) == (10, {"step": 10}, CONFIG)
    assert weight(latest) == 10
    assert below(store.root) == ["step_10", "step_2"]


def test_a_step_saved_again_replaces_the_first(store):
    save(store, 1)
    directory = store.begin(1)
    store.publish(1, {"step": 1}, CONFIG, lambda: fill(directory, 7))
    assert weight(store.latest()) == 7


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 4)])
def test_the_best_is_kept_in_addition_to_the_newest_and_marked(root, mode, best):
    store = CheckpointStore(root, keep=2, best=mode, background=False)
    values = {1: None, 2: 0.9, 3: 0.5, 4: 0.1, 5: 0.9, 6: None, 7: 0.3}
    for step, value in values.items():
        save(store, step, value=value)
    assert store.steps() == sorted({best, 6, 7}), "of equals the first stays"
    assert json.loads(store.root.read_text("best.json")) == {"step": best, "metric": "reward", "value": values[best]}
    assert find_checkpoint(f"{store.root}/best").step == best
    assert find_checkpoint(str(store.root)).step == find_checkpoint(f"{store.root}/latest").step == 7
    assert store.set_aside_after(3 if mode == "max" else 4) == ([6, 7])
    again = CheckpointStore(root, keep=1, best=mode, background=False)
    save(again, 8, value=-1.0 if mode == "min" else 1.0)
    assert again.steps() == [8], "a new best replaces the old one"


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_rated_after_it_was_saved(root, background):
    store = CheckpointStore(root, keep=1, background=background)
    save(store, 1, value=0.5)
    for step, value in ((2, 0.4), (3, 0.7)):
        save(store, step)
        store.rate(step, "reward", value)
        store.wait()
        best = step if value > 0.5 else 1
        assert json.loads(store.root.read_text("best.json"))["step"] == best
        assert store.steps() == sorted({best, step}), "the former best is deleted"
    store.open(3).verify()


def test_a_rating_after_a_failed_save_leaves_its_error(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)

    def fail() -> None:
        raise OSError(errno.ENOSPC, "full")

    save(store, 1, fail)
    store.rate(1, "reward", 0.5)
    with raises(CheckpointError, "the disk is full"):
        store.wait()


def test_without_a_metric_nothing_is_best(store):
    save(store, 1)
    assert below(store.root) == ["step_1"]
    with raises(CheckpointError, "trainer.best_ckpt_metric"):
        find_checkpoint(f"{store.root}/best")


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
    directory = store.begin(2)

    def write() -> None:
        fill(directory, 2)
        raise error

    with raises(CheckpointError, "step 2", "disk is full", "step_1", "trainer.max_ckpt_to_keep=1"):
        store.publish(2, {}, CONFIG, write)
    assert store.steps() == [1]
    assert store.latest().step == 1
    save(store, 2)
    assert store.steps() == [1, 2]
    assert below(store.root) == ["step_1", "step_2"]


def test_other_failures_are_raised_unchanged_and_leave_no_checkpoint(store):
    def write() -> None:
        store.root.write_text(".partial-step_1/half" if store.root.is_local else "step_1/half", "half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(store, 1, write)
    assert store.steps() == []
    save(store, 2)
    assert below(store.root) == ["step_2"]


@pytest.mark.parametrize("index", ["actor/model.safetensors.index.json", "actor_optimizer/index.json", None])
def test_nodes_that_share_no_disk(store, index):
    save(store, 1)
    directory = store.begin(2)
    content = {
        "weight_map": {"w": "model-00002-of-00002.safetensors"},
        "tensors": {"w": {"pieces": [["rank_00001.safetensors", [0], [1]]]}},
    }
    elsewhere = Storage(f"memory://{uuid.uuid4().hex}")
    missing = {
        "actor/model": "actor/model-00002-of-00002.safetensors",
        "actor_optim": "actor_optimizer/rank_00001.safetensors",
    }
    file = missing[index[:11]] if index else "all files"
    with raises(CheckpointError, "step 2", file, "trainer.checkpoint_dir=", where="trainer.checkpoint_dir"):
        store.publish(
            2, {}, CONFIG, lambda: (directory if index else elsewhere).write_text(index or "x", json.dumps(content))
        )
    assert store.steps() == [1]


def test_an_unwritable_place(disk):
    disk.root.parent.make()
    disk.root.local_path.write_text("a file in place of the folder")
    with raises(CheckpointError, "step 1", disk.root, "trainer.checkpoint_dir="):
        save(disk, 1)


def test_an_unknown_kind_of_storage_is_one_message():
    with raises(CheckpointError, "nosuch://bucket", install_command("remote")):
        CheckpointStore("nosuch://bucket", keep=1)


# in the background -----------------------------------------------------------------------------------------------


def test_a_save_in_the_background_appears_when_it_is_written(root):
    store, release = CheckpointStore(root, keep=None), threading.Event()
    directory = store.begin(1)
    state = {"step": 1}
    store.publish(1, state, CONFIG, lambda: (release.wait(SOON), fill(directory, 1)))
    state["step"] = 99  # the run goes on
    store.check()
    assert store.steps() == []
    release.set()
    store.wait()
    assert store.steps() == [1]
    assert store.latest().state == {"step": 1}


def test_a_failure_in_the_background_is_raised_once_in_the_run(root):
    store = CheckpointStore(root, keep=None)

    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save(store, 1, write)
    while store._thread.is_alive():  # noqa: SLF001
        pass
    with raises(CheckpointError, "disk is full"):
        store.check()
    store.check()
    save(store, 2, write)
    with raises(CheckpointError, "disk is full"):
        store.begin(3)
    save(store, 3)
    store.wait()
    assert store.steps() == [3]


# killed and damaged ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["writing", "syncing", "replacing", "retiring"])
def test_a_process_killed_at_any_moment_leaves_whole_checkpoints(disk, moment, monkeypatch):
    save(disk, 1)
    save(disk, 2)
    step = 2 if moment == "replacing" else 3

    def die(*_args, **_kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        if moment == "writing":
            save(disk, step, lambda: die())
        monkeypatch.setattr("os.fsync" if moment == "syncing" else "shutil.rmtree", die)
        save(disk, step)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    latest = disk.latest()
    assert latest is None or latest.step in (1, 2, 3)
    for found in disk.steps():
        disk.open(found)
    assert 1 in disk.steps() or moment == "retiring"
    save(disk, 4)
    assert disk.latest().step == 4
    assert not [name for name in below(disk.root) if name.startswith(".partial-")]


def bytes_of_a_save(store: CheckpointStore) -> int:
    return sum(store.latest().storage.sizes().values())


class Budget:
    """Bytes that may still be written before the process is killed, or the store answers no more."""

    def __init__(self, monkeypatch, count: int, end) -> None:
        self.left, self.end = count, end
        create = Storage.create
        monkeypatch.setattr(Storage, "create", lambda storage, name: self._watched(create(storage, name)))

    def _watched(self, context):
        budget = self

        class Watched:
            def __enter__(self):
                self.file = context.__enter__()
                return self

            def __exit__(self, *error):
                return context.__exit__(*error)

            def write(self, data) -> int:
                data = memoryview(data).cast("B")
                fits = data[: max(0, budget.left)]
                budget.left -= len(data)
                self.file.write(fits)
                if len(fits) < len(data):
                    self.file.flush()
                    budget.end()
                return len(data)

        return Watched()


def test_killed_after_any_number_of_bytes_the_one_before_is_picked_up(disk, monkeypatch):
    save(disk, 1)
    whole, draw = bytes_of_a_save(disk), random.Random(0)
    counts = [0, 1, whole - 1, *(draw.randrange(whole) for _ in range(17))]
    for step, count in enumerate(counts, start=2):
        child = os.fork()
        if child == 0:
            Budget(monkeypatch, count, lambda: os.kill(os.getpid(), signal.SIGKILL))
            save(disk, step)
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), count
        latest = CheckpointStore(disk.root, keep=2).latest()
        assert (latest.step, weight(latest)) == (1, 1.0), count
    save(disk, 50)
    assert (disk.latest().step, weight(disk.latest())) == (50, 50.0)


def test_an_object_store_that_stops_after_any_number_of_bytes(monkeypatch):
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}/run", keep=2, background=False)
    save(store, 1)
    whole, draw = bytes_of_a_save(store), random.Random(1)

    def stop() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    for step, count in enumerate([0, whole - 1, *(draw.randrange(whole) for _ in range(18))], start=2):
        with monkeypatch.context() as patched:
            Budget(patched, count, stop)
            with raises(CheckpointError, f"step {step}", "Connection reset by peer"):
                save(store, step)
        latest = store.latest()
        assert (latest.step, weight(latest)) == (1, 1.0), count
    save(store, 50)
    assert below(store.root) == ["step_1", "step_50"]


@pytest.mark.parametrize("harm", ["missing", "short", "no manifest", "half a manifest"])
def test_a_damaged_checkpoint_is_refused(disk, harm):
    save(disk, 1)
    path = disk.root.local_path / "step_1"
    file = path / "actor/model.safetensors"
    if harm == "missing":
        file.unlink()
    elif harm == "short":
        file.write_bytes(file.read_bytes()[:-4])
    elif harm == "no manifest":
        (path / "checkpoint.json").unlink()
    else:
        (path / "checkpoint.json").write_text((path / "checkpoint.json").read_text()[:20])
    with raises(CheckpointError, path, "trainer.resume_from_path"):
        disk.latest()


def test_a_checkpoint_of_an_older_format_is_named_as_such(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "actor_optimizer.safetensors")
    (tmp_path / "checkpoint.json").write_text(json.dumps({"step": 3, "files": {}}))
    with raises(CheckpointError, "format 1", "format 2"):
        Checkpoint.open(tmp_path)


def test_later_checkpoints_are_set_aside_when_a_run_resumes_from_an_earlier_one(root):
    store = CheckpointStore(root, keep=None, background=False)
    for step in (1, 2, 3):
        save(store, step)
    assert store.set_aside_after(1) == [2, 3]
    assert store.steps() == [1]
    save(store, 2)
    assert store.set_aside_after(1) == [2], "a second time replaces what was set aside before"
    assert store.steps() == [1]
    expected = (
        ["abandoned_step_2", "abandoned_step_3", "step_1"] if store.root.is_local else ["step_1", "step_2", "step_3"]
    )
    assert below(store.root) == expected
