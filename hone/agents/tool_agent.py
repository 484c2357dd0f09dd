"""The built-in agent loops: one turn; a conversation with tools, an environment or a simulated user. And which loop a row has, with the tools
that its prompt shows.

A conversation parses turns of the policy into messages, and appends messages as tokens (:class:`ChatLoop`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hone.agents.base import AGENT_LOOPS, AgentLoop, EpisodeContext
from hone.agents.environments.base import Environment, make_environment
from hone.agents.episode import BudgetSpent, Episode
from hone.agents.interactions.base import Interaction
from hone.agents.messages import AssistantTurn, Message, check_read
from hone.agents.tools.base import Tool, ToolSession, text_schema
from hone.config.agents import AgentConfig, CompactionConfig, MultiTurnConfig
from hone.data.episode_log import EpisodeEnd
from hone.data.prompts import ShownOf
from hone.data.types import Sample, StopReason
from hone.errors import DataError, did_you_mean
from hone.text import valid_data

DELEGATE = text_schema(
    "delegate",
    "Give a task to an assistant with an empty conversation and the same tools; returns its answer.",
    "task",
    "the task, with all that is needed to solve it",
)


class Delegate(Tool):
    """Tool through which the policy gives a task to a sub-agent: itself, in a conversation of its own. Of one episode."""

    timeout = float("inf")  # the episode's limits bound a sub-agent
    retries = 0

    def __init__(self, play: Callable[[str], Awaitable[str]]) -> None:
        super().__init__(DELEGATE)
        self._play = play

    async def execute(self, state: Any, arguments: Mapping[str, Any], **kwargs: Any) -> str:
        return await self._play(arguments["task"])


REMOVED = "(result removed)"
"""Content of a tool result that was dropped."""
SUMMARY = "What happened so far:"
"""Line before a summary."""


class Compactor:
    """Decides when a conversation is rewritten, and how."""

    def __init__(self, multi_turn: MultiTurnConfig) -> None:
        self.config: CompactionConfig = multi_turn.compaction
        self.reserve = compaction_reserve(multi_turn)

    @property
    def asks(self) -> bool:
        return self.config.strategy == "summarize"

    @property
    def instruction(self) -> Message:
        """Message that asks for a summary."""
        return {"role": "user", "content": self.config.instruction}

    def is_due(self, tokens: int, turn: int) -> bool:
        """Return whether a conversation of ``tokens`` is rewritten before a next turn of at most ``turn`` tokens."""
        limit = self.config.context_tokens
        return self.config.strategy is not None and limit is not None and tokens + turn + self.reserve > limit

    def without_results(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation without the contents of its tool results, except those of the latest ``keep_turns`` turns."""
        kept = len(messages) - len(latest_turns(messages, max(1, self.config.keep_turns)))
        return [
            {**message, "content": REMOVED} if message["role"] == "tool" and place < kept else message
            for place, message in enumerate(messages)
        ]

    def summarized(self, prompt: Sequence[Message], messages: Sequence[Message], summary: str) -> list[Message]:
        """Return the conversation that follows a summary.

        Args:
            prompt: messages of the episode's prompt; the summary is added to the last one of the user.
            messages: the conversation before the request for a summary.
            summary: text of the policy.
        """
        last = max((place for place, message in enumerate(prompt) if message["role"] == "user"), default=None)
        note = f"{SUMMARY}\n{summary}"
        if last is None:
            begin = [*prompt, {"role": "user", "content": note}]
        else:
            request: dict[str, Any] = {**prompt[last], "content": f"{prompt[last]['content']}\n\n{note}"}
            begin = [*prompt[:last], request, *prompt[last + 1 :]]
        return [*begin, *latest_turns(messages, self.config.keep_turns)]


def latest_turns(messages: Sequence[Message], count: int) -> list[Message]:
    """Return the last ``count`` turns of the policy, each with the messages that follow it."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return list(messages[turns[-min(count, len(turns))] :]) if count and turns else []


_WRAPPER_TOKENS, _REQUEST_TOKENS = 32, 64
"""Upper bounds of the usual templates: tokens around a tool result, and those of the request for a summary."""


def compaction_reserve(multi_turn: MultiTurnConfig) -> int:
    """Return the tokens that stay free after a turn: for the results of its calls, and for a summary with its request."""
    config = multi_turn.compaction
    if config.reserve_tokens is not None:
        return config.reserve_tokens
    results = multi_turn.max_parallel_calls * (multi_turn.max_tool_response_length + _WRAPPER_TOKENS)
    return results + (config.max_summary_tokens + _REQUEST_TOKENS if config.strategy == "summarize" else 0)


Tools = Sequence[dict[str, Any]]


class ChatLoop(AgentLoop):
    """Base class of loops whose episodes are conversations."""

    needs_messages = True

    def __init__(self, context: EpisodeContext) -> None:
        super().__init__(context)
        self.renderer = context.renderer
        self.compactor = Compactor(context.multi_turn)

    async def take_turn(self, episode: Episode, tools: Tools = ()) -> AssistantTurn:
        """Generate a policy turn and parse it, after a summary if one was asked for.

        Raises:
            BudgetSpent: a limit is reached. A turn that was truncated by the token limit is still added to the conversation.
        """
        if episode.messages[-1:] == [self.compactor.instruction]:
            await self._summarize(episode, tools)
        return await self._turn(episode, tools)

    async def _summarize(self, episode: Episode, tools: Tools) -> None:
        """Let the policy write a summary, which replaces the conversation."""
        before = episode.messages[:-1]
        turn = await self._turn(episode, tools, max_tokens=self.compactor.config.max_summary_tokens)
        self._rewrite(episode, self.compactor.summarized(episode.sample.messages or [], before, turn.content), tools)

    def _rewrite(self, episode: Episode, messages: list[Message], tools: Tools) -> None:
        prompt_ids = episode.shown.expand(self.renderer.prompt(messages, list(tools) or None), messages)
        limit = self.compactor.config.context_tokens
        if limit is not None and len(prompt_ids) >= limit:
            raise BudgetSpent(EpisodeEnd.CONTEXT)
        episode.rewrite(messages, prompt_ids)

    async def _turn(self, episode: Episode, tools: Tools, max_tokens: int | None = None) -> AssistantTurn:
        stops = dict.fromkeys((*episode.sampling.stop_token_ids, *self.renderer.stop_token_ids))
        before = episode.ledger.ids
        completion = await episode.generate(max_tokens=max_tokens, stop_token_ids=tuple(stops))
        calls = sum(len(message.get("tool_calls", ())) for message in episode.log.messages)
        turn = self.renderer.parse(completion.token_ids, list(tools) or None, calls_before=calls, prompt_ids=before)
        episode.log.messages.append(turn.message())
        if completion.stop_reason is StopReason.LENGTH and episode.tokens_left <= 0:
            raise BudgetSpent(EpisodeEnd.TOKENS)
        return turn

    def answer(self, episode: Episode, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Append messages to the policy's turn, so that the policy can answer them; rewrite a conversation that grows too long.

        If the chat template would rewrite earlier turns (remove their thinking), a new segment of the episode begins with
        the conversation as the template renders it. Otherwise tokens are only appended.

        Raises:
            BudgetSpent: the messages do not fit.
            DataError: the messages contain something other than text, and images if the model reads them.
        """
        messages = valid_data(list(messages))
        who = f"the answer to turn {episode.log.assistant_turns} of row {episode.sample.uid}"
        check_read(messages, who, images=episode.shown.processor is not None)
        messages, images = episode.shown.placed(messages, who)
        schemas, ledger = list(tools) or None, episode.ledger
        before, last = episode.messages, ledger.turns[-1]
        sampled = ledger.response_ids[last.start : last.stop]
        if self.compactor.config.strategy is not None:
            given = episode.shown.expand(self.renderer.bridge(sampled, messages, schemas), messages, images)
            following = len(ledger) + len(given)
            if self.compactor.is_due(following, episode.sampling.max_tokens):
                if not self.compactor.asks:
                    episode.log.messages += messages
                    episode.shown.add(images)
                    self._rewrite(episode, self.compactor.without_results(episode.messages), tools)
                    return
                messages = [*messages, self.compactor.instruction]
        episode.log.messages += messages
        history = episode.shown.fold(ledger.ids)
        episode.shown.add(images)
        if self.renderer.split_reason(before, list(messages), schemas, history_ids=history):
            episode.begin(episode.shown.expand(self.renderer.prompt(episode.messages, schemas), episode.messages))
            return
        episode.append(episode.shown.expand(self.renderer.bridge(sampled, list(messages), schemas), messages))

    def check_tokens(self, episode: Episode, tools: Tools = ()) -> None:
        """Compare the last segment's tokens with a fresh rendering of its conversation, and log a difference."""
        mode = self.context.multi_turn.tokenization_sanity_check_mode
        if mode == "disable" or not episode.ledger.turns:
            return
        ids = episode.shown.fold(episode.ledger.ids)
        difference = self.renderer.sanity_check(ids, episode.messages, list(tools) or None, mode=mode)
        if difference is not None:
            episode.log.tokenization = difference.kind


@AGENT_LOOPS.register("tool_agent")
class ToolAgent(ChatLoop):
    """Loop of turn, calls, results, turn, ... until a turn has no calls.

    The calls of a turn run concurrently, up to ``multi_turn.max_parallel_calls``. Every call, also a malformed one or one over the
    limit, is answered by a tool message. With ``multi_turn.subagents`` the policy can give tasks to sub-agents. ``extra_info.tool_selection`` of a row lists the allowed tools, and
    ``extra_info.tools_kwargs`` their arguments.
    """

    async def play(self, episode: Episode) -> None:
        """Play the episode until a turn has no calls."""
        async with self.context.toolbox.session(episode, self.context.tokenizer) as tools:
            if self.context.multi_turn.subagents:
                tools.add(Delegate(lambda task: self._delegated(episode, tools, task)))
            await self._converse(episode, tools)
            episode.log.end = EpisodeEnd.ANSWER
            self.check_tokens(episode, tools.schemas)

    async def _converse(self, episode: Episode, tools: ToolSession) -> AssistantTurn:
        """Play a conversation until a turn has no calls, and return that turn."""
        while True:
            turn = await self.take_turn(episode, tools.schemas)
            if not turn.calls:
                return turn
            if tools.exhausted:
                raise BudgetSpent(EpisodeEnd.TOOL_CALLS)
            try:
                results = await tools.answer(turn.calls)
            finally:
                await episode.absorb_children()
            self.answer(episode, results, tools.schemas)

    async def _delegated(self, episode: Episode, tools: ToolSession, task: str) -> str:
        """Play a task in a conversation of its own; return the answer, or the limit that ended it."""
        messages: list[Message] = [{"role": "user", "content": task}]
        schemas = [schema for schema in tools.schemas if schema["function"]["name"] != DELEGATE["function"]["name"]]
        child = episode.child(messages, self.renderer.prompt(messages, schemas or None))
        try:
            turn = await self._converse(child, tools.shared_with(child, schemas))
        except BudgetSpent as limit:
            return f"error: the assistant has no answer, it reached the limit '{limit.end}'"
        return turn.content


# they play through an HTTP endpoint, which no other loop needs
AGENT_LOOPS.register_later("hone.agents.program.loop", "program")
AGENT_LOOPS.register_later("hone.agents.program.verifiers_loop", "verifiers")
AGENT_LOOPS.register_later("hone.agents.self_play", "self_play")
AGENT_LOOPS.register_later("hone.agents.proposer_solver", "proposer_solver")


@AGENT_LOOPS.register("single_turn", "single_turn_agent")
class SingleTurn(AgentLoop):
    several_turns = False

    async def play(self, episode: Episode) -> None:
        await episode.generate()


class EnvironmentLoop(ChatLoop):
    """Loop of reset, turn, step, turn, ... until the environment is done.

    ``extra_info.environment`` of a row is ``{"name": ..., "seed": ..., "options": {...}}``. The row's prompt must equal what
    ``reset(seed)`` returns; `hone data make environment:NAME` writes such rows.
    """

    gives_reward = True

    async def play(self, episode: Episode) -> None:
        limit = self.context.multi_turn.tool_timeout
        environment, seed = self.environment_of(episode)
        episode.on_finish(environment.close)
        episode.log.reward = 0.0  # all rewards are those of turns
        check_prompt(episode, valid_data(await episode.outside(environment.reset(seed), limit)))
        while True:
            turn = await self.take_turn(episode, environment.tools)
            step = await episode.outside(environment.step(turn), limit)
            episode.reward_turn(step.reward)
            episode.log.facts |= step.facts
            if step.done:
                break
            episode.count_user_turn()
            self.answer(episode, step.messages, environment.tools)
        episode.log.end = EpisodeEnd.DONE
        self.check_tokens(episode, environment.tools)

    def environment_of(self, episode: Episode) -> tuple[Environment, int]:
        """Return the environment that the row names, and its seed."""
        spec: Any = episode.sample.extra_info.get("environment")
        if not isinstance(spec, dict) or "name" not in spec:
            raise DataError(
                f"row {episode.sample.uid} has no extra_info.environment",
                why="its loop plays the environment that this field names",
                fix='add "environment": {"name": "guess_the_number", "seed": 1, "options": {}} to extra_info',
                where="extra_info.environment",
                code="R48",
            )
        pythons = self.context.agent.environment_python
        return make_environment(spec["name"], spec.get("options") or {}, pythons), int(spec.get("seed") or 0)


AGENT_LOOPS.register("environment")(EnvironmentLoop)


def wrong_environment(episode: Episode, loop: str, lacks: str, why: str) -> DataError:
    """Return the error of a row whose environment cannot be played by ``loop``."""
    return DataError(
        f"row {episode.sample.uid} has the loop '{loop}', but its environment {lacks}",
        why=why,
        fix="agent_name=environment",
        where="extra_info.environment.name",
        code="R48",
    )


def check_prompt(episode: Episode, shown: list[Message]) -> None:
    """Raise DataError if the row's prompt differs from what its environment shows first."""
    row = episode.sample.messages or []
    if [(m["role"], m.get("content")) for m in row] != [(m["role"], m.get("content")) for m in shown]:
        raise DataError(
            f"the prompt of row {episode.sample.uid} differs from what its environment returns on reset: {shown!r:.300}",
            why="the policy would see one task and be scored on another",
            fix="make the dataset again with `hone data make environment:NAME`, with the same options",
            where="extra_info.environment",
        )


@AGENT_LOOPS.register("interaction")
class InteractionLoop(ChatLoop):
    """Loop of turn, reply, turn, ... until the user is done; tool calls are answered before the user.

    ``extra_info.interaction_kwargs`` of a row are passed to the user; its ``name`` chooses one of several users.
    """

    gives_reward = True

    def __init__(self, context: EpisodeContext) -> None:
        super().__init__(context)
        self.users = context.interactions

    async def play(self, episode: Episode) -> None:
        several, kwargs = self.context.multi_turn, dict(episode.sample.extra_info.get("interaction_kwargs") or {})
        user = self._user(kwargs.pop("name", None))
        state = await episode.outside(user.start(episode.sample, **kwargs), several.tool_timeout)
        episode.on_finish(partial(user.finish, state))
        async with self.context.toolbox.session(episode, self.context.tokenizer) as tools:
            while True:
                turn = await self.take_turn(episode, tools.schemas)
                if turn.calls and tools.schemas:
                    if tools.exhausted:
                        raise BudgetSpent(EpisodeEnd.TOOL_CALLS)
                    self.answer(episode, await tools.answer(turn.calls), tools.schemas)
                    continue
                reply = await episode.outside(user.reply(state, episode.messages), several.tool_timeout)
                episode.reward_turn(reply.reward)
                episode.log.facts |= reply.facts
                if reply.done or reply.content is None:
                    break
                episode.count_user_turn()
                self.answer(episode, [{"role": "user", "content": reply.content}], tools.schemas)
            episode.log.end = EpisodeEnd.DONE
            self.check_tokens(episode, tools.schemas)

    def _user(self, name: str | None) -> Interaction:
        if name is None and len(self.users) == 1:
            return next(iter(self.users.values()))
        if name not in self.users:
            raise DataError(
                f"interaction_kwargs has name={name!r}, which is not a user of the interaction file",
                why="no user would answer the model",
                fix=did_you_mean(str(name), self.users),
                where="extra_info.interaction_kwargs.name",
                code="R48",
            )
        return self.users[name]


def default_loop(multi_turn: MultiTurnConfig, agent: AgentConfig) -> str:
    """Return the loop for rows without ``agent_name``: the configured default, else the one that the given files imply."""
    if agent.default_agent_loop is not None:
        return agent.default_agent_loop
    if agent.program.command or agent.program.function:
        return "program"
    if multi_turn.enable and multi_turn.interaction_config_path:
        return "interaction"
    if multi_turn.enable and (multi_turn.tool_config_path or multi_turn.function_tool_path):
        return "tool_agent"
    return "single_turn"


def loop_class(context: EpisodeContext, sample: Sample) -> type[AgentLoop]:
    return AGENT_LOOPS.get(sample.agent_name or default_loop(context.multi_turn, context.agent))


def shown_of(context: EpisodeContext) -> ShownOf:
    """Return a function that gives what the template gets of a row: its messages, and the schemas of its tools.

    The function raises DataError if a row lacks the messages that its loop needs, or selects an unknown tool.
    """
    tools = tools_of(context)

    def shown(sample: Sample) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        schemas = tools(sample)
        if not loop_class(context, sample).needs_messages:
            return sample.messages or (), schemas
        return context.renderer.as_shown(sample.messages or (), schemas)

    return shown


def tools_of(context: EpisodeContext) -> Callable[[Sample], Sequence[dict[str, Any]]]:
    """Return a function that gives the tool schemas for the prompt of a row; it raises as that of :func:`shown_of` does."""

    def tools(sample: Sample) -> Sequence[dict[str, Any]]:
        loop = loop_class(context, sample)
        if not loop.needs_messages:
            return ()
        if sample.messages is None:
            raise flat_prompt_error(sample)
        check_read(sample.messages, f"the prompt of row {sample.uid}", images=bool(sample.images))
        if issubclass(loop, EnvironmentLoop):
            spec = sample.extra_info.get("environment") or {}
            options, pythons = spec.get("options") or {}, context.agent.environment_python
            return make_environment(spec["name"], options, pythons).tools if "name" in spec else ()
        schemas = context.toolbox.schemas(sample.extra_info.get("tool_selection"))
        delegates = context.multi_turn.subagents and issubclass(loop, ToolAgent)
        return [*schemas, DELEGATE] if delegates else schemas

    return tools


def flat_prompt_error(sample: Sample) -> DataError:
    """Return the error for a prompt that cannot be continued as a conversation."""
    return DataError(
        f"row {sample.uid} has a prompt of plain text or token ids, but its loop plays a conversation",
        why="a conversation is continued by the chat template, which needs messages",
        fix='write the prompt as [{"role": "user", "content": "..."}], or set agent_name=single_turn for this row',
        where="data.prompt_key",
        code="R34",
    )
