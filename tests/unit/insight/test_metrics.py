"""Metrics: every reduction against its definition, and the table against its documentation."""

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pages.metrics import metrics_page
from support.messages import raises

from hone.insight import metrics as module
from hone.insight.metrics import METRICS, MetricSpec, MetricStore, Reduction, declare, find_metric, is_timing

PAIRS = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 100).map(float)), min_size=1, max_size=20)
EXAMPLES = {
    Reduction.SUM: "perf/total_num_tokens",
    Reduction.MEAN: "actor/pg_loss",
    Reduction.MAX: "response_length/max",
    Reduction.MIN: "response_length/min",
    Reduction.LAST: "actor/lr",
}


def fill(name, pairs):
    store = MetricStore()
    for value, weight in pairs:
        store.add(name, value, weight)
    return store


@given(PAIRS)
def test_each_reduction_is_what_the_table_says(pairs):
    values = [value for value, _ in pairs]
    total = math.fsum(weight for _, weight in pairs)
    expected = {
        Reduction.SUM: math.fsum(values),
        Reduction.MEAN: math.fsum(value * weight for value, weight in pairs) / total,
        Reduction.MAX: max(values),
        Reduction.MIN: min(values),
        Reduction.LAST: values[-1],
    }
    for reduction, name in EXAMPLES.items():
        assert fill(name, pairs).reduce()[name] == pytest.approx(expected[reduction], rel=1e-12, abs=1e-9)


@given(PAIRS, st.randoms(), st.integers(0, 20))
def test_sum_and_mean_do_not_depend_on_order_or_on_how_stores_are_merged(pairs, rng, cut):
    shuffled = list(pairs)
    rng.shuffle(shuffled)
    for name in ("perf/total_num_tokens", "actor/pg_loss", "response_length/max"):
        parts = fill(name, shuffled[:cut])
        parts.merge(fill(name, shuffled[cut:]))
        assert parts.reduce() == fill(name, pairs).reduce()  # to the last bit


def test_reduction_comes_from_the_table_and_not_from_the_name():
    store = fill("val-aux/max_words/acc_min/mean@4", [(1.0, 1), (3.0, 1)])
    assert store.reduce() == {"val-aux/max_words/acc_min/mean@4": 3.0}  # declared as last
    store = fill("actor/first_ratio_max_abs_log", [(1.0, 1), (3.0, 1), (2.0, 1)])
    assert store.reduce() == {"actor/first_ratio_max_abs_log": 3.0}


def test_tensors_are_read_and_detached():
    weight = torch.ones((), requires_grad=True)
    store = MetricStore()
    store.add("actor/pg_loss", weight * 3)
    store.add("actor/pg_loss", torch.tensor([5.0]))
    assert store.reduce() == {"actor/pg_loss": 4.0}
    with raises(ValueError, "'actor/pg_loss'", "(2,)"):
        store.add("actor/pg_loss", torch.ones(2))


def test_a_cpu_tensor_is_copied_so_that_later_changes_do_not_show():
    value, store = torch.tensor(1.0), MetricStore()
    store.add("actor/pg_loss", value)
    value.fill_(9.0)
    assert store.reduce() == {"actor/pg_loss": 1.0}


def test_programmer_errors():
    store = MetricStore()
    with raises(ValueError, "'actor/pg_los'", "declare()", "actor/pg_loss"):
        store.add("actor/pg_los", 1.0)
    with raises(ValueError, "'actor/pg_loss'", "weight -1"):
        store.add("actor/pg_loss", 1.0, weight=-1)
    with raises(ValueError, "'actor/pg_loss'", "weight nan"):
        store.add("actor/pg_loss", 1.0, weight=math.nan)


def test_weight_zero_counts_for_nothing_even_when_the_value_is_nan():
    assert fill("actor/pg_loss", [(math.nan, 0), (2.0, 5)]).reduce() == {"actor/pg_loss": 2.0}
    assert fill("actor/pg_loss", [(math.nan, 0)]).reduce() == {}


@pytest.mark.parametrize("name", EXAMPLES.values())
def test_nan_shows_at_any_position(name):
    for pairs in ([(math.nan, 1), (1.0, 1)], [(1.0, 1), (math.nan, 1)]):
        reduced = fill(name, pairs).reduce()[name]
        assert math.isnan(reduced) or (name == "actor/lr" and reduced == pairs[-1][0])


def test_infinities_do_not_raise():
    assert fill("actor/grad_norm", [(math.inf, 1), (1.0, 1)]).reduce()["actor/grad_norm"] == math.inf
    assert math.isnan(fill("actor/grad_norm", [(math.inf, 1), (-math.inf, 1)]).reduce()["actor/grad_norm"])


def test_timer_adds_up_and_records_a_failing_block():
    store = MetricStore()
    with store.timer("gen"):
        pass
    with pytest.raises(KeyError), store.timer("gen"):
        raise KeyError
    assert 0 <= store.reduce()["timing_s/gen"] < 1
    assert len(store._values["timing_s/gen"]) == 2


def test_reduce_is_sorted():
    store = MetricStore()
    store.update({"training/global_step": 1, "actor/lr": 2, "critic/vf_loss": 3})
    assert list(store.reduce()) == ["actor/lr", "critic/vf_loss", "training/global_step"]


def test_every_metric_is_declared_once():
    names = [spec.name for spec in METRICS]
    assert len(names) == len(set(names))


def test_an_exact_name_wins_over_a_pattern():
    assert find_metric("reward/no_verdict_rate").name == "reward/no_verdict_rate"
    assert find_metric("reward/format/mean").name == "reward/<term>/mean"
    assert find_metric("val-core/openai/gsm8k/acc/mean@16").name == "val-core/<data_source>/<metric>/mean@<n>"
    with raises(ValueError, "'val-core/x/acc/mean@many'"):
        find_metric("val-core/x/acc/mean@many")


def test_timing_names_are_exactly_those_measured_in_time_or_memory_replicas_and_alerts():
    units = {"s", "ms", "GB", "tokens/s/device", "share of time", "reward - time"}
    measured = {
        s.name for s in METRICS if s.unit in units or s.name.startswith(("replica/", "insight/alerts/machine"))
    }  # a free replica takes the next request
    assert {spec.name for spec in METRICS if is_timing(spec.name)} == measured


def test_a_plugin_declares_its_own(monkeypatch):
    monkeypatch.setattr(module, "_EXACT", dict(module._EXACT))
    spec = MetricSpec("actor/my_statistic", "share", Reduction.MAX, "Mine.")
    declare(spec)
    declare(spec)
    assert fill(spec.name, [(1.0, 1), (4.0, 1)]).reduce() == {spec.name: 4.0}
    with raises(ValueError, "'actor/my_statistic'"):
        declare(MetricSpec("actor/my_statistic", "share", Reduction.MIN, "Not mine."))
    monkeypatch.undo()
    find_metric.cache_clear()


def test_docs_page_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == metrics_page(), "run: scripts/make_docs"


def test_docs_page_names_every_metric_in_a_well_formed_row():
    rows = [line for line in metrics_page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(METRICS)
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 6
