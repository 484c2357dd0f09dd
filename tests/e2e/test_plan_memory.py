"""The memory that the plan predicts, against what runs really hold: three sizes, three layouts.

Compared is, for each process with models, the most resident memory that it had (VmHWM, from which what it held when everything
was imported and nothing made is taken away) with the fullest phase of the plan without its share for the bare process. Both are
what `hone runs show` shows of a run: the plan is written at its start, the measurement at its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import hone
from support.world import World, run_record

pytestmark = pytest.mark.slow

TOLERANCE = 0.15
SHAPES: dict[str, dict[str, int]] = {
    "5M": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 704, "head_dim": 32},
    "20M": {"hidden_size": 448, "num_hidden_layers": 8, "intermediate_size": 1216, "head_dim": 56},
    "60M": {"hidden_size": 704, "num_hidden_layers": 10, "intermediate_size": 1920, "head_dim": 88},
}
PROMPTS = {"5M": 8, "20M": 4, "60M": 2}
LAYOUTS = {
    "one process": ("trainer.runtime=local",),
    "two shards": ("trainer.runtime=ray", "trainer.n_gpus_per_node=2", "ray.num_cpus=2"),
    "two tensor-parallel": (
        "trainer.runtime=ray",
        "trainer.n_gpus_per_node=2",
        "ray.num_cpus=2",
        "actor_rollout_ref.actor.tensor_model_parallel_size=2",
    ),
}


@pytest.fixture(scope="module")
def models(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each size with random weights."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    root, tokenizer = tmp_path_factory.mktemp("models"), AutoTokenizer.from_pretrained(world.tokenizer)
    made = {}
    for size, shape in SHAPES.items():
        heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": len(tokenizer)}
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, **ends, tie_word_embeddings=True))
        assert 0.8 < model.num_parameters() / (float(size[:-1]) * 1e6) < 1.2
        made[size] = root / size
        model.save_pretrained(made[size])
        tokenizer.save_pretrained(made[size])
    return made


def train(world: World, model: Path, run: Path, prompts: int, *overrides: str) -> dict[str, Any]:
    """Two steps; returns run.json. Responses are as long as they may be, as the plan takes them to be."""
    ended = hone(
        "train",
        "--preset=grpo",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={world.train}",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=24",
        "data.max_response_length=96",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "trainer.total_training_steps=2",
        "trainer.save_freq=0",
        "trainer.num_threads=1",
        "trainer.device=cpu",
        "trainer.watchdog_seconds=0",
        "trainer.logger=[]",
        f"trainer.default_local_dir={run}",
        *overrides,
        log=run.with_suffix(".log"),
        timeout=240,
    )
    assert ended.code == 0, ended.output
    return run_record(run)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SHAPES)
def test_prediction_is_what_a_run_holds(
    world: World, models: dict[str, Path], tmp_path: Path, size: str, layout: str
) -> None:
    record = train(world, models[size], tmp_path / "run", PROMPTS[size], *LAYOUTS[layout])
    (plan,) = record["plan"]
    assert len(record["memory"]) == (1 if layout == "one process" else 2)
    for name, held in record["memory"].items():
        measured = held["peak"] - held["bare"]
        assert plan["peak_gib"] == pytest.approx(measured, rel=TOLERANCE), f"{name}: {held}, {plan['phases']}"
