"""Every registered preference loss and Bradley-Terry: oracle, gradients, invariances."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import preferences as oracle
from support.examples import examples
from support.messages import raises
from torch import Tensor

from hone.algorithms import preference_losses
from hone.algorithms.preference_losses import COUNTED_BY, best_worst_pairs, kto_kl, pair_rows
from hone.algorithms.reward_model import bradley_terry_loss
from hone.errors import ConfigError, DataError

NAMES = preference_losses.names()
OPTIONS = {
    "beta": [0.1, 0.7], "label_smoothing": [0.0, 0.2], "average_log_prob": [False, True], "simpo_gamma": [0.0, 1.3],
    "cpo_alpha": [0.0, 0.5], "desirable_weight": [1.0, 1.3], "undesirable_weight": [1.0, 0.4],
}  # fmt: skip
KL = 0.4
quick = examples(40)


@dataclass
class Case:
    """Responses ``[B, T]``, NaN wherever the mask is 0; the rows of a pair are at any place."""

    log_probs: Tensor
    ref: Tensor
    mask: Tensor
    labels: Tensor
    pair_ids: list[str]

    def select(self, rows: list[int]) -> Case:
        tensors = {name: getattr(self, name)[rows] for name in ("log_probs", "ref", "mask", "labels")}
        return Case(**tensors, pair_ids=[self.pair_ids[row] for row in rows])

    def padded(self, columns: int) -> Case:
        def pad(x: Tensor, fill: float) -> Tensor:
            return torch.nn.functional.pad(x, (0, columns), value=fill)

        return replace(
            self, log_probs=pad(self.log_probs, math.nan), ref=pad(self.ref, math.nan), mask=pad(self.mask, 0)
        )


def build(seed: int, pairs: int, columns: int, *, gap: float, dtype: torch.dtype = torch.float64) -> Case:
    draw = random.Random(seed)
    rows = [(f"p{p}", label) for p in range(pairs) for label in (True, False)]
    draw.shuffle(rows)
    mask = []
    for _ in rows:
        length = draw.choice([0, 1, columns, draw.randint(1, columns), draw.randint(1, columns)])
        mask.append([int(t < length and draw.random() > 0.2) for t in range(columns)])

    def matrix(value) -> Tensor:
        return torch.tensor([[value() if m else math.nan for m in row] for row in mask], dtype=dtype)

    log_probs = matrix(lambda: -draw.choice([1e-7, draw.expovariate(1.0), draw.expovariate(0.1)]))
    return Case(
        log_probs,
        log_probs + matrix(lambda: draw.choice([0.0, 1e-7, 1.0]) * draw.uniform(-gap, gap)),
        torch.tensor(mask),
        torch.tensor([label for _, label in rows]),
        [pair for pair, _ in rows],
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return build(
        draw(st.integers(0, 2**32)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 7)),
        gap=draw(st.sampled_from([0.01, 1.0, 30.0])),
    )


def options_of(name: str, data: st.DataObject) -> dict:
    options = sorted(preference_losses.get(name).options & OPTIONS.keys())
    return {o: data.draw(st.sampled_from(OPTIONS[o]), label=o) for o in options}


def run(name: str, case: Case, **arguments) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    log_probs = case.log_probs.clone().requires_grad_()
    loss, metrics = preference_losses.get(name)(
        log_probs, case.mask, case.labels, pair_ids=case.pair_ids, ref_log_probs=case.ref, kl=KL, **arguments
    )
    loss.backward()
    assert log_probs.grad is not None
    return loss.detach(), log_probs.grad, metrics


def paired(name: str) -> bool:
    return "pairs" in preference_losses.get(name).needs


def counts(name: str, case: Case) -> dict[str, Tensor]:
    return preference_losses.get(name).counts(case.mask, case.labels, case.pair_ids)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(case=cases(), data=st.data())
def test_loss_and_metrics_equal_the_oracle(name: str, case: Case, data: st.DataObject) -> None:
    options = options_of(name, data)
    loss, gradient, metrics = run(name, case, **options)
    lists = (case.log_probs.tolist(), case.ref.tolist(), case.mask.tolist(), case.labels.tolist())
    if paired(name):
        expected, numbers = oracle.pair_loss(name, *lists, case.pair_ids, **options)
    else:
        expected, numbers = oracle.kto(*lists, KL, **options)
    assert float(loss) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    for key, value in numbers.items():
        assert float(metrics[key]) == pytest.approx(value, rel=1e-9, abs=1e-9), key
    assert torch.isfinite(gradient).all() and not gradient[case.mask == 0].any()
    assert 0 <= float(metrics["rewards/accuracies"]) <= 1


@pytest.mark.parametrize("name", NAMES)
@quick
@given(case=cases(), data=st.data())
def test_split_order_padding_and_ranks_change_nothing(name: str, case: Case, data: st.DataObject) -> None:
    options = options_of(name, data)
    whole, gradient, metrics = run(name, case, **options)
    total = int(counts(name, case)["units"])

    order = data.draw(st.permutations(range(len(case.labels))))
    shuffled, shuffled_gradient, _ = run(name, case.select(order), **options)
    torch.testing.assert_close(shuffled, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shuffled_gradient, gradient[order], rtol=1e-9, atol=1e-12)

    first = data.draw(st.sets(st.sampled_from(sorted(set(case.pair_ids)))))
    parts = [case.select([r for r, p in enumerate(case.pair_ids) if (p in first) == side]) for side in (True, False)]
    split = [run(name, part, global_batch_size=total, **options) for part in parts]
    torch.testing.assert_close(split[0][0] + split[1][0], whole, rtol=1e-9, atol=1e-9)
    ranks = [run(name, part, global_batch_size=total, dp_size=2, **options)[0] for part in parts]
    torch.testing.assert_close((ranks[0] + ranks[1]) / 2, whole, rtol=1e-9, atol=1e-9)
    for key, value in metrics.items():
        weights = [counts(name, part)[COUNTED_BY.get(key, "units")] for part in parts]
        joined = sum(w * s[2][key] for w, s in zip(weights, split, strict=True)) / max(int(sum(weights)), 1)
        torch.testing.assert_close(joined, value, rtol=1e-9, atol=1e-9)

    more, more_gradient, _ = run(name, case.padded(3), **options)
    torch.testing.assert_close(more, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(more_gradient[:, : gradient.shape[1]], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_finite_differences(name: str) -> None:
    case = build(5, 4, 5, gap=1.0)
    case.log_probs = torch.where(case.mask.bool(), case.log_probs - 0.1, 0.0)
    loss = preference_losses.get(name)

    def value(log_probs: Tensor) -> Tensor:
        return loss(log_probs, case.mask, case.labels, pair_ids=case.pair_ids, ref_log_probs=case.ref, kl=KL)[0]

    assert torch.autograd.gradcheck(value, case.log_probs.requires_grad_(), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    case = build(3, 8, 20, gap=0.1, dtype=dtype)
    double = replace(case, log_probs=case.log_probs.double(), ref=case.ref.double())
    (low, _, _), (high, _, _) = run(name, case), run(name, double)
    assert low.dtype == torch.float32
    assert abs(float(low) - float(high)) <= tolerance * max(1.0, abs(float(high)))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_along_the_gradient_prefers_the_chosen(name: str) -> None:
    """Whatever the loss: going down raises what is chosen against what is rejected."""
    log_probs, mask, labels = torch.full((2, 3), -1.0), torch.ones(2, 3), torch.tensor([True, False])
    case = Case(log_probs, log_probs.clone(), mask, labels, ["a", "a"])
    _, gradient, metrics = run(name, case)
    assert float(gradient[0].sum()) < float(gradient[1].sum())
    assert float(metrics["rewards/accuracies"]) == 0.5


@pytest.mark.parametrize("name", [name for name in NAMES if paired(name)])
@quick
@given(case=cases())
def test_accuracies_by_length_are_those_of_their_pairs(name: str, case: Case) -> None:
    _, _, metrics = run(name, case)
    lengths = case.mask.sum(-1).tolist()
    found: dict[str, list[float]] = {"longer": [], "shorter": []}
    for pair in set(case.pair_ids):
        rows = [row for row, other in enumerate(case.pair_ids) if other == pair]
        chosen, rejected = sorted(rows, key=lambda row: not case.labels[row])
        if lengths[chosen] and lengths[rejected] and lengths[chosen] != lengths[rejected]:
            right = run(name, case.select([chosen, rejected]))[2]["rewards/accuracies"]
            found["longer" if lengths[chosen] > lengths[rejected] else "shorter"].append(float(right))
    for side, values in found.items():
        assert int(counts(name, case)[side]) == len(values)
        if values:
            assert float(metrics[f"rewards/accuracies_{side}"]) == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize("name", NAMES)
def test_wrong_options_and_inputs_are_refused(name: str) -> None:
    loss, x, labels = preference_losses.get(name), torch.full((2, 2), -1.0), torch.tensor([True, False])
    given_all = {"ref_log_probs": x, "kl": 0.0}
    with raises(ConfigError, "'betta'", "Did you mean beta"):
        loss(x, x < 0, labels, **given_all, betta=0.1)
    with raises(ConfigError, "beta=0", where="loss.beta"):
        loss(x, x < 0, labels, **given_all, beta=0)
    if "label_smoothing" in loss.options:
        with raises(ConfigError, "label_smoothing=0.5", where="loss.label_smoothing"):
            loss(x, x < 0, labels, **given_all, label_smoothing=0.5)
    if "reference" in loss.needs:
        with raises(ConfigError, f"'{loss.name}'", "ref_log_probs"):
            loss(x, x < 0, labels, kl=0.0)
    if "kl" in loss.needs:
        with raises(ConfigError, f"'{loss.name}'", "kl"):
            loss(x, x < 0, labels, ref_log_probs=x)
    with raises(ValueError, "dp_size=2", "global_batch_size"):
        loss(x, x < 0, labels, **given_all, dp_size=2)
    if "pairs" in loss.needs:
        with raises(DataError, "2 chosen", "0 rejected"):
            loss(x, x < 0, torch.tensor([True, True]), **given_all)
        for bad in (["a", "b"], ["a", "a", "a"]):
            rows = torch.full((len(bad), 2), -1.0)
            with raises(DataError, f"{len(bad)} rows"):
                loss(rows, rows < 0, torch.tensor([True, False, False][: len(bad)]), pair_ids=bad, ref_log_probs=rows)
    empty, metrics = loss(x[:0], x[:0], labels[:0], pair_ids=[], ref_log_probs=x[:0], kl=0.0)
    assert float(empty) == 0 and all(float(v) == 0 for v in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_metadata_is_complete(name: str) -> None:
    loss = preference_losses.get(name)
    assert loss.formula and "arXiv" in loss.paper and "beta" in loss.options
    assert loss.__doc__ and len(loss.__doc__) > 80
    assert all(option in loss.formula or option in str(loss.__doc__) for option in loss.options - {"beta"} - SMOOTHING)


SMOOTHING = {"label_smoothing", "desirable_weight", "undesirable_weight"}


def test_extreme_log_probs_stay_finite() -> None:
    log_probs = torch.tensor([[0.0], [-1e4], [-1e4], [0.0]])
    for name in NAMES:
        case = Case(log_probs, -log_probs, torch.ones(4, 1), torch.tensor([True, False, True, False]), [*"aabb"])
        loss, gradient, _ = run(name, case)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all(), name


# --------------------------------------------------------------------------------------------------------------- pairs


def test_pair_rows_finds_the_sides_in_any_order() -> None:
    chosen, rejected = pair_rows(torch.tensor([False, True, True, False]), ["x", "y", "x", "y"])
    assert chosen.tolist() == [2, 1] and rejected.tolist() == [0, 3]
    chosen, rejected = pair_rows(torch.tensor([0, 1, 1, 0]), torch.tensor([7, 3, 7, 3]))
    assert chosen.tolist() == [2, 1] and rejected.tolist() == [0, 3]


@quick
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 0.5, 1.0, -2.0])), max_size=12),
    st.sampled_from([0.0, 1.0]),
)
def test_best_and_worst_of_each_group(rows: list[tuple[str, float]], margin: float) -> None:
    groups, scores = [g for g, _ in rows], [s for _, s in rows]
    best, worst = best_worst_pairs(torch.tensor(scores), groups, margin=margin)
    expected = []
    for group in dict.fromkeys(groups):
        its = [s for g, s in rows if g == group]
        if max(its) > min(its) and max(its) - min(its) >= margin:
            expected.append((group, max(its), min(its)))
    pairs = zip(best.tolist(), worst.tolist(), strict=True)
    assert [(groups[b], scores[b], scores[w]) for b, w in pairs] == expected
    assert [groups[w] for w in worst.tolist()] == [group for group, _, _ in expected]


@quick
@given(case=cases())
def test_kto_kl_equals_the_oracle(case: Case) -> None:
    got = kto_kl(case.log_probs, case.ref, case.mask)
    expected = oracle.kto_kl(case.log_probs.tolist(), case.ref.tolist(), case.mask.tolist())
    assert float(got) == pytest.approx(expected, rel=1e-9, abs=1e-12) and not got.requires_grad


# ------------------------------------------------------------------------------------------------------ Bradley-Terry


@quick
@given(st.lists(st.tuples(*[st.floats(-40, 40)] * 3), min_size=1, max_size=6), st.sampled_from([0.0, 0.01]), st.data())
def test_bradley_terry(pairs: list[tuple[float, float, float]], centering: float, data: st.DataObject) -> None:
    columns = torch.tensor(pairs, dtype=torch.float64).T

    def value(rows: slice, **arguments) -> Tensor:
        chosen, rejected, margin = columns[:, rows]
        return bradley_terry_loss(chosen, rejected, margin=margin, centering_coeff=centering, **arguments)[0]

    expected = oracle.bradley_terry(*columns.tolist(), centering)
    assert float(value(slice(None))) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    cut = data.draw(st.integers(0, len(pairs)))
    halves = [value(rows, global_batch_size=len(pairs)) for rows in (slice(cut), slice(cut, None))]
    assert float(halves[0] + halves[1]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    ranks = [value(rows, global_batch_size=len(pairs), dp_size=2) for rows in (slice(cut), slice(cut, None))]
    assert float(ranks[0] + ranks[1]) / 2 == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_bradley_terry_gradient_metrics_and_mistakes() -> None:
    scores = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: bradley_terry_loss(s[0], s[1], centering_coeff=0.1)[0], scores)
    _, metrics = bradley_terry_loss(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.0, 2.0, 3.0]))
    assert {name: float(v) for name, v in metrics.items()} == pytest.approx(
        {"rewards/chosen": 1.0, "rewards/rejected": 5 / 3, "rewards/margins": -2 / 3, "rewards/accuracies": 0.5}
    )
    with raises(ConfigError, "centering_coeff=-1"):
        bradley_terry_loss(scores[0], scores[1], centering_coeff=-1)
    with raises(ValueError, "global_batch_size"):
        bradley_terry_loss(scores[0], scores[1], dp_size=2)
    with raises(ValueError, "5 chosen", "4 rejected"):
        bradley_terry_loss(scores[0], scores[1, :4])
