"""Generation from prompts with images: log-probs are the trainer's, shared prompts and sessions change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.image_models import CASES, batch_of, image_model, lively_policy, rows_of

from hone.data.images import ImageData, token_ids
from hone.errors import RequestError
from hone.generation.native.speculative import Speculation
from hone.generation.native.speculative.build import ModelDrafter, NgramDrafter
from hone.generation.protocol import Completion, Engine, GenerationRequest, SamplingParams
from hone.models.heads import PolicyHead
from hone.models.routing import use_hone_attention
from hone.training.packing import pack

SAMPLING = SamplingParams(max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = image_model(tmp_path_factory.mktemp("images"), request.param)
    return directory, lively_policy(directory)


def sampled(engine: Engine, requests: list[GenerationRequest]) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return [completion async for completion in engine.generate(requests)]

    answers = {answer.request_id: answer for answer in asyncio.run(all_of_them())}
    return [answers[request.request_id] for request in requests]


def test_log_probs_are_those_of_the_trainer(model: tuple[Path, Any], make_engine: Callable[..., Engine]) -> None:
    directory, policy = model
    rows = rows_of(directory)
    requests = [
        GenerationRequest(f"{row}.{sample}", prompt, SAMPLING, seed=10 * row + sample, images=images)
        for row, (prompt, _, images) in enumerate(rows)
        for sample in range(1 + row % 3)  # some prompts are shared
    ]
    answers = sampled(make_engine(policy, max_model_len=512), requests)
    played = [(r.prompt_ids, answer.token_ids, r.images) for r, answer in zip(requests, answers, strict=True)]
    with torch.no_grad():
        packed = pack(batch_of(played), torch.device("cpu"))
        scores = packed.outputs_by_row(PolicyHead()(policy, packed, with_entropy=False))["log_probs"]
    engine_scores = torch.tensor([value for answer in answers for value in answer.log_probs])
    assert (scores - engine_scores).abs().max() < 2e-5


def test_a_session_continues_after_an_image_and_adds_another(
    model: tuple[Path, Any], make_engine: Callable[..., Engine]
) -> None:
    directory, policy = model
    rows = rows_of(directory)
    (first, _, images), (second, _, more) = rows[0], rows[3]
    kept, fresh = (make_engine(policy, max_model_len=512, max_cache_tokens=4096) for _ in range(2))
    answers = {}
    for engine, session in ((kept, "episode"), (fresh, None)):
        (one,) = sampled(engine, [GenerationRequest("1", first, SAMPLING, 3, session, images=images)])
        ids, all_images = [*first, *one.token_ids, *second], (*images, *more)
        answers[session] = sampled(engine, [GenerationRequest("2", ids, SAMPLING, 4, session, images=all_images)])[0]
    assert answers["episode"].token_ids == answers[None].token_ids
    torch.testing.assert_close(answers["episode"].log_probs, answers[None].log_probs, atol=2e-5, rtol=0)
    assert kept.describe().stats["session_hits"] == 1


def test_tokens_of_unknown_images_are_refused(model: tuple[Path, Any], make_engine: Callable[..., Engine]) -> None:
    directory, policy = model
    prompt, _, images = rows_of(directory)[0]
    engine = make_engine(policy)
    with pytest.raises(RequestError) as error:
        sampled(engine, [GenerationRequest("1", prompt, SAMPLING)])
    assert error.value.field == "prompt"
    with pytest.raises(RequestError):  # a response cannot begin inside an image
        sampled(engine, [GenerationRequest("1", [*prompt, *token_ids(images[0].key, 1)], SAMPLING, images=images)])


def test_a_model_of_text_reads_no_images(make_model: Callable[..., Any], make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(make_model("qwen3"))
    image = ImageData(b"any content")
    with pytest.raises(RequestError) as error:
        sampled(engine, [GenerationRequest("1", [1, *token_ids(image.key, 2), 3], SAMPLING, images=(image,))])
    assert error.value.field == "images"


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_no_token_after_an_image(
    model: tuple[Path, Any], make_engine: Callable[..., Engine], make_model: Callable[..., Any], method: str
) -> None:
    directory, policy = model
    rows = rows_of(directory)
    requests = [
        GenerationRequest(str(row), prompt, SAMPLING, seed=row, images=images)
        for row, (prompt, _, images) in enumerate(rows)
    ]
    small = make_model("qwen3")
    use_hone_attention(small)
    model_drafter = ModelDrafter(small, device=torch.device("cpu"), dtype=torch.float32)
    drafter = NgramDrafter(1, 3) if method == "ngram" else model_drafter
    expected = sampled(make_engine(policy, max_model_len=512), requests)
    answers = sampled(make_engine(policy, max_model_len=512, speculation=Speculation(drafter, num_tokens=3)), requests)
    for plain, drafted in zip(expected, answers, strict=True):
        assert drafted.token_ids == plain.token_ids
        torch.testing.assert_close(drafted.log_probs, plain.log_probs, atol=2e-5, rtol=0)
