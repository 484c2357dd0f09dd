"""Inputs of teachers with another tokenizer, and what is read from their answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.backend_cases import CPU
from support.templates import tokenizer
from support.tiny_runs import make_model

from hone.cluster.context import WorkerContext
from hone.cluster.handles import TEACHER_RESPONSES, TEACHER_SPANS
from hone.cluster.teacher import TeacherWorker
from hone.config import RLConfig, load_config
from hone.data.batch import Batch
from hone.data.chat import encode_texts, render_prompt
from hone.data.ragged import Ragged
from hone.data.types import Sample
from hone.errors import DataError
from hone.insight.metrics import MetricStore
from hone.models.teacher import SPANS, TEACHER_LOG_PROBS, TEACHER_PROMPTS
from hone.trainers.teacher_inputs import TeacherInputs, span_columns

POLICY = tokenizer("qwen2_5")
QUESTION = [{"role": "user", "content": "Is it sunny in Rome?"}]
ANSWERS = ("It is sunny.", "It will rain tomorrow in Rome.")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "policy")
    make_model(folder / "same", layers=1)
    make_model(folder / "other", layers=1, family="llama3_1")
    return folder


def config_of(models: Path, *words: str) -> RLConfig:
    paths = [f"actor_rollout_ref.model.path={models}/policy", "distillation.enable=true", "distillation.loss_mode=k1"]
    return load_config(RLConfig, [*paths, *words])


def answered(masks: list[list[int]] | None = None) -> Batch:
    responses = [[*ids, POLICY.eos_token_id] for ids in encode_texts(POLICY, ANSWERS)]
    prompt = render_prompt(POLICY, QUESTION, {})
    samples = [Sample(uid=f"u{n}", prompt_ids=prompt, messages=QUESTION, data_source="any") for n in range(2)]
    column = Ragged.from_rows(responses, torch.int64)
    columns: dict[str, Any] = {
        "uid": ["u0", "u1"],
        "prompt_ids": Ragged.from_rows([prompt, prompt], torch.int64),
        "response_ids": column,
        "response_mask": Ragged.from_rows(masks or [[1] * len(ids) for ids in responses], torch.int64),
        "trajectory": [SimpleNamespace(uid=sample.uid, sample=sample) for sample in samples],
        "data_source": ["any", "any"],
    }
    return Batch(columns)


def test_the_span_path_with_the_same_tokenizer_is_the_plain_path(models: Path) -> None:
    config, batch = config_of(models, f"distillation.path={models}/same"), answered()
    inputs = TeacherInputs(config, POLICY, None)
    assert inputs.others == {} and TEACHER_RESPONSES not in inputs(batch)
    teacher = TeacherWorker(WorkerContext(config, CPU))
    plain = teacher.teach(batch).ragged(TEACHER_LOG_PROBS)
    inputs.others = {0: POLICY}
    columns = batch.updated(inputs(batch))
    assert columns.ragged(TEACHER_PROMPTS).to_lists() == batch.ragged("prompt_ids").to_lists()
    assert columns.ragged(TEACHER_RESPONSES).to_lists() == batch.ragged("response_ids").to_lists()
    metrics = MetricStore()
    found = span_columns(columns.updated(teacher.teach(columns)), metrics)
    torch.testing.assert_close(found.ragged(TEACHER_LOG_PROBS).values, plain.values, atol=1e-6, rtol=0)
    assert metrics.reduce()["distillation/span_tokens"] == 1


def test_spans_have_the_log_probs_of_their_text(models: Path) -> None:
    """The sum over a response is the teacher's log-prob of the same text, under the prompt of its own template."""
    config, batch = config_of(models, f"distillation.path={models}/other"), answered()
    other = tokenizer("llama3_1")
    inputs = TeacherInputs(config, POLICY, None)
    columns = batch.updated(inputs(batch))
    assert columns.ragged(TEACHER_PROMPTS).to_lists() == [render_prompt(other, QUESTION, {})] * 2
    texts = [[*ids, other.eos_token_id] for ids in encode_texts(other, ANSWERS)]
    assert columns.ragged(TEACHER_RESPONSES).to_lists() == texts
    said = TeacherWorker(WorkerContext(config, CPU)).teach(columns)
    found = span_columns(columns.updated(said), MetricStore())
    assert torch.equal(found.ragged(TEACHER_LOG_PROBS).lengths, batch.ragged("response_ids").lengths)
    for row in range(2):
        own = said.ragged(TEACHER_LOG_PROBS).row(row)
        torch.testing.assert_close(found.ragged(TEACHER_LOG_PROBS).row(row).sum(), own.sum())
        mine, theirs = found.ragged(SPANS).row(row), columns.ragged(TEACHER_SPANS).row(row)
        for span in range(int(mine.max()) + 1):
            of_span = found.ragged(TEACHER_LOG_PROBS).row(row)[mine == span]
            torch.testing.assert_close(of_span.sum(), own[theirs == span].sum())


def test_tokens_that_the_policy_did_not_sample_are_refused(models: Path) -> None:
    config, batch = config_of(models, f"distillation.path={models}/other"), answered()
    masks = [[0, *row[1:]] for row in batch.ragged("response_mask").to_lists()]
    with pytest.raises(DataError, match="1 response tokens that the policy did not sample"):
        TeacherInputs(config, POLICY, None)(answered(masks))
