"""Chunked log-probs and entropies: equal to the plain computation in value and gradient, in bounded memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import algorithms as oracle
from support.examples import examples
from torch.utils._python_dispatch import TorchDispatchMode

from hone.algorithms import chunked_log_probs, entropy_from_logits, token_log_probs


def problem(rows: int = 11, width: int = 6, vocabulary: int = 17, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(rows, width), torch.randn(vocabulary, width), torch.randn(vocabulary)
    targets = torch.randint(0, vocabulary, (rows,))
    return *(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), targets


def naive(hidden, weight, bias, targets, temperature, softcap):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return token_log_probs(logits, targets, temperature), entropy_from_logits(logits / temperature)


@given(
    logits=st.lists(st.floats(-30, 30), min_size=2, max_size=6),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    data=st.data(),
)
@examples(60)
def test_plain_functions_equal_the_oracle(logits: list[float], temperature: float, data: st.DataObject) -> None:
    target = data.draw(st.integers(0, len(logits) - 1))
    rows = torch.tensor([logits], dtype=torch.float64)
    log_prob = token_log_probs(rows, torch.tensor([target]), temperature)
    assert float(log_prob) == pytest.approx(oracle.log_prob(logits, target, temperature), abs=1e-9)
    assert float(entropy_from_logits(rows / temperature)) == pytest.approx(
        oracle.entropy(logits, temperature), abs=1e-9
    )


def test_entropy_with_excluded_tokens() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    assert float(entropy.detach()) == pytest.approx(0.6931472)
    entropy.sum().backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("chunk_size", [1, 4, 11, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_chunked_equals_naive_in_value_and_gradient(chunk_size: int, softcap: float | None, with_bias: bool) -> None:
    hidden, weight, bias, targets = problem()
    bias = bias if with_bias else None
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    expected = naive(hidden, weight, bias, targets, 0.7, softcap)
    got = chunked_log_probs(
        hidden, weight, targets, bias=bias, temperature=0.7, softcap=softcap, with_entropy=True, chunk_size=chunk_size
    )
    weights = torch.randn(2, len(targets))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad((weights[0] * o[0] + weights[1] * o[1]).sum(), inputs) for o in (got, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_chunked_gradient_equals_finite_differences(with_entropy: bool, softcap: float | None) -> None:
    hidden, weight, bias, targets = problem(5, 3, 7, torch.float64)

    def run(h, w, b):
        out = chunked_log_probs(
            h, w, targets, bias=b, temperature=1.3, softcap=softcap, with_entropy=with_entropy, chunk_size=2
        )
        return tuple(x for x in out if x is not None)

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


def test_frozen_weights_and_no_gradient() -> None:
    hidden, weight, _, targets = problem()
    frozen = weight.detach()
    log_probs, entropy = chunked_log_probs(hidden, frozen, targets, chunk_size=3)
    assert entropy is None
    log_probs.sum().backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not chunked_log_probs(hidden, weight, targets)[0].requires_grad
    assert chunked_log_probs(hidden[:0], weight, targets[:0])[0].shape == (0,)


def test_low_precision_inputs_give_float32_softmax() -> None:
    hidden, weight, bias, targets = problem(64, 32, 100, torch.bfloat16)
    got, _ = chunked_log_probs(hidden, weight, targets, bias=bias, chunk_size=10)
    logits = torch.nn.functional.linear(hidden, weight, bias)  # rounded to bfloat16, as the projection does
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0])
    got.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_autocast_projects_in_bfloat16_and_returns_float32_gradients() -> None:
    hidden, weight, _, targets = problem(64, 32, 100)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = chunked_log_probs(hidden, weight, targets, chunk_size=10)
        logits = torch.nn.functional.linear(hidden, weight)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(got, logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0])
    got.sum().backward()
    exact = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    chunked_log_probs(*exact, targets)[0].sum().backward()
    for low, high in zip((hidden, weight), exact, strict=True):
        assert low.grad.dtype == torch.float32
        assert (low.grad - high.grad).norm() < 0.02 * high.grad.norm()


class WidestTable(TorchDispatchMode):
    """Records the most rows of any ``[rows, vocabulary]`` tensor that an operation returns."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and self.vocabulary in tensor.shape:
                other = tensor.numel() // self.vocabulary
                self.rows = max(self.rows, other)
        return result


@pytest.mark.parametrize("with_entropy", [True, False])
def test_no_table_larger_than_a_chunk_exists(with_entropy: bool) -> None:
    hidden, weight, _, targets = problem(rows=64, width=4, vocabulary=1009)
    with WidestTable(1009) as chunked:
        log_probs, entropy = chunked_log_probs(hidden, weight, targets, with_entropy=with_entropy, chunk_size=8)
        (log_probs.sum() + (entropy.sum() if entropy is not None else 0)).backward()
    assert chunked.rows == 8
    with WidestTable(1009) as plain:  # the instrument does see the naive computation's table
        token_log_probs(hidden @ weight.t(), targets).sum().backward()
    assert plain.rows == 64
