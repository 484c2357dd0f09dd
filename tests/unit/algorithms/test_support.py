"""Log-probs over supports: equal to a masked softmax, and without the bias of the whole softmax under truncated sampling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.vocabulary_cases import supports_around

from hone.algorithms import support as module
from hone.algorithms import token_log_probs
from hone.algorithms.support import Supports, restricted_logits, support_log_probs


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    softcap=st.sampled_from([None, 2.0]),
    with_bias=st.booleans(),
    elements=st.sampled_from([5, 23, 10_000]),
)
@examples(120)
def test_equals_a_masked_softmax_in_value_and_gradient(sizes, seed, temperature, softcap, with_bias, elements) -> None:
    torch.manual_seed(seed)
    rows, width, vocabulary = len(sizes), 5, 9
    inputs = [torch.randn(rows, width), torch.randn(vocabulary, width), torch.randn(vocabulary)]
    hidden, weight, bias = (x.double().requires_grad_() for x in inputs)
    bias = bias if with_bias else None
    trained = [x for x in (hidden, weight, bias) if x is not None]
    targets = torch.randint(0, vocabulary, (rows,))
    supports = supports_around(seed, targets, sizes, vocabulary)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    masked = restricted_logits(logits, supports)
    is_restricted = supports.sizes > 0
    expected = token_log_probs(masked, targets, temperature).where(is_restricted, 0.0)
    before, module._ELEMENTS = module._ELEMENTS, elements
    try:
        log_probs, squares = support_log_probs(
            hidden, weight, targets, supports, bias=bias, temperature=temperature, softcap=softcap
        )
        torch.testing.assert_close(log_probs, expected)
        outer = torch.randn(rows, dtype=torch.float64)
        wanted = torch.autograd.grad(expected, trained, outer)
        for gradient, want in zip(torch.autograd.grad(log_probs, trained, outer), wanted, strict=True):
            torch.testing.assert_close(gradient, want)
    finally:
        module._ELEMENTS = before
    all_squares = (masked / temperature).softmax(-1).square().sum(-1)
    torch.testing.assert_close(squares, all_squares.detach().where(is_restricted, 0.0))


@pytest.mark.parametrize("kept", [2, 3, 5])
def test_the_score_has_mean_zero_only_over_the_support(kept: int) -> None:
    """With equal rewards no token is better: the expected policy gradient under the sampler is 0, and not with whole log-probs."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(1, 4).double().requires_grad_(), torch.randn(8, 4).double()
    logits = (hidden @ weight.T).detach()[0]
    ids = logits.topk(kept).indices.sort().values
    drawn = logits[ids].softmax(-1)  # top-k sampling
    supports = Supports.from_sizes(torch.full((kept,), kept), ids.repeat(kept), all_restricted=True)
    restricted, _ = support_log_probs(hidden.expand(kept, -1), weight, ids, supports)
    whole = token_log_probs((hidden @ weight.T).expand(kept, -1), ids)
    (gradient,) = torch.autograd.grad((drawn * restricted).sum(), hidden)
    assert gradient.abs().max() < 1e-12
    torch.testing.assert_close(restricted.exp(), drawn)
    (biased,) = torch.autograd.grad((drawn * whole).sum(), hidden)
    assert biased.norm() > 0.05
