"""A run whose order of prompts follows its own pass rates: resumed, it goes on as if it had never stopped."""

import json

import pyarrow.parquet as pq
import pytest
from support.archives import records
from support.world import metrics, rl_command

from hone.insight.archive.read import open_archive

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/data", "hone/trainers")]


def asked(run):
    """Uids of the prompts of every step, from the rollouts written."""
    return [[record["uid"] for record in records(run, step)] for step in open_archive(run).steps()]


def test_a_curriculum_by_pass_rate_resumes_exactly(world, run, tmp_path):
    overrides = (
        "data.sampler.name=pass_rate", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.rollout_dump_freq=1",
    )  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, steps in ((whole, 4), (parts, 2), (parts, 4)):
        ended = run(*rl_command(world, directory, "grpo", *overrides, f"trainer.total_training_steps={steps}"))
        assert ended.code == 0, ended.output
    assert metrics(parts) == metrics(whole)
    assert asked(parts) == asked(whole) and len(asked(whole)) == 4
    assert len({tuple(uids) for uids in asked(whole)}) > 1, "not the same prompts in every step"


STAGES = "data.sampler.stages=[{name:lenient,rows:{level:0},success:0.05,groups:8},{name:strict,rows:{level:1},success:1.0,max_batches:2},{name:all}]"


@pytest.fixture
def levels(world, tmp_path):
    """The problems of the world in two levels."""
    file = tmp_path / "levels.jsonl"
    rows = [
        row | {"extra_info": {"level": number % 2}} for number, row in enumerate(pq.read_table(world.train).to_pylist())
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_curriculum_of_stages_opens_by_success_and_resumes_exactly(world, run, levels, tmp_path):
    overrides = (
        f"data.train_files={levels}", "data.sampler.name=stages", STAGES, "data.sampler.keep_earlier=0.25",
        "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.rollout_dump_freq=1",
    )  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, steps in ((whole, 6), (parts, 3), (parts, 6)):
        ended = run(*rl_command(world, directory, "grpo", *overrides, f"trainer.total_training_steps={steps}"))
        assert ended.code == 0, ended.output
    assert metrics(parts) == metrics(whole)
    assert asked(parts) == asked(whole)
    rows = metrics(whole)
    assert [row["curriculum/stage"] for row in rows] == sorted(row["curriculum/stage"] for row in rows)
    scores = [row["critic/score/mean"] for row in rows]
    assert rows[1]["curriculum/success/lenient"] == pytest.approx(sum(scores[:2]) / 2), "of the groups of two steps"
    levels_of = [[int(uid.partition("~")[0].rpartition(":")[2]) % 2 for uid in uids[::4]] for uids in asked(whole)]
    assert levels_of[:2] == [[0] * 4] * 2
    strict = [number for number, row in enumerate(rows) if row["curriculum/stage"] == 2]
    assert strict == [2, 3] and all(sorted(levels_of[step]) == [0, 1, 1, 1] for step in strict), (
        "one row in four is kept"
    )
    assert rows[-1]["curriculum/stage"] == 3 and rows[-1]["curriculum/forced"] == 1


CLASSES = """
import random

class Sums:
    def __len__(self):
        return 40

    def __getitem__(self, row):
        return {"prompt": f"{row}+1=", "data_source": "exact_match", "reward_model": {"ground_truth": str(row + 1)}}


class Order:
    def __init__(self, data_source, seed):
        self.size, self.draw = len(data_source), random.Random(seed)

    def __iter__(self):
        return iter(self.draw.sample(range(self.size), 10))
"""


def test_dataset_and_sampler_classes_of_the_user_resume_exactly(world, run, tmp_path):
    (tmp_path / "classes.py").write_text(CLASSES)
    overrides = (
        f"data.custom_cls.path={tmp_path}/classes.py", "data.custom_cls.name=Sums",
        f"data.sampler.class_path={tmp_path}/classes.py", "data.sampler.class_name=Order",
        "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.rollout_dump_freq=1",
    )  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, steps in ((whole, 4), (parts, 3), (parts, 4)):
        ended = run(*rl_command(world, directory, "grpo", *overrides, f"trainer.total_training_steps={steps}"))
        assert ended.code == 0, ended.output
    assert metrics(parts) == metrics(whole)
    assert asked(parts) == asked(whole) and {uid.partition(":")[0] for step in asked(whole) for uid in step} == {"row"}
