"""The conversations of one client as tokens: a call that continues a recorded conversation is never rendered again.

A client of the endpoint knows only messages. So a call's messages are looked up among the conversations of its session: where
they go on from a recorded reply, the prompt is the recorded tokens and, behind them, those of the new messages alone
(:meth:`Renderer.bridge`). Anything else begins a conversation of its own, rendered whole: a first call, an agent that rewrote its
history, or a template that does so (reasoning removed).

The turns form a forest, because an agent may ask twice from the same place. Every path from a first turn to a last one is a
:class:`~hone.agents.ledger.TokenLedger`; a turn that several paths share counts as sampled in the first of them and is given
context in the others, so each sampled token is trained on once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.agents.ledger import TokenLedger
from hone.agents.messages import Message
from hone.agents.rendering import Renderer
from hone.agents.serving.errors import bad_request
from hone.data.seeding import derive_seed
from hone.generation.protocol import Completion, SamplingParams

ROLES = ("system", "user", "assistant", "tool")


@dataclass(eq=False)
class Turn:
    """One reply of the model, and what was put before it.

    Attributes:
        parent: the turn it continues; None begins a conversation.
        given_ids: tokens between the parent's reply and this one: the whole prompt where there is no parent.
        completion: what was sampled.
        ids: all tokens up to the end of this reply.
        calls: tool calls made in the conversation so far.
        messages: the conversation up to this reply, which is the last of them as the client got it.
        children: how many turns continue it.
    """

    parent: Turn | None
    given_ids: list[int]
    completion: Completion
    ids: list[int]
    calls: int
    messages: list[Message]
    children: int = 0


@dataclass
class Prompt:
    """What the model is given in a call.

    Attributes:
        parent: the turn it continues.
        given_ids: tokens behind that turn's reply; the whole prompt without a parent.
        ids: all tokens.
        messages: of the call.
        chain: fingerprints of the conversation, the last one with all messages of the call.
    """

    parent: Turn | None
    given_ids: list[int]
    ids: list[int]
    messages: list[Message]
    chain: list[str]

    @property
    def calls(self) -> int:
        """Tool calls made in the conversation so far."""
        return self.parent.calls if self.parent else 0


@dataclass
class Session:
    """The calls of one client.

    Attributes:
        name: of the session; engines keep what they hold of its earlier turns under it.
        key: the API key that names it.
        seed: of its draws; each depends on it, on the tokens of the prompt, and on how often that prompt was asked.
        sampling: how every reply is drawn, whatever the client asks for; None leaves it to the client.
        allow: most tokens that the reply to a prompt may have; raises ApiError when it may have none. None allows all.
        turns: replies in the order in which they were recorded.
        counts: calls, conversations begun (``opened``), histories that the agent rewrote (``rewritten``) or the template
            (``split``), replies refused or lost (``failed``).
    """

    name: str
    key: str = ""
    seed: int = 0
    sampling: SamplingParams | None = None
    allow: Callable[[Prompt], int] | None = None
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _by_conversation: dict[str, Turn] = field(default_factory=dict)
    _asked: Counter[str] = field(default_factory=Counter)

    def prompt(self, renderer: Renderer, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> Prompt:
        """The tokens for a call with these messages; see the module.

        Raises:
            DataError: the template refuses the messages.
        """
        chain = fingerprints(messages, tools, renderer.template.kwargs)
        for known in range(len(messages) - 1, 0, -1):
            turn = self._by_conversation.get(chain[known])
            new = list(messages[known:])
            if turn is None or any(message["role"] == "assistant" for message in new):
                continue
            if renderer.split_reason(list(messages[:known]), new, tools, history_ids=turn.ids) is not None:
                self.counts["split"] += 1
                break
            given = renderer.bridge(turn.completion.token_ids, new, tools)
            return Prompt(turn, given, turn.ids + given, list(messages), chain)
        else:
            claimed = any(message["role"] == "assistant" for message in messages)
            self.counts["rewritten" if claimed else "opened"] += 1
        ids = renderer.prompt(list(messages), tools)
        return Prompt(None, ids, ids, list(messages), chain)

    def text_prompt(self, ids: list[int]) -> Prompt:
        """The tokens for a call that gives them itself: it continues the reply whose tokens it begins with."""
        for turn in reversed(self.turns):
            if len(ids) > len(turn.ids) and ids[: len(turn.ids)] == turn.ids:
                return Prompt(turn, ids[len(turn.ids) :], ids, turn.messages, [])
        self.counts["opened"] += 1
        return Prompt(None, ids, ids, [], [])

    def seeds(self, ids: Sequence[int], n: int) -> list[int]:
        """The random streams for ``n`` replies to these tokens; asked again, others."""
        digest = hashlib.blake2b(json.dumps(list(ids)).encode(), digest_size=16).hexdigest()
        first = self._asked[digest]
        self._asked[digest] += n
        return [derive_seed(self.seed, digest, number) for number in range(first, first + n)]

    def record(self, prompt: Prompt, completion: Completion, message: Message) -> Turn:
        """Keep a reply, as tokens and as the message that the client got."""
        calls = prompt.calls + len(message.get("tool_calls") or ())
        ids, messages = prompt.ids + completion.token_ids, [*prompt.messages, message]
        turn = Turn(prompt.parent, prompt.given_ids, completion, ids, calls, messages)
        if prompt.parent is not None:
            prompt.parent.children += 1
        self.turns.append(turn)
        if prompt.chain:
            self._by_conversation[_link(prompt.chain[-1], message)] = turn
        return turn

    def ledgers(self) -> list[TokenLedger]:
        """Every conversation, from its first turn to a last one, in the order of the last turns."""
        counted: set[Turn] = set()
        ledgers = []
        for leaf in (turn for turn in self.turns if not turn.children):
            path = _path(leaf)
            ledger = TokenLedger(path[0].given_ids)
            for turn in path:
                if turn.parent is not None:
                    ledger.add_given(turn.given_ids)
                if turn in counted:
                    ledger.add_given(turn.completion.token_ids)
                else:
                    ledger.add_sampled(ledger.ids, turn.completion)
                    counted.add(turn)
            ledgers.append(ledger)
        return ledgers

    def as_json(self) -> dict[str, Any]:
        """Its conversations as plain data."""
        return {
            "id": self.name,
            "counts": dict(self.counts),
            "conversations": [
                {
                    "prompt_ids": ledger.prompt_ids,
                    "response_ids": ledger.response_ids,
                    "response_mask": ledger.mask,
                    "log_probs": ledger.log_probs,
                    "sampling_log_probs": ledger.sampling_log_probs,
                    "weight_versions": ledger.versions,
                }
                for ledger in self.ledgers()
            ],
        }


def _path(turn: Turn) -> list[Turn]:
    path = [turn]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def fingerprints(messages: Sequence[Message], tools: Any, template_kwargs: Mapping[str, Any]) -> list[str]:
    """Fingerprints of a conversation: entry k is of what the template is given with the first k messages."""
    chain = [_digest([tools or [], dict(template_kwargs)])]
    for message in messages:
        chain.append(_link(chain[-1], message))
    return chain


def _link(before: str, message: Message) -> str:
    """Two messages are one when role, text and calls are: clients leave out and add empty fields, and write JSON anew."""
    calls = [
        [call.get("id"), call["function"].get("name"), _decoded(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    return _digest([before, message["role"], message.get("content") or "", calls, message.get("tool_call_id")])


def _decoded(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def checked_messages(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages of a request as renderers take them: text contents, tool results with the name of their tool.

    Raises:
        ApiError: a role, content or call that is none.
    """
    checked: list[Message] = []
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        role = "system" if message.get("role") == "developer" else message.get("role")
        if role not in ROLES:
            raise bad_request(f"role {role!r} is none of {', '.join(ROLES)}", f"{where}.role")
        clean: Message = {"role": role, "content": _text(message.get("content"), where)}
        calls = message.get("tool_calls") or []
        for call in calls:
            _check_call(call, where)
            names[call.get("id", "")] = call["function"]["name"]
        if calls:
            clean["tool_calls"] = calls
        elif role != "assistant" and message.get("content") is None:
            raise bad_request(f"a message of role {role} has no content", f"{where}.content")
        if isinstance(message.get("reasoning_content"), str):
            clean["reasoning_content"] = message["reasoning_content"]
        if role == "tool":
            name = message.get("tool_call_id")
            if not isinstance(name, str):
                raise bad_request("a tool result has no tool_call_id", f"{where}.tool_call_id")
            clean |= {"tool_call_id": name, "name": message.get("name") or names.get(name, "")}
        checked.append(clean)
    return checked


def _check_call(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request("a tool call has no function with a name", f"{where}.tool_calls")


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise bad_request("content is neither text nor a list of text parts; nothing else is supported", f"{where}.content")
