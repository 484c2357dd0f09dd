"""SFT, preferences and reward models on workers: the numbers of one process, and those of a run that was never interrupted."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from support.choice import CORE
from support.models import tiny_model
from support.small_preferences import make_small_preferences, small_preference_settings
from support.small_sft import small_sft_settings
from support.world import metrics, run_record

from hone.cluster.ray.connection import SETTINGS
from hone.config import PreferenceConfig, RewardModelConfig, SFTConfig, load_config
from hone.insight import activity
from hone.trainers import preference, sft
from hone.trainers.session import Callbacks, calling

pytestmark = pytest.mark.long(
    "hone/trainers/offline.py",
    "hone/trainers/sft.py",
    "hone/trainers/preference.py",
    "hone/cluster/offline_roles.py",
    "hone/training/preferences.py",
)

STEPS = 4
TEACHER = ("distillation.enable=true", "distillation.path={data}/teacher")
KINDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "sft": (SFTConfig, ()),
    "sft-teacher": (SFTConfig, (*TEACHER, "distillation.topk=5", "distillation.task_weight=0.5")),
    "sft-whole": (SFTConfig, (*TEACHER, "distillation.loss_mode=jsd")),
    "dpo": (PreferenceConfig, ("loss.beta=0.5",)),
    "dpo-lora": (PreferenceConfig, ("loss.beta=0.5", "model.lora_rank=4")),
    "kto": (PreferenceConfig, ("loss.name=kto",)),
    "reward-model": (RewardModelConfig, ()),
    "reward-lora": (RewardModelConfig, ("model.lora_rank=4",)),
}
TWO = ("trainer.runtime=ray", "trainer.n_gpus_per_node=2")


@pytest.fixture(scope="module")
def cluster(forked_ray_workers):
    """One Ray for all runs of the module; they leave it open."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_small_preferences(tmp_path_factory.mktemp("data"))
    shutil.copytree(root / "model", root / "teacher")
    tiny_model(seed=1).save_pretrained(root / "teacher")
    return root


def run(data: Path, where: Path, kind: str, *overrides: str, steps: int = STEPS) -> list[dict]:
    """Metrics of a run, without those of the division over ranks."""
    tree, options = KINDS[kind]
    given = [option.format(data=data) for option in options]
    settings = small_sft_settings if tree is SFTConfig else small_preference_settings
    optim = ("optim.lr=1e-3", "optim.eps=1e-6")  # so that rounding alone moves no weight far
    words = settings(data, where, f"trainer.total_training_steps={steps}", *optim, *given, *overrides)
    program: Any = sft if tree is SFTConfig else preference
    assert program.train(load_config(tree, words)) == 0
    return [{name: v for name, v in row.items() if not name.startswith("global_seqlen/")} for row in metrics(where)]


@pytest.fixture(scope="module")
def local(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict]]:
    """Metrics of the runs in one process."""
    known: dict[str, list[dict]] = {}

    def of(kind: str) -> list[dict]:
        if kind not in known:
            known[kind] = run(data, tmp_path_factory.mktemp(kind) / "run", kind, "trainer.save_freq=0")
            assert [row["step"] for row in known[kind]] == list(range(STEPS + 1))
        return known[kind]

    return of


def assert_close(rows: list[dict], expected: list[dict]) -> None:
    assert [sorted(row) for row in rows] == [sorted(row) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        far = {n: (row[n], v) for n, v in other.items() if abs(row[n] - v) > 1e-5 * max(1.0, abs(v))}
        assert not far, f"step {row['step']}"


@pytest.mark.long(*CORE)
@pytest.mark.parametrize("kind", ["sft", "kto", "reward-model"])
def test_one_worker_gives_the_same_numbers(cluster, data: Path, local, tmp_path: Path, kind: str):
    assert run(data, tmp_path / "run", kind, "trainer.runtime=ray", "trainer.save_freq=0") == local(kind)


LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "tensor": ("tensor_model_parallel_size=2",),
    "sequence": ("ulysses_sequence_parallel_size=2",),
    "pipeline": ("pipeline_model_parallel_size=2",),
    "ring": ("context_parallel_size=2",),
    "in order": ("trainer.balance_batch=false",),
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, None) for kind in KINDS),
        *(("sft", "sequence"), ("reward-model", "tensor"), ("dpo", "in order"), ("reward-model", "sequence")),
        *((kind, "ring") for kind in ("sft", "dpo", "reward-model")),
        *((kind, "pipeline") for kind in ("sft", "dpo-lora", "reward-model")),
        ("sft-whole", "tensor"),
    ],
)
def test_two_workers_train_as_one(cluster, data: Path, local, tmp_path: Path, kind: str, layout: str | None):
    assert_close(
        run(data, tmp_path / "run", kind, *TWO, *LAYOUTS.get(layout or "", ()), "trainer.save_freq=0"), local(kind)
    )


@pytest.mark.parametrize("kind", ["sft", "sft-teacher", "dpo", "reward-model"])
def test_a_checkpoint_fits_any_number_of_workers(cluster, data: Path, local, tmp_path: Path, kind: str):
    """Two steps on two workers, one in this process, the last on two again."""
    where = tmp_path / "run"
    run(data, where, kind, *TWO, steps=2)
    run(data, where, kind, steps=3)
    rows = run(data, where, kind, *TWO)
    assert_close(rows, local(kind))
    assert (where / f"checkpoints/step_{STEPS}/actor/config.json").is_file()


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward-model"])
def test_a_killed_worker_changes_nothing(cluster, data: Path, local, tmp_path: Path, kind: str):
    where, killed = tmp_path / "run", []

    def kill(step: int, _: Mapping[str, float]) -> None:
        if step == 2 and not killed:
            records = {record.name: record.pid for record in activity.read_records(where / activity.FOLDER)}
            killed.append(records["main[1]"])
            os.kill(killed[0], signal.SIGKILL)

    with calling(Callbacks(on_step=kill)):
        rows = run(data, where, kind, *TWO, "trainer.max_restarts=1")
    assert killed and len(run_record(where)["restarts"]) == 1
    assert_close(rows, local(kind))
