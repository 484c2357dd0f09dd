"""A run that keeps its checkpoints in an object store goes on from there, exports from there, and stops when it cannot save."""

import json
import uuid
from pathlib import Path

import fsspec
import pytest
from support.small_sft import make_small_sft, small_sft_settings

from hone.config import load_config
from hone.config.offline import SFTConfig
from hone.errors import CheckpointError
from hone.trainers.sft import SFTTrainer
from hone.training.checkpoints.checkpoint import find_checkpoint
from hone.training.checkpoints.storage import Storage
from hone.training.export import find_actor


@pytest.fixture
def world(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_small_sft(tmp_path)


def trainer(world: Path, name: str, *overrides: str) -> SFTTrainer:
    return SFTTrainer(load_config(SFTConfig, small_sft_settings(world, world / name, *overrides)))


def rows(run: Path) -> list[dict[str, float]]:
    kept = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "train/loss", "train/grad_norm", "val/loss")
    return [{name: row[name] for name in names if name in row} for row in kept]


@pytest.mark.parametrize("adapter", [(), ("model.lora_rank=2",)], ids=["whole", "adapter"])
def test_a_run_goes_on_from_an_object_store_bit_for_bit(world, adapter):
    bucket = f"memory://{uuid.uuid4().hex}/run"
    steps = "trainer.total_training_steps=4"
    assert trainer(world, "whole", steps, *adapter).fit() == 0
    remote = (f"trainer.checkpoint_dir={bucket}", "trainer.best_ckpt_metric=val/loss", "trainer.best_ckpt_mode=min")
    assert trainer(world, "parts", "trainer.total_training_steps=2", *remote, *adapter).fit() == 0
    assert not list((world / "parts/checkpoints").iterdir())
    assert trainer(world, "parts", steps, *remote, *adapter).fit() == 0
    assert rows(world / "parts") == rows(world / "whole")
    assert [row["step"] for row in rows(world / "parts")] == [0, 1, 2, 3, 4]
    losses = {row["step"]: row["val/loss"] for row in rows(world / "parts") if row["step"] > 0}
    best = json.loads(Storage(bucket).read_text("best.json"))
    assert best == {"step": min(losses, key=losses.__getitem__), "metric": "val/loss", "value": min(losses.values())}
    assert find_checkpoint(f"{bucket}/best").value == min(losses.values())
    timings = [json.loads(line) for line in (world / "parts/metrics.jsonl").read_text().splitlines()]
    assert ["timing_s/save_checkpoint" in row for row in timings] == [False, False, True, False, True]
    assert find_actor(world / "parts").is_dir(), "the run directory says where its checkpoints are"


class Full(fsspec.get_filesystem_class("memory")):
    """An object store that takes nothing more after some files."""

    protocol = "full"
    files = 0

    def _open(self, path, mode="rb", **kwargs):
        if "w" in mode:
            type(self).files += 1
            if type(self).files > 40:
                raise PermissionError("the quota of this bucket is used up")
        return super()._open(path, mode, **kwargs)


def test_a_store_that_takes_no_more_ends_the_run_with_one_message_and_can_be_resumed(world):
    fsspec.register_implementation("full", Full, clobber=True)
    bucket = f"full://{uuid.uuid4().hex}/run"
    running = trainer(world, "run", "trainer.total_training_steps=30", f"trainer.checkpoint_dir={bucket}")
    with pytest.raises(CheckpointError, match="the quota of this bucket is used up") as caught:
        running.fit()
    assert "step_" in caught.value.why
    assert "trainer.checkpoint_dir=" in caught.value.fix
    record = json.loads((world / "run/run.json").read_text())
    assert record["status"] == "failed"
    saved = find_checkpoint(bucket).step
    Full.files = -10_000
    again = trainer(world, "run", f"trainer.total_training_steps={saved + 1}", f"trainer.checkpoint_dir={bucket}")
    assert again.step == saved
    assert again.fit() == 0


def test_a_metric_that_is_never_measured_is_said(world, caplog):
    assert trainer(world, "run", "trainer.total_training_steps=1", "trainer.best_ckpt_metric=val/los").fit() == 0
    assert "step 1 has no val/los" in caplog.text
    assert "val/loss" in caplog.text
    assert not (world / "run/checkpoints/best.json").exists()
