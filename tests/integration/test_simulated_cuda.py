"""The simulated GPU: it refuses what CUDA refuses and counts what costs time there. And the budgets of Hone's inner loops on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.engine_cases import make_model as tied_model
from support.engine_cases import save
from support.simulated_cuda.build import compiler
from support.simulated_cuda.machine import Machine
from support.tiny_runs import make_model

pytestmark = [
    pytest.mark.simulated_cuda(
        "hone/models/kernels", "hone/models/attention", "hone/generation/native", "hone/training/engine.py"
    ),
    pytest.mark.skipif(
        compiler() is None, reason="no C++ compiler for the driver of the simulated GPU (CXX, c++, g++)"
    ),
]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine() as machine:
        yield machine


def test_the_device_computes_refuses_and_counts(machine: Machine, tmp_path: Path) -> None:
    """The checks themselves run in its process: :func:`support.simulated_cuda.work.check`."""
    ended = machine.start("support.simulated_cuda.work:check", [], tmp_path).wait()
    assert ended.code == 0, ended.output


def test_decoding_with_graphs_and_pages(machine: Machine, tmp_path: Path) -> None:
    """The checks run in its process: :func:`support.simulated_cuda.work.decode`."""
    ended = machine.start("support.simulated_cuda.work:decode", [make_model(tmp_path / "model")], tmp_path).wait()
    assert ended.code == 0, ended.output


def test_activations_in_host_memory(machine: Machine, tmp_path: Path) -> None:
    """The checks run in its process: :func:`support.simulated_cuda.work.offload`."""
    ended = machine.start("support.simulated_cuda.work:offload", [], tmp_path).wait()
    assert ended.code == 0, ended.output


LAYERS = 2, 4


class Budget(NamedTuple):
    """At most what a piece of work asks of the GPU, in bfloat16.

    Attributes:
        layer: launches of each layer.
        rest: launches outside the layers.
        waits: of the host, all of them outside the layers.
    """

    layer: int
    rest: int
    waits: int


BUDGETS = {
    # A decode step: one CUDA graph.
    "rows that share prompts": Budget(0, 1, 1),
    "rows with prompts of their own": Budget(0, 1, 1),
    "rows with stop strings": Budget(0, 1, 1),
    "rows with top-p": Budget(0, 1, 1),
    # Without a graph, because of the penalties. Attention over pages is two launches.
    "rows with top-p and penalties": Budget(32, 112, 1),
    # One micro-batch of fused layers without checkpointing, each operator one launch as on CUDA.
    "log-prob pass": Budget(19, 20, 1),
    "update": Budget(68, 58, 2),
}
"""Today's numbers. Who launches less lowers them."""


@pytest.fixture(scope="module")
def work(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """What each piece of work asks of the GPU, with models of either number of layers."""
    folder = tmp_path_factory.mktemp("layers")
    models = [make_model(folder / str(layers), layers=layers) for layers in LAYERS]
    ended = machine.start("support.simulated_cuda.work:count", models, folder).wait()
    assert ended.code == 0, ended.output
    return json.loads(ended.output.splitlines()[-1])


@pytest.mark.parametrize("name", BUDGETS)
def test_launches_and_waits_stay_in_their_budgets(
    work: list[dict[str, Any]], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = (counters[name] for counters in work)
    layer = (large["launches"] - small["launches"]) / (LAYERS[1] - LAYERS[0])
    rest = small["launches"] - LAYERS[0] * layer
    with capsys.disabled():
        print(  # noqa: T201 - the stage prints its budgets
            f"\n{name}: {layer:.0f} launches a layer (budget {BUDGETS[name].layer}), {rest:.0f} outside "
            f"({BUDGETS[name].rest}), {small['waits']:.0f} waits ({BUDGETS[name].waits})"
        )
    places = {key: value for key, value in small.items() if key.startswith("wait: ")}
    assert large["waits"] == small["waits"], "no layer waits"
    assert small["waits"] <= BUDGETS[name].waits, places
    assert layer <= BUDGETS[name].layer and rest <= BUDGETS[name].rest


@pytest.mark.parametrize("program", ["chunks", "deliver", "refused"])
def test_weights_stay_on_the_gpu_of_trainer_and_engine(machine: Machine, tmp_path: Path, program: str) -> None:
    """The checks run in its process, and in engines forked from it: :mod:`support.simulated_cuda.ipc`."""
    ended = machine.start(
        f"support.simulated_cuda.ipc:{program}", [save(tied_model("tied"), tmp_path / "model")], tmp_path
    ).wait()
    assert ended.code == 0, ended.output
