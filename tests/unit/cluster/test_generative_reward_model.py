"""A language model as reward model: what it is asked, what it says, and what comes of it."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch
from support.judges import write_judge
from support.messages import mentioned, raises
from transformers import AutoModelForCausalLM

from hone.cluster.context import WorkerContext
from hone.cluster.plan import model_roles
from hone.cluster.reward_model import GenerativeRewardModelWorker
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.chat import render_prompt
from hone.data.tokenizer import load_tokenizer
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import ConfigError, RewardError

ASK = [{"role": "user", "content": "copy 12"}]
JUDGEMENTS = {"12": "Score: 9", "1": "Score: 2", "none": "fine"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("judges") / "judge", "copy 12", JUDGEMENTS)


def answer(text: str, messages=ASK, index: int = 0, extra=None) -> Trajectory:
    sample = Sample("u", [1, 2], messages, "chat", ground_truth="12", extra_info=extra or {})
    return Trajectory("u", index, [1, 2], [3], [1], [0.0], [0.0], text, StopReason.STOP, sample)


def config_of(directory: Path | None, **settings) -> RLConfig:
    config = RLConfig()
    config.reward.reward_model.enable, config.reward.reward_model.kind = True, "generative"
    config.reward.reward_model.path = None if directory is None else str(directory)
    config.reward.judge.max_tokens = 8
    if directory is not None:
        config.reward.judge.prompt = str(directory / "rubric.txt")
    for name, value in settings.items():
        setattr(config.reward.reward_model, name, value)
    return config


def worker(config: RLConfig) -> GenerativeRewardModelWorker:
    (spec,) = (role for role in model_roles(config) if role.name == "reward_model")
    assert spec.cls is GenerativeRewardModelWorker and spec.replicated
    context = WorkerContext(config, torch.device("cpu"))
    path = config.reward.reward_model.path
    context.tokenizer = load_tokenizer(path) if path else None
    return spec.cls(context)


def judged(judge: GenerativeRewardModelWorker, *trajectories: Trajectory) -> tuple[list[float], list[str]]:
    found = asyncio.run(judge.score(Batch({"trajectory": list(trajectories)})))
    return found.tensor("rm_score").tolist(), found.objects("rm_judgement")


def by_transformers(directory: Path, content: str) -> str:
    tokenizer = load_tokenizer(str(directory))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    ids = render_prompt(tokenizer, [{"role": "user", "content": content}])
    out = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(ids) :]
    return tokenizer.decode(out, skip_special_tokens=True)


def test_it_writes_what_transformers_writes_and_its_score_is_read(directory):
    judge = worker(config_of(directory))
    scores, words = judged(judge, *map(answer, ["12", "1", "none"]))
    assert words == [by_transformers(directory, f"copy 12: {text}?") for text in ("12", "1", "none")]
    assert words == list(JUDGEMENTS.values())
    assert scores[:2] == pytest.approx([0.9, 0.2]) and math.isnan(scores[2])


def test_it_asks_what_the_row_asks(directory):
    judge = worker(config_of(directory))
    rows = (answer("12"), answer("12", messages=None, extra={"question": "copy 12"}), answer("12", messages=None))
    seen = [judge._judge_prompt(row) for row in rows]
    assert seen[0] == seen[1] == "copy 12: 12?"
    assert seen[2] == f"{judge.policy_tokenizer.decode([1, 2], skip_special_tokens=True)}: 12?"


def test_what_is_longer_than_the_budget_has_no_score_and_the_others_do(directory):
    short = len(render_prompt(load_tokenizer(str(directory)), [{"role": "user", "content": "copy 12: 12?"}]))
    judge = worker(config_of(directory, max_token_len_per_gpu=short + 8))
    scores, words = judged(judge, answer("12"), answer("12 " * 40), answer("1"))
    assert math.isnan(scores[1]) and mentioned(str(judge.longest), words[1])
    assert [scores[0], scores[2]] == pytest.approx([0.9, 0.2])


def test_a_path_and_a_rubric_are_needed(directory, tmp_path):
    with raises(ConfigError, "reward.reward_model.path"):
        worker(config_of(None))
    config = config_of(directory)
    (tmp_path / "empty.txt").write_text("how good is it?")
    config.reward.judge.prompt = str(tmp_path / "empty.txt")
    with raises(RewardError, "{response}"):
        worker(config)
