"""Decoders that read images, against transformers' own forward pass on each sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.image_models import CASES, batch_of, image_model, keys_in, lively_policy, oracle, rows_of

from hone.models.heads import PolicyHead
from hone.models.images import vision_tower
from hone.training.packing import pack


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = image_model(tmp_path_factory.mktemp("images"), request.param)
    return directory, lively_policy(directory)


def test_packed_rows_with_images_score_as_each_alone(model: tuple[Path, Any]) -> None:
    directory, policy = model
    rows = rows_of(directory)
    with torch.no_grad():
        packed = pack(batch_of(rows), torch.device("cpu"))
        scores = packed.outputs_by_row(PolicyHead()(policy, packed, with_entropy=False))["log_probs"]
    expected = torch.cat([oracle(policy, directory, *row) for row in rows])
    assert (scores - expected).abs().max() < 2e-5
    first, second = (expected[: len(rows[0][1])], expected[len(rows[0][1]) :])
    assert len(first) and len(second)


def test_rows_share_an_image_but_never_another_one(model: tuple[Path, Any]) -> None:
    directory, _ = model
    rows = rows_of(directory)
    length = [len(prompt) for prompt, _, _ in rows]
    same, other = pack(batch_of(rows[:2]), torch.device("cpu")), pack(batch_of([rows[0], rows[2]]), torch.device("cpu"))
    answers = [len(response) for _, response, _ in rows]
    assert same.input_ids.shape[1] < length[0] + answers[0] + answers[1]
    assert other.input_ids.shape[1] > length[0] + answers[0] + answers[2]
    assert len(keys_in(rows[5][0])) == 1
    assert len(keys_in(rows[3][0])) == 2


def test_the_vision_tower_gets_its_gradient(model: tuple[Path, Any]) -> None:
    directory, policy = model
    rows = rows_of(directory)
    packed = pack(batch_of(rows), torch.device("cpu"))
    PolicyHead()(policy, packed, with_entropy=False)["log_probs"].sum().backward()
    tower = vision_tower(policy)
    assert tower is not None
    norms = [p.grad.norm() for p in tower.parameters() if p.grad is not None]
    assert len(norms) >= 10
    assert all(norm.isfinite() for norm in norms)
    assert sum(float(norm) for norm in norms) > 0
    policy.zero_grad()
