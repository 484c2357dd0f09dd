"""Rows with images: what is read, where its tokens are, and that no image is cut, lost or trained on."""

from __future__ import annotations

import copy
import io
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.image_models import ABOUT, as_text_ids, data_url, drawn, image_model, keys_in
from support.messages import raises
from support.preflight import write_rows
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from hone.apps.lab.data.check import DatasetOptions, check_dataset
from hone.apps.lab.data.inspection import inspect_row
from hone.config.tree import RLConfig
from hone.data.batch import to_batch
from hone.data.chat import render_prompt
from hone.data.checks import check_images
from hone.data.conversations import ConversationDataset
from hone.data.files import read_all
from hone.data.image_processor import Gemma3Processor as Gemma3Processing
from hone.data.image_processor import GridProcessor, ImageProcessor, TileProcessor, load_image_processor
from hone.data.images import ImageData, token_ids
from hone.data.preferences import PreferenceDataset, preference_batch
from hone.data.prompts import PromptDataset
from hone.data.row_images import RowImages
from hone.data.tokenizer import decoded, load_tokenizer
from hone.data.tokenizing import shortened
from hone.data.types import StopReason, Trajectory
from hone.errors import DataError
from hone.insight.run_directory import RunDirectory
from hone.trainers.sft import conversation_batch
from hone.trainers.teacher_inputs import teacher_prompt

RED, BLUE = drawn((255, 0, 0)), drawn((0, 0, 255), (120, 50))
ASKED = [{"role": "user", "content": "<image>what colour is the <image> shape?"}]
ANSWER = {"role": "assistant", "content": "red"}


@dataclass(frozen=True)
class Reader:
    """A model's directory, tokenizer and processor."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    processor: ImageProcessor

    def prompts(self, file: Path, limit: int = 400, policy: str = "error", **more: Any) -> PromptDataset:
        keys = {"prompt_key": "prompt", "reward_fn_key": "data_source", "image_processor": self.processor}
        return PromptDataset(file, self.tokenizer, max_prompt_length=limit, truncation=policy, **keys | more)

    def conversations(self, file: Path, limit: int = 400, policy: str = "error") -> ConversationDataset:
        keys = {"messages_key": "messages", "image_processor": self.processor}
        return ConversationDataset(file, self.tokenizer, max_length=limit, truncation=policy, **keys)

    def preferences(self, file: Path, limit: int = 400, policy: str = "error") -> PreferenceDataset:
        return PreferenceDataset(
            file, self.tokenizer, max_length=limit, truncation=policy, image_processor=self.processor
        )

    def transformers_ids(self, messages: list[dict[str, Any]], *images: ImageData) -> list[int]:
        """Token ids of a prompt by the processor of transformers, which has one placeholder for each token of an image."""
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
        from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
        from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
        from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

        prepare = AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        no_video = {"video_processor": None}
        whole: Any
        if isinstance(self.processor, GridProcessor):
            whole = Qwen2_5_VLProcessor(prepare, self.tokenizer, **no_video)
        elif isinstance(self.processor, TileProcessor):
            whole = SmolVLMProcessor(prepare, self.tokenizer, **no_video, image_seq_len=4)
        else:
            words = with_marks(self.tokenizer)
            whole = (
                Gemma3Processor(prepare, words, image_seq_length=16)
                if isinstance(self.processor, Gemma3Processing)
                else Gemma4Processor(None, prepare, words, **no_video)
            )
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        opened = [image.open() for image in images]
        return list(whole(text=[text], images=opened if self.processor.in_grid else [opened])["input_ids"][0])


def with_marks(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer with the attributes that the processors of Gemma read."""
    words: Any = copy.deepcopy(tokenizer)
    marks = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
    words._set_model_specific_special_tokens({f"{name}_token": mark for name, mark in marks.items()})
    words._set_model_specific_special_tokens({f"{name}_token": "<start_of_image>" for name in ("audio", "boa", "eoa")})
    return words


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm", "gemma3", pytest.param("gemma4", marks=ABOUT)])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = image_model(tmp_path_factory.mktemp(request.param), request.param)
    tokenizer = load_tokenizer(str(folder))
    if request.param == "gemma3":  # it has a token for each number of ends of lines
        tokenizer.add_tokens(["\n" * count for count in range(6, 1, -1)])
        tokenizer.save_pretrained(folder)
    processor = load_image_processor(folder, tokenizer)
    assert processor is not None
    return Reader(folder, tokenizer, processor)


@pytest.fixture(autouse=True)
def processors_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' processors be built without torchvision and num2words, which they need for videos alone."""
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.processing_utils import ProcessorMixin

    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *arguments: None)
    monkeypatch.setattr(processing_smolvlm, "num2words", str, raising=False)


def placed(*parts: str | None) -> list[dict[str, Any]]:
    """A user's message with texts, and a place for an image for each None."""
    shown = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": shown}]


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_tokens_are_those_of_transformers(reader: Reader, tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", {"prompt": ASKED, "images": [RED.content, BLUE.content]})
    sample = reader.prompts(file)[0]
    assert sample.messages == placed(None, "what colour is the ", None, " shape?")
    json.dumps(sample.messages)
    assert sample.images == (RED, BLUE)
    assert keys_in(sample.prompt_ids) == [RED.key, BLUE.key]
    expected = reader.transformers_ids(sample.messages, RED, BLUE)
    assert as_text_ids(sample.prompt_ids, reader.processor.filler) == expected
    for image in (RED, BLUE):
        tokens = [token for token in sample.prompt_ids if token < 0 and keys_in([token]) == [image.key]]
        assert tokens == token_ids(image.key, len(tokens))


@pytest.mark.parametrize(
    "row",
    [
        lambda folder: {"images": [data_url(RED), data_url(BLUE)]},
        lambda folder: {"images": [{"bytes": None, "path": "red.png"}, {"path": str(folder / "blue.png")}]},
        lambda folder: {"images": ["red.png", {"url": data_url(BLUE)}]},
        lambda folder: {"pictures": ["red.png", "blue.png"]},
        lambda folder: {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": data_url(RED)}},
                        {"type": "text", "text": "what colour is the <image> shape?"},
                    ],
                }
            ],
            "images": [data_url(BLUE)],
        },
        lambda folder: {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": "red.png"},
                        {"type": "text", "text": "what colour is the "},
                        {"type": "input_image", "image_url": data_url(BLUE)},
                        {"type": "text", "text": " shape?"},
                    ],
                }
            ]
        },
        lambda folder: {
            "prompt": placed(None, "what colour is the ", None, " shape?"),
            "images": ["red.png", "blue.png"],
        },
    ],
    ids=["urls", "paths", "relative", "another key", "part and mark", "parts", "places"],
)
def test_every_form_gives_the_same_row(row: Callable[[Path], dict[str, Any]], reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED.content)
    (tmp_path / "blue.png").write_bytes(BLUE.content)
    values = {"prompt": ASKED} | row(tmp_path)
    key = "pictures" if "pictures" in values else "images"
    sample = reader.prompts(write_rows(tmp_path / "a.jsonl", [values]), image_key=key)[0]
    plain = parquet(tmp_path / "b.parquet", {"prompt": ASKED, "images": [RED.content, BLUE.content]})
    expected = reader.prompts(plain)[0]
    assert (sample.prompt_ids, sample.images) == (expected.prompt_ids, expected.images)
    assert sample.messages == expected.messages


def test_pillow_images_of_a_dataset_class(reader: Reader, tmp_path: Path) -> None:
    from hone.data.files import Row

    def read(*files: Any, **options: Any) -> list[Row]:
        assert "image" not in options["refused"] and "video" in options["refused"]
        return [Row("a:0", "a", {"prompt": ASKED, "data_source": "x", "images": [RED.open(), BLUE.open()]})]

    sample = reader.prompts(tmp_path, read=read)[0]
    assert [image.open().tobytes() for image in sample.images] == [image.open().tobytes() for image in (RED, BLUE)]


def test_text_rows_are_as_those_of_a_model_of_text(reader: Reader, tmp_path: Path) -> None:
    texts = [{"prompt": [{"role": "user", "content": "red circle?"}]}, {"prompt": "red"}, {"prompt": [5, 6]}]
    rows = parquet(tmp_path / "a.parquet", *texts[:1])
    file = write_rows(tmp_path / "a.jsonl", texts + [row | {"images": []} for row in texts])
    with_images, text_only = reader.prompts(file), reader.prompts(file, image_processor=None)
    assert [with_images[n] for n in range(6)] == [text_only[n] for n in range(6)]
    assert reader.prompts(rows)[0].messages == texts[0]["prompt"]


@pytest.mark.parametrize("parts", [(None, "red"), ("red\n", None, "\n\nblue"), (None, None, "\n"), (None, "\n", None)])
def test_lines_around_images_are_those_of_transformers(parts: tuple[str | None, ...], reader: Reader) -> None:
    messages, images = placed(*parts), [RED, BLUE][: parts.count(None)]
    ids = render_prompt(reader.tokenizer, messages)
    expanded = reader.processor.expand(ids, images)
    assert as_text_ids(expanded, reader.processor.filler) == reader.transformers_ids(messages, *images)
    assert reader.processor.fold(expanded, images) == ids
    pieces = reader.processor.pieces(ids, images)
    assert len(pieces) == len(ids) and [token for piece in pieces for token in piece] == expanded


def test_placeholders_of_text_and_token_ids_get_their_images(reader: Reader, tmp_path: Path) -> None:
    placeholder = reader.processor.placeholder
    text = f"red{reader.tokenizer.convert_ids_to_tokens(placeholder)}?"
    ids = reader.tokenizer(text)["input_ids"]
    rows = [{"prompt": text, "images": [data_url(RED)]}, {"prompt": ids, "images": [data_url(RED)]}]
    data = reader.prompts(write_rows(tmp_path / "a.jsonl", rows))
    expected = reader.processor.expand(ids, [RED])
    assert [data[n].prompt_ids for n in range(2)] == [expected] * 2 and data[0].images[0] is data[1].images[0]


@pytest.mark.parametrize(
    ("row", "counts"),
    [
        ({"prompt": ASKED, "images": ["a.png"]}, "2 places"),
        ({"prompt": ASKED, "images": []}, "2 places"),
        ({"prompt": placed("red"), "images": ["a.png"]}, "0 places"),
        ({"prompt": placed(None)}, "1 places"),
        ({"prompt": ASKED, "images": None, "image": {"bytes": "x"}}, "data.image_key=image"),
        ({"prompt": "red", "images": ["a.png"]}, "0 places"),
    ],
)
def test_places_and_images_must_match(row: dict[str, Any], counts: str, reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED.content)
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": placed("red")}, row])
    with raises(DataError, counts, where=f"{file}, row 1"):
        reader.prompts(file)


def test_a_damaged_image_is_an_error_before_training(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED.content[:60])
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": placed(None), "images": ["a.png"]}])
    with raises(DataError, "cannot be decoded"):
        reader.prompts(file)


def test_videos_stay_refused(reader: Reader, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": ASKED, "images": [data_url(RED)] * 2, "videos": ["a.mp4"]}])
    with raises(DataError, "1 video", where=f"{file}, row 0"):
        reader.prompts(file)


@pytest.mark.parametrize("policy", ["left", "right", "middle", "drop"])
def test_no_truncation_cuts_an_image(policy: str, reader: Reader, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "red green blue <image> circle square"}], "images": [data_url(RED)]}
    texts = [{"prompt": "red " * 200}, {"prompt": [5]}]
    file = write_rows(tmp_path / "rows.jsonl", [*texts, row])
    whole = reader.prompts(file, limit=2000)[2].prompt_ids
    images = [place for place, token in enumerate(whole) if token < 0]
    for limit in range(len(whole) - 1, 3, -1):
        data = reader.prompts(file, limit, policy)
        left = [] if policy == "drop" else shortened(list(range(len(whole))), limit, policy)
        expected = [[whole[place] for place in left]] if {*images} <= {*left} else []
        assert [data[n].prompt_ids for n in range(len(data)) if data[n].images] == expected
        assert data.dropped == 1 - len(expected) + (policy == "drop") and len(data) == 3 - data.dropped
    with raises(DataError, f"data.max_prompt_length={len(whole)}"):
        reader.prompts(write_rows(tmp_path / "one.jsonl", [row]), limit=4, policy=policy)


def test_images_are_not_trained_on(reader: Reader, tmp_path: Path) -> None:
    answer = [{"type": "text", "text": "red "}, {"type": "image"}, {"type": "text", "text": " blue"}]
    rows = [
        {"messages": [*ASKED, ANSWER], "images": [data_url(RED), data_url(BLUE)]},
        {
            "messages": [ASKED[0] | {"content": "blue?"}, {"role": "assistant", "content": answer}],
            "images": [data_url(RED)],
        },
        {"messages": [ASKED[0] | {"content": "blue?"}, ANSWER]},
    ]
    data = reader.conversations(write_rows(tmp_path / "rows.jsonl", rows))
    first, second, third = (data[number] for number in range(3))
    assert first.images == (RED, BLUE) and second.images == (RED,) and third.images == ()
    prompt = render_prompt(reader.tokenizer, placed(None, "what colour is the ", None, " shape?"))
    start = first.loss_mask.index(1)
    assert first.input_ids[:start] == reader.processor.expand(prompt, [RED, BLUE])
    assert reader.tokenizer.decode(first.input_ids[start:]).startswith("red<|im_end|>")
    inside = [bit for token, bit in zip(second.input_ids, second.loss_mask, strict=True) if token < 0]
    assert inside and not any(inside)
    trained = [token for token, bit in zip(second.input_ids, second.loss_mask, strict=True) if bit]
    assert "red" in reader.tokenizer.decode(trained) and "blue" in reader.tokenizer.decode(trained)
    batch = conversation_batch([first, third])
    assert batch.objects("images") == [(RED, BLUE), ()] and "images" not in conversation_batch([third])


def test_truncated_conversations_keep_their_images_or_are_dropped(reader: Reader, tmp_path: Path) -> None:
    later = {"role": "user", "content": "<image> and here?"}
    rows = [{"messages": [*ASKED, ANSWER, later, ANSWER], "images": [data_url(RED), data_url(BLUE), data_url(RED)]}] * 2
    rows.append({"messages": [ASKED[0] | {"content": "blue?"}, ANSWER]})
    file = write_rows(tmp_path / "rows.jsonl", rows)
    whole = reader.conversations(file)[0].input_ids
    last = max(place for place, token in enumerate(whole) if token < 0)
    fitting, short = (reader.conversations(file, limit, "right") for limit in (last + 1, last))
    assert (fitting.dropped, fitting.truncated, len(fitting)) == (0, 2, 3)
    assert (short.dropped, short.truncated, len(short)) == (2, 0, 1)


@pytest.mark.parametrize("whole", [False, True], ids=["prompt", "conversations"])
def test_both_sides_of_a_pair_show_the_images(whole: bool, reader: Reader, tmp_path: Path) -> None:
    other = {"role": "assistant", "content": "blue"}
    sides = {"chosen": [ANSWER], "rejected": [other]}
    row = {name: [*ASKED, *turns] for name, turns in sides.items()} if whole else {"prompt": ASKED, **sides}
    data = reader.preferences(write_rows(tmp_path / "rows.jsonl", [row | {"images": [data_url(RED), data_url(BLUE)]}]))
    (_, chosen), (_, rejected) = data[0].responses
    prompt = render_prompt(reader.tokenizer, placed(None, "what colour is the ", None, " shape?"))
    assert chosen.prompt_ids == rejected.prompt_ids == reader.processor.expand(prompt, [RED, BLUE])
    assert chosen.images == (RED, BLUE) and all(a is b for a, b in zip(chosen.images, rejected.images, strict=True))
    assert preference_batch([data[0]]).objects("images") == [(RED, BLUE)] * 2


def test_a_group_shares_the_images_of_its_row(reader: Reader, tmp_path: Path) -> None:
    sample = reader.prompts(
        write_rows(tmp_path / "a.jsonl", [{"prompt": ASKED, "images": [data_url(RED), data_url(BLUE)]}])
    )[0]
    rows = [
        Trajectory("a", n, sample.prompt_ids, [5], [1], [0.0], [0.0], "", StopReason.STOP, sample) for n in range(3)
    ]
    column = to_batch(rows).objects("images")
    assert all(images is sample.images for images in column)


def test_a_model_of_text_refuses_them_in_any_column(reader: Reader, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": ASKED, "pictures": [data_url(RED), data_url(BLUE)]}])
    with raises(DataError, "2 images", where=f"{file}, row 0"):
        reader.prompts(file, image_key="pictures", image_processor=None)


def test_columns_of_a_reward_function_have_no_images(reader: Reader, tmp_path: Path) -> None:
    row = {"prompt": ASKED, "images": [data_url(RED), data_url(BLUE)], "level": 3}
    sample = reader.prompts(write_rows(tmp_path / "a.jsonl", [row]), all_columns=True)[0]
    assert sample.extra_info == {"level": 3}
    assert sample.images == (RED, BLUE)


def test_each_image_is_one_mark_in_text(reader: Reader) -> None:
    ids = [*reader.tokenizer.encode("red "), *token_ids(7, 4), *token_ids(7, 4), *reader.tokenizer.encode("?")]
    assert decoded(reader.tokenizer, ids) == "red <image><image>?"
    assert decoded(reader.tokenizer, ids[-3:]) == "<image>?" and decoded(reader.tokenizer, token_ids(0, 2)) == "<image>"


def test_the_prompt_of_a_teacher_keeps_its_images(reader: Reader, tmp_path: Path) -> None:
    config = RLConfig()
    config.distillation.teacher_prompt = "{prompt} It is {ground_truth}."
    row = {"prompt": ASKED, "images": [data_url(RED), data_url(BLUE)], "reward_model": {"ground_truth": "red"}}
    sample = reader.prompts(write_rows(tmp_path / "a.jsonl", [row]))[0]
    ids = teacher_prompt(sample, config, reader.tokenizer, reader.processor)
    shown = placed(None, "what colour is the ", None, " shape? It is red.")
    assert ids == reader.processor.expand(render_prompt(reader.tokenizer, shown), [RED, BLUE])


def test_data_check_counts_images(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "damaged.png").write_bytes(RED.content[:60])
    shown = [[data_url(RED), data_url(BLUE)], [data_url(RED)], ["damaged.png", data_url(RED)], ["none.png"] * 2, None]
    rows = [{"prompt": ASKED, "images": images} for images in shown] + [{"prompt": "red", "images": []}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    for images in (RowImages("images", reader.processor), RowImages("images", None, any_model=True)):
        check = check_images(read_all(file), ("prompt",), images)
        assert check.rows == 4 and check.sizes == [image.open().size for image in (RED, BLUE)]
        misplaced, unreadable = check.findings()
        assert misplaced.error.where == f"{file}, row 1" and "1 of 4" in misplaced.error.what
        assert unreadable.error.where == f"{file}, row 2" and "2 of 4" in unreadable.error.what
        expected = [len(reader.processor.pixels(image).ids) for image in (RED, BLUE)] if images.processor else []
        assert check.tokens == expected
    report = check_dataset([str(file)], [], DatasetOptions(tokenizer=str(reader.folder), max_prompt_length=8))
    whole = reader.prompts(write_rows(tmp_path / "one.jsonl", rows[:1]))[0].prompt_ids
    assert max(report.lengths["prompt_tokens"]) == len(whole)
    assert {finding.error.code for finding in report.findings if finding.stops} >= {"R86", "R45"}


def test_inspected_rows_show_their_images(reader: Reader, tmp_path: Path) -> None:
    row = {"prompt": ASKED, "messages": [*ASKED, ANSWER], "images": [data_url(RED), data_url(BLUE)]}
    file = write_rows(tmp_path / "a.jsonl", [row])
    images = RowImages("images", reader.processor)
    prompt = inspect_row(read_all(file)[0], reader.tokenizer, images=images)
    assert [piece.token for piece in prompt] == reader.prompts(file)[0].prompt_ids
    assert [piece.text for piece in prompt].count("<image>") == 2
    chat = inspect_row(read_all(file)[0], reader.tokenizer, images=images, conversation=True)
    expected = reader.conversations(file)[0]
    assert [piece.token for piece in chat] == expected.input_ids
    assert [piece.learned for piece in chat] == [bool(bit) for bit in expected.loss_mask]


def test_a_run_stores_each_image_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    photo = ImageData(b"\xff\xd8\xffphoto")
    run.write_images([RED, BLUE, RED], run.rollouts)
    written = {file: file.stat().st_mtime_ns for file in (run.rollouts / "images").iterdir()}
    run.write_images([RED, photo], run.rollouts)
    files = {file.name: file.read_bytes() for file in (run.rollouts / "images").iterdir()}
    assert files == {f"{image.key:011x}{image.suffix}": image.content for image in (RED, BLUE, photo)}
    assert [image.suffix for image in (RED, photo)] == [".png", ".jpg"]
    assert all(file.stat().st_mtime_ns == time for file, time in written.items())
    assert f"{keys_in(token_ids(RED.key, 2))[0]:011x}.png" in files


def encoded(size: tuple[int, int], form: str) -> ImageData:
    buffer = io.BytesIO()
    Image.new("RGB", size, (9, 90, 200)).save(buffer, form)
    return ImageData(buffer.getvalue())


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (29, 200), (640, 31), (333, 512), (1000, 1500)])
def test_tokens_are_counted_without_decoding(
    reader: Reader, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the processor makes; for grids from the size alone."""
    for form in ("PNG", "JPEG"):
        image = encoded(size, form)
        expected = load_image_processor(reader.folder, reader.tokenizer)
        assert expected is not None
        assert reader.processor.tokens(image) == expected.pixels(image).ids
    if reader.processor.in_grid:
        monkeypatch.setattr(ImageData, "open", lambda self: pytest.fail("decoded"))
        assert reader.processor.tokens(encoded((size[0] + 1, size[1]), "JPEG"))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_what_cannot_be_decoded_has_no_size(form: str) -> None:
    whole = encoded((90, 60), form)
    assert whole.size == (90, 60)
    broken = 0
    for missing in range(1, len(whole.content), 7):
        cut = ImageData(whole.content[:-missing])
        try:
            cut.open()
        except DataError:
            broken += 1
            with raises(DataError, "cannot be decoded"):
                _ = cut.size
    assert broken >= 5


def test_an_image_that_is_too_narrow_is_named(reader: Reader) -> None:
    if reader.processor.in_grid:
        with raises(DataError, "3 x 900 pixels"):
            reader.processor.tokens(encoded((3, 900), "PNG"))


def test_preflight_reads_each_file_at_most_once(tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(RED.content)
    reader = RowImages("images", None, any_model=True, reads=False)
    rows = [{"prompt": ASKED, "images": ["there.png", name]} for name in ("there.png", "absent.png")]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    there, absent = read_all(file)
    assert [image.content for image in reader.place(ASKED, there)[1]] == [b"", b""]
    with raises(DataError, "absent.png"):
        reader.place(ASKED, absent)


@pytest.mark.parametrize("kind", ["EPS", "PDF", "PSD", "BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_not_opened(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPS starts Ghostscript when it is decoded."""
    from PIL import EpsImagePlugin, Image

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **options: pytest.fail("Ghostscript began"))
    buffer = io.BytesIO()
    if kind == "PSD":
        buffer.write(b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 4, 4, 8, 3) + bytes(12) + bytes(2 + 48))
    else:
        Image.new("RGB", (4, 4)).save(buffer, kind)
    for look in (lambda image: image.size, lambda image: image.open()):
        with pytest.raises(DataError):
            look(ImageData(buffer.getvalue()))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_upright(kind: str, orientation: int) -> None:
    """A corner is bright: it is where the EXIF data says, and the size is that of the turned image."""
    from PIL import Image, ImageOps

    stored = Image.new("RGB", (24, 16))
    stored.paste((255, 255, 255), (0, 0, 8, 8))
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    stored.save(buffer, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    image = ImageData(buffer.getvalue())
    shown = image.open()
    with Image.open(buffer) as opened:
        assert list(shown.getdata()) == list(ImageOps.exif_transpose(opened).convert("RGB").getdata())
    corners = [(2, 2), (shown.width - 3, 2), (shown.width - 3, shown.height - 3), (2, shown.height - 3)]
    bright = [sum(shown.getpixel(place)) > 600 for place in corners].index(True)
    assert bright == {1: 0, 2: 1, 3: 2, 4: 3, 5: 0, 6: 1, 7: 2, 8: 3}[orientation]
    assert image.size == shown.size == ((24, 16) if orientation < 5 else (16, 24))
