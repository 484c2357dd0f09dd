"""64 ranks in one process: shards, meshes and one update of layouts that no test machine has the processes for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.backend_cases import Case, save_model, trained
from support.fake_ranks import train
from support.launch import Command
from support.simulated_cuda.build import compiler
from support.simulated_cuda.machine import Machine

pytestmark = pytest.mark.simulated_cuda("hone/training/backends", "hone/training/layout.py")

WORLD = 64
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "fsdp2": ({}, {"dp_replicate": 1, "dp_shard": 64, "sequence": 1, "tensor": 1}),
    "hybrid x sequence x tensor": (
        {"tensor_model_parallel_size": 2, "ulysses_sequence_parallel_size": 4, "fsdp_config": {"fsdp_size": 16}},
        {"dp_replicate": 2, "dp_shard": 4, "sequence": 4, "tensor": 2},
    ),
    "ring x sequence": (
        {"context_parallel_size": 4, "ulysses_sequence_parallel_size": 2},
        {"dp_replicate": 1, "dp_shard": 8, "sequence": 2, "tensor": 1, "context": 4},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_64_ranks_train_a_batch(tmp_path: Path, name: str) -> None:
    parallel, sizes = LAYOUTS[name]
    shape = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    model = save_model(tmp_path / "model", "qwen3", **shape)
    case = {"model": str(model), "parallel": {"strategy": "fsdp2", **parallel}, "updates": 1, "rows": 2080}
    command = Command(["37", str(WORLD), json.dumps(case)], tmp_path / "log", run=train)
    ended = command.wait()
    assert ended.code == 0, ended.output
    outcome = json.loads(ended.output.splitlines()[-1])
    assert outcome["layout"] == {
        "world": WORLD,
        **sizes,
        "expert": 1,
        "pipeline": 1,
        "context": sizes.get("context", 1),
    }
    assert outcome["finite"] and outcome["norms"][0] > 0
    copies = WORLD // sizes["dp_replicate"]
    assert outcome["parameters"] / copies <= outcome["here"] < 1.3 * outcome["parameters"] / copies


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler for the driver of the simulated GPU (CXX, c++, g++)")
def test_a_single_rank_trains_on_the_simulated_gpu(tmp_path: Path) -> None:
    """The strategy fsdp2 shards nothing over one rank: losses and gradient norms are those of the CPU."""
    case = Case(save_model(tmp_path / "model", "qwen3"), updates=2)
    _, _, losses, norms = trained(case, range(case.updates))
    sharded = {"model": str(case.model), "updates": 2, "device": "cuda", "parallel": {"strategy": "fsdp2"}}
    with Machine() as machine:
        ended = machine.start("support.fake_ranks:train", ["0", "1", json.dumps(sharded)], tmp_path).wait()
    assert ended.code == 0, ended.output
    outcome = json.loads(ended.output.splitlines()[-1])
    assert ended.counters.launches.total() > 500 and outcome["here"] == outcome["parameters"]
    assert outcome["losses"] == pytest.approx(losses, rel=1e-4)
    assert outcome["norms"] == pytest.approx(norms, rel=1e-4)
