"""Agents that only know a base URL: as processes and as functions, on the plain client and on a framework of others."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.messages import raises
from support.patience import SOON
from support.program_episodes import play
from support.scripted import ScriptedEngine
from support.templates import tokenizer

from hone.agents.program.process import ProgramFailed, ProgramOutcome, last_json
from hone.agents.rendering import renderer_for
from hone.data.episode_log import EpisodeEnd
from hone.data.types import Sample
from hone.errors import ConfigError

pytestmark = pytest.mark.application("hone/agents")

TOKENIZER = tokenizer("qwen2_5")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
OPENAI_AGENT = """
import json, subprocess, sys
from openai import OpenAI

row = json.loads(sys.stdin.readline())
client, messages = OpenAI(), list(row["messages"])
tools = [{"type": "function", "function": {"name": "add", "description": "adds two numbers", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]
left = subprocess.Popen(["sleep", "600"])
for _ in range(4):
    reply = client.chat.completions.create(model="policy", messages=messages, tools=tools, temperature=0.0).choices[0].message
    messages.append(reply.model_dump(exclude_none=True))
    if not reply.tool_calls:
        break
    for call in reply.tool_calls:
        given = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
print("some words before the result")
facts = {"turns": len(messages), "pid": left.pid}
print(json.dumps({"reward": float(row["ground_truth"] in reply.content), "text": reply.content, "facts": facts}))
"""

ANTHROPIC_AGENT = """
import json, os, sys
from anthropic import Anthropic

row = json.loads(sys.stdin.readline())
client, messages = Anthropic(max_retries=0), list(row["messages"])
tools = [{"name": "add", "description": "adds two numbers", "input_schema": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}]
for _ in range(4):
    with client.messages.stream(model=os.environ["ANTHROPIC_MODEL"], max_tokens=9999, messages=messages, tools=tools) as stream:
        reply = stream.get_final_message()
    messages.append({"role": "assistant", "content": reply.content})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": str(c.input["a"] + c.input["b"])} for c in calls]
    messages.append({"role": "user", "content": results})
thoughts = sum(block.type == "thinking" for message in messages[1:] for block in message["content"] if not isinstance(block, dict))
text = reply.content[-1].text
print(json.dumps({"reward": float(row["ground_truth"] in text), "text": text, "facts": {"thoughts": thoughts}}))
"""


def ids(text: str) -> list[int]:
    return TOKENIZER(text + "<|im_end|>", add_special_tokens=False)["input_ids"]


def adder(request: Any) -> list[int]:
    return ids("The sum is 5.") if "<tool_response>" in TOKENIZER.decode(request.prompt_ids) else ids(CALL)


def rows(count: int = 1, prompt: str = "What is 2 + 3?") -> list[Sample]:
    messages = [{"role": "user", "content": prompt}]
    prompt_ids = renderer_for(TOKENIZER).prompt(messages)
    return [Sample(f"row{number}", prompt_ids, messages, "sums", ground_truth="5") for number in range(count)]


def gone(pid: float) -> bool:
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        if "\nState:\tZ" in Path(f"/proc/{int(pid)}/status").read_text():
            return True
        time.sleep(0.05)
    return False


def test_an_unmodified_agent_on_the_official_client_becomes_exact_trajectories(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(OPENAI_AGENT)
    engine = ScriptedEngine(adder)
    (trajectory,) = play(engine, rows(), command=["python", str(tmp_path / "agent.py")])
    log = trajectory.episode
    assert log is not None and log.error is None and log.end is EpisodeEnd.ANSWER
    assert log.reward == 1.0 and log.facts["turns"] == 4 and trajectory.text == "The sum is 5."
    assert [message["role"] for message in log.messages] == ["assistant", "tool", "assistant"]
    first, second = engine.asked
    assert trajectory.prompt_ids == first.prompt_ids
    assert trajectory.prompt_ids + trajectory.response_ids == second.prompt_ids + ids("The sum is 5.")
    sampled = [token for token, mask in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if mask]
    assert sampled == ids(CALL) + ids("The sum is 5.")
    assert {request.sampling.temperature for request in engine.asked} == {0.7}, "the run's, not the agent's"
    assert first.session == second.session and first.session in engine.ended
    assert gone(log.facts["pid"]), "what an agent leaves running is ended with it"


def test_an_agent_that_knows_only_anthropic_s_messages_becomes_exact_trajectories(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ANTHROPIC_AGENT)
    calls = "<think>\nTwo sums.\n</think>\n\n" + CALL + CALL.replace("3", "4")
    engine = ScriptedEngine(
        lambda request: ids("5 and 6.") if "<tool_response>" in TOKENIZER.decode(request.prompt_ids) else ids(calls)
    )
    (trajectory,) = play(engine, rows(), command=["python", str(tmp_path / "agent.py")])
    log = trajectory.episode
    assert log is not None and log.error is None and log.end is EpisodeEnd.ANSWER
    assert (log.reward, trajectory.text, log.facts["thoughts"]) == (1.0, "5 and 6.", 1)
    assert [message["role"] for message in log.messages] == ["assistant", "tool", "tool", "assistant"]
    first, second = engine.asked
    assert trajectory.prompt_ids == first.prompt_ids
    assert second.prompt_ids[: len(first.prompt_ids) + len(ids(calls))] == first.prompt_ids + ids(calls)
    assert trajectory.prompt_ids + trajectory.response_ids == second.prompt_ids + ids("5 and 6.")
    sampled = [token for token, mask in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if mask]
    assert sampled == ids(calls) + ids("5 and 6.")
    assert {request.sampling.temperature for request in engine.asked} == {0.7}, "the run's, not the agent's"


def smol(row: dict[str, Any], *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
    """An agent on smolagents: its own prompts, its own tool calling, its own loop."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: one.
            b: the other.
        """
        return a + b

    agent = ToolCallingAgent(
        tools=[add], model=OpenAIModel(model, api_base=base_url, api_key=api_key), max_steps=4, verbosity_level=0
    )
    found = agent.run(row["messages"][0]["content"])
    return {"reward": float(str(found) == row["ground_truth"]), "text": str(found)}


def smol_script(request: Any) -> list[int]:
    """Behind the call that ``tool_choice=required`` has begun: add, then the final answer."""
    shown = TOKENIZER.decode(request.prompt_ids)
    assert shown.endswith("<tool_call>\n"), "the call was begun for the model"
    call = {"name": "add", "arguments": {"a": 2, "b": 3}}
    if re.search(r"Observation:\s*5", shown):
        call = {"name": "final_answer", "arguments": {"answer": "5"}}
    return ids(json.dumps(call) + "\n</tool_call>")


def test_an_agent_on_a_framework_of_others_is_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(smol_script)
    monkeypatch.setattr("hone.agents.program.loop.imported", lambda path, key: smol)
    trajectories = play(engine, rows(), function="agents:smol", tokens=2000)
    assert {t.episode.reward for t in trajectories} == {1.0} and trajectories[0].episode.error is None
    sampled = [
        [token for token, mask in zip(t.response_ids, t.response_mask, strict=True) if mask] for t in trajectories
    ]
    assert sum(map(len, sampled)) == sum(len(smol_script(request)) for request in engine.asked)
    for request in engine.asked:  # every call is in a trajectory, behind exactly the tokens that the engine was given
        whole = request.prompt_ids + smol_script(request)
        assert any((t.prompt_ids + t.response_ids)[: len(whole)] == whole for t in trajectories)


async def several(row: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Three questions at once, two of them alike."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def asking(text: str) -> str:
            messages: Any = [*row["messages"], {"role": "user", "content": text}]
            found = await client.chat.completions.create(model=model, messages=messages)
            return found.choices[0].message.content or ""

        said = await asyncio.gather(asking("a"), asking("b"), asking("a"))
    return float(said[0] != said[2])


def test_calls_made_at_once_have_draws_of_their_own_that_a_rerun_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.agents.program.loop.imported", lambda path, key: several)
    seen = []
    for _ in range(2):
        engine = ScriptedEngine(lambda request: ids(str(request.seed)))
        trajectories = play(engine, rows(2), n=2, function="agents:several")
        assert all(t.episode.reward == 1.0 for t in trajectories) and len(trajectories) == 12
        assert len({request.seed for request in engine.asked}) == 12
        seen.append(sorted(request.seed for request in engine.asked))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo oh no >&2; exit 3", r"ended with code 3: oh no"),
        ("kill -9 $$", "killed by signal 9"),
        ("sleep 600", "more than 3 s"),
        ("exit 0", "ended without a request"),
        ("echo '[1, 2]'", "result is"),
    ],
)
def test_an_agent_that_fails_breaks_its_episode_and_says_how(script: str, said: str) -> None:
    (trajectory,) = play(ScriptedEngine(adder), rows(), command=["sh", "-c", script], timeout=3)
    assert trajectory.episode and re.search(said, trajectory.episode.error or "")
    assert trajectory.episode.reward is None


ASKS_ON = """
import json, os, sys, urllib.request
messages = json.loads(sys.stdin.readline())["messages"]
for _ in range(50):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    reply = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    messages += [reply, {"role": "user", "content": "More."}]
"""


def test_an_agent_that_wants_more_than_its_budget_ends_with_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASKS_ON)
    (trajectory,) = play(
        ScriptedEngine(lambda request: ids("Yes.")), rows(), tokens=60, command=["python", str(tmp_path / "agent.py")]
    )
    assert trajectory.episode and trajectory.episode.end is EpisodeEnd.TOKENS
    assert trajectory.episode.reward == 0.0 and trajectory.episode.error is None
    assert 30 < len(trajectory.response_ids) <= 60


def test_a_command_that_does_not_exist_is_the_user_s_mistake() -> None:
    with raises(ConfigError, where="actor_rollout_ref.rollout.agent.program.command"):
        play(ScriptedEngine(adder), rows(), command=["/no/such/agent"])


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("", ProgramOutcome()),
        ("some words", ProgramOutcome()),
        ("x\n1\n\n", ProgramOutcome(reward=1.0)),
        ('{"reward": true}', ProgramOutcome(reward=1.0)),
        ('"the answer"', ProgramOutcome(text="the answer")),
        ('{"text": "a", "facts": {"x": 2}}', ProgramOutcome(text="a", facts={"x": 2.0})),
    ],
)
def test_the_result_on_the_last_line(said: str, outcome: ProgramOutcome) -> None:
    assert ProgramOutcome.parse(last_json(said)) == outcome


@pytest.mark.parametrize("said", [[1], {"rewrd": 1}, {"reward": "high"}, {"facts": {"x": "y"}}, {"text": 3}])
def test_what_is_no_result_is_refused(said: Any) -> None:
    with raises(ProgramFailed, "reward", "text", "facts"):
        ProgramOutcome.parse(said)
