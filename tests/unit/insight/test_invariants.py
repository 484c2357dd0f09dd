"""Every invariant: what passes, what is tolerated and counted, what stops the run."""

import json
import logging
import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.agents import call, play, sample, setting
from support.messages import mentioned, raises

from hone.agents.tools.calculator import Calculator
from hone.data.batch import Batch, to_batch
from hone.data.ragged import Ragged
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import InvariantError
from hone.insight.invariants import MASKED_GRADIENT, RATIO_MAX, RATIO_MEAN, Invariants, log_prob_gap, token_hash
from hone.insight.metrics import MetricStore


@dataclass
class Update:
    grad_norm: float = 1.0
    applied: bool = True
    statistics: list = field(default_factory=list)
    overflow: bool = False


def batch(lengths=(3, 2), masks=None, **columns):
    rows = [list(range(10 * row, 10 * row + length)) for row, length in enumerate(lengths)]
    trajectories = [
        Trajectory(
            uid=f"u{row // 2}",
            index=row % 2,
            prompt_ids=[100 + row],
            response_ids=ids,
            response_mask=masks[row] if masks else [1] * len(ids),
            rollout_log_probs=[-1.0] * len(ids),
            sampling_log_probs=[-1.0] * len(ids),
            text="",
            stop_reason=StopReason.STOP,
            sample=Sample(f"u{row // 2}", [100 + row], None, "test"),
        )
        for row, ids in enumerate(rows)
    ]
    return to_batch(trajectories).with_columns(**columns)


def ragged(*rows):
    return Ragged.from_rows([list(map(float, row)) for row in rows], torch.float32)


def counts(invariants):
    store = MetricStore()
    invariants.report(store)
    return store.reduce()


# groups, masks, ids -------------------------------------------------------------------------------------------------


def test_groups():
    Invariants().check_groups(["a", "b", "a", "b"], 2)
    with raises(InvariantError, 2, "n=2", "a: 3, b: 1", code="D-uid"):
        Invariants().check_groups(["a", "b", "a", "a"], 2)


def test_masks_that_are_right():
    invariants = Invariants()
    invariants.check_mask(batch(masks=[[1, 0, 1], [0, 1]]))
    assert not any(invariants.state_dict()["counts"].values())


@pytest.mark.parametrize(
    ("masks", "mentions"),
    [
        ([[1, 0, 1], [0, 0]], ("token",)),
        ([[1, 0, 1], [1]], ("1 entries", "response 2")),
        ([[1, 0, 1], [2, 1]], (2, "0 or 1")),
    ],
)
def test_masks_that_are_wrong_name_their_sample(masks, mentions):
    with raises(InvariantError, *mentions, code="D-mask") as caught:
        Invariants().check_mask(batch(masks=masks))
    assert "row 1, uid u0, index 1, tokens 0 to 2 of 2: [10, 11]" in caught.value.where


def test_log_probs_must_be_aligned_and_excerpts_are_decoded():
    wrong = batch(rollout_log_probs=ragged([-1, -1, -1], [-1]))
    with raises(InvariantError, "1 log-probs", "2 tokens", code="D-mask") as caught:
        Invariants(decode=lambda ids: "/".join(map(str, ids))).check_mask(wrong)
    assert "'10/11'" in caught.value.where


def test_an_empty_response_has_no_sampled_token():
    with raises(InvariantError, "row 1", code="D-mask"):
        Invariants().check_mask(batch(lengths=(3, 0)))


def test_a_gradient_at_masked_tokens_stops_the_run():
    clean = [{MASKED_GRADIENT: (torch.tensor(0.0), 3.0)}]
    Invariants().check_updates("actor", [Update(statistics=clean)])
    leaking = [*clean, {MASKED_GRADIENT: (torch.tensor(0.25), 3.0)}]
    with raises(InvariantError, 0.25, code="D-mask"):
        Invariants().check_updates("actor", [Update(statistics=leaking)])


def test_ids_pass_through_reordering_and_fail_when_a_column_is_not_reordered():
    good = batch().reorder([1, 0])
    Invariants().check_ids(good)
    mixed = good.with_columns(response_ids=batch().ragged("response_ids"))
    with raises(InvariantError, code="D-ids", where="row 0, uid u0"):
        Invariants().check_ids(mixed)
    changed = batch().ragged("response_ids")
    changed.values[4] += 1
    emitted = [token_hash([*t.prompt_ids, *t.response_ids]) for t in batch().objects("trajectory")]
    with raises(InvariantError, code="D-ids", where="row 1"):
        Invariants().check_ids(batch().with_columns(response_ids=changed), emitted)


@given(st.lists(st.integers(0, 2**31), max_size=8), st.lists(st.integers(0, 2**31), max_size=8))
def test_token_hash(a, b):
    assert (
        token_hash(a)
        == token_hash(torch.tensor(a, dtype=torch.int64))
        == token_hash(torch.tensor(a, dtype=torch.int64))
    )
    assert (token_hash(a) == token_hash(b)) == (a == b)
    assert token_hash(torch.tensor([1, 2], dtype=torch.int32)) == token_hash([1, 2])


# ratio --------------------------------------------------------------------------------------------------------------


def first_update(largest: float, mean: float) -> Update:
    return Update(statistics=[{RATIO_MAX: (largest, 1), RATIO_MEAN: (mean, 1)}])


@pytest.mark.parametrize(("dtype", "quiet", "loud"), [("float32", 0.9e-3, 1.1e-3), ("bfloat16", 0.049, 0.051)])
def test_ratio_thresholds(dtype, quiet, loud, caplog):
    invariants = Invariants(dtype)
    assert invariants.check_first_ratio(first_update(quiet, quiet / 50), MetricStore()) is None
    assert counts(invariants) == {}
    with caplog.at_level(logging.WARNING):
        assert invariants.check_first_ratio(first_update(loud, loud / 50), MetricStore()) is not None
    assert "D-ratio" in caplog.text
    assert counts(invariants) == {"invariant/D-ratio": 1.0}
    assert counts(invariants) == {}  # reported once


@pytest.mark.parametrize("mean", [0.06, math.nan])
def test_ratio_far_off_stops_the_run(mean):
    with raises(InvariantError, str(mean), code="D-ratio"):
        Invariants("bfloat16").check_first_ratio(first_update(0.06, mean), MetricStore())


def test_ratio_from_update_statistics_weighs_means_by_tokens():
    invariants, store = Invariants("bfloat16"), MetricStore()
    update = Update(
        statistics=[{RATIO_MAX: (0.01, 1), RATIO_MEAN: (0.0, 1)}, {}, {RATIO_MAX: (0.2, 9), RATIO_MEAN: (0.04, 9)}]
    )
    assert invariants.check_first_ratio(update, store) is not None
    assert store.reduce() == {"actor/first_ratio_max_abs_log": 0.2}
    bad = Update(statistics=[{RATIO_MAX: (0.1, 1), RATIO_MEAN: (0.0, 1)}, {RATIO_MAX: (0.2, 9), RATIO_MEAN: (0.06, 9)}])
    with raises(InvariantError, "0.054", "training/rollout_probs_diff_mean", code="D-ratio"):
        invariants.check_first_ratio(bad, store)
    with raises(ValueError, RATIO_MAX, RATIO_MEAN):
        invariants.check_first_ratio(Update(), store)


def test_gap_finds_the_place():
    gap = log_prob_gap(ragged([0, 0, 5], [1, 7]), ragged([0, 0, 5], [0, 0]), ragged([1, 1, 1], [1, 1]))
    assert (gap.largest, gap.row, gap.position, gap.mean) == (7.0, 1, 1, 8 / 5)


# finite -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_finite_in_every_shape(bad):
    for good, wrong in (
        (torch.ones(2), torch.tensor([1.0, bad])),
        (torch.ones(2, 3), torch.tensor([[1.0, 1, 1], [1, bad, 1]])),
        (ragged([1, 1, 1], [1, 1]), ragged([1, 1, 1], [bad, 1])),
        (1.0, bad),
    ):
        invariants = Invariants()
        assert invariants.check_finite("advantages", good, batch()) is None
        finding = invariants.check_finite("advantages", wrong, batch())
        assert finding is not None and mentioned("1 values of advantages", finding.message)
        assert isinstance(wrong, float) != finding.where.startswith("row 1, uid u0, index 1")


def test_three_times_in_a_row_stops_the_run_and_dumps_each_batch(tmp_path):
    dumped = []

    def dump(name, bad):
        dumped.append((name, len(bad)))
        return tmp_path / f"{name}.jsonl"

    invariants, bad, good = Invariants(dump=dump), torch.tensor([1.0, math.nan]), torch.ones(2)
    for values in (bad, bad, good, bad, bad):
        invariants.check_finite("reward", values, batch())
    with raises(InvariantError, "reward.jsonl", "3 times", code="D-finite"):
        invariants.check_finite("reward", bad, batch())
    assert dumped == [("reward", 2)] * 5
    assert counts(invariants) == {"invariant/D-finite": 4.0}


def test_stages_are_counted_separately():
    invariants, bad = Invariants(), torch.tensor([math.nan])
    for _ in range(2):
        invariants.check_finite("reward", bad)
        invariants.check_finite("advantages", bad)
    invariants.check_finite("reward", torch.ones(1))
    with raises(InvariantError, "advantages", "3 times", code="D-finite"):
        invariants.check_finite("advantages", bad)


def test_skipped_updates():
    invariants = Invariants()
    ok, skipped = Update(), Update(math.inf, applied=False)
    invariants.check_updates("actor", [skipped, skipped, ok, skipped, skipped])
    invariants.check_updates("critic", [ok])
    with raises(InvariantError, "actor", "inf", "3 times", code="D-finite"):
        invariants.check_updates("actor", [skipped])


# canary -------------------------------------------------------------------------------------------------------------


def test_canary_compares_with_the_first_sync():
    invariants, engine = Invariants(), ragged([-1, -1, -1], [-1, -1])
    assert invariants.check_canary(engine, ragged([-1.01] * 3, [-1.01] * 2), batch()) == pytest.approx(0.01)
    assert invariants.check_canary(engine, ragged([-1.09] * 3, [-1.09] * 2), batch()) == pytest.approx(0.09)
    with raises(InvariantError, "0.11 nats", "0.01", "0.1", code="D-sync"):
        invariants.check_canary(engine, ragged([-1.11] * 3, [-1.11] * 2), batch())


def test_canary_lets_rounding_pass_after_an_exact_start():
    invariants, engine = Invariants(), ragged([-1, -1])
    invariants.check_canary(engine, engine)
    invariants.check_canary(engine, ragged([-1.0005, -1]))
    with raises(InvariantError, "nats", code="D-sync"):
        invariants.check_canary(engine, ragged([-1.003, -1]))


def test_canary_compares_sampled_tokens_only_and_finds_nan():
    mixed = batch(masks=[[1, 1, 0], [1, 1]])
    engine = ragged([-1, -1, 0], [-1, -1])
    assert Invariants().check_canary(engine, ragged([-1, -1, -9], [-1, -1]), mixed) == 0
    with raises(InvariantError, "nan", code="D-sync"):
        Invariants().check_canary(engine, ragged([-1, math.nan, 0], [-1, -1]), mixed)


def test_an_engine_without_new_weights_is_detected_even_by_slow_drift():
    invariants = Invariants()
    still = ragged([-1.0, -2.0])
    invariants.check_canary(still, still, fixed=True)
    with raises(InvariantError, "0.00012 nats", "load_weights", code="D-sync"):
        for step in range(1, 20):
            invariants.check_canary(still, ragged([-1 - 3e-5 * step, -2.0]), fixed=True)
    assert step == 4  # 1.2e-4 nats, just over what rounding explains


def test_an_engine_that_follows_is_fine():
    invariants = Invariants()
    for step in range(20):
        values = ragged([-1 - 0.1 * step, -2.0])
        assert invariants.check_canary(values, values, fixed=True) == 0
    assert not any(invariants.state_dict()["counts"].values())


# state --------------------------------------------------------------------------------------------------------------


def test_state_survives_a_resume_exactly():
    def drive(invariants, seen):
        invariants.check_finite("reward", torch.tensor([math.nan]))
        seen.append(invariants.check_canary(ragged([-1, -2]), ragged([-1.00001, -2]), fixed=True))

    straight, seen = Invariants(), []
    drive(straight, seen)
    drive(straight, seen)
    first, again = Invariants(), []
    drive(first, again)
    resumed = Invariants()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    drive(resumed, again)
    assert seen == again and resumed.state_dict() == straight.state_dict()
    for invariants in (straight, resumed):
        with raises(InvariantError, "3 times", code="D-finite"):
            invariants.check_finite("reward", torch.tensor([math.nan]))


def test_a_batch_without_identities_still_gets_a_message():
    plain = Batch({"response_ids": Ragged.from_rows([[1], [2]]), "response_mask": Ragged.from_rows([[1], [0]])})
    with raises(InvariantError, code="D-mask", where="row 1, tokens 0 to 1 of 1"):
        Invariants().check_mask(plain)


def test_tool_tokens_in_the_loss_stop_the_run():
    calls = lambda name, turn: call("calculator", expression="6*7") if turn == 0 else "#### 42"  # noqa: E731
    played, _ = play(setting([Calculator()]), calls, [sample(tools=[Calculator().schema])], n=2)
    batch, invariants = to_batch(played), Invariants()
    invariants.check_mask(batch)
    invariants.check_ids(batch)
    mask = batch.ragged("response_mask")
    given = int((mask.values == 0).sum())
    assert given > 0
    planted = batch.with_columns(response_mask=mask.with_values(mask.values * 0 + 1))
    for check in (invariants.check_mask, invariants.check_ids):
        with raises(InvariantError, f"{given} tokens in 2 rows", code="D-mask"):
            check(planted)
    one = mask.values.clone()
    first = int((mask.values == 0).nonzero()[0])
    one[first] = 1
    with raises(InvariantError, "1 tokens in 1 rows", code="D-mask") as caught:
        invariants.check_ids(batch.with_columns(response_mask=Ragged(one, mask.offsets)))
    assert "row 0" in caught.value.where
