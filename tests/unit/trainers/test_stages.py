"""Stages: what cannot be supplied is said before the first token; what is not needed is not run; each is timed."""

import asyncio

import pytest
import torch
from support.messages import raises

from hone.data.batch import Batch
from hone.errors import ConfigError
from hone.insight.metrics import MetricStore
from hone.trainers.stages import Stage, StepState, check_stages, run_stages


def nothing(batch: Batch) -> Batch:
    return batch


def test_every_column_must_come_from_an_earlier_active_stage():
    gen, values = Stage("gen", nothing, adds=("ids",)), Stage("values", nothing, needs=("ids",), adds=("values",))
    adv = Stage("adv", nothing, needs=("ids", "values"), supplied_by="critic.enable=true")
    check_stages([gen, values, adv])
    off = Stage("values", nothing, needs=("ids",), adds=("values",), when=False)
    with raises(ConfigError, "adv", "values") as caught:
        check_stages([gen, off, adv])
    assert caught.value.fix == "critic.enable=true"
    with raises(ConfigError, "values", "ids"):
        check_stages([values, gen])
    check_stages([gen, Stage("adv", nothing, needs=("values",), when=False)])


def test_the_message_names_the_stage_that_would_help():
    with pytest.raises(ConfigError) as caught:
        check_stages([Stage("ref", nothing, adds=("ref",), when=False), Stage("kl", nothing, needs=("ref",))])
    assert "ref" in caught.value.fix
    with pytest.raises(ConfigError) as caught:
        check_stages([Stage("kl", nothing, needs=("unheard",))])
    assert "none exists" in caught.value.fix


def test_the_message_names_the_key_that_switches_a_stage_on():
    early = Stage("old", nothing, adds=("old",), when=False, switch="recompute=true")
    with pytest.raises(ConfigError) as caught:
        check_stages([early, Stage("bonus", nothing, needs=("old",)), Stage("update", nothing, adds=("old",))])
    assert caught.value.fix == "recompute=true"


def test_stages_run_in_order_async_or_not_and_are_timed():
    seen = []

    def plain(state: StepState) -> StepState:
        seen.append("plain")
        return state.add(Batch({"x": torch.ones(2)}))

    async def waiting(state: StepState) -> StepState:
        seen.append("waiting")
        await asyncio.sleep(0)
        return state.add(Batch({"y": state.batch.tensor("x") + 1}))

    def never(state: StepState) -> StepState:
        raise AssertionError("it is switched off")

    metrics = MetricStore()
    stages = [Stage("gen", plain), Stage("ref", never, when=False), Stage("reward", waiting)]
    batch = asyncio.run(run_stages(stages, StepState(1, metrics))).batch
    assert seen == ["plain", "waiting"]
    assert batch.tensor("y").tolist() == [2, 2]
    assert set(metrics.reduce()) == {"timing_s/gen", "timing_s/reward"}


def test_a_stage_that_returns_its_batch_is_told_what_to_return() -> None:
    stages = [Stage("novelty", lambda state: state.batch)]  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError) as refused:
        asyncio.run(run_stages(stages, StepState(1, MetricStore())))
    assert "state.add" in refused.value.fix
