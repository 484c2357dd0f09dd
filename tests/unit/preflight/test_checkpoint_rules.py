"""Rules about checkpoints: of another model, and where none can be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.preflight import SMALL_MODEL, change

from hone.config import RLConfig, SFTConfig
from hone.preflight import Stage, findings
from hone.training.checkpoints.storage import Storage


class ReadOnly(MemoryFileSystem):
    """A read-only store."""

    protocol = ("readonly",)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode:
            raise PermissionError("no put for this key")
        return super()._open(path, mode, **kwargs)


fsspec.register_implementation("readonly", ReadOnly, clobber=True)


def problems_of(config: Any) -> list[Any]:
    """Return the errors of the rules about checkpoints."""
    stages = (Stage.FILES, Stage.ENVIRONMENT)
    return [each.error for each in findings(config, stages) if each.error.code in ("R55", "R75", "E-checkpoint")]


def write_checkpoint(folder: Path, model: dict[str, Any], adapter: dict[str, Any] | None = None, step: int = 4) -> Path:
    """Write the parts of a checkpoint that preflight reads."""
    directory = folder / f"step_{step}"
    (directory / "actor").mkdir(parents=True)
    name, content = ("config.json", model) if adapter is None else ("adapter_config.json", adapter)
    (directory / "actor" / name).write_text(json.dumps(content))
    (directory / "checkpoint.json").write_text(json.dumps({"format": 2, "step": step, "files": {}}))
    (directory / "state.json").write_text(json.dumps({"step": step}))
    return directory


@pytest.mark.parametrize("tree", ["rl", "sft"])
def test_a_checkpoint_of_the_same_model_is_taken(tree, request):
    config: RLConfig | SFTConfig = request.getfixturevalue(tree)
    write_checkpoint(Path(config.trainer.default_local_dir) / "checkpoints", SMALL_MODEL)
    assert problems_of(config) == []


@pytest.mark.parametrize("tree", ["rl", "sft"])
def test_a_checkpoint_of_another_model_is_refused(tree, request):
    config: RLConfig | SFTConfig = request.getfixturevalue(tree)
    folder = Path(config.trainer.default_local_dir) / "checkpoints"
    write_checkpoint(folder, SMALL_MODEL, step=2)
    write_checkpoint(folder, {**SMALL_MODEL, "hidden_size": 64, "vocab_size": 512}, step=10)
    (problem,) = problems_of(config)
    assert problem.code == "R55" and "step_10" in problem.what, "the newest counts, by number"
    assert "vocab_size=512, not 300, hidden_size=64, not 32" in problem.what
    change(config, {"trainer.resume_mode": "disable"})
    assert problems_of(config) == []


@pytest.mark.parametrize(
    ("adapter", "keys", "words"),
    [
        ({"r": 8}, {}, ["r=8", "lora_rank=0"]),
        ({"r": 8}, {"lora_rank": 16}, ["r=8", "lora_rank=16"]),
        (None, {"lora_rank": 8}, ["lora_rank=8"]),
        ({"r": 8}, {"lora_rank": 8}, None),
    ],
)
def test_a_checkpoint_with_another_adapter_is_refused(rl: RLConfig, adapter, keys, words):
    folder = Path(rl.trainer.default_local_dir) / "checkpoints"
    directory = write_checkpoint(folder, SMALL_MODEL, adapter)
    change(rl, {f"actor_rollout_ref.model.{key}": value for key, value in keys.items()})
    change(rl, {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(directory)})
    problems = problems_of(rl)
    if words is None:
        assert problems == []
    else:
        assert len(problems) == 1 and all(word in problems[0].what for word in words)


def test_a_path_without_a_checkpoint_is_refused(rl: RLConfig, tmp_path: Path):
    change(rl, {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / "nothing")})
    (problem,) = problems_of(rl)
    assert "nothing" in problem.what and "step_<N>" in problem.fix


def test_a_checkpoint_in_a_store_is_checked(rl: RLConfig):
    root = Storage("memory://preflight-other-model")
    (root / "step_3" / "actor").write_text("config.json", json.dumps({**SMALL_MODEL, "num_hidden_layers": 3}))
    (root / "step_3").write_text("checkpoint.json", json.dumps({"format": 2, "step": 3, "files": {}}))
    (root / "step_3").write_text("state.json", "{}")
    change(rl, {"trainer.checkpoint_dir": "memory://preflight-other-model"})
    (problem,) = problems_of(rl)
    assert "num_hidden_layers=3, not 2" in problem.what


def test_writable_storage_has_no_finding_and_is_unchanged(rl: RLConfig, tmp_path: Path):
    for place in ("memory://preflight-writable", str(tmp_path / "new" / "folder")):
        change(rl, {"trainer.checkpoint_dir": place})
        assert problems_of(rl) == []
    assert Storage("memory://preflight-writable").names() == []
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("TMP/file/below", ["/file "]),
        ("nosuchstore://bucket/run", ["nosuchstore"]),
        ("readonly://bucket/run", ["readonly://bucket/run", "no put for this key"]),
    ],
)
def test_storage_that_cannot_be_written(rl: RLConfig, tmp_path: Path, place, words):
    (tmp_path / "file").write_text("no archive")
    change(rl, {"trainer.checkpoint_dir": place.replace("TMP", str(tmp_path))})
    (problem,) = {each.what: each for each in problems_of(rl)}.values()
    assert all(word in problem.what for word in words)
    change(rl, {"trainer.save_freq": 0, "trainer.resume_mode": "disable"})
    assert problems_of(rl) == [], "no checkpoint is written"


def test_a_protected_folder_is_named(rl: RLConfig):
    change(rl, {"trainer.checkpoint_dir": "/proc/checkpoints/run"})  # root may write anywhere else
    (problem,) = problems_of(rl)
    assert "/proc" in problem.what and problem.code == "R75"
