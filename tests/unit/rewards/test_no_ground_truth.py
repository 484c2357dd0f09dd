"""Rewards of rows without a ground truth, and of prompts that are plain strings."""

import pytest
from support.messages import raises

from hone.config.reward import CustomRewardConfig, RewardConfig
from hone.data.prompts import scored_rows
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import RewardError
from hone.rewards.bench import bench_findings, run_bench
from hone.rewards.scorers import SCORERS
from hone.rewards.sources import with_conversation
from hone.rewards.worker import Adapted, to_score

PRICE = "def reward(completions, price, **kw):\n    return [float(str(p) in c) for c, p in zip(completions, price)]\n"


@pytest.mark.parametrize(
    ("column", "scorer", "words", "stops"),
    [
        ("price", None, ("no ground truth is known", "data.answer_key=COLUMN", "preflight.allow=[R49]"), False),
        ("price", "exact", ("no ground truth is known", "2 rows", "data.answer_key=COLUMN"), True),
        ("label", "exact", ("no ground truth is known", "data.answer_key=label"), True),
    ],
)
def test_what_could_not_be_tried_is_said(tmp_path, column, scorer, words, stops):
    (tmp_path / "a.csv").write_text(f"prompt,{column}\nx,3\ny,4\n")
    (tmp_path / "r.py").write_text(PRICE)
    config = RewardConfig(scorer=scorer, num_workers=1)
    if scorer is None:
        config.custom_reward_function = CustomRewardConfig.named(f"{tmp_path / 'r.py'}:reward")
    rows = scored_rows(tmp_path / "a.csv", reward_fn_key="data_source", limit=9)
    found = list(bench_findings(run_bench(config, rows), config))
    assert [(one.error.code, one.stops) for one in found] == [("R49", stops)]
    with raises(RewardError, *words):
        raise found[0].error


def test_a_missing_answer_is_not_the_text_none():
    with pytest.raises(ValueError, match="empty"):
        SCORERS.get("exact").compute("exact", "None", None)


@pytest.mark.parametrize("text", ["2+2?", None])
def test_functions_of_trl_get_strings_where_the_prompt_was_one(text):
    asked = [{"role": "user", "content": "2+2?"}]
    sample = Sample("a:0", [1], asked, "default", text=text)
    given = Trajectory("a:0", 0, [1], [2], [1], [0.0], [0.0], "4", StopReason.STOP, sample)
    seen = {}

    def reward(completions, prompts, **columns):
        seen.update(completions=completions, prompts=prompts)
        return [1.0]

    assert to_score(Adapted(reward, {}, batch=False)(**with_conversation(given))).total == 1.0
    messages = [{"role": "assistant", "content": "4"}]
    assert seen == {"completions": ["4" if text else messages], "prompts": [text or asked]}
