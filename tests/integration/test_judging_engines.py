"""Reward models in engines: they write and score what Hone writes and scores in its own process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.engine_cases import SHAPE, byte_tokenizer
from support.judges import write_judge
from support.messages import raises
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from hone.cluster.context import WorkerContext
from hone.cluster.plan import model_roles
from hone.config import RLConfig
from hone.data.batch import Batch
from hone.data.tokenizer import load_tokenizer
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import ConfigError
from hone.generation.environments import interpreter_of

ENGINES = [
    pytest.param({"num_replicas": 1}, id="replica"),
    pytest.param({"name": "vllm"}, id="vllm", marks=pytest.mark.engines),
]


def answer(text: str, *, uid: str = "u", ids: tuple[int, ...] = (3,)) -> Trajectory:
    sample = Sample(uid, [1, 2], [{"role": "user", "content": "copy 12"}], "chat", ground_truth="12")
    zeros = [0.0] * len(ids)
    return Trajectory(uid, 0, [1, 2], list(ids), [1] * len(ids), zeros, zeros, text, StopReason.STOP, sample)


def config_of(path: Path, run: Path, kind: str, rollout: dict) -> RLConfig:
    config = RLConfig()
    config.trainer.default_local_dir, config.actor_rollout_ref.actor.dtype = str(run), "float32"
    model = config.reward.reward_model
    model.enable, model.kind, model.path = True, kind, str(path)
    config.reward.judge.max_tokens, config.reward.judge.prompt = 8, str(path / "rubric.txt")
    for name, value in rollout.items():
        setattr(model.rollout, name, value)
    return config


@contextlib.contextmanager
def scorer(config: RLConfig) -> Iterator[Callable[..., Batch]]:
    """A function that returns what the configured role says of some answers."""
    if config.reward.reward_model.rollout.name == "vllm":
        try:
            interpreter_of("vllm")
        except ConfigError as missing:
            pytest.skip(missing.what)
    context = WorkerContext(config, torch.device("cpu"))
    context.tokenizer = load_tokenizer(str(config.reward.reward_model.path))
    worker = next(role for role in model_roles(config) if role.name == "reward_model").cls(context)

    def score(*answers: Trajectory) -> Batch:
        found = worker.score(Batch({"trajectory": list(answers)}))
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    try:
        yield score
    finally:
        context.roles["reward_model"] = worker
        context.close_roles()


@pytest.mark.parametrize("rollout", ENGINES)
def test_an_engine_writes_the_judgements_of_the_process(tmp_path: Path, rollout: dict):
    judge = write_judge(tmp_path / "judge", "copy 12", {"12": "Score: 9", "1": "Score: 2", "none": "fine"})
    config = config_of(judge, tmp_path / "run", "generative", rollout)
    config.reward.reward_model.max_token_len_per_gpu = 96
    with scorer(config) as score:
        found = score(answer("1"), answer("12 " * 40), answer("12"))
    assert found.objects("rm_judgement")[::2] == ["Score: 2", "Score: 9"]
    assert found.tensor("rm_score")[::2].tolist() == pytest.approx([0.2, 0.9])
    assert found.tensor("rm_score")[1].isnan()
    assert list((tmp_path / "run/judge/engines").glob("*.log"))


@pytest.mark.engines
def test_vllm_gives_the_scores_of_the_weights(tmp_path: Path):
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(Qwen3Config(**SHAPE | {"max_position_embeddings": 24}, num_labels=1))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "scorer")
    byte_tokenizer().save_pretrained(tmp_path / "scorer")
    answers = [answer("", uid=str(length), ids=tuple(range(5, 5 + length))) for length in (1, 7, 21)]
    with scorer(config_of(tmp_path / "scorer", tmp_path / "run", "discriminative", {})) as score:
        own = score(*answers)["rm_score"]
    with scorer(config_of(tmp_path / "scorer", tmp_path / "run", "discriminative", {"name": "vllm"})) as score:
        torch.testing.assert_close(score(*answers)["rm_score"], own, atol=1e-4, rtol=0)
        with raises(ConfigError, "24 tokens", where="reward.reward_model.max_token_len_per_gpu"):
            score(answer("", ids=tuple(range(5, 27))))
