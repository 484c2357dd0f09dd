"""64 ranks in one process: shards, meshes and one update of layouts that no test machine has the processes for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.backend_cases import save_model
from support.fake_ranks import train
from support.launch import Command

pytestmark = pytest.mark.simulated_cuda

WORLD = 64
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "fsdp2": ({}, {"dp_replicate": 1, "dp_shard": 64, "sequence": 1, "tensor": 1}),
    "hybrid x sequence x tensor": (
        {"tensor_model_parallel_size": 2, "ulysses_sequence_parallel_size": 4, "fsdp_config": {"fsdp_size": 16}},
        {"dp_replicate": 2, "dp_shard": 4, "sequence": 4, "tensor": 2},
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
    assert outcome["layout"] == {"world": WORLD, **sizes, "expert": 1}
    assert outcome["finite"] and outcome["norms"][0] > 0
    copies = WORLD // sizes["dp_replicate"]
    assert outcome["parameters"] / copies <= outcome["here"] < 1.3 * outcome["parameters"] / copies
