"""Rewards of a reward model: what replaces, what is added, what it reads."""

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch
from support.messages import mentioned, raises
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from hone.apps.lab.data.inspection import train_tokenizer
from hone.cluster.context import WorkerContext
from hone.cluster.reward_model import RewardModelWorker
from hone.config.reward import RewardConfig, RewardModelUseConfig
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.chat import render_prompt
from hone.data.tokenizer import load_tokenizer
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import ConfigError, RewardError
from hone.rewards.manager import JudgedRewards
from hone.rewards.score import Cause, Score
from hone.rewards.worker import no_verdict_metrics

ASK = [{"role": "user", "content": "copy 12"}]


def answer(text: str, source: str = "digit_sequence", prompt=(1, 2), ids=(3,), messages=ASK) -> Trajectory:
    sample = Sample("u", list(prompt), messages, source, ground_truth="12")
    zeros = [0.0] * len(ids)
    return Trajectory("u", 0, list(prompt), list(ids), [1] * len(ids), zeros, zeros, text, StopReason.STOP, sample)


def rewards_of(*, max_no_verdict_rate: float = 0.5, **settings) -> JudgedRewards:
    model = RewardModelUseConfig(True, "x", **settings)
    return JudgedRewards(RewardConfig(reward_model=model, max_no_verdict_rate=max_no_verdict_rate))


def scored(rewards: JudgedRewards, *judged: tuple[float, Trajectory]) -> list[Score]:
    return asyncio.run(rewards.score([found for _, found in judged], [value for value, _ in judged]))


def test_the_model_replaces_the_rule_which_is_still_seen():
    rewards = rewards_of(coef=2.0)
    rewards.check({"digit_sequence": 2})
    first, second = scored(rewards, (0.3, answer("12")), (-2.0, answer("1")))
    assert (first.total, second.total) == (0.6, -4.0)
    assert first.terms == {"rm": 0.3, "rule": 1.0, "acc": 1.0} and second.terms["rule"] == 0.5


def test_the_two_are_added():
    rewards = rewards_of(combine="add", coef=2.0)
    rewards.check({"digit_sequence": 1})
    (score,) = scored(rewards, (0.25, answer("12")))
    assert score.total == 1.5 and score.terms["rm"] == 0.25


def test_a_data_source_without_a_scorer():
    alone = rewards_of()
    alone.check({"chat": 3, "digit_sequence": 1})
    (score,) = scored(alone, (0.7, answer("hello", "chat")))
    assert score.total == 0.7 and score.terms == {"rm": 0.7}
    with raises(RewardError, "chat", 3, code="R43"):
        rewards_of(combine="add").check({"chat": 3})


def test_a_nan_score_ends_the_run():
    with raises(RewardError, "row u", "nan", where="reward.reward_model.path"):
        scored(rewards_of(), (math.nan, answer("12")))


def worded(rewards: JudgedRewards, *judged: tuple[float, str, Trajectory]) -> list[Score]:
    values, judgements, found = zip(*judged, strict=True)
    return asyncio.run(rewards.score(found, values, judgements=judgements))


def test_a_judgement_without_a_score_is_an_error_and_the_others_count():
    rewards = rewards_of(kind="generative")
    rewards.check({"digit_sequence": 2})
    good, bad = worded(rewards, (0.7, "Score: 7", answer("12")), (math.nan, "fine", answer("1")))
    assert good.total == 0.7 and good.terms["rm"] == 0.7 and good.extra["judgement"] == "Score: 7"
    assert bad.total == 0.0 and mentioned("fine", str(bad.error)) and mentioned("10", str(bad.error))
    assert no_verdict_metrics([good, bad])["reward/no_verdict_rate"] == 0.5
    assert bad.cause == Cause.SERVICE
    with raises(RewardError, "9 of 10"):
        worded(rewards, (0.7, "Score: 7", answer("12")), *[(math.nan, "fine", answer("1"))] * 9)
    strict = rewards_of(kind="generative", max_no_verdict_rate=0.0)
    strict.check({"digit_sequence": 2})
    with raises(RewardError, "1 of 2"):
        worded(strict, (0.7, "Score: 7", answer("12")), (math.nan, "fine", answer("1")))


def test_judgements_of_problems_that_no_rule_knows():
    alone = rewards_of(kind="generative", coef=2.0)
    alone.check({"chat": 1})
    (score,) = worded(alone, (0.5, "Score: 5", answer("hello", "chat")))
    assert score.total == 1.0 and score.terms == {"rm": 0.5} and score.extra == {"judgement": "Score: 5"}


# ---------------------------------------------------------------------------------------------------------- the model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """Reward models of random weights: with the policy's tokenizer, and with one of its own."""
    root = tmp_path_factory.mktemp("judges")
    made = []
    for number, texts in enumerate((["copy 12", "hello there"], ["another vocabulary", "copy words"])):
        directory = root / f"judge{number}"
        rows = [{"messages": [{"role": "user", "content": text}]} for text in texts * 4]
        (root / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        tokenizer = train_tokenizer([root / "texts.jsonl"], directory, vocab_size=290)
        torch.manual_seed(number)
        config = Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=128, num_labels=1,
        )  # fmt: skip
        model = Qwen3ForSequenceClassification(config)
        torch.nn.init.normal_(model.score.weight, std=1.0)
        model.save_pretrained(directory)
        made.append(directory)
    return made[0], made[1]


def worker(path: Path | None, tokenizer) -> RewardModelWorker:
    config = RLConfig()
    config.reward.reward_model = RewardModelUseConfig(True, None if path is None else str(path))
    context = WorkerContext(config, torch.device("cpu"))
    context.tokenizer = tokenizer
    return RewardModelWorker(context)


def judged_by(judge: RewardModelWorker, *trajectories: Trajectory) -> list[float]:
    return judge.score(Batch({"trajectory": list(trajectories)})).tensor("rm_score").tolist()


def by_transformers(directory: Path, ids: list[int]) -> float:
    model = Qwen3ForSequenceClassification.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return float(model.eval()(input_ids=torch.tensor([ids])).logits)


def test_it_reads_the_tokens_sampled_where_vocabularies_agree(models):
    tokenizer = load_tokenizer(str(models[0]))
    judge = worker(models[0], tokenizer)
    assert judge.same_tokens
    prompt = render_prompt(tokenizer, ASK)
    odd = [tokenizer.convert_tokens_to_ids("1"), tokenizer.convert_tokens_to_ids("2")]  # not ended, as sampled
    scores = judged_by(judge, answer("12", prompt=prompt, ids=odd), answer("1", prompt=prompt, ids=odd[:1]))
    assert scores == pytest.approx([by_transformers(models[0], prompt + odd[:n]) for n in (2, 1)], abs=1e-5)


def test_it_renders_in_its_own_template_where_they_do_not(models):
    policy, own = (load_tokenizer(str(path)) for path in models)
    judge = worker(models[1], policy)
    assert not judge.same_tokens
    (score,) = judged_by(judge, answer("12", prompt=render_prompt(policy, ASK), ids=[5]))
    whole = own.apply_chat_template([*ASK, {"role": "assistant", "content": "12"}], tokenize=False)
    ids = own(whole.rstrip("\n"), add_special_tokens=False)["input_ids"]
    assert score == pytest.approx(by_transformers(models[1], ids), abs=1e-5)
    text = policy("copy 12 ")["input_ids"]
    (score,) = judged_by(judge, answer("12", prompt=text, messages=None))
    ids = own("copy 12 ")["input_ids"] + own("12")["input_ids"] + [own.eos_token_id]
    assert score == pytest.approx(by_transformers(models[1], ids), abs=1e-5)


def test_a_path_is_needed(models):
    with raises(ConfigError, "reward.reward_model.path"):
        worker(None, load_tokenizer(str(models[0])))
