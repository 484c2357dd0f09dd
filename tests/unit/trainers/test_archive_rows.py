"""Rows of the rollout archive: from the columns of a batch, and the choice of prompts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises
from support.templates import tokenizer as template_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hone.config.run import TrainerConfig
from hone.data.batch import Batch, to_batch
from hone.data.ragged import Ragged
from hone.data.tokenizer import token_texts
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import HoneError
from hone.insight.archive.read import table_records
from hone.insight.archive.schema import COLUMNS
from hone.insight.archive.write import BackgroundWriter
from hone.rewards.score import Cause, Score
from hone.trainers.archiving import Archiving, place
from hone.trainers.batch_ops import prompt_texts, rollout_table, scored

FLOATS = st.floats(-10, 0, width=32)


def trajectory(draw: st.DrawFn, row: int) -> Trajectory:
    length = draw(st.integers(0, 5))
    numbers = st.lists(FLOATS, min_size=length, max_size=length)
    log_probs, restricted = draw(numbers), draw(numbers)
    messages = [{"role": "user", "content": "ask"}] if draw(st.booleans()) else None
    sample = Sample(f"train:{row // 2}", [1, 2, row], messages, "x", ground_truth={"a": [row]})
    return Trajectory(
        *(
            sample.uid,
            row % 2,
            sample.prompt_ids,
            [10 + row] * length,
            draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
        ),
        *(log_probs, draw(st.sampled_from([log_probs, restricted])), f"text {row}", StopReason.STOP, sample),
        token_versions=[row] * length,
        seconds=1.5,
        seed=2**63 + row,
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    played = [trajectory(draw, row) for row in range(draw(st.integers(1, 4)))]
    batch = to_batch(played).updated(scored([Score(float(n), {"acc": 1.0}, {"p": "q"}) for n in range(len(played))]))
    responses = batch.ragged("response_ids")
    drawn = st.lists(FLOATS, min_size=len(responses.values), max_size=len(responses.values))
    optional = ("old_log_probs", "new_log_probs", "entropy", "advantages", "token_level_rewards", "rollout_is_weights")
    for name in draw(st.sets(st.sampled_from(optional))):
        batch = batch.with_columns(**{name: responses.with_values(torch.tensor(draw(drawn), dtype=torch.float32))})
    if draw(st.booleans()):
        batch = batch.with_columns(
            kept_mask=responses.with_values(torch.zeros(len(responses.values), dtype=torch.int64))
        )
    return batch


NAMES = {"token_rewards": "token_level_rewards", "correction": "rollout_is_weights", "loss_mask": "kept_mask"}


@given(batches())
@examples(60)
def test_rows_hold_what_the_batch_has(batch: Batch) -> None:
    table = rollout_table(batch, ["trained"] * len(batch), 7, prompt_texts(batch, str))
    truncated = any(t.sampling_log_probs != t.rollout_log_probs for t in batch.objects("trajectory"))
    for row, record in enumerate(table_records(table)):
        t = batch.objects("trajectory")[row]
        for column in COLUMNS:
            source = NAMES.get(column.name, column.name)
            if column.name in ("rollout_log_probs", "sampling_log_probs"):
                expected: Any = getattr(t, column.name)
                expected = expected if truncated or column.name == "rollout_log_probs" else None
            elif column.name == "loss_mask" and source not in batch:
                expected = t.response_mask
            elif column.by_token or column.name == "prompt_ids":
                expected = batch.ragged(source).row(row).tolist() if source in batch else None
            else:
                continue
            assert record[column.name] == expected, column.name
        assert (record["step"], record["fate"], record["uid"], record["index"]) == (7, "trained", t.uid, t.index)
        assert (record["row"], record["seed"], record["ground_truth"]) == (row // 2, str(2**63 + row), {"a": [row]})
        first = next(other for other in batch.objects("trajectory") if other.uid == t.uid)
        assert record["prompt"] == ("ask" if first.sample.messages else str(first.prompt_ids))
        assert (record["score"], record["terms"], record["extra"]) == (float(row), {"acc": 1.0}, {"p": "q"})


def test_rows_that_were_not_trained_on() -> None:
    sample = Sample("rows:3", [1], None, "x")
    played = Trajectory("rows:3", 0, [1], [2], [1], [-1.0], [-1.0], "", StopReason.LENGTH, sample)
    lost = Score(0.0, error="no answer", cause=Cause.TIMEOUT)
    kept = Score(0.5, unshaped=0.75)
    batch = to_batch([played, played]).updated(scored([lost, kept]))
    first, second = table_records(rollout_table(batch, ["failed", "filtered"], 1, {"rows:3": "p"}))
    assert (first["score"], first["error"], first["cause"], first["loss_mask"]) == (None, "no answer", "timeout", None)
    assert (second["score"], second["unshaped"], second["fate"], second["seed"]) == (0.5, 0.75, "filtered", None)


class Written:
    """Batch ops that note what they are to write."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def write_rollouts(self, batch: Any, left_out: Any, step: int, *, fates: list[str], rows: int) -> None:
        names = [None if part is None else part.uids for part in (batch, left_out)]
        self.calls.append((step, *names, fates, rows))


def dataset(count: int) -> list[Sample]:
    return [Sample(f"rows:{row}", [1], None, "x") for row in range(count)]


def rows(*uids: str, **columns: Any) -> Batch:
    return Batch({"uid": list(uids), **{name: [value] * len(uids) for name, value in columns.items()}})


def archiving(ops: Any, data: Any, **keys: Any) -> Archiving:
    return Archiving(TrainerConfig(**keys), data, ops)


def test_all_rows_of_chosen_steps() -> None:
    ops = Written()
    archive = archiving(ops, dataset(3), rollout_dump_freq=4, rollout_dump_steps=[7], rollout_dump_share=0.0)
    assert [step for step in range(1, 13) if archive.whole(step)] == [1, 4, 7, 8, 12]

    async def run() -> None:
        await archive.write(1, rows("rows:0", "rows:1", a=1, b=2))
        archive.leave_out(rows("rows:2", a=1, c=2), "filtered")
        archive.leave_out(rows("rows:1", "rows:1", a=1), "failed")
        await archive.write(2, rows("rows:0"))
        await archive.write(4, rows("rows:0"))

    asyncio.run(run())
    assert ops.calls == [(1, ["rows:0", "rows:1"], None, [], 2), (4, ["rows:0"], None, [], 1)], "step 2 is over"


def test_followed_prompts_at_every_step() -> None:
    data = dataset(40)
    archive = archiving(Written(), data, rollout_dump_freq=0, rollout_dump_share=0.25)
    followed = [sample.uid for sample in data if archive.follows(sample.uid)]
    assert followed == [sample.uid for sample in data if place(sample.uid) <= 0.25] and 4 <= len(followed) <= 16
    ops = Written()
    archive = archiving(ops, data, rollout_dump_freq=0, rollout_dump_share=0.25)
    others = [sample.uid for sample in data if sample.uid not in followed]

    async def run() -> None:
        archive.leave_out(rows(f"{followed[0]}~2", others[0]), "filtered")
        await archive.write(1, rows(others[0], followed[1], followed[1], others[1]))
        await archive.write(2, rows(*others[:3]))
        archive.leave_out(rows(followed[0]), "failed")
        await archive.write(3, rows(others[0]))

    asyncio.run(run())
    assert ops.calls == [
        (1, [followed[1]] * 2, [f"{followed[0]}~2"], ["filtered"], 6),
        (3, None, [followed[0]], ["failed"], 2),
    ]


@given(st.integers(1, 30), st.floats(1e-6, 0.01))
@examples(40)
def test_at_least_one_prompt_is_followed(count: int, share: float) -> None:
    data = dataset(count)
    archive = archiving(Written(), data, rollout_dump_share=share)
    followed = [place(sample.uid) for sample in data if archive.follows(sample.uid)]
    assert min(place(sample.uid) for sample in data) in followed and len(followed) <= max(1, count * 0.5)
    assert not archiving(Written(), data, rollout_dump_freq=0, rollout_dump_share=0.0).writes


def test_places_are_spread_evenly() -> None:
    places = np.sort([place(f"rows:{row}") for row in range(4000)])
    assert np.abs(places - np.arange(4000) / 4000).max() < 0.03


def test_an_error_of_the_thread_is_raised_by_the_next_call() -> None:
    def full() -> None:
        assert threading.current_thread() is not threading.main_thread()
        raise HoneError("the disk is full")

    writer = BackgroundWriter()
    for call in (writer.wait, lambda: writer.submit(int)):
        writer.submit(full)
        with raises(HoneError, "the disk is full"):
            call()
    writer.wait()
    writer.close()


def test_the_texts_of_tokens_make_up_a_text() -> None:
    tokenizer = template_tokenizer("qwen2_5")
    texts = token_texts(tokenizer)
    assert len(texts) == len(tokenizer.get_vocab())
    ids = tokenizer("What is 6 * 7? It is 42.", add_special_tokens=False)["input_ids"]
    assert "".join(texts[token] for token in ids) == "What is 6 * 7? It is 42."


def test_the_texts_of_tokens_keep_their_spaces() -> None:
    """The decoder of SentencePiece drops the space in front of the first token."""
    inner = Tokenizer(models.WordLevel({"\u2581go": 0, "on": 1, "\u2581": 2, "?": 5}, unk_token="?"))
    inner.decoder = decoders.Metaspace()
    assert inner.decode([0]) == "go"
    assert token_texts(PreTrainedTokenizerFast(tokenizer_object=inner)) == [" go", "on", " ", "", "", "?"]


def test_the_last_output_of_a_token_counts() -> None:
    from hone.training.engine import Outputs

    outputs = Outputs(Ragged.from_rows([[1, 2], [3], [4, 5]]))
    for number, part in enumerate(([2, 0], [1], [0, 1])):
        mini = outputs.for_rows(part)
        sizes = [[2, 1, 2][row] for row in part]
        mini.add(list(range(len(part))), {"x": torch.full((sum(sizes),), float(number))})
    assert outputs.columns()["x"].to_lists() == [[2.0, 2.0], [2.0], [0.0, 0.0]]
