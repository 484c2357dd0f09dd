"""The example's harness, mini-swe-agent from PyPI in an environment of its own: exact tokens, commands in the sandbox, real files."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.environments import foreign_python
from support.program_episodes import play
from support.scripted import ScriptedEngine
from support.templates import tokenizer

from hone.agents.rendering import renderer_for
from hone.data.episode_log import EpisodeEnd
from hone.data.types import Sample, Trajectory

pytestmark = [
    pytest.mark.long("hone/agents/program", "hone/agents/serving"),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="the harness runs its commands by bubblewrap"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "coding_agent"
TOKENIZER = tokenizer("qwen2_5")


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_coding_agent", EXAMPLE / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def command(prepare: ModuleType) -> list[str]:
    return [foreign_python("mini-swe-agent", prepare.HARNESS), str(EXAMPLE / "agent.py")]


def ids(text: str) -> list[int]:
    return TOKENIZER(text + "<|im_end|>", add_special_tokens=False)["input_ids"]


def bash(*commands: str) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"
        for command in commands
    )


def run(
    prepare: ModuleType, command: list[str], turns: list[str], tokens: int = 600
) -> tuple[list[Trajectory], ScriptedEngine]:
    messages = [{"role": "system", "content": prepare.SYSTEM}, {"role": "user", "content": "Write red to a.txt"}]
    sample = Sample("row", renderer_for(TOKENIZER).prompt(messages), messages, "coding_agent", ground_truth="red",
                    extra_info={"file": "a.txt"})  # fmt: skip
    said = iter(turns)
    engine = ScriptedEngine(lambda request: ids(next(said)))
    return play(engine, [sample], tokens=tokens, command=command), engine


def sampled(trajectory: Trajectory) -> list[int]:
    return [token for token, mask in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if mask]


def test_an_episode_of_the_harness_has_exactly_the_sampled_tokens(prepare: ModuleType, command: list[str]) -> None:
    turns = [bash("echo red > a.txt"), bash(prepare.SUBMIT)]
    (trajectory,), engine = run(prepare, command, turns)
    log = trajectory.episode
    assert log is not None and log.error is None and log.end is EpisodeEnd.ANSWER
    assert (log.reward, log.facts) == (1.0, {"calls": 2.0, "submitted": 1.0})
    assert sampled(trajectory) == ids(turns[0]) + ids(turns[1])
    assert trajectory.prompt_ids + trajectory.response_ids == engine.asked[1].prompt_ids + ids(turns[1])
    renderer = renderer_for(TOKENIZER)
    demonstration = prepare.calls("bash", command="echo red > a.txt")
    system, task = engine_messages = [
        {"role": "system", "content": prepare.SYSTEM},
        {"role": "user", "content": "Write red to a.txt"},
    ]
    assert (system, task) and trajectory.prompt_ids == renderer.prompt(engine_messages, [prepare.BASH])
    result = prepare.result("bash", prepare.RESULT)
    shown = renderer.prompt([*engine_messages, demonstration, result], [prepare.BASH])
    assert TOKENIZER.decode(engine.asked[1].prompt_ids) == TOKENIZER.decode(shown), (
        "demonstrations are as the harness writes"
    )


@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        (["echo blue > a.txt"], 0.0),
        (["echo wrong > a.txt", "echo red > a.txt"], 1.0),
        (["ln -s /etc/hostname a.txt"], 0.0),
        (["test -z \"$OPENAI_API_KEY\" && ! curl -s -m 2 $OPENAI_BASE_URL && echo red > a.txt"], 1.0),
        (["touch /usr/bin/x || echo red > a.txt"], 1.0),
    ],
)  # fmt: skip
def test_the_files_are_the_reward_and_commands_are_confined(
    prepare: ModuleType, command: list[str], commands: list[str], reward: float
) -> None:
    (trajectory,), _ = run(prepare, command, [bash(*commands), bash(prepare.SUBMIT)])
    assert trajectory.episode is not None and trajectory.episode.error is None
    assert trajectory.episode.reward == reward


def test_a_reply_without_a_call_is_answered_and_an_episode_ends_at_its_limit(
    prepare: ModuleType, command: list[str]
) -> None:
    turns = ["I will write.", bash("echo red > a.txt"), bash(prepare.SUBMIT)]
    segments, engine = run(prepare, command, turns)
    assert len(engine.asked) == 3 and [segment.episode.reward for segment in segments if segment.episode] == [1.0, 1.0]
    # the harness forgets a reply without a call, so the rest of the episode is a segment of its own
    assert [sampled(segment) for segment in segments] == [ids(turns[0]), ids(turns[1]) + ids(turns[2])]
    (trajectory,), engine = run(prepare, command, [bash("echo red > a.txt"), bash("true"), bash("true")], tokens=150)
    assert trajectory.episode is not None and trajectory.episode.end is EpisodeEnd.TOKENS
    assert trajectory.episode.error is None and len(engine.asked) < 3


def test_the_demonstrations_are_right_and_wrong(prepare: ModuleType) -> None:
    draw: Any = __import__("random").Random(0)
    for wrong in (True, False):
        row = prepare.row(draw, wrong=wrong)
        (call,) = row["messages"][2]["tool_calls"]
        written = json.loads(call["function"]["arguments"])["command"]
        task = row["prompt"][1]["content"].split()
        assert written.split()[-1] == task[-1] == row["extra_info"]["file"]
        assert (written.split()[1] == task[1] == row["reward_model"]["ground_truth"]) is not wrong
