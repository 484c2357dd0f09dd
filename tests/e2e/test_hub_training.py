"""Training from names of the hub, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.hub import serve_hub, use_hub
from support.patience import LONG
from support.world import World

MODEL = "tiny-org/copier"


@pytest.mark.slow
@pytest.mark.application("hone/hub", "hone/data", "hone/models/loading.py")
def test_training_and_its_record_from_names(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub() as hub:
        use_hub(hub, tmp_path, monkeypatch)
        hub.add_folder("models", MODEL, world.model)
        hub.add("datasets", "me/copy", {"data/train-00000-of-00001.parquet": world.train.read_bytes()})
        command = [
            sys.executable, "-m", "hone.cli.main", "train", f"actor_rollout_ref.model.path={MODEL}", "data.train_files=me/copy", "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2", "data.max_prompt_length=32",
            "data.max_response_length=8", "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'run'}",
        ]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
        record = json.loads((tmp_path / "run/run.json").read_text())
        downloads = record["downloads"]
        assert {key: [part["name"] for part in parts] for key, parts in downloads.items()} == {
            "actor_rollout_ref.model.path": [MODEL],
            "data.train_files": ["me/copy::train"],
        }
        assert all(part["commit"] for parts in downloads.values() for part in parts)
