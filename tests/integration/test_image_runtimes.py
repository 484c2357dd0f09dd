"""Models with images on Ray workers: the numbers of one process, checkpoints of any layout, frozen vision towers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file
from support.image_models import BLUE, RED, data_url, drawn, image_model, make_lively
from support.messages import raises
from support.world import metrics
from transformers import AutoModelForImageTextToText

from hone.apps.lab.replay.replay import replay
from hone.apps.lab.replay.stored import WeightGradients, load_step
from hone.cluster.ray.connection import SETTINGS
from hone.config import RLConfig, SFTConfig, load_config
from hone.errors import HoneError
from hone.trainers import rl, sft

pytestmark = pytest.mark.long("hone/data/images.py", "hone/models", "hone/cluster/remote_batch.py", "hone/apps/lab")

STEPS = 3
TWO = ("trainer.runtime=ray", "trainer.n_gpus_per_node=2")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COPIED = "rollout/canary_gap"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 6
"""


@pytest.fixture(scope="module")
def cluster(forked_ray_workers):
    """One Ray for all runs of the module; they leave it open."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a reward function, and twelve rows, of which every third has no image."""
    folder = tmp_path_factory.mktemp("images")
    make_lively(image_model(folder, "qwen3_vl", "200k"))
    (folder / "reward.py").write_text(REWARD)
    rows = []
    for number in range(12):
        colour, name = ((RED, "red"), (BLUE, "blue"))[number % 2]
        shown = [drawn(colour, (60 + number, 60), at=number)] * (number % 3)
        prompt = [{"role": "user", "content": "<image>" * len(shown) + f"what colour {number}?"}]
        rows.append(
            {
                "prompt": prompt,
                "messages": [*prompt, {"role": "assistant", "content": name}],
                "images": [data_url(image) for image in shown],
                "data_source": "colours",
                "reward_model": {"ground_truth": name},
            }
        )
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def run(root: Path, where: Path, kind: str, *overrides: str, steps: int = STEPS) -> list[dict]:
    """Metrics of a run, without those of the division over ranks."""
    words = [
        f"data.train_files={root}/rows.jsonl",
        f"trainer.default_local_dir={where}",
        f"trainer.total_training_steps={steps}",
        *("trainer.logger=[]", "trainer.device=cpu", "trainer.num_threads=1", "trainer.watchdog_seconds=0"),
    ]
    if kind == "sft":
        words += [
            f"model.path={root}/qwen3_vl",
            f"data.val_files={root}/rows.jsonl",
            "data.max_length=200",
            "trainer.test_freq=1",
        ]
        words += ["data.train_batch_size=6", "optim.lr=1e-3", "optim.eps=1e-6", "data.max_token_len_per_gpu=60"]
        assert sft.train(load_config(SFTConfig, [*words, *overrides])) == 0
    else:
        words += [f"actor_rollout_ref.model.path={root}/qwen3_vl", f"{ACTOR}.optim.lr=1e-3", f"{ACTOR}.optim.eps=1e-6"]
        words += [f"{ACTOR}.ppo_mini_batch_size=6", "data.train_batch_size=6", f"{ROLLOUT}.n=2"]
        words += ["data.max_prompt_length=160", "data.max_response_length=6", f"{ACTOR}.ppo_max_token_len_per_gpu=80"]
        words += [f"reward.custom_reward_function.path={root}/reward.py", f"{ACTOR}.use_kl_loss=true"]
        assert rl.train(load_config(RLConfig, [*words, *overrides], preset="grpo")) == 0
    return [{name: v for name, v in row.items() if not name.startswith("global_seqlen/")} for row in metrics(where)]


@pytest.fixture(scope="module")
def local(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict]]:
    """Metrics of the runs in one process."""
    known: dict[str, list[dict]] = {}

    def of(kind: str) -> list[dict]:
        if kind not in known:
            known[kind] = run(root, tmp_path_factory.mktemp(kind) / "run", kind)
        return known[kind]

    return of


def assert_close(rows: list[dict], expected: list[dict]) -> None:
    assert [sorted({*row} - {COPIED}) for row in rows] == [sorted(row) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        far = {n: (row[n], v) for n, v in other.items() if abs(row[n] - v) > 1e-5 * max(1.0, abs(v))}
        assert not far, f"step {row['step']}"


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_two_workers_train_as_one(cluster, root: Path, local, tmp_path: Path, kind: str) -> None:
    """The colocated engine gets the images, and the weights of the vision tower after each update."""
    rows = run(root, tmp_path / "run", kind, *TWO)
    assert_close(rows, local(kind))
    if kind == "rl":
        assert max(row.get(COPIED, 0.0) for row in rows) < 1e-4
        assert any(abs(row.get("actor/grad_norm", 0.0)) > 1e-3 for row in rows)


def test_an_engine_in_a_pool_of_its_own_gets_images_and_weights(cluster, root: Path, local, tmp_path: Path) -> None:
    apart = [f"{ROLLOUT}.{key}" for key in ("enable_resource_pool=true", "n_gpus_per_node=1", "nnodes=1")]
    assert_close(run(root, tmp_path / "run", "rl", "trainer.runtime=ray", *apart), local("rl"))


def test_a_checkpoint_fits_any_number_of_workers(cluster, root: Path, local, tmp_path: Path) -> None:
    """Two steps on two workers, the third in this process; the weights are those of a model directory."""
    where = tmp_path / "run"
    run(root, where, "sft", *TWO, "trainer.save_freq=1", steps=2)
    assert_close(run(root, where, "sft", "trainer.save_freq=1"), local("sft"))
    saved = where / "checkpoints/step_2/actor"
    model: Any = AutoModelForImageTextToText.from_pretrained(saved)
    before: Any = AutoModelForImageTextToText.from_pretrained(root / "qwen3_vl")
    assert (saved / "preprocessor_config.json").is_file()
    for part in ("visual", "language_model"):
        pairs = zip(getattr(model.model, part).parameters(), getattr(before.model, part).parameters(), strict=True)
        assert any(not torch.equal(one, other) for one, other in pairs), part


@pytest.mark.parametrize("overrides", [(), TWO], ids=["local", "two workers"])
def test_a_frozen_vision_tower_stays(
    root: Path, tmp_path: Path, overrides: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    if overrides:
        request.getfixturevalue("cluster")
    run(root, tmp_path / "run", "sft", *overrides, "model.freeze_vision_tower=true", steps=1)
    files = (tmp_path / "run/checkpoints/step_1/actor").glob("*.safetensors")
    after = {name: value for file in files for name, value in load_file(file).items()}
    before = load_file(root / "qwen3_vl/model.safetensors")
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed and not any(".visual." in name for name in changed)
    optimizer = list((tmp_path / "run/checkpoints/step_1").rglob("*optim*.json"))
    assert all(".visual." not in file.read_text() for file in optimizer)


def test_a_stored_step_is_replayed_with_its_images(root: Path, tmp_path: Path) -> None:
    """Log-probs and update are computed again from the images of the archive; without one of them nothing runs."""
    where = tmp_path / "run"
    run(root, where, "rl", "trainer.save_steps_for_replay=[2]")
    assert replay(where, 2, "adv").bisection.first is None
    stored_step = load_step(where, 2)
    log_probs = stored_step.batch.ragged("rollout_log_probs")
    gradient = WeightGradients(stored_step).gradient(log_probs.with_values(torch.ones_like(log_probs.values)))
    assert float(gradient.norm()) > 0
    stored = sorted((where / "rollouts/images").iterdir())
    stored[0].unlink()
    with raises(HoneError, stored[0].stem, "rollouts/images"):
        for step in (1, 2, 3):
            load_step(where, step)
