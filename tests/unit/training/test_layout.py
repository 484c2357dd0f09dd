"""Layouts: every rank in one place of every grid, and sizes that do not divide are told with their numbers."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises

from hone.config.parallel import FsdpConfig, Layout, ParallelConfig
from hone.errors import ConfigError
from hone.extras import install_command
from hone.training.backends.registry import BackendEntry, backend_of


@given(
    replicate=st.integers(1, 3),
    shard=st.integers(1, 4),
    sequence=st.integers(1, 4),
    tensor=st.integers(1, 4),
    pipeline=st.integers(1, 3),
    context=st.integers(1, 3),
)
def test_the_sizes_given_are_the_sizes_planned(replicate, shard, sequence, tensor, pipeline, context):
    same_rows = sequence * tensor * pipeline * context
    world = replicate * shard * same_rows
    config = ParallelConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        ulysses_sequence_parallel_size=sequence,
        context_parallel_size=context,
        expert_parallel_size=shard,
        fsdp_config=FsdpConfig(fsdp_size=shard * sequence * context),
    )
    layout = Layout.plan(world, config)
    assert layout == Layout(world, replicate, shard, sequence, tensor, shard, pipeline, context)
    shards = [layout.dp_rank(rank) for rank in range(world)]
    assert shards == sorted(shards)
    assert [shards.count(share) for share in range(layout.dp_size)] == [same_rows] * layout.dp_size
    assert [shards.index(share) for share in range(layout.dp_size)] == [r for r in range(world) if layout.leads(r)]
    assert all(rank in layout.ranks_of(layout.dp_rank(rank)) for rank in range(world))


@pytest.mark.parametrize(
    ("world", "changes", "fsdp_size", "mentions"),
    [
        (6, {"tensor_model_parallel_size": 4}, -1, ("6 processes", "4 tensor")),
        (4, {"ulysses_sequence_parallel_size": 3}, -1, ("4 processes", "3 sequence")),
        (4, {"context_parallel_size": 3}, -1, ("4 processes", "3 context", "context_parallel_size must divide 4")),
        (
            8,
            {"context_parallel_size": 2, "ulysses_sequence_parallel_size": 2},
            2,
            ("over 2 of 8 ranks", "4 share", "4, 8"),
        ),
        (8, {}, 3, ("over 3 of 8 ranks", "1, 2, 4, 8")),
        (8, {"ulysses_sequence_parallel_size": 4}, 2, ("over 2 of 8 ranks", "4, 8")),
        (4, {"expert_parallel_size": 3}, -1, ("4 ranks", "groups of 3", "divisor of 4")),
        (4, {"pipeline_model_parallel_size": 3}, -1, ("4 processes", "3 pipeline")),
        (1, {"pipeline_model_parallel_size": 2, "strategy": "local"}, -1, ("no pipeline", "strategy=fsdp2")),
        (4, {"strategy": "megatron", "pipeline_model_parallel_size": 3}, -1, ("4 processes", "3 pipeline")),
        (4, {"strategy": "torchtitan"}, -1, ("torchtitan", "strategy=fsdp2")),
        (2, {"strategy": "local"}, -1, (1, 2, "strategy=fsdp2")),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_their_numbers(world, changes, fsdp_size, mentions):
    config = dataclasses.replace(ParallelConfig(fsdp_config=FsdpConfig(fsdp_size=fsdp_size)), **changes)
    with raises(ConfigError, *mentions):
        backend_of(config, world)
        Layout.plan(world, config)


def test_sizes_must_multiply_to_the_world():
    with raises(ConfigError, "4 processes"):
        Layout(world=4, dp_shard=3)


def test_a_backend_whose_package_is_missing_is_refused_with_the_command_that_installs_it():
    entry = BackendEntry("anywhere:Backend", package="a-package", module="a_missing_module", extra="an-extra")
    with raises(ConfigError, "a-package", install_command("an-extra"), "strategy=fsdp2"):
        entry.load()
