"""Experts that are recorded and followed: against a slow mixture, in the engine's rows, and from rows to the packed row."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.families import make_engine, serve, tiny_model
from support.messages import raises
from support.prefix_trees import tree_batch
from transformers import PretrainedConfig

from hone.agents.episode import TokenLedger
from hone.data.ragged import Ragged
from hone.data.types import StopReason
from hone.errors import ModelError
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.generation.remote.messages import completion_as_message, completion_of
from hone.models.experts import UNKNOWN, ExpertRouters, expert_routers
from hone.training.engine import router_statistics
from hone.training.packing import pack, packed_rows

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
IDS = torch.arange(40)[None] * 7 % 61


def routers_of(model: Any) -> ExpertRouters:
    routers = expert_routers(model)
    assert routers is not None
    return routers


def recorded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The experts of every token, in one forward pass over a whole sequence."""
    routers = routers_of(model)
    routers.record()
    with torch.no_grad():
        model(ids)
    return routers.take_recorded()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_routers_choice_followed_changes_nothing(name: str) -> None:
    model = tiny_model(name)
    before = model(IDS).logits
    routers = routers_of(model)
    choices = recorded(model, IDS)
    assert choices.shape == (40, routers.width) and choices.dtype == torch.int16
    routers.follow(choices)
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=0)
    routers.follow(torch.full_like(choices, UNKNOWN))
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=0)
    routers.release()
    assert expert_routers(model) is routers


def slow_mixture(block: Any, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """A mixture of Qwen 3 with given experts, token by token."""
    probabilities = (hidden @ block.gate.weight.T).softmax(-1)
    rows = []
    for token, experts in enumerate(chosen.tolist()):
        weights = probabilities[token][experts]
        weights = weights / weights.sum() if block.gate.norm_topk_prob else weights
        parts = []
        for expert in experts:
            gate, up = (block.experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            parts.append(block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(sum(weight * part for weight, part in zip(weights, parts, strict=True)))
    return torch.stack(rows)


@examples(15)
@given(seed=st.integers(0, 10**6), known=st.booleans())
def test_any_experts_are_a_slow_mixture_of_them(seed: int, known: bool) -> None:
    model = tiny_model("qwen3_moe")
    torch.manual_seed(seed)
    block: Any = model.get_decoder().layers[0].mlp
    other = copy.deepcopy(block)  # without routers that follow
    hidden = torch.randn(9, 32)
    own = torch.topk((hidden @ block.gate.weight.T).softmax(-1), 2).indices
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    if not known:
        chosen[::2] = UNKNOWN
    routers = routers_of(model)
    routers.follow(torch.cat([chosen, chosen], 1).to(torch.int16))
    routers.count()
    result = block(hidden[None])[0]
    used = torch.where(chosen == UNKNOWN, own, chosen)
    expected = slow_mixture(other, hidden, used)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(result)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(parameter.grad, other.get_parameter(name).grad, atol=1e-5, rtol=1e-4)
    counts = routers.take_counts()
    assert counts.chosen[0].tolist() == used.flatten().bincount(minlength=4).tolist()
    pairs = [(mine, theirs) for mine, theirs in zip(own.tolist(), chosen.tolist(), strict=True) if theirs[0] != UNKNOWN]
    assert int(counts.replayed) == 2 * len(pairs)
    assert int(counts.changed) == sum(expert not in mine for mine, theirs in pairs for expert in theirs)
    counts.chosen[1] = counts.chosen[0]
    counts.probabilities[1] = counts.probabilities[0]
    statistics = router_statistics(counts)
    mean = (hidden @ other.gate.weight.detach().T).softmax(-1).mean(0)
    balance = 4 * float((used.flatten().bincount(minlength=4) / 18 * mean).sum())
    assert statistics["moe/balance_loss"][0] == pytest.approx(balance, rel=1e-5)
    assert statistics["moe/max_load"][0] == pytest.approx(4 * max(counts.chosen[0].tolist()) / 18)


def test_a_router_that_takes_no_topk_is_refused() -> None:
    class OddTopKRouter(torch.nn.Linear):
        num_experts = top_k = 1

    layers = torch.nn.ModuleList([torch.nn.ModuleDict({"router": OddTopKRouter(2, 1)})])
    model: Any = torch.nn.ModuleDict({"layers": layers})
    model.config = PretrainedConfig(num_hidden_layers=1)
    routers = expert_routers(model)
    assert routers is not None
    routers.count()
    with raises(ModelError, "OddTopKRouter", where="model.path"):
        layers[0]["router"](torch.ones(1, 2))


def test_layers_without_experts_are_left_out_and_other_widths_refused() -> None:
    model = tiny_model("qwen3_moe")
    routers = routers_of(model)
    routers.layers, routers.num_layers = [1, 2], 3  # as if the first layer were dense
    choices = recorded(model, IDS)
    routers.follow(torch.cat([torch.zeros(40, 2, dtype=torch.int16), choices], 1))
    assert routers._followed is not None and torch.equal(routers._followed.flatten(1), choices)
    with pytest.raises(ModelError) as refused:
        routers.follow(choices[:, :3])
    assert refused.value.where == "actor_rollout_ref.actor.router_replay.mode"
    assert expert_routers(tiny_model("qwen3")) is None


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("prompts", [[[5, 6, 7, 8]] * 3, [[5], [9, 3], [5, 6, 7], [5, 6, 7]], [[4]] * 2])
def test_completions_have_the_experts_of_their_tokens(name: str, prompts: list[list[int]]) -> None:
    """Of prompts that rows share, of rows that leave at different times, and of turns that continue a session."""
    model = tiny_model(name)
    engine = make_engine(model, report_experts=True)
    requests = [
        GenerationRequest(
            str(number), ids, SamplingParams(max_tokens=3 + 2 * number, ignore_eos=True), number, f"s{number}"
        )
        for number, ids in enumerate(prompts)
    ]
    plain = tiny_model(name)
    for _ in range(2):
        completions = serve(engine, requests)
        for request in requests:
            completion = completion_of(completion_as_message(completions[request.request_id]))
            ids = [*request.prompt_ids, *completion.token_ids]
            reported = np.asarray(completion.expert_ids).reshape(len(ids) - 1, -1)
            expected = recorded(plain, torch.tensor([ids[:-1]])).numpy()
            same = (np.sort(reported.reshape(-1, 2), 1) == np.sort(expected.reshape(-1, 2), 1)).mean()
            assert reported.shape == expected.shape and same > 0.98  # almost equal scores may change places
        requests = [
            GenerationRequest(
                request.request_id,
                [*request.prompt_ids, *completions[request.request_id].token_ids, 11, 12],
                request.sampling,
                request.seed,
                request.session,
            )
            for request in requests
        ]
    assert engine.describe().stats["session_hits"] > 0


def test_an_engine_that_was_not_asked_reports_none() -> None:
    request = GenerationRequest("a", [3, 4], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(serve(make_engine(tiny_model("qwen3_moe")), [request])["a"].expert_ids) == 0
    assert len(serve(make_engine(tiny_model("qwen3"), report_experts=True), [request])["a"].expert_ids) == 0


def test_the_ledger_keeps_the_newest_report() -> None:
    ledger = TokenLedger([1, 2])
    assert len(ledger.experts_of(2)) == 0
    ledger.add_sampled(ledger.ids, Completion("a", [3, 4], [0, 0], [0, 0], StopReason.STOP, expert_ids=[*range(6)]))
    assert list(ledger.experts_of(4)) == [*range(6), -1, -1]
    ledger.add_given([5])
    ledger.add_sampled(ledger.ids, Completion("a", [6], [0], [0], StopReason.STOP, expert_ids=[*range(10)]))
    assert list(ledger.experts_of(6)) == [*range(10), -1, -1]
    assert list(ledger.experts_of(3)) == [*range(6)]


@examples(30)
@given(seed=st.integers(0, 10**6))
def test_packed_rows_have_the_experts_of_their_tokens(seed: int) -> None:
    """Tokens that rows share have the experts of any row that knows them."""
    batch = tree_batch(seed, 6)
    generator = np.random.default_rng(seed)
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    context, index = packed_rows(prompts, responses)
    truth = generator.integers(0, 8, (context.position_ids.shape[1], 4)).astype(np.int16)
    rows, known_anywhere = [], np.zeros(len(truth), bool)
    for row in range(len(batch)):
        places = index.row(row).numpy()
        if generator.random() < 0.3:
            rows.append(torch.zeros(0, dtype=torch.int16))
            continue
        experts = truth[places].copy()
        unknown = generator.random(len(places)) < 0.2
        experts[unknown] = UNKNOWN
        known_anywhere[places[~unknown]] = True
        rows.append(torch.from_numpy(experts.ravel()))
    packed = pack(batch.with_columns(expert_ids=Ragged.from_rows(rows, torch.int16)), torch.device("cpu"))
    if not any(map(len, rows)):
        assert packed.experts is None
        return
    assert packed.experts is not None
    expected = np.where(known_anywhere[:, None], truth, UNKNOWN)
    assert packed.experts.numpy().tolist() == expected.tolist()
