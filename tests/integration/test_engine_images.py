"""Engines in processes of their own read images: log-probs are the trainer's, new weights reach the vision tower."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_cases import make_model, plan, save, serve
from support.image_models import ARCHITECTURES, batch_of, drawn, image_model, make_lively, rows_of
from support.messages import raises

from hone.config.model import ModelConfig
from hone.errors import ConfigError, GenerationError, RequestError
from hone.generation.environments import interpreter_of
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.generation.remote import ServedEngine
from hone.models.heads import PolicyHead
from hone.models.images import vision_tower
from hone.models.loading import load_policy
from hone.training.packing import pack

pytestmark = pytest.mark.application("hone/generation", "hone/models", "hone/data")

CPU = torch.device("cpu")
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
TOLERANCE = 1e-4
CASES = [
    pytest.param(engine, arch, marks=marks, id=f"{engine}-{arch}")
    for engine, marks in (("served", pytest.mark.slow), ("vllm", pytest.mark.engines))
    for arch in ARCHITECTURES
    if engine != "vllm" or arch in ("qwen2_5_vl", "qwen3_vl")
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {arch: make_lively(image_model(tmp_path_factory.mktemp(arch), arch, "200k")) for arch in ARCHITECTURES}


def asked(directory: Path, name: str = "") -> list[GenerationRequest]:
    """Requests with no, one and two images, some of them equal."""
    return [
        GenerationRequest(f"{name}{row}.{sample}", prompt, SAMPLING, seed=10 * row + sample, images=images)
        for row, (prompt, _, images) in enumerate(rows_of(directory))
        for sample in range(1 + row % 2)
    ]


def largest_gap(policy: Any, requests: list[GenerationRequest], done: dict[str, Completion]) -> float:
    """Largest difference of a log-prob between engine and trainer."""
    answers = [done[request.request_id] for request in requests]
    played = [(r.prompt_ids, answer.token_ids, r.images) for r, answer in zip(requests, answers, strict=True)]
    with torch.no_grad():
        packed = pack(batch_of(played), CPU)
        scores = packed.outputs_by_row(PolicyHead()(policy, packed, with_entropy=False))["log_probs"]
    return float((scores - torch.tensor([value for answer in answers for value in answer.log_probs])).abs().max())


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_log_probs_are_those_of_the_trainer(name: str, arch: str, directories: dict[str, Path], tmp_path: Path) -> None:
    """Before and after new weights, of which those of the vision tower alone change most; without them the sync fails."""
    if name == "vllm":
        try:
            interpreter_of(name)
        except ConfigError as missing:
            pytest.skip(missing.what)
    directory = directories[arch]
    policy: Any = load_policy(ModelConfig(path=str(directory)), device=CPU, seed=0)
    engine = ServedEngine.start(plan(name, directory, tmp_path / "log"))
    try:
        requests = asked(directory)
        done = serve(engine, requests)
        assert largest_gap(policy, requests, done) < TOLERANCE
        tower = vision_tower(policy)
        assert tower is not None
        with torch.no_grad():
            for parameter in tower.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        assert largest_gap(policy, requests, done) > 100 * TOLERANCE
        asyncio.run(engine.load_weights(policy.named_parameters(), 1))
        again = asked(directory, "again")
        assert largest_gap(policy, again, serve(engine, again)) < TOLERANCE
        inside = {id(parameter) for parameter in tower.parameters()}
        partly = [(key, value) for key, value in policy.named_parameters() if id(value) not in inside]
        with pytest.raises(GenerationError, match="have not arrived"):
            asyncio.run(engine.load_weights(partly, 2))
    finally:
        engine.close()


def test_a_server_of_a_text_model_refuses_images(tmp_path: Path) -> None:
    engine = ServedEngine.start(plan("served", save(make_model("tied"), tmp_path / "model"), tmp_path / "log"))
    try:
        with raises(RequestError, "1 images", "vllm"):
            serve(engine, [GenerationRequest("0", [1, 2], SAMPLING, images=(drawn((9, 9, 9)),))])
    finally:
        engine.close()
