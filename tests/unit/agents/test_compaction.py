"""Conversations that are rewritten before they outgrow their context, and sub-agents: every token exact, one episode, one reward."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from support.agents import ScriptedEngine, call, play, sample, setting

from hone.agents.tool_agent import REMOVED, SUMMARY, Compactor, latest_turns, tools_of
from hone.agents.tools.base import Tool
from hone.config.agents import CompactionConfig, MultiTurnConfig
from hone.data.batch import to_batch
from hone.data.episode_log import CallStatus, EpisodeEnd
from hone.data.types import Trajectory
from hone.insight.records import trace, trajectory_record
from hone.trainers.estimates import join_segments

SCHEMA = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read one page.",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]},
    },
}


CONTEXT = 760
"""The prompt has about 330 tokens, a page with its call about 110, and the request for a summary about 95."""


class Pages(Tool):
    """Pages of ten words; counts its states."""

    def __init__(self) -> None:
        super().__init__(SCHEMA)
        self.created = 0

    async def create(self, **kwargs):
        self.created += 1
        return {"read": 0}

    async def execute(self, state, arguments, **kwargs):
        state["read"] += 1
        return f"page {arguments['page']}: " + " ".join(["word"] * 10) + f" code{arguments['page']}", 0.5


def decoded(made, trajectory: Trajectory) -> str:
    return made.tokenizer.decode([*trajectory.prompt_ids, *trajectory.response_ids])


def reading(name: str, turn: int) -> str:
    """Reads pages 0 to 5, and answers."""
    return call("read", page=turn) if turn < 6 else "#### done"


def compacting(**keys) -> CompactionConfig:
    return CompactionConfig(**{"context_tokens": CONTEXT, "reserve_tokens": 205, "max_summary_tokens": 30} | keys)


def test_old_results_lose_their_contents():
    made = setting([Pages()], compaction=compacting(strategy="drop_results"), max_tokens_per_turn=40)
    made.max_model_len = CONTEXT
    parts, engine = play(made, reading, [sample(tools=[SCHEMA])], max_tokens=4000)
    assert len(parts) > 1 and [part.part for part in parts] == list(range(len(parts)))
    log = parts[0].episode
    assert log is not None and all(part.episode is log for part in parts)
    assert log.end is EpisodeEnd.ANSWER and log.assistant_turns == 7
    assert sum(len(part.prompt_ids) + len(part.response_ids) > CONTEXT for part in parts) == 0
    assert all(len(request.prompt_ids) + request.sampling.max_tokens <= CONTEXT for request in engine.requests)
    last = decoded(made, parts[-1])
    assert REMOVED in last and "code5" in last and "code0" not in last
    assert [m["content"].split(":")[0] for m in log.messages if m["role"] == "tool"] == [f"page {n}" for n in range(6)]
    assert sum(sum(part.response_mask) for part in parts) == sum(
        len(made.tokenizer.encode(reading("", turn))) + 1 for turn in range(7)
    )
    assert log.turn_rewards == [0.5] * 6 + [0.0]


class Reader(ScriptedEngine):
    """Reads pages 0 to 5 and answers; where it is asked for a summary, it writes how far it has read."""

    def __init__(self, tokenizer, asked: str) -> None:
        self.page, self.asked = -1, asked
        super().__init__(tokenizer, self.read)

    def read(self, name: str, turn: int) -> str:
        if self.asked in self.tokenizer.decode(self.requests[-1].prompt_ids):
            return f"read up to {self.page}"
        self.page += 1
        return reading(name, self.page)


def test_the_policy_writes_the_summary_that_stays():
    made = setting([Pages()], compaction=compacting(strategy="summarize", keep_turns=0), max_tokens_per_turn=40)
    made.max_model_len = CONTEXT
    asked: Any = made.multi_turn.compaction.instruction
    parts, engine = play(made, asked, [sample(tools=[SCHEMA])], max_tokens=4000, engine_type=Reader)
    assert all(len(request.prompt_ids) + request.sampling.max_tokens <= CONTEXT for request in engine.requests)
    log = parts[0].episode
    assert log is not None and log.end is EpisodeEnd.ANSWER and len(parts) > 1
    summaries = [m["content"] for m in log.messages if m["role"] == "assistant" and m["content"].startswith("read up")]
    assert len(summaries) == len(parts) - 1 and all(len(p.prompt_ids) + len(p.response_ids) <= CONTEXT for p in parts)
    for before, after, summary in zip(parts, parts[1:], summaries, strict=False):
        ends = before.response_ids[-len(made.tokenizer.encode(summary)) - 1 : -1]
        assert made.tokenizer.decode(ends) == summary and all(before.response_mask[-len(ends) :]), "it is trained"
        begins = made.tokenizer.decode(after.prompt_ids)
        assert f"{SUMMARY}\n{summary}" in begins and "code" not in begins and begins.count("What is 6*7?") == 1
    assert f"{SUMMARY}\n{summaries[0]}" not in made.tokenizer.decode(parts[-1].prompt_ids) or len(summaries) == 1
    batch = to_batch(parts)
    joined = join_segments(batch.with_columns(response_mask=batch["response_mask"]), {"uid", "response_mask"})
    assert len(joined) == 1 and int(joined.ragged("response_mask").values.sum()) == sum(
        sum(p.response_mask) for p in parts
    )


def test_a_conversation_that_cannot_be_shortened_ends():
    keys = compacting(strategy="drop_results", context_tokens=360, reserve_tokens=0)
    made = setting([Pages()], compaction=keys, max_tokens_per_turn=40)
    made.max_model_len = CONTEXT
    parts, _ = play(made, reading, [sample("What is 6*7? " * 2, tools=[SCHEMA])], max_tokens=4000)
    assert parts[0].episode is not None and parts[0].episode.end in (EpisodeEnd.CONTEXT, EpisodeEnd.TOKENS)


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (1, 2), (2, 4), (9, 4)])
def test_latest_turns(count, kept):
    messages = [{"role": role} for role in ("user", "assistant", "tool", "assistant", "tool")]
    assert latest_turns(messages, count) == messages[len(messages) - kept :]


def test_a_prompt_without_a_user_gets_the_summary_as_one():
    compactor = Compactor(MultiTurnConfig(compaction=compacting(strategy="summarize", keep_turns=0)))
    system = {"role": "system", "content": "x"}
    assert compactor.summarized([system], [system], "s") == [system, {"role": "user", "content": f"{SUMMARY}\ns"}]


# sub-agents ----------------------------------------------------------------------------------------------------------


def team(name: str, turn: int) -> str:
    """The first conversation reads a page, gives two tasks in one turn, and answers; a sub-agent reads a page and answers."""
    if "/" in name.removeprefix("row#0"):
        return [call("read", page=turn + 10), f"found {name[-1]}"][turn]
    tasks = "\n".join(call("delegate", task=f"read part {number}") for number in (1, 2))
    return [call("read", page=0), tasks, "#### both"][turn]


def test_sub_agents_have_conversations_of_their_own_and_one_reward():
    tool = Pages()
    made = setting([tool], subagents=True, max_assistant_turns=9)
    row = sample()
    row = dataclasses.replace(row, prompt_ids=made.renderer.prompt(row.messages or [], tools_of(made)(row)))
    parts, engine = play(made, team, [row], max_tokens=4000)
    assert len(parts) == 3 and [part.part for part in parts] == [0, 1, 2]
    log = parts[0].episode
    assert log is not None and log.end is EpisodeEnd.ANSWER and log.assistant_turns == 7
    for number, part in enumerate(parts[:2]):
        text = decoded(made, part)
        assert f"read part {number + 1}" in text and f"found {number}" in text and '"delegate"' not in text
    whole = decoded(made, parts[2])
    assert "found 0" in whole and "found 1" in whole and "delegate" in whole and "code10" not in whole
    assert log.turn_rewards == [0.5, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0]
    assert sorted((c.name, c.turn) for c in log.calls) == [
        *(("delegate", 5), ("delegate", 5), ("read", 0), ("read", 2), ("read", 4)),
    ]
    assert [m["role"] for m in log.messages] == ["assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert [(c["turn"], c["turns"], len(c["messages"])) for c in log.conversations] == [(0, 2, 4), (2, 2, 4)]
    assert sorted(engine.ended) == ["row#0", "row#0/2.0", "row#0/2.1"]
    shown = trace(trajectory_record(parts[0], score=1.0))
    assert (
        "assistant, turn 5, reward 0.5" in shown
        and "assistant, turn 1, reward 0.5" in shown
        and shown.count("sub-agent:") == 2
    )
    assert tool.created == 1, "sub-agents use the states of the episode's tools"
    assert len({request.seed for request in engine.requests}) == 7
    json.dumps(log.summary())


def test_the_limit_of_a_sub_agent_is_an_answer():
    made = setting([Pages()], subagents=True, max_assistant_turns=2)

    def script(name: str, turn: int) -> str:
        child = "/" in name.removeprefix("row#0")
        return call("read", page=turn) if child else [call("delegate", task="go"), "#### none"][turn]

    row = sample()
    row = dataclasses.replace(row, prompt_ids=made.renderer.prompt(row.messages or [], tools_of(made)(row)))
    parts, _ = play(made, script, [row], max_tokens=4000)
    log = parts[0].episode
    assert log is not None and len(parts) == 2
    results = [m["content"] for m in log.messages if m["role"] == "tool"]
    assert "assistant_turns" in results[0]
    assert log.calls[-1].status is CallStatus.OK or log.calls[0].status is CallStatus.OK
