"""Episodes with images: tool results and prompts that show some, to the policy and to training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.agents import call, play, setting
from support.image_models import as_text_ids, data_url, drawn, keys_in
from support.templates import tokenizer as template_tokenizer

from hone.agents.base import EpisodeContext
from hone.agents.tools import Tool
from hone.data.chat import render_prompt
from hone.data.image_processor import GridProcessor
from hone.data.images import ImageData
from hone.data.types import Sample
from hone.models.init import IMAGE_MODELS

RED, BLUE = drawn((255, 0, 0)), drawn((0, 0, 255), (120, 50))
SCHEMA = {
    "type": "function",
    "function": {"name": "look", "description": "look", "parameters": {"type": "object", "properties": {}}},
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Look(Tool):
    """Shows an image."""

    def __init__(self, value: Any) -> None:
        super().__init__(SCHEMA)
        self.value = value

    async def execute(self, state: Any, arguments: Any, **kwargs: Any) -> Any:
        return self.value


@pytest.fixture(params=["qwen2_5", "chatml"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> EpisodeContext:
    """The setting of a policy that reads images, with a template of tools or without one."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = copy.deepcopy(template_tokenizer("qwen2_5"))
    if request.param == "chatml":
        tokenizer.chat_template = CHATML
    IMAGE_MODELS["qwen2_5_vl"].add_marks(tokenizer)
    prepare = Qwen2VLImageProcessorPil(patch_size=14, size={"shortest_edge": 28 * 28, "longest_edge": 448 * 448})
    placeholder = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    renderer = {"renderer": "text_tools"} if request.param == "chatml" else {}
    context = setting(max_assistant_turns=4, **renderer)
    context.tokenizer = tokenizer
    context.image_processor = GridProcessor({"image_token_id": placeholder}, prepare, tokenizer, tmp_path)
    return context


def row(made: EpisodeContext, *images: ImageData) -> Sample:
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": "what is it?"}]
    messages = [{"role": "user", "content": parts if images else "what is it?"}]
    schemas = None if made.renderer.tools_as_text else {"tools": [SCHEMA]}
    assert made.image_processor is not None
    ids = made.renderer.prompt(messages, [SCHEMA])
    if schemas is not None:
        assert ids == render_prompt(made.tokenizer, messages, schemas)
    return Sample("row", made.image_processor.expand(ids, images), messages, "shapes", "red", images=images)


def shown(*images: ImageData) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return [{"type": "text", "text": "a picture:"}, *parts]


def played(made: EpisodeContext, sample: Sample, value: Any) -> tuple[Any, Any]:
    from hone.agents.tools.base import Toolbox

    made.toolbox = Toolbox([Look(value)], made.multi_turn)
    (trajectory,), engine = play(made, lambda name, turn: call("look") if turn == 0 else "red", [sample])
    return trajectory, engine


@pytest.mark.parametrize("prompt_images", [(), (BLUE,)])
def test_the_images_of_a_tool_are_seen_and_not_trained_on(made: EpisodeContext, prompt_images: Any) -> None:
    sample = row(made, *prompt_images)
    trajectory, engine = played(made, sample, shown(RED, BLUE))
    first, second = engine.requests
    assert first.images == prompt_images and second.images == (*prompt_images, RED, BLUE) == trajectory.images
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    given = second.prompt_ids[len(first.prompt_ids) :]
    assert keys_in(given) == [RED.key, BLUE.key]
    mask = dict(zip(trajectory.response_ids, trajectory.response_mask, strict=True))
    assert all(mask[token] == 0 for token in given if token < 0)
    assert made.image_processor is not None
    whole = [*trajectory.prompt_ids, *trajectory.response_ids]
    log = trajectory.episode
    assert log.tokenization is None, "the tokens are those of the conversation rendered anew"
    rendered = made.renderer.prompt([*sample.messages, *log.messages[:2]], [SCHEMA])
    expected = made.image_processor.expand(rendered, second.images)
    assert whole[: len(expected)] == expected
    json.dumps(log.record())
    (record,) = log.calls
    assert record.result == "a picture:" and record.left_out == 0


def test_a_policy_of_text_gets_a_note(made: EpisodeContext) -> None:
    sample = row(made)
    made.image_processor = None
    trajectory, engine = played(made, sample, shown(RED))
    (record,) = trajectory.episode.calls
    assert "image_url left out" in record.result and record.left_out == 1
    assert min(engine.requests[1].prompt_ids) >= 0 and trajectory.images == ()


def test_a_damaged_image_of_a_tool_is_a_note(made: EpisodeContext) -> None:
    trajectory, engine = played(made, row(made), shown(ImageData(RED.content[:60])))
    (record,) = trajectory.episode.calls
    assert "image_url left out" in record.result and min(engine.requests[1].prompt_ids) >= 0


def test_folded_ids_have_one_placeholder_for_each_image(made: EpisodeContext) -> None:
    from hone.agents.episode import EpisodeImages

    assert made.image_processor is not None
    placeholder = made.image_processor.placeholder
    ids = [5, placeholder, placeholder, 7, placeholder]
    images = EpisodeImages((RED, BLUE, RED), made.image_processor)
    places = [{"role": "user", "content": [{"type": "image"}] * 3}]
    expanded = images.expand(ids, places)
    assert images.fold(expanded) == ids and len(expanded) > len(as_text_ids(ids, placeholder))
