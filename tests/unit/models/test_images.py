"""Decoders that read images, against transformers' own forward pass on each sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hone.config.model import ModelConfig
from hone.data.batch import Batch
from hone.data.image_processor import load_image_processor
from hone.data.images import ImageData, as_text_ids, keys_in
from hone.data.ragged import Ragged
from hone.data.tokenizer import load_tokenizer
from hone.models.heads import PolicyHead
from hone.models.images import IMAGES
from hone.models.loading import load_policy
from hone.models.routing import attention_of
from hone.training.packing import pack
from tests.support.image_models import ARCHITECTURES, drawn, image_model

RED, BLUE = (220, 20, 20), (20, 20, 220)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = image_model(tmp_path_factory.mktemp("images"), request.param)
    policy = load_policy(ModelConfig(path=str(directory)), device=torch.device("cpu"), seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():  # random weights of usual size give nearly uniform attention
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return directory, policy


def rows_of(directory: Path) -> list[tuple[list[int], list[int], tuple[ImageData, ...]]]:
    tokenizer = load_tokenizer(directory)
    processor = load_image_processor(directory, tokenizer)
    assert processor is not None

    def row(parts: list[dict[str, str]], images: tuple[ImageData, ...], answer: str) -> tuple:
        text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True)
        ids = processor.expand(tokenizer.encode(text, add_special_tokens=False), images)
        return ids, tokenizer.encode(answer, add_special_tokens=False), images

    image, ask = {"type": "image"}, {"type": "text", "text": "what colour?"}
    red, blue, wide = drawn(RED), drawn(BLUE), drawn(RED, (150, 64))
    return [
        row([image, ask], (red,), "red square"),
        row([image, ask], (red,), "red circle"),
        row([image, ask], (blue,), "blue"),
        row([image, ask, image, ask], (red, wide), "red red"),
        row([ask], (), "green"),
        row([ask, image, image], (wide, wide), "blue"),
    ]


def batch_of(rows: list) -> Batch:
    prompts, responses, images = zip(*rows, strict=True)
    ones = [[1] * len(response) for response in responses]
    return Batch(
        {
            "prompt_ids": Ragged.from_rows(list(prompts), torch.int64),
            "response_ids": Ragged.from_rows(list(responses), torch.int64),
            "response_mask": Ragged.from_rows(ones, torch.int64),
            IMAGES: list(images),
        }
    )


def oracle(model: Any, directory: Path, prompt: list[int], response: list[int], images: tuple[ImageData, ...]) -> torch.Tensor:
    """Log-probs of the response by transformers' forward pass over one sequence."""
    processor = load_image_processor(directory, load_tokenizer(directory))
    assert processor is not None
    ids = torch.tensor([as_text_ids([*prompt, *response], processor.placeholder)])
    values: dict[str, Any] = {}
    if images:
        pixels = [processor.pixels(image).values for image in images]
        along = 0 if processor.in_grid else 1
        values = {name: torch.cat([each[name] for each in pixels], along) for name in pixels[0]}
        if processor.in_grid:
            values["mm_token_type_ids"] = (ids == processor.placeholder).int()
    if processor.in_grid:
        model.model.rope_deltas = None
    with attention_of(model, "eager"), torch.no_grad():
        logits = model(input_ids=ids, **values, use_cache=False).logits[0]
    scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return scores.gather(1, torch.tensor(response)[:, None])[:, 0]


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
    tower = getattr(policy.model, "visual", None) or policy.model.vision_model
    norms = [p.grad.norm() for p in tower.parameters() if p.grad is not None]
    assert len(norms) >= 10
    assert all(norm.isfinite() for norm in norms)
    assert sum(float(norm) for norm in norms) > 0
    policy.zero_grad()
