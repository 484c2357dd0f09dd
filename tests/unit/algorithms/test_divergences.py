"""Exact divergences, the full KL and distillation losses: oracle, gradients, identities, invariances."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import algorithms as aggregation
from oracles import divergences as oracle
from support.examples import examples
from support.messages import raises
from support.ragged_cases import Case, build, cases
from torch import Tensor

from hone.algorithms import (
    AGGREGATION_MODES,
    DISTILLATION_MODES,
    DIVERGENCES,
    KL_KINDS,
    distillation_advantages,
    distillation_loss,
    distillation_token_loss,
    divergence,
    full_kl,
    kl_penalty,
)
from hone.errors import ConfigError

quick = examples(50)
AS_LOSS = [mode for mode in DISTILLATION_MODES if mode not in ("k1", "kl")]
SCALE = 5.0


def draw_logits(seed: int, rows: int, vocabulary: int, spread: float, *, holes: bool = False) -> tuple[Tensor, Tensor]:
    """Logits of two models; with ``holes`` some tokens are excluded (-inf), never all of a row."""
    generator = torch.Generator().manual_seed(seed)
    pair = spread * torch.randn(2, rows, vocabulary, dtype=torch.float64, generator=generator)
    if holes:
        excluded = torch.rand(pair.shape, generator=generator) < 0.3
        excluded[..., 0] = False
        pair = pair.masked_fill(excluded, -math.inf)
    return pair[0], pair[1]


logits = st.builds(
    draw_logits,
    st.integers(0, 2**32),
    st.integers(0, 4),
    st.integers(2, 7),
    st.sampled_from([1e-6, 1.0, 10.0]),
    holes=st.booleans(),
)


# --------------------------------------------------------------------------------------------------------- divergences


@pytest.mark.parametrize("kind", DIVERGENCES)
@quick
@given(pair=logits, beta=st.sampled_from([0.1, 0.5, 0.9]))
def test_divergence_equals_the_oracle(kind: str, pair: tuple[Tensor, Tensor], beta: float) -> None:
    student, teacher = (x.log_softmax(-1) for x in pair)
    result = divergence(student, teacher, kind, beta=beta)
    expected = [oracle.divergence(q, p, kind, beta) for q, p in zip(student.tolist(), teacher.tolist(), strict=True)]
    assert result.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
@quick
@given(pair=logits, data=st.data())
def test_top_k_with_the_rest_is_exact_and_never_above_the_whole(
    kind: str, pair: tuple[Tensor, Tensor], data: st.DataObject
) -> None:
    student, teacher = (x.log_softmax(-1) for x in pair)
    vocabulary = student.shape[-1]
    count = data.draw(st.integers(1, vocabulary - 1))
    tokens = teacher.topk(count, -1).indices
    near, far = student.gather(-1, tokens), teacher.gather(-1, tokens)
    result = divergence(near, far, kind, tail_bucket=True)
    assert result.isfinite().all()
    # a tail of the size of rounding errors is not known to any number of digits
    known = (1 - near.exp().sum(-1) > 1e-6) & (1 - far.exp().sum(-1) > 1e-6)
    result, whole = result[known], divergence(student, teacher, kind)[known]
    expected = [
        oracle.divergence(q, p, kind, 0.5, tail=True)
        for q, p in zip(near[known].tolist(), far[known].tolist(), strict=True)
    ]
    assert result.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert bool((result <= whole * (1 + 1e-6) + 1e-9).all())
    if count == vocabulary - 1:  # one token is a bucket by itself
        torch.testing.assert_close(result, whole, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_that_leave_nothing_give_finite_numbers_and_gradients(kind: str, dtype: torch.dtype) -> None:
    """The K tokens have all the mass, or by rounding more than all of it."""
    for teacher_mass, student_mass in ((1.0, 0.5), (0.5, 1.0), (1.0, 1.0), (1.02, 1.02)):
        student = (torch.tensor([[0.9, 0.1]]) * student_mass).log().to(dtype).requires_grad_()
        teacher = (torch.tensor([[0.2, 0.8]]) * teacher_mass).log().to(dtype)
        value = divergence(student, teacher, kind, tail_bucket=True)
        value.sum().backward()
        assert value.isfinite().all() and float(value.detach()) > 0
        assert student.grad is not None and student.grad.isfinite().all()


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_divergence_gradient_equals_finite_differences(kind: str, tail: bool, holes: bool) -> None:
    student, teacher = draw_logits(7, 3, 5, 1.0, holes=holes)
    finite = student.isfinite()

    def loss(free: Tensor) -> Tensor:
        scores = torch.full_like(student, -math.inf).masked_scatter(finite, free)
        log_probs, target = scores.log_softmax(-1), teacher.log_softmax(-1)
        return divergence(
            log_probs[:, :3] if tail else log_probs, target[:, :3] if tail else target, kind, tail_bucket=tail
        )

    assert torch.autograd.gradcheck(loss, student[finite].requires_grad_(), eps=1e-6, atol=1e-6)


def test_jensen_shannon_is_bounded_symmetric_and_reaches_both_kls() -> None:
    student, teacher = (x.log_softmax(-1) for x in draw_logits(1, 20, 6, 3.0))
    half = divergence(student, teacher, "jsd", beta=0.5)
    torch.testing.assert_close(half, divergence(teacher, student, "jsd", beta=0.5))
    assert bool((half >= 0).all()) and bool((half <= math.log(2)).all())
    tiny = 1e-7
    forward = divergence(student, teacher, "jsd", beta=tiny) / tiny
    torch.testing.assert_close(forward, divergence(student, teacher, "forward_kl"), rtol=1e-3, atol=1e-6)
    reverse = divergence(student, teacher, "jsd", beta=1 - tiny) / tiny
    torch.testing.assert_close(reverse, divergence(student, teacher, "reverse_kl"), rtol=1e-3, atol=1e-6)
    for beta in (0.0, 1.0):
        with raises(ConfigError, f"beta={beta}", "above 0", "below 1"):
            divergence(student, teacher, "jsd", beta=beta)
    with raises(ConfigError, "'reverse'", "Did you mean reverse_kl"):
        divergence(student, teacher, "reverse")


@quick
@given(pair=logits)
def test_full_kl_is_what_the_estimators_estimate(pair: tuple[Tensor, Tensor]) -> None:
    policy, reference = (x.log_softmax(-1) for x in pair)
    exact = full_kl(*pair)
    torch.testing.assert_close(exact, full_kl(policy, reference))  # log-probs are normalised logits
    if policy.isfinite().all() and reference.isfinite().all():
        mean = (policy.exp() * kl_penalty(policy, reference, "k1")).sum(-1)
        torch.testing.assert_close(exact, mean)
    expected = [oracle.kl(p, q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True)]
    assert exact.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_full_kl_of_top_k_and_lower_precision() -> None:
    a, b = draw_logits(3, 8, 50, 1.0)
    tokens = a.topk(20, -1).indices
    policy, reference = (logits.log_softmax(-1).gather(-1, tokens) for logits in (a, b))
    part, whole = full_kl(policy, reference, top_k=True), full_kl(a, b)
    assert bool((part <= whole).all()) and bool((part > 0.5 * whole).all())
    low = full_kl(a.bfloat16(), b.bfloat16())
    assert low.dtype == torch.float32
    torch.testing.assert_close(
        low.double(), full_kl(a.bfloat16().double(), b.bfloat16().double()), rtol=1e-4, atol=1e-5
    )
    with raises(ConfigError, "hone.algorithms.full_kl"):
        kl_penalty(a[:, 0], b[:, 0], "full")


# -------------------------------------------------------------------------------------------------------- distillation


def models(case: Case, loss_mode: str, seed: int = 0, vocabulary: int = 6, count: int = 3) -> tuple[Tensor, Tensor]:
    """Log-probs of student and teacher as ``loss_mode`` wants them, NaN outside the mask."""
    rows, columns = case.mask.shape
    pair = draw_logits(seed, rows * columns, vocabulary, 2.0)
    student, teacher = (x.log_softmax(-1).view(rows, columns, vocabulary) for x in pair)
    if loss_mode in KL_KINDS:
        student, teacher = case.new, case.old
    elif loss_mode.endswith("_topk"):
        tokens = teacher.topk(count, -1).indices
        student, teacher = student.gather(-1, tokens), teacher.gather(-1, tokens)
    mask = case.mask if student.dim() == 2 else case.mask[..., None]
    return student.masked_fill(mask == 0, math.nan), teacher.masked_fill(mask == 0, math.nan)


def loss_and_gradient(case: Case, mode: str, pair: tuple[Tensor, Tensor], **arguments) -> tuple[Tensor, Tensor, dict]:
    student = pair[0].clone().requires_grad_()
    loss, metrics = distillation_loss(student, pair[1], case.mask, loss_mode=mode, loss_scale_factor=SCALE, **arguments)
    loss.backward()
    assert student.grad is not None
    return loss.detach(), student.grad, metrics


@pytest.mark.parametrize("mode", AS_LOSS)
@examples(30)
@given(
    case=cases(),
    aggregate=st.sampled_from(AGGREGATION_MODES),
    beta=st.sampled_from([0.2, 0.5]),
    low=st.sampled_from([None, -2.0]),
    high=st.sampled_from([None, 0.3]),
)
def test_distillation_loss_equals_the_oracle(
    mode: str, case: Case, aggregate: str, beta: float, low: float | None, high: float | None
) -> None:
    pair, clamps = models(case, mode), {"beta": beta, "log_prob_min_clamp": low, "loss_max_clamp": high}
    loss, gradient, metrics = loss_and_gradient(case, mode, pair, loss_agg_mode=aggregate, **clamps)
    vectors = [(x if x.dim() == 3 else x[..., None]).tolist() for x in pair]
    mask = case.mask.tolist()
    tokens = [
        [oracle.token_loss(q, p, mode, **clamps) if m else math.nan for q, p, m in zip(*rows, strict=True)]
        for rows in zip(*vectors, mask, strict=True)
    ]
    assert float(loss) == pytest.approx(aggregation.aggregate(tokens, mask, aggregate, SCALE), rel=1e-8, abs=1e-9)
    outside = case.mask == 0
    assert gradient.isfinite().all() and not gradient[outside].any()
    seen = aggregation.selected(tokens, mask) or [0.0]
    expected = {
        "loss": aggregation.mean(seen),
        "abs_loss": aggregation.mean([abs(x) for x in seen]),
        "loss_min": min(seen),
        "loss_max": max(seen),
    }
    if mode.endswith("_topk"):
        for name, rows in zip(("student", "teacher"), vectors, strict=True):
            masses = [math.fsum(math.exp(x) for x in v) for v in aggregation.selected(rows, mask)]
            expected[f"{name}_mass"] = aggregation.mean(masses)
    assert set(metrics) == {f"distillation/{name}" for name in expected}
    for name, value in expected.items():
        assert float(metrics[f"distillation/{name}"]) == pytest.approx(value, rel=1e-8, abs=1e-9), name


@pytest.mark.parametrize("mode", AS_LOSS)
@examples(15)
@given(case=cases(), aggregate=st.sampled_from(AGGREGATION_MODES), data=st.data())
def test_distillation_split_order_and_ranks(mode: str, case: Case, aggregate: str, data: st.DataObject) -> None:
    counts = {"batch_num_tokens": int(case.mask.sum()), "global_batch_size": int((case.mask.sum(1) > 0).sum())}
    pair, settings = models(case, mode), {"loss_agg_mode": aggregate, **counts}
    whole, gradient, _ = loss_and_gradient(case, mode, pair, **settings)
    order = data.draw(st.permutations(range(len(case.mask))))
    cut = data.draw(st.integers(0, len(order)))
    parts = [order[:cut], order[cut:]]

    def part_of(part: list[int], **more: int) -> tuple[Tensor, Tensor, dict]:
        return loss_and_gradient(case.select(part), mode, (pair[0][part], pair[1][part]), **settings, **more)

    split = [part_of(part) for part in parts]
    torch.testing.assert_close(split[0][0] + split[1][0], whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([s[1] for s in split]), gradient[order], rtol=1e-9, atol=1e-12)
    ranks = [part_of(part, dp_size=2)[0] for part in parts]
    torch.testing.assert_close((ranks[0] + ranks[1]) / 2, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", [mode for mode in AS_LOSS if not mode.endswith("+")])
def test_distillation_gradient_equals_finite_differences(mode: str) -> None:
    case = build(11, 4, 5, holes=True, equal=False, gap=1.0, dtype=torch.float64)
    student, teacher = models(case, mode)
    student = (student.nan_to_num(nan=-1.0) - 1e-3).requires_grad_()  # some differ by 1e-7: off the kink of abs
    assert torch.autograd.gradcheck(
        lambda x: distillation_loss(x, teacher, case.mask, loss_mode=mode)[0], student, eps=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", AS_LOSS)
def test_distillation_in_lower_precision(mode: str, dtype: torch.dtype) -> None:
    case = build(2, 8, 20, holes=True, equal=False, gap=0.5, dtype=torch.float64)
    pair = tuple(x.to(dtype) for x in models(case, mode))
    low, _ = distillation_loss(*pair, case.mask, loss_mode=mode)
    high, _ = distillation_loss(*(x.double() for x in pair), case.mask, loss_mode=mode)
    assert low.dtype == torch.float32
    # bfloat16 log-probs of K tokens may sum to more than 1: the rest then has the smallest mass its dtype can tell from 0
    tolerance = 1e-5 if dtype == torch.float32 or not mode.endswith("_topk") else 2e-2
    assert float(low) == pytest.approx(float(high), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("mode", ["k1", "kl", "reverse_kl"])
def test_policy_gradient_of_the_advantages_is_the_gradient_of_the_reverse_kl(mode: str) -> None:
    """``E_q[A grad log q] = -grad KL(q || p)`` for k1; for a distribution's exact KL the advantage is a baseline: 0."""
    scores, teacher = draw_logits(5, 1, 6, 1.0)
    scores.requires_grad_()
    log_q, log_p = scores.log_softmax(-1)[0], teacher.log_softmax(-1)[0]
    mask = torch.ones(1, 6)
    if mode == "reverse_kl":
        every = log_q[None, None].expand(1, 6, 6), log_p[None, None].expand(1, 6, 6)
        advantages = distillation_advantages(*every, mask, loss_mode=mode)
        torch.testing.assert_close(advantages, -full_kl(scores, teacher).detach()[:, None].expand(1, 6))
        return
    advantages = distillation_advantages(log_q[None], log_p[None], mask, loss_mode=mode)
    assert not advantages.requires_grad
    surrogate = (log_q.exp().detach() * advantages[0] * log_q).sum()
    exact = -full_kl(scores, teacher).sum()
    (policy_gradient,) = torch.autograd.grad(surrogate, scores, retain_graph=True)
    (gradient,) = torch.autograd.grad(exact, scores)
    torch.testing.assert_close(policy_gradient, gradient)


@pytest.mark.parametrize("mode", ["k2", "mse", "k1+", "k3+", "abs+"])
def test_k2_gradient_is_that_of_the_kl_on_average(mode: str) -> None:
    scores, teacher = draw_logits(6, 1, 6, 1.0)
    scores.requires_grad_()
    log_q, log_p = scores.log_softmax(-1)[0], teacher.log_softmax(-1)[0]
    tokens = distillation_token_loss(log_q[None], log_p[None], mode)[0]
    (average,) = torch.autograd.grad((log_q.exp().detach() * tokens).sum(), scores, retain_graph=True)
    (exact,) = torch.autograd.grad(full_kl(scores, teacher).sum(), scores)
    torch.testing.assert_close(average, exact)


def test_without_the_bucket_the_top_k_sum_is_clamped_at_zero() -> None:
    teacher = torch.tensor([[[0.5, 0.3]]]).log()
    greedy = torch.tensor([[[0.6, 0.4]]]).log()  # all mass on the two tokens: the bare sum is negative
    with_rest = distillation_token_loss(greedy, teacher, "forward_kl_topk")
    without = distillation_token_loss(greedy, teacher, "forward_kl_topk", tail_bucket=False)
    assert float(with_rest) > 1.0 and float(without) == 0.0
    half = distillation_token_loss(teacher - 1.0, teacher, "forward_kl_topk", tail_bucket=False)
    assert float(half) == pytest.approx(0.8)  # 0.8 of the mass, each a nat less likely


@pytest.mark.parametrize("mode", AS_LOSS)
def test_the_teacher_and_the_reference_are_constants(mode: str) -> None:
    case = build(8, 3, 4, holes=False, equal=False, gap=1.0, dtype=torch.float64)
    student, teacher = (x.nan_to_num(nan=-1.0).requires_grad_() for x in models(case, mode))
    loss = distillation_loss(student, teacher, case.mask, loss_mode=mode)[0]
    extra = kl_penalty(student, teacher, mode) if mode in KL_KINDS else full_kl(student, teacher)
    (loss + extra.sum()).backward()
    assert teacher.grad is None and student.grad is not None and bool(student.grad.any())


def test_advantages_are_zero_outside_the_mask() -> None:
    student, mask = torch.tensor([[-1.0, math.nan]]), torch.tensor([[1, 0]])
    assert distillation_advantages(student, torch.tensor([[-0.5, -1.0]]), mask).tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize(
    ("settings", "mention"),
    [
        ({"loss_mode": "k1"}, "loss_mode=k1+"),
        ({"loss_mode": "kl"}, "distillation_advantages"),
        ({"loss_mode": "forward_topk"}, "forward_kl_topk"),
        ({"loss_mode": "k3", "log_prob_min_clamp": 10.0}, "log_prob_min_clamp=-10"),
        ({"loss_mode": "k3", "loss_max_clamp": 0.0}, "loss_max_clamp=10"),
        ({"loss_mode": "reverse_kl_topk", "tail_bucket": False}, "tail_bucket=true"),
    ],
)
def test_a_wrong_setting_is_explained(settings: dict, mention: str) -> None:
    with raises(ConfigError, mention):
        distillation_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), **settings)


def test_shapes_that_do_not_match_are_refused() -> None:
    with raises(ValueError, "(2, 3, 4)", "(2, 3, 5)"):
        distillation_loss(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), torch.ones(2, 3), loss_mode="reverse_kl")
    with raises(ValueError, "(2, 3)", "(2, 4)"):
        distillation_advantages(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 4))
