"""The memory that the plan predicts, against what processes really hold: three sizes, three layouts.

Compared is the most resident memory (VmHWM) of each process while it makes two steps with the roles of a run, above what the
same process held before, with everything imported and used once, and the fullest phase of the plan without its share for the
bare process. The plan speaks of the fullest process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.plan_cases import hold, plan_config, save_plan_model
from support.ranks import Ranks

from hone.preflight.plan.memory import memory_of
from hone.preflight.plan.model import shape_of
from hone.preflight.plan.work import work_of

pytestmark = pytest.mark.long("hone/preflight/plan")

TOLERANCE = 0.15
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 8},
    "5M": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 704, "head_dim": 32},
    "10M": {"hidden_size": 320, "num_hidden_layers": 8, "intermediate_size": 896, "head_dim": 40},
    "30M": {"hidden_size": 576, "num_hidden_layers": 9, "intermediate_size": 1536, "head_dim": 72},
}
PROMPTS = {"5M": 8, "10M": 2, "30M": 1}
LAYOUTS = {
    "one process": (),
    "two shards": ("trainer.runtime=ray", "trainer.n_gpus_per_node=2"),
    "two tensor-parallel ranks": (
        "trainer.runtime=ray",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.tensor_model_parallel_size=2",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each size with random weights."""
    root = tmp_path_factory.mktemp("plan")
    return {size: save_plan_model(root / size, **shape) for size, shape in SHAPES.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", PROMPTS)
def test_prediction_is_what_a_process_holds(two_ranks: Ranks, models: dict[str, Path], size: str, layout: str) -> None:
    config = plan_config(models[size], PROMPTS[size], *LAYOUTS[layout])
    warm_up = plan_config(models["tiny"], 2, *LAYOUTS[layout])
    shape = shape_of(config.actor_rollout_ref.model)
    assert shape is not None and 0.8 < shape.parameters / (float(size[:-1]) * 1e6) < 1.2
    work = work_of(config, shape, on_cpu=True)
    predicted = memory_of(work, work.main)
    ranks = [held for held in two_ranks.run(hold, warm_up, config) if held is not None]
    measured = max(held["peak"] - held["bare"] for held in ranks) * 2**30
    assert predicted.peak.total == pytest.approx(measured, rel=TOLERANCE), (
        f"{measured / 2**20:.0f} MiB measured, predicted "
        + "; ".join(
            f"{phase.name} {phase.total / 2**20:.0f}: "
            + ", ".join(f"{name} {size / 2**20:.0f}" for name, size in phase.parts.items())
            for phase in predicted.phases
        )
    )
