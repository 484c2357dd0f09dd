"""Checkpoints with flipped bytes, edited steps and missing files: refused by name, with the newest whole one and how to use it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.checkpoint_cases import train_and_save
from support.launch import hone
from support.messages import raises
from support.ranks import Ranks
from support.small_sft import make_small_sft, small_sft_settings

from hone.config import load_config
from hone.config.offline import SFTConfig
from hone.errors import CheckpointError
from hone.trainers.sft import SFTTrainer
from hone.training.checkpoints import checksums
from hone.training.checkpoints.checkpoint import Checkpoint
from hone.training.checkpoints.store import CheckpointStore
from hone.training.export import find_actor

STEPS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small world with the run ``whole`` of three steps and three checkpoints."""
    root = make_small_sft(tmp_path_factory.mktemp("small"))
    assert trainer(root, root / "whole", STEPS).fit() == 0
    return root


def trainer(root: Path, run: Path, steps: int, *overrides: str) -> SFTTrainer:
    settings = small_sft_settings(root, run, f"trainer.total_training_steps={steps}", "trainer.max_ckpt_to_keep=5")
    return SFTTrainer(load_config(SFTConfig, [*settings, *overrides]))


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Path:
    """A copy of the run that may be damaged."""
    return shutil.copytree(root / "whole", tmp_path / "run")


def flip(file: Path, place: int | None = None) -> None:
    """Change one bit in the middle of a file, or at ``place``."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    file.write_bytes(content)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content, indent=1))


def without_checksums(checkpoint: Path) -> None:
    """Make it one of a version that recorded no checksums."""
    edit(checkpoint / "checkpoint.json", lambda manifest: (manifest.pop("sha256"), manifest.pop(checksums.SEAL)))


def same_size(checkpoint: Path) -> None:
    """Record the sizes that the files have now."""
    edit(checkpoint / "checkpoint.json", lambda m: m.update(files={n: (checkpoint / n).stat().st_size for n in m["files"]}))  # fmt: skip


FILES = [
    *("actor/model.safetensors", "actor/config.json", "actor/tokenizer.json", "actor_optimizer/rank_00000.safetensors"),
    *("actor_optimizer/index.json", "state.json", "config.yaml"),
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("below", [None, -2], ids=["middle", "end"])
def test_a_flipped_bit_is_refused_and_the_whole_checkpoint_resumes(root: Path, run: Path, file: str, below: int | None) -> None:  # fmt: skip
    checkpoints = run / "checkpoints"
    flip(checkpoints / f"step_{STEPS}" / file, below)
    setting = f"trainer.resume_from_path={checkpoints / 'step_2'}"
    with raises(CheckpointError, file, f"step_{STEPS}", "trainer.resume_mode=resume_path", setting):
        trainer(root, run, STEPS)
    resumed = trainer(root, run, STEPS, "trainer.resume_mode=resume_path", setting)
    assert resumed.step == 2
    if file == FILES[0]:
        assert resumed.fit() == 0
        losses = [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
        expected = (root / "whole" / "metrics.jsonl").read_text().splitlines()[1:]
        assert losses == [json.loads(line)["train/loss"] for line in expected]
        assert trainer(root, run, STEPS + 1).step == STEPS, "the next resume takes the new checkpoint"


def test_the_newest_whole_one_is_named_when_several_are_damaged(root: Path, run: Path) -> None:
    checkpoints = run / "checkpoints"
    flip(checkpoints / "step_3/actor/model.safetensors")
    (checkpoints / "step_2/actor/model.safetensors").unlink()
    with raises(CheckpointError, f"trainer.resume_from_path={checkpoints / 'step_1'}"):
        trainer(root, run, STEPS)
    shutil.rmtree(checkpoints / "step_1")
    with raises(CheckpointError, "trainer.experiment_name=<another name>"):
        trainer(root, run, STEPS)


def emptied(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": emptied,
    "no manifest": lambda c: (c / "checkpoint.json").unlink(),
    "half a manifest": lambda c: (c / "checkpoint.json").write_text((c / "checkpoint.json").read_text()[:50]),
    "a manifest of other types": lambda c: (c / "checkpoint.json").write_text("[1, 2]"),
    "no state": lambda c: (c / "state.json").unlink(),
    "step in the manifest": lambda c: edit(c / "checkpoint.json", lambda m: m.update(step=2)),
    "step in the state": lambda c: (edit(c / "state.json", lambda s: s.update(step=2)), same_size(c)),
    "step in both": lambda c: [edit(c / name, lambda m: m.update(step=2)) for name in ("checkpoint.json", "state.json")],
    "a step that is no number": lambda c: edit(c / "checkpoint.json", lambda m: m.update(step="3")),
    "another value": lambda c: edit(c / "checkpoint.json", lambda m: m.update(value=9.0)),
    "another checksum": lambda c: edit(c / "checkpoint.json", lambda m: m["sha256"].update({"state.json": "0" * 64})),
}  # fmt: skip


@pytest.mark.parametrize("harm", DAMAGES)
def test_a_damaged_newest_checkpoint_names_the_whole_one(root: Path, run: Path, harm: str) -> None:
    checkpoints = run / "checkpoints"
    DAMAGES[harm](checkpoints / "step_3")
    with raises(CheckpointError, "step_3", f"trainer.resume_from_path={checkpoints / 'step_2'}"):
        trainer(root, run, STEPS)


STATES = {
    "text": b"not JSON",
    "empty": b"",
    "zeros": bytes(50),
    "not UTF-8": b'{"step": 3, "sampler": "\xff\xfe"}',
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "nothing in it": b"{}",
    "other types": b'{"step": 3, "sampler": 5}',
    "a sampler without a place": b'{"step": 3, "sampler": {}}',
    "NaN for a step": b'{"step": NaN, "sampler": {}}',
}


@pytest.mark.parametrize("old", [False, True], ids=["verified", "without checksums"])
@pytest.mark.parametrize("state", STATES)
def test_a_damaged_state_is_one_message(root: Path, run: Path, state: str, old: bool) -> None:
    checkpoint = run / "checkpoints" / "step_3"
    if old:
        without_checksums(checkpoint)
    (checkpoint / "state.json").write_bytes(STATES[state])
    if old:
        same_size(checkpoint)
    with raises(CheckpointError, "state.json", f"trainer.resume_from_path={run / 'checkpoints' / 'step_2'}"):
        trainer(root, run, STEPS + 1)


@pytest.mark.parametrize("place", ["checkpoint.json", "state.json"])
def test_an_edited_step_is_refused_without_checksums_too(root: Path, run: Path, place: str) -> None:
    checkpoint = run / "checkpoints" / "step_3"
    without_checksums(checkpoint)
    edit(checkpoint / place, lambda content: content.update(step=1))
    same_size(checkpoint)
    with raises(CheckpointError, "step 1", f"trainer.resume_from_path={run / 'checkpoints' / 'step_2'}"):
        trainer(root, run, STEPS)


def test_a_checkpoint_without_checksums_resumes_with_a_note(root: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    without_checksums(run / "checkpoints" / "step_3")
    logging.getLogger("hone").addHandler(caplog.handler)
    try:
        assert trainer(root, run, STEPS + 1).step == 3
    finally:
        logging.getLogger("hone").removeHandler(caplog.handler)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("step_3" in line and "not verified" in line for line in warnings)


@pytest.mark.slow
def test_the_commands_end_with_one_message(root: Path, run: Path) -> None:
    flip(run / "checkpoints/step_3/actor/model.safetensors")
    emptied(run / "checkpoints/step_2")
    settings = small_sft_settings(root, run, f"trainer.total_training_steps={STEPS + 1}")
    for words in (["sft", *settings], ["export", str(run), "--out", str(run / "exported")]):
        ended = hone(*words, log=run / "log")
        assert ended.code == 2 and "Traceback" not in ended.output, ended.output
        for word in ("E-checkpoint", "actor/model.safetensors", "step_1"):
            assert word in ended.message
    assert not (run / "exported").exists()
    emptied(run / "checkpoints/step_3")
    ended = hone("sft", *settings, "--dry-run", log=run / "log")
    assert ended.code == 2 and "step_1" in ended.message and "Traceback" not in ended.output, ended.output


def test_a_later_save_passes_by_a_damaged_checkpoint(root: Path, run: Path) -> None:
    emptied(run / "checkpoints/step_1")
    flip(run / "checkpoints/step_2/checkpoint.json", 3)
    assert trainer(root, run, STEPS + 1, "trainer.best_ckpt_metric=val/loss", "trainer.best_ckpt_mode=min").fit() == 0
    assert json.loads((run / "checkpoints/best.json").read_text())["step"] == STEPS + 1
    (run / "checkpoints/best.json").write_text("{")
    with raises(CheckpointError, "best.json"):
        find_actor(run / "checkpoints" / "best")


def test_an_object_store_is_verified_too(root: Path, tmp_path: Path) -> None:
    bucket = f"memory://{uuid.uuid4().hex}/run"
    assert trainer(root, tmp_path / "run", STEPS, f"trainer.checkpoint_dir={bucket}").fit() == 0
    files = fsspec.filesystem("memory")
    name = f"{bucket.removeprefix('memory:/')}/step_3/actor_optimizer/rank_00000.safetensors"
    content = bytearray(files.cat(name))
    content[-5] ^= 1
    files.pipe(name, bytes(content))
    with raises(CheckpointError, "rank_00000.safetensors", "step_2"):
        trainer(root, tmp_path / "run", STEPS, f"trainer.checkpoint_dir={bucket}")


@pytest.mark.long("hone/training/checkpoints")
def test_sharded_saves_record_what_each_rank_wrote(two_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    store = CheckpointStore(tmp_path / "checkpoints", None)
    directory = store.begin(7).local_path
    two_ranks.run(train_and_save, directory, "fsdp")
    shutil.rmtree(directory / "first")
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    written = {name for name in files if not name.startswith(f"{checksums.FOLDER}/")}
    assert len(files - written) == 2
    monkeypatch.setattr(checksums, "_checksum", lambda *_: pytest.fail("a file was read back"))
    store.publish(7, {"step": 7}, {}, lambda: None)
    store.wait()
    monkeypatch.undo()
    checkpoint = Checkpoint.open(tmp_path / "checkpoints/step_7")
    assert checkpoint.checksums is not None and set(checkpoint.checksums) == written | {"state.json", "config.yaml"}
    assert {"actor_optimizer/rank_00000.safetensors", "actor_optimizer/rank_00001.safetensors"} < written
    for name, digest in checkpoint.checksums.items():
        assert digest == hashlib.sha256((checkpoint.storage.local_path / name).read_bytes()).hexdigest(), name
        assert re.fullmatch("[0-9a-f]{64}", digest)
    checkpoint.verify()
    flip(checkpoint.storage.local_path / "actor_optimizer/rank_00001.safetensors", -3)
    with raises(CheckpointError, "actor_optimizer/rank_00001.safetensors"):
        checkpoint.verify()
