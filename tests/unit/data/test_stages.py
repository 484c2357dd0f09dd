"""Stages of a curriculum: gates that only measured success opens, shares of earlier stages, and exact resumption."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises

from hone.config.data import DataConfig, SamplerConfig
from hone.data.curriculum import RowFacts, StagedSampler, StageSpec, make_sampler, read_stages, rows_of_stages
from hone.data.types import Sample
from hone.errors import CheckpointError, ConfigError, DataError

ROWS = [[0, 1, 2], [3, 4], [0, 1, 2, 3, 4, 5, 6]]
"""Rows of three stages; the last has those of the others too."""


def curriculum(success=(0.5, 0.8), groups=3, most=(None, None), keep=0.0, batch=2, seed=0):
    gates = zip("ab", success, most, strict=True)
    stages = [StageSpec(name, {}, least, groups, limit) for name, least, limit in gates] + [StageSpec("c")]
    return StagedSampler(stages, ROWS, 8, batch, seed=seed, keep_earlier=keep)


def stage_of_each_batch(success, groups, most, batches, rate_of):
    """Slow reference without earlier rows: stage of each batch of two rows, each observed before the next draw."""
    stage, spent, measured, stages = 0, 0, [], []
    for number in range(batches):
        if stage < 2:
            latest = measured[-groups:]
            opened = success[stage] is not None and len(latest) == groups and sum(latest) / groups >= success[stage]
            if opened or (most[stage] is not None and spent >= most[stage]):
                stage, spent, measured = stage + 1, 0, []
        stages.append(stage)
        spent += 1
        measured += rate_of(number)
    return stages


@given(
    success=st.tuples(*[st.sampled_from([0.25, 0.5, 1.0])] * 2),
    groups=st.integers(1, 5),
    most=st.tuples(*[st.sampled_from([None, 2, 6])] * 2),
    rates=st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * 2), min_size=1, max_size=25),
)
def test_a_stage_begins_by_measured_success_or_after_its_batches(success, groups, most, rates):
    sampler, stages = curriculum(success, groups, most), []
    measured = {}
    for number, pair in enumerate(rates):
        rows = sampler.next_batch()
        stages.append(sampler.stage)
        assert set(rows) <= set(ROWS[sampler.stage])
        by_row = {}
        for row, rate in zip(rows, pair, strict=True):
            by_row.setdefault(row, rate)
        measured[number] = list(by_row.values())
        sampler.observe(by_row)
    assert stages == stage_of_each_batch(success, groups, most, len(rates), measured.__getitem__)
    assert sampler.metrics()["curriculum/stage"] == stages[-1] + 1


def test_without_success_the_first_stage_never_ends():
    sampler = curriculum(success=(0.5, 0.5))
    for _ in range(50):
        sampler.observe(dict.fromkeys(sampler.next_batch(), 0.49))
    assert sampler.stage == 0 and sampler.forced == 0


def test_a_gate_needs_all_its_groups():
    sampler = curriculum(groups=5)
    for _ in range(2):  # four groups
        sampler.observe(dict.fromkeys(sampler.next_batch(), 1.0))
    sampler.next_batch()
    assert sampler.stage == 0
    sampler.observe({0: 1.0, 1: 1.0, 2: 1.0})
    sampler.next_batch()
    assert sampler.stage == 1


def test_a_forced_stage_is_counted():
    sampler = curriculum(most=(3, None))
    for _ in range(4):
        sampler.next_batch()
    assert (sampler.stage, sampler.forced) == (1, 1)
    assert sampler.metrics() == {"curriculum/stage": 2.0, "curriculum/forced": 1.0}


def test_rows_that_were_not_drawn_for_a_stage_do_not_open_its_gate():
    sampler = curriculum(groups=2, keep=0.5)
    sampler.observe({0: 1.0, 1: 1.0, 2: 1.0})
    sampler.next_batch()
    assert sampler.stage == 0, "rows that were never drawn"
    sampler.observe({0: 1.0, 1: 1.0, 2: 1.0})
    sampler.next_batch()
    for _ in range(10):  # half of each batch comes from the first stage, and alone succeeds
        assert sampler.stage == 1
        sampler.observe({row: float(row < 3) for row in sampler.next_batch()})
    assert sampler.success(0) == 1.0 and sampler.success(1) == 0.0


@given(keep=st.floats(0, 0.9), batch=st.integers(1, 8), batches=st.integers(1, 20), seed=st.integers(0, 3))
def test_earlier_stages_keep_their_share(keep, batch, batches, seed):
    stages = [StageSpec("a", success=1.0, groups=1), StageSpec("b", success=1.0, groups=1), StageSpec("c")]
    sampler = StagedSampler(stages, [[0, 1], [2, 3], [4, 5, 6, 7]], 8, batch, seed=seed, keep_earlier=keep)
    while sampler.stage < 2:
        sampler.observe(dict.fromkeys(sampler.next_batch(), 1.0))
        before = sampler.state_dict()["position_in_stage"]
    rows = [row for _ in range(batches) for row in sampler.next_batch()]
    counts = [sum(row in members for row in rows) for members in ([0, 1], [2, 3], [4, 5, 6, 7])]
    total = len(rows) + before[1]
    assert abs(counts[0] + counts[1] + before[2] - keep * total) < 1 + 1e-6
    assert abs(counts[0] - counts[1]) <= 1


@given(
    steps=st.integers(0, 12),
    keep=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 3),
    rates=st.lists(st.dictionaries(st.integers(0, 1), st.floats(-1, 2)), min_size=30, max_size=30),
)
def test_a_resumed_curriculum_draws_the_same_rows(steps, keep, seed, rates):
    """Some rows are never observed, as those without a verdict."""

    def step(sampler, number):
        rows = sampler.next_batch()
        sampler.observe({rows[place]: rate for place, rate in rates[number].items()})
        return rows, sampler.metrics()

    one, resumed = (curriculum((0.3, 0.6), 2, (9, 9), keep=keep, seed=seed) for _ in range(2))
    for number in range(steps):
        step(one, number)
    resumed.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [step(resumed, number) for number in range(steps, 30)] == [step(one, number) for number in range(steps, 30)]
    assert resumed.state_dict() == one.state_dict()


def test_other_stages_do_not_resume():
    other = StagedSampler([StageSpec("a", success=0.5), StageSpec("z")], [[0], [1]], 8, 2, seed=0)
    with raises(CheckpointError, "'z'", 3, "data.sampler", "trainer.resume_mode=disable"):
        other.load_state_dict(curriculum().state_dict())


@pytest.mark.parametrize(
    ("entries", "mentions"),
    [
        ([], (0, "data.sampler.stages")),
        (["easy"], ("'easy'", "stages[0]")),
        ([{"name": "a", "sucess": 0.5}], ("sucess", "success")),
        ([{"name": "a b"}], ("'a b'",)),
        ([{"rows": {}}], ("None",)),
        ([{"name": "a", "rows": "gsm8k"}], ("'gsm8k'",)),
        ([{"name": "a", "success": 0}, {"name": "b"}], ("success=0",)),
        ([{"name": "a", "success": 1.01}, {"name": "b"}], ("success=1.01",)),
        ([{"name": "a", "success": True}, {"name": "b"}], ("success=True",)),
        ([{"name": "a", "success": 0.5, "groups": 0}, {"name": "b"}], ("groups=0",)),
        ([{"name": "a", "success": 0.5, "max_batches": 1.5}, {"name": "b"}], ("max_batches=1.5",)),
        ([{"name": "a"}, {"name": "b"}], ("'a'", "'b'", "stages[0]")),
        ([{"name": "a", "success": 0.5}], ("'a'", "stages[0]")),
        ([{"name": "a", "success": 0.5}, {"name": "a"}], ("'a'",)),
    ],
)
def test_stages_that_cannot_be(entries, mentions):
    with raises(ConfigError, *mentions):
        read_stages(entries)


def test_rows_are_selected_by_source_loop_and_nested_entries():
    rows = [
        RowFacts("calc", None, {"level": 1}),
        RowFacts("calc", "tool_agent", {"level": 2, "tools": {"noisy": True}}),
        RowFacts("game", "environment", {}),
    ]
    entries = [
        {"name": "single", "rows": {"agent_name": None}, "success": 0.5},
        {"name": "tools", "rows": {"data_source": "calc", "level": [2, 3]}, "max_batches": 4},
        {"name": "noisy", "rows": {"tools.noisy": True}, "success": 1},
        {"name": "mixed"},
    ]
    stages = read_stages(entries)
    assert rows_of_stages(stages, rows) == [[0], [1], [1], [0, 1, 2]]
    assert (stages[0].groups, stages[1].max_batches, stages[2].success) == (32, 4, 1.0)
    with raises(DataError, "'tools'", "0 of 1 rows", "'game'", "stages[1].rows"):
        rows_of_stages([stages[3], stages[1]], rows[2:])


def test_the_configured_sampler_has_the_stages_of_the_dataset():
    stages = [{"name": "easy", "rows": {"level": 1}, "success": 0.5, "groups": 2}, {"name": "all"}]
    config = DataConfig(train_batch_size=2, sampler=SamplerConfig(name="stages", stages=stages, keep_earlier=0.25))
    dataset = [Sample(f"r{row}", [1], None, "calc", extra_info={"level": row % 2}) for row in range(6)]
    sampler = make_sampler(config, dataset, 3)  # type: ignore[arg-type]
    assert isinstance(sampler, StagedSampler) and sampler.keep_earlier == 0.25 and sampler.learns
    assert set(sampler.next_batch()) < {1, 3, 5}
