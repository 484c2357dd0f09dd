"""What hardware is enough: the fewest devices that the plan of the same keys fits, and never fewer on a smaller GPU."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hone.config.load import load_config
from hone.config.trees import TREES
from hone.errors import ModelError
from hone.preflight.plan import enough as table
from hone.preflight.plan.devices import device_named
from hone.preflight.plan.plan import plan_of, render

LLAMA = {
    "model_type": "llama",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(tmp_path)


def test_the_fewest_devices_fit_and_fewer_do_not(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {name: table.METHODS[name] for name in ("SFT, all weights", "SFT, LoRA", "DPO, all weights")}
    monkeypatch.setattr(table, "METHODS", methods)
    found = {(one.method, one.gpu): one for one in table.enough(model)}
    for method, (command, keys) in methods.items():
        counts = [found[method, gpu].devices or 99 for gpu in table.GPUS]
        assert counts == sorted(counts, reverse=True), "a larger GPU needs more of them"
        for gpu in table.GPUS:
            one = found[method, gpu]
            if one.devices is None:
                continue
            sizes = [] if one.devices == 1 else ["trainer.runtime=ray", f"trainer.n_gpus_per_node={one.devices}"]
            turned = [key for setting in one.keys for key in setting.split(" ")]
            plan = plan_of(
                load_config(TREES[command], [f"model.path={model!r}", *keys, *sizes, *turned]), device_named(gpu)
            )
            assert plan.fits and max(memory.peak.total for memory in plan.memories) == pytest.approx(one.peak, rel=0.02)
    assert found["SFT, all weights", "A10-24GB"].devices == 8  # offloads to the host, which once asked for a key of RL
    assert found["SFT, LoRA", "A10-24GB"].devices == 1


def test_a_method_is_not_replaced_by_another(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "METHODS", {"GRPO": ("train", ("algorithm.adv_estimator=grpo",))})
    monkeypatch.setattr(table, "GPUS", ("A10-24GB",))
    monkeypatch.setattr(table, "COUNTS", (1,))
    (one,) = table.enough(model)
    assert one.devices is None and one.keys == ()


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        next(table.enough(str(tmp_path)))


def test_a_validation_takes_what_a_step_with_its_answers_takes_to_generate(model: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"] * 96}), tmp_path / "val.parquet")
    answers = ["actor_rollout_ref.rollout.val_kwargs.n=2", "trainer.test_freq=10", "trainer.save_freq=20"]
    keys = [f"actor_rollout_ref.model.path={model!r}", f"data.val_files={str(tmp_path / 'val.parquet')!r}", *answers]
    device = device_named("H100-80GB")
    plan = plan_of(load_config(TREES["train"], keys), device)
    step = plan_of(
        load_config(TREES["train"], [*keys, "data.train_batch_size=96", "actor_rollout_ref.rollout.n=2"]), device
    )
    assert plan.validation == (192, step.time.generation)
    assert "validation: " in render(plan) and "checkpoint: " in render(plan)
    assert plan_of(load_config(TREES["train"], [*keys, "data.val_max_samples=5"]), device).validation[0] == 10
    assert plan_of(load_config(TREES["train"], [*keys, "trainer.test_freq=0"]), device).validation is None
    assert plan_of(load_config(TREES["train"], [*keys, "data.val_files=none.parquet"]), device).validation is None
