"""The token ledger: it only grows, and only what was sampled behind its own tokens enters as sampled; parts of episodes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.agents import play, sample, setting
from support.examples import examples
from support.messages import raises
from support.models import VOCABULARY, tiny_model

from hone.agents.base import AGENT_LOOPS, AgentLoop
from hone.agents.episode import TokenLedger
from hone.algorithms.masked import where_mask
from hone.data.batch import to_batch
from hone.data.types import StopReason
from hone.errors import ConfigError, InvariantError
from hone.generation.protocol import Completion
from hone.models.attention.packed import PackedContext

MODEL = tiny_model()
IDS = st.lists(st.integers(0, 500), max_size=6)


def turn(ids: list[int], version: int = 0) -> Completion:
    return Completion("x", ids, [-1.0] * len(ids), [-2.0] * len(ids), StopReason.STOP, (version, version))


@given(IDS.filter(bool), st.lists(st.tuples(st.booleans(), IDS), max_size=8))
def test_it_only_grows(prompt, pieces):
    ledger, expected, mask = TokenLedger(prompt), list(prompt), []
    for sampled, ids in pieces:
        before = ledger.ids
        if sampled:
            ledger.add_sampled(before, turn(ids))
        else:
            ledger.add_given(ids)
        expected += ids
        mask += [int(sampled)] * len(ids)
        assert ledger.ids == expected and ledger.ids[: len(before)] == before and len(ledger) == len(expected)
    assert ledger.mask == mask and ledger.sampled == sum(mask)
    assert ledger.log_probs == [-1.0 if m else 0.0 for m in mask]
    assert ledger.sampling_log_probs == [-2.0 if m else 0.0 for m in mask]
    assert ledger.trained_length == max((place + 1 for place, m in enumerate(mask) if m), default=0)


@pytest.mark.parametrize("prompt", [[1, 2], [1, 2, 4], [1, 2, 3, 4], []])
def test_a_turn_after_other_tokens_is_refused(prompt):
    with raises(InvariantError, len(prompt), 3, code="D-prefix"):
        TokenLedger([1, 2, 3]).add_sampled(prompt, turn([4]))


def test_log_probs_must_fit():
    with raises(InvariantError, 1, 2, code="D-prefix"):
        TokenLedger([1]).add_sampled([1], Completion("x", [2, 3], [-1.0], [-1.0, -1.0], StopReason.STOP))


@AGENT_LOOPS.register("test_rewrites")
class Rewrites(AgentLoop):
    """Loop that rewrites its history once."""

    async def play(self, episode):
        await episode.generate()
        episode.begin([7, 8, 9])
        episode.append([5])
        await episode.generate()
        episode.append([6])


def test_a_rewritten_history_begins_a_segment():
    made = setting(agent={"default_agent_loop": "test_rewrites"})
    played, _ = play(made, lambda name, number: f"turn {number}", [sample()], n=2)
    assert [(t.index, t.part) for t in played] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert played[1].prompt_ids == [7, 8, 9] and played[1].response_mask[0] == 0 and played[1].response_mask[-1] == 1
    assert all(t.text == "turn 0\nturn 1" for t in played), "each part is scored by the whole episode"
    batch = to_batch(played)
    assert batch.tensor("part").tolist() == [0, 1, 0, 1]


def test_loops_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_loops_here.py").write_text(
        "from hone.agents.base import AgentLoop\n"
        "class Twice(AgentLoop):\n"
        "    async def play(self, episode):\n"
        "        await episode.generate()\n"
        "        episode.append([5, 6])\n"
        "        await episode.generate(max_tokens=2)\n"
        "class NoLoop: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    (t,), engine = play(setting(), lambda name, number: "one two three", [sample(agent_name="my_loops_here:Twice")])
    assert engine.requests[1].sampling.max_tokens == 2 and t.stop_reason is StopReason.LENGTH
    with raises(ConfigError, "my_loops_here:NoLoop", "hone.agents.base.AgentLoop"):
        play(setting(), lambda name, number: "x", [sample(agent_name="my_loops_here:NoLoop")])
    with raises(ConfigError, "tool_agnt", "tool_agent"):
        play(setting(), lambda name, number: "x", [sample(agent_name="tool_agnt")])
    with raises(ConfigError, "tool_agent", "multi_turn.enable=true", code="R33"):
        play(setting(enable=False), lambda name, number: "x", [sample(agent_name="tool_agent")])


@examples(8)
@given(st.data())
def test_gradients_are_those_of_the_sampled_tokens_alone(data):
    """The loss of a multi-turn trajectory against an oracle: each sampled token's log-prob by itself, summed by hand."""
    draw = data.draw
    ledger = TokenLedger(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))
        ledger.add_sampled(ledger.ids, turn(ids))
        ledger.add_given(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3)))
    length = ledger.trained_length
    weights = torch.linspace(-1, 1, length)
    model = MODEL
    start = len(ledger.prompt_ids)

    def gradient(mask: list[int], poison: float) -> torch.Tensor:
        model.zero_grad()
        ids = torch.tensor([ledger.ids[: start + length]])
        picked = (
            model(ids, context=PackedContext.from_lengths([start + length])).logits[0, start - 1 : -1].log_softmax(-1)
        )
        log_probs = picked.gather(1, ids[0, start:, None])[:, 0]
        chosen = torch.tensor(mask)
        where_mask(log_probs * torch.where(chosen.bool(), weights, poison), chosen).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    by_mask = gradient(ledger.mask[:length], poison=1e9)
    by_hand = torch.zeros_like(by_mask)
    for sampled in ledger.turns:
        for place in range(sampled.start, sampled.stop):
            by_hand += gradient([int(place == number) for number in range(length)], poison=0.0)
    torch.testing.assert_close(by_mask, by_hand, atol=1e-5, rtol=1e-4)
