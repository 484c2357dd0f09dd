"""Log-probs, entropies and their gradients from a vocabulary in two parts are those of the whole."""

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.examples import examples
from support.ranks import Ranks
from support.vocabulary_cases import in_parts, inputs, supports_around, supports_in_parts

from hone.algorithms.logits import entropy_from_logits, sum_pi_squared_from_logits, token_log_probs
from hone.algorithms.support import support_log_probs

pytestmark = pytest.mark.long("hone/models/heads.py", "hone/models/kernels", "hone/training/backends")


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(0, 8),
    vocabulary=st.integers(2, 11),
    bias=st.booleans(),
    with_entropy=st.booleans(),
    temperature=st.sampled_from([1.0, 0.6]),
    softcap=st.sampled_from([None, 2.0]),
    fused=st.booleans(),
)
def test_parts_equal_the_whole(
    seed, rows, vocabulary, bias, with_entropy, temperature, softcap, fused, two_ranks: Ranks
):
    case = inputs(seed, rows, vocabulary, bias)
    for name in ("hidden", "weight", "bias"):
        if case[name] is not None:
            case[name].requires_grad_()
    logits = torch.nn.functional.linear(case["hidden"], case["weight"], case["bias"])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = {
        "log_probs": token_log_probs(logits, case["targets"], temperature),
        "squares": sum_pi_squared_from_logits(logits / temperature),
    }
    loss = (expected["log_probs"] * case["grad_log_probs"]).sum()
    if with_entropy:
        expected["entropy"] = entropy_from_logits(logits / temperature)
        loss = loss + (expected["entropy"] * case["grad_entropy"]).sum()
    loss.backward()

    settings_ = {"temperature": temperature} | ({} if softcap is None else {"softcap": softcap})
    found = two_ranks.run(in_parts, seed, rows, vocabulary, bias, with_entropy, fused, **settings_)
    for of_rank in found:
        for name, value in expected.items():
            torch.testing.assert_close(of_rank[name], value.detach(), msg=name)
        torch.testing.assert_close(of_rank["hidden"], case["hidden"].grad)
    for name in ("weight", "bias") if bias else ("weight",):
        torch.testing.assert_close(torch.cat([of_rank[name] for of_rank in found]), case[name].grad)


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(0, 7), max_size=6),
    softcap=st.sampled_from([None, 2.0]),
)
def test_supports_in_parts_equal_the_whole(seed, sizes, softcap, two_ranks: Ranks):
    case = inputs(seed, len(sizes), 7, bias=True)
    for name in ("hidden", "weight", "bias"):
        case[name].requires_grad_()
    settings_ = {"temperature": 0.7} | ({} if softcap is None else {"softcap": softcap})
    supports = supports_around(seed, case["targets"], sizes, 7)
    expected = support_log_probs(
        case["hidden"], case["weight"], case["targets"], supports, bias=case["bias"], **settings_
    )
    (expected[0] * case["grad_log_probs"]).sum().backward()
    ranks = two_ranks.run(supports_in_parts, seed, sizes, 7, **settings_)
    for of_rank in ranks:
        torch.testing.assert_close(of_rank["log_probs"], expected[0].detach())
        torch.testing.assert_close(of_rank["squares"], expected[1])
        torch.testing.assert_close(of_rank["hidden"], case["hidden"].grad)
    for name in ("weight", "bias"):
        torch.testing.assert_close(torch.cat([of_rank[name] for of_rank in ranks]), case[name].grad)
