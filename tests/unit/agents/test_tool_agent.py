"""The tool agent: tokens are exact, every call is answered, every limit ends the episode by its own name."""

import asyncio
import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.agents import call, play, sample, setting
from support.examples import examples
from support.messages import raises

from hone.agents.tool_agent import shown_of, tools_of
from hone.agents.tools import Tool, ToolError, ToolResult, tool
from hone.agents.tools.calculator import Calculator
from hone.config.reward import EpisodePricesConfig
from hone.data.episode_log import CallStatus, EpisodeEnd
from hone.errors import ConfigError, DataError, EpisodeError
from hone.insight.episode_metrics import episode_metrics

SCHEMA = Calculator().schema


def schema(name: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


class Recorder(Tool):
    """Notes its life."""

    def __init__(self, behaviour=None, name="note") -> None:
        super().__init__(schema(name, text={"type": "string"}))
        self.behaviour, self.life = behaviour, []

    async def create(self, **kwargs):
        self.life.append(("create", kwargs))
        return {}

    async def execute(self, state, arguments, **kwargs):
        self.life.append(("execute", arguments["text"]))
        return await self.behaviour(arguments) if self.behaviour else "noted"

    async def calc_reward(self, state, **kwargs):
        self.life.append(("calc_reward", kwargs))
        return 0.5

    async def release(self, state, **kwargs):
        self.life.append(("release", kwargs))


def asks_then_answers(name, turn):
    return call("calculator", expression="6*7") if turn == 0 else "#### 42"


def test_a_call_is_carried_out_and_only_sampled_tokens_count():
    made = setting([Calculator()])
    (t,), engine = play(made, asks_then_answers, [sample(tools=[SCHEMA])])
    first, second = engine.requests
    decode = made.tokenizer.decode
    assert first.session == second.session == "row#0" and engine.ended == ["row#0"]
    assert first.seed != second.seed
    # the next prompt is exactly what was there, what was sampled, and what was put in
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert (
        t.prompt_ids == first.prompt_ids
        and t.prompt_ids + t.response_ids[: -len(made.tokenizer.encode("#### 42")) - 1] == second.prompt_ids
    )
    sampled = [i for i, m in zip(t.response_ids, t.response_mask, strict=True) if m]
    given_ids = [i for i, m in zip(t.response_ids, t.response_mask, strict=True) if not m]
    assert decode(sampled) == call("calculator", expression="6*7") + "<|im_end|>#### 42<|im_end|>"
    assert "42" in decode(given_ids) and "tool_response" in decode(given_ids)
    assert all(p == 0 for p, m in zip(t.rollout_log_probs, t.response_mask, strict=True) if not m)
    assert all(p < 0 for p, m in zip(t.rollout_log_probs, t.response_mask, strict=True) if m)
    assert t.text == call("calculator", expression="6*7") + "\n#### 42", "what the tool said is not the model's"
    assert t.episode is not None and t.episode.end is EpisodeEnd.ANSWER
    (record,) = t.episode.calls
    assert (record.status, record.result, record.turn, record.arguments) == (
        CallStatus.OK,
        "42",
        0,
        {"expression": "6*7"},
    )
    assert [m["role"] for m in t.episode.messages] == ["assistant", "tool", "assistant"] and t.episode.num_turns == 4
    assert t.episode.tokenization is None, "the tokens are those of the conversation rendered anew"
    json.dumps(t.episode.summary())


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ('<tool_call>\n{"name": "calculator", "arguments": {\n</tool_call>', CallStatus.MALFORMED, "error"),
        (call("calc", expression="1"), CallStatus.UNKNOWN_TOOL, "calculator"),
        (call("calculator", wrong=1), CallStatus.INVALID_ARGUMENTS, "'expression' is a required property"),
        (call("calculator", expression=7), CallStatus.INVALID_ARGUMENTS, "expression: 7 is not of type 'string'"),
        (call("calculator", expression="1/0"), CallStatus.ERROR, "division by zero"),
        (call("calculator", expression="__import__('os')"), CallStatus.ERROR, "__import__('os')"),
    ],
)
def test_the_model_receives_the_error_of_a_failed_call(said, status, words):
    made = setting([Calculator()])
    (t,), engine = play(made, lambda name, turn: said if turn == 0 else "sorry", [sample(tools=[SCHEMA])])
    assert t.episode is not None
    (record,) = t.episode.calls
    assert record.status is status and words in record.result
    assert words[:20] in made.tokenizer.decode(engine.requests[1].prompt_ids)


def test_calls_over_the_limit_are_answered_and_not_carried_out():
    note = Recorder()
    made = setting([note], max_parallel_calls=2)
    said = "\n".join(call("note", text=str(number)) for number in range(4))
    (t,), _ = play(made, lambda name, turn: said if turn == 0 else "done", [sample(tools=[note.schema])])
    assert t.episode is not None
    assert [r.status for r in t.episode.calls] == [CallStatus.OK] * 2 + [CallStatus.OVER_LIMIT] * 2
    assert "at most 2 calls" in t.episode.calls[-1].result
    assert [step for step, _ in note.life] == ["create", "execute", "execute", "calc_reward", "release"]
    assert t.episode.facts == {"note_reward": 0.5}


@pytest.mark.parametrize(
    ("limits", "end", "turns"),
    [
        ({"max_assistant_turns": 3}, EpisodeEnd.ASSISTANT_TURNS, 3),
        ({"max_tool_calls": 2}, EpisodeEnd.TOOL_CALLS, 4),
        ({}, EpisodeEnd.TOKENS, None),
    ],
)
def test_every_limit_ends_an_episode_by_its_own_name(limits, end, turns):
    made = setting([Calculator()], agent={"on_error": "drop", "max_retries": 0}, **limits)
    most = 900 if limits else 200
    (t,), _ = play(
        made, lambda name, turn: call("calculator", expression="1"), [sample(tools=[SCHEMA])], max_tokens=most
    )
    assert t.episode is not None
    assert t.episode.end is end
    assert turns is None or t.episode.assistant_turns == turns
    assert t.response_mask[-1] == 1, "what nobody answered is cut off: it teaches nothing"
    assert len(t.response_ids) <= most


def test_the_time_limit_ends_an_episode_during_a_tool_call():
    calls = []

    async def hangs_the_second_time(arguments):
        calls.append(1)
        if len(calls) == 2:
            await asyncio.sleep(60)

    note = Recorder(hangs_the_second_time)
    made = setting([note], max_episode_seconds=2.0, tool_timeout=None)
    (t,), _ = play(made, lambda name, turn: call("note", text="x"), [sample(tools=[note.schema])])
    assert t.episode is not None and t.episode.error is None
    assert t.episode.end is EpisodeEnd.TIME and t.episode.assistant_turns == len(calls) == 2
    assert t.response_mask[-1] == 1, "the unanswered call is the last that was sampled"
    assert [step for step, _ in note.life][-1] == "release"


def test_a_time_limit_before_the_first_token_is_an_error():
    made = setting([Calculator()], agent={"on_error": "drop", "max_retries": 0}, max_episode_seconds=1e-9)
    (t,), _ = play(made, lambda name, turn: "done", [sample(tools=[SCHEMA])])
    assert t.episode is not None and t.episode.end is EpisodeEnd.ERROR
    assert f"({EpisodeEnd.TIME})" in (t.episode.error or "")


def test_a_hanging_or_failing_tool_is_retried_and_always_released():
    tries = []

    async def hangs(arguments):
        tries.append(1)
        await asyncio.sleep(60)

    async def breaks(arguments):
        tries.append(1)
        raise KeyError("database")

    async def recovers(arguments):
        tries.append(1)
        if len(tries) == 1:
            raise OSError("reset")
        return ToolResult("fine", reward=0.25, metrics={"hits": 3})

    for behaviour, status, words, count in (
        (hangs, CallStatus.TIMEOUT, "no answer within 0.05 seconds", 2),
        (breaks, CallStatus.ERROR, "KeyError: 'database'", 2),
        (recovers, CallStatus.OK, "fine", 2),
    ):
        tries.clear()
        note = Recorder(behaviour)
        made = setting([note], tool_timeout=0.05, tool_retries=1)
        script = lambda name, turn: call("note", text="x") if turn == 0 else "done"  # noqa: E731
        (t,), _ = play(made, script, [sample(tools=[note.schema])])
        assert t.episode is not None
        (record,) = t.episode.calls
        assert record.status is status and words in record.result and record.attempts == len(tries) == count
        assert [step for step, _ in note.life][-2:] == ["calc_reward", "release"]
    assert t.episode.turn_rewards == [0.25, 0.0] and record.metrics == {"hits": 3}
    (first, called), (second, end) = t.episode.turn_times
    assert record.started is not None and 0 <= first <= called <= record.started <= record.started + record.seconds
    assert record.started + record.seconds <= second <= end <= t.seconds
    assert t.episode.record()["tool_calls"][0]["started"] == record.started


def test_an_episode_that_breaks_is_retried_and_its_tools_are_released():
    class Broken(Recorder):
        async def release(self, state, **kwargs):
            await super().release(state)
            if len(self.life) < 5:
                raise RuntimeError("cannot close")

    note = Broken()
    script = lambda name, turn: call("note", text="x") if turn == 0 else "done"  # noqa: E731
    (t,), engine = play(setting([note]), script, [sample(tools=[note.schema])])
    assert t.episode is not None and t.episode.retries == 1 and t.episode.error is None
    assert {request.session for request in engine.requests} == {"row#0", "row#0~1"}
    assert len({request.seed for request in engine.requests}) == 4
    note = Broken()
    with raises(EpisodeError, "row", "RuntimeError: cannot close", "agent.max_retries=2"):
        play(setting([note], agent={"max_retries": 0}), script, [sample(tools=[note.schema])])
    note = Broken()
    made = setting([note], agent={"max_retries": 0, "on_error": "drop"})
    (t,), _ = play(made, script, [sample(tools=[note.schema])])
    assert t.episode is not None and t.episode.end is EpisodeEnd.ERROR and "cannot close" in (t.episode.error or "")


def test_slow_tools_do_not_hold_other_episodes_up():
    rows = [sample(uid=f"r{number}", tools=[Recorder().schema]) for number in range(20)]
    script = lambda name, turn: call("note", text="x") if turn == 0 else "done"  # noqa: E731

    def most_at_once(expected: int, n: int = 1, concurrency: int | None = None, **agent):
        """The most calls under way at a time, when each waits until ``expected`` are."""
        waiting, most, all_here = 0, 0, asyncio.Event()

        async def slow(arguments):
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            if waiting == expected:
                all_here.set()
            await all_here.wait()
            waiting -= 1
            return "ok"

        note = Recorder(slow)
        note.concurrency = concurrency
        played, _ = play(setting([note], agent=agent), script, rows, n=n)
        assert [(t.uid, t.index) for t in played] == [(f"r{row}", index) for row in range(20) for index in range(n)]
        return most

    assert most_at_once(40, n=2) == 40
    assert most_at_once(3, concurrency=3) == 3
    assert most_at_once(5, max_concurrent_episodes=5) == 5


def test_a_row_chooses_its_tools_and_their_arguments():
    note, other = Recorder(), Recorder(name="other")
    made = setting([note, other])
    row = sample(tools=[note.schema], tool_selection=["note"], tools_kwargs={"note": {"create_kwargs": {"path": "p"}}})
    script = lambda name, turn: call("other" if turn == 0 else "note", text="x") if turn < 2 else "done"  # noqa: E731
    (t,), _ = play(made, script, [row])
    assert t.episode is not None
    assert [r.status for r in t.episode.calls] == [CallStatus.UNKNOWN_TOOL, CallStatus.OK]
    assert note.life[0] == ("create", {"path": "p"}) and other.life == []
    with raises(DataError, "nott", "note", code="R48"):
        play(made, script, [sample(tool_selection=["nott"])])


def test_a_row_makes_its_tools_noisy():
    note = Recorder()
    script = lambda name, turn: call("note", text=str(turn)) if turn < 20 else "done"  # noqa: E731
    calm, noisy = sample(tools=[note.schema]), sample(tools=[note.schema])
    noisy.uid, noisy.extra_info = "noisy", {"tools_kwargs": {"note": {"noise": {"failure_rate": 0.5, "seed": 1}}}}
    played, _ = play(setting([note], max_assistant_turns=21), script, [calm, noisy], max_tokens=4000)
    failed = {t.uid: sum(call.status is CallStatus.ERROR for call in t.episode.calls) for t in played}
    assert failed["row"] == 0 and 3 <= failed["noisy"] <= 17
    assert sum(name == "execute" for name, _ in note.life) == 40 - failed["noisy"], (
        "a failed call does not reach the tool"
    )
    noisy.extra_info["tools_kwargs"]["note"]["noise"] = {"failure_rte": 0.5}
    with raises(DataError, "failure_rte", "failure_rate", code="R48"):
        play(setting([note]), script, [noisy])


def test_long_results_are_cut_by_tokens():
    async def long(arguments):
        return "word " * 2_000_000

    note = Recorder(long)
    made = setting([note], max_tool_response_length=10)
    script = lambda name, turn: call("note", text="x") if turn == 0 else "done"  # noqa: E731
    (t,), _ = play(made, script, [sample(tools=[note.schema])])
    assert t.episode is not None
    (record,) = t.episode.calls
    assert record.truncated and "...(truncated)..." in record.result and len(record.result) < 120


def test_images_are_replaced_by_notes_and_counted():
    async def draws(arguments):
        return [{"type": "text", "text": "a map:"}, {"type": "image_url", "image_url": {"url": "data:,"}}]

    note = Recorder(draws)
    script = lambda name, turn: call("note", text="x") if turn == 0 else "done"  # noqa: E731
    (t,), _ = play(setting([note]), script, [sample(tools=[note.schema])])
    assert t.episode is not None
    (record,) = t.episode.calls
    assert (record.status, record.left_out) == (CallStatus.OK, 1)
    assert record.result == "a map:\n(image_url left out: the model reads text only)"
    found = episode_metrics([t], [1.0], EpisodePricesConfig())
    assert found["tool/left_out_rate"] == 1.0 and found["episode/sampled_tokens/mean"] == sum(t.response_mask)
    assert found["episode/given_tokens/mean"] == len(t.response_mask) - sum(t.response_mask)
    seen = sample(tools=[note.schema])
    seen.messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with raises(DataError, "row row", 1, "image_url", where="prompt"):
        tools_of(setting([note]))(seen)


def test_functions_become_tools():
    @tool
    def convert(amount: float, unit: str = "km") -> dict:
        """Convert a length.

        Args:
            amount: how much.
            unit: of what.
        """
        return {"metres": amount * 1000} if unit == "km" else {}

    made = setting([convert])
    assert convert.schema["function"]["parameters"]["required"] == ["amount"]
    script = lambda name, turn: call("convert", amount=2.5) if turn == 0 else "done"  # noqa: E731
    (t,), _ = play(made, script, [sample(tools=[convert.schema])])
    assert t.episode is not None and t.episode.calls[0].result == '{"metres": 2500.0}'
    with raises(ConfigError, "untyped", "@tool"):

        @tool
        def untyped(x):
            """Nothing is said of x."""


def test_two_tools_of_one_name_are_refused():
    with raises(ConfigError, "calculator", where="actor_rollout_ref.rollout.multi_turn"):
        setting([Calculator(), Calculator()])


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=30)
TRICKY = st.sampled_from(["<|im_end|>", "<tool_call>", "</tool_response>", '{"name": "note"}', "<|im_start|>user\n"])


@examples(25)
@given(answers=st.lists(st.one_of(TEXT, TRICKY), min_size=1, max_size=4))
def test_whatever_tools_say_the_tokens_only_grow(answers):
    replies = list(answers)

    async def behaviour(arguments):
        return replies.pop(0)

    note = Recorder(behaviour)
    made = setting([note])
    script = lambda name, turn: call("note", text=str(turn)) if turn < len(answers) else "end"  # noqa: E731
    (t,), engine = play(made, script, [sample(tools=[note.schema])], max_tokens=4000)
    assert t.episode is not None and [r.status for r in t.episode.calls] == [CallStatus.OK] * len(answers)
    whole = t.prompt_ids + t.response_ids
    for before, after in zip(engine.requests, engine.requests[1:], strict=False):
        assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
        assert whole[: len(after.prompt_ids)] == after.prompt_ids
    end = made.tokenizer.eos_token_id
    marks = [i for i, m in zip(t.response_ids, t.response_mask, strict=True) if i == end and m == 0]
    assert len(marks) == len(answers), "text that looks like a mark is no mark"


def test_tool_errors_are_not_tried_again():
    async def refuses(arguments):
        raise ToolError("no such page")

    note = Recorder(refuses)
    script = lambda name, turn: call("note", text="x") if turn == 0 else "done"  # noqa: E731
    (t,), _ = play(setting([note], tool_retries=5), script, [sample(tools=[note.schema])])
    assert t.episode is not None
    assert (t.episode.calls[0].attempts, t.episode.calls[0].result) == (1, "error: no such page")


def test_a_dataset_shows_tools_as_the_renderer_does(tmp_path):
    """The prompt of a row, token by token, is what the renderer and supervised fine-tuning make of the same messages."""
    from hone.data.conversations import ConversationDataset
    from hone.data.prompts import PromptDataset

    made = setting([Calculator()])
    messages = [{"role": "user", "content": "What is 6*7?"}]
    answer = [{"role": "assistant", "content": "#### 42"}]
    row = {
        "prompt": messages,
        "messages": messages + answer,
        "data_source": "calculator",
        "tools": json.dumps([SCHEMA]),
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    limits = {"max_prompt_length": 900, "truncation": "error"}
    prompts = PromptDataset(
        file, made.tokenizer, prompt_key="prompt", reward_fn_key="data_source", shown_of=shown_of(made), **limits
    )
    shown = made.renderer.prompt(messages, [SCHEMA])
    assert prompts[0].prompt_ids == shown
    chats = ConversationDataset(file, made.tokenizer, messages_key="messages", max_length=900, truncation="error")
    assert chats[0].input_ids[: len(shown)] == shown


@pytest.mark.parametrize("loop", ["tool_agent", "single_turn"])
def test_the_prompt_of_a_template_without_tools_is_the_renderer_s(loop, tmp_path):
    from hone.data.chat_formats import CHAT_FORMATS
    from hone.data.prompts import PromptDataset

    made = setting([Calculator()], agent={"default_agent_loop": loop}, renderer="text_tools")
    made.tokenizer = copy.deepcopy(made.tokenizer)  # other tests share it
    made.tokenizer.chat_template = CHAT_FORMATS["chatml"].template
    call = {"type": "function", "id": "a", "function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
    question = [{"role": "user", "content": "What is 6*7?"}]
    before = [
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
        {"role": "assistant", "content": "#### 2"},
    ]
    conversations = [question, [*before, *question]] if loop == "tool_agent" else [question]
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": prompt, "data_source": "calculator"}) + "\n" for prompt in conversations)
    )
    limits = {"max_prompt_length": 900, "truncation": "error"}
    prompts = PromptDataset(
        file, made.tokenizer, prompt_key="prompt", reward_fn_key="data_source", shown_of=shown_of(made), **limits
    )
    schemas = [SCHEMA] if loop == "tool_agent" else None
    for shown, messages in zip(prompts, conversations, strict=True):
        assert shown.messages == messages
        assert shown.prompt_ids == made.renderer.prompt(messages, schemas)
