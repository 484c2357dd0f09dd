"""Conversations of one client as tokens; a call that continues a recorded conversation reuses its tokens.

A client of the endpoint sends only messages. A call's messages are looked up among the conversations of its session. If they
continue a recorded reply, the prompt is the recorded tokens plus the tokens of the new messages (:meth:`Renderer.bridge`). Otherwise
the call begins a new conversation, rendered completely: a first call, an agent that rewrote its history, or a template that does so
(reasoning removed).

The turns form a forest, because an agent may branch from an earlier turn. Every path from root to leaf is a
:class:`~hone.agents.episode.TokenLedger`. A turn shared by several paths counts as sampled in the first one and as given context in
the others, so each sampled token is trained on once.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from hone.agents.episode import TokenLedger
from hone.agents.messages import Message
from hone.agents.rendering import Ending, Renderer
from hone.agents.serving.errors import ApiError, bad_request
from hone.data.seeding import derive_seed
from hone.generation.protocol import Completion, SamplingParams


@dataclass(eq=False)
class Turn:
    """Reply of the model with the tokens given before it."""

    parent: Turn | None  # turn that it continues; None begins a conversation
    given_ids: list[int]  # tokens between the parent's reply and this one: the complete prompt without a parent
    completion: Completion
    ids: list[int]  # all tokens up to the end of this reply
    calls: int  # tool calls made in the conversation up to this reply
    messages: list[Message]  # the conversation up to this reply, which is the last message, as the client received it
    name: str = ""  # unique name, which is also the signature of its reasoning; empty without one
    children: int = 0  # number of turns that continue it


@dataclass
class Prompt:
    """Tokens and messages that the model receives in a call."""

    parent: Turn | None  # turn that it continues
    given_ids: list[int]  # tokens after that turn's reply; the complete prompt without a parent
    ids: list[int]  # all tokens
    messages: list[Message]  # messages of the call
    chain: list[str]  # fingerprints of the conversation, the last one over all messages of the call
    continues: bool = False  # True if the reply continues the last message, an assistant's

    @property
    def calls(self) -> int:
        """Number of tool calls in the conversation before this prompt."""
        return self.parent.calls if self.parent else 0


@dataclass
class Session:
    """Recorded calls of one client."""

    name: str  # name of the session and of its KV cache in the engine
    key: str = ""  # API key of the session
    # seed of its sampling; a reply's seed depends on it, the prompt's tokens and how often that prompt occurred
    seed: int = 0
    sampling: SamplingParams | None = None  # sampling parameters that override the client's; None uses the client's
    # function of a prompt that returns the reply's maximum tokens, or raises ApiError if none are left; None allows all
    allow: Callable[[Prompt], int] | None = None
    turns: list[Turn] = field(default_factory=list)  # replies in the order in which they were recorded
    # counters of calls, new conversations (``opened``), histories rewritten by the agent (``rewritten``) or the
    # template (``split``), replies refused or lost (``failed``)
    counts: Counter[str] = field(default_factory=Counter)
    _by_conversation: dict[str, list[Turn]] = field(default_factory=dict)
    _by_name: dict[str, Turn] = field(default_factory=dict)
    _uses: Counter[str] = field(default_factory=Counter)

    def prompt(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        ending: Ending = Ending.REPLY,
    ) -> Prompt:
        """Return the prompt for these messages, continuing a recorded conversation if one matches.

        Raises:
            DataError: the template refuses the messages.
        """
        chain = fingerprints(messages, tools, renderer.template.kwargs)
        names = {message["reasoning_signature"] for message in messages if message.get("reasoning_signature")}
        continues = ending is Ending.OPEN
        unfinished = self._recorded(chain[-1], names) if continues else None
        if unfinished is not None and not renderer.turn_ended(unfinished.completion.token_ids):
            return Prompt(unfinished, [], list(unfinished.ids), list(messages), chain, continues)
        complete = list(messages[:-1] if continues else messages)
        for length in range(len(complete) - 1, 0, -1):
            turn = self._recorded(chain[length], names)
            new = complete[length:]
            if turn is None or any(message["role"] == "assistant" for message in new):
                continue
            if renderer.split_reason(complete[:length], new, tools, history_ids=turn.ids) is not None:
                self.counts["split"] += 1
                break
            given = renderer.bridge(turn.completion.token_ids, messages[length:], tools, ending)
            return Prompt(turn, given, turn.ids + given, list(messages), chain, continues)
        else:
            has_replies = any(message["role"] == "assistant" for message in complete)
            self.counts["rewritten" if has_replies else "opened"] += 1
        ids = renderer.prompt(list(messages), tools, ending=ending)
        return Prompt(None, ids, ids, list(messages), chain, continues)

    def text_prompt(self, ids: list[int]) -> Prompt:
        """Return the prompt of a call that sends tokens; it continues the reply whose tokens are its prefix."""
        for turn in reversed(self.turns):
            if len(ids) > len(turn.ids) and ids[: len(turn.ids)] == turn.ids:
                return Prompt(turn, ids[len(turn.ids) :], ids, turn.messages, [])
        self.counts["opened"] += 1
        return Prompt(None, ids, ids, [], [])

    def seeds(self, ids: Sequence[int], n: int) -> list[int]:
        """Return seeds for ``n`` replies to a prompt; repeated prompts get new seeds."""
        digest = hashlib.blake2b(json.dumps(list(ids)).encode(), digest_size=16).hexdigest()
        first = self._uses[digest]
        self._uses[digest] += n
        return [derive_seed(self.seed, digest, number) for number in range(first, first + n)]

    def named(self, name: str) -> Turn | None:
        return self._by_name.get(name)

    def record(self, prompt: Prompt, completion: Completion, message: Message, name: str = "") -> Turn:
        """Record a reply as tokens and as the message that the client received; ``name`` is that of the turn's signed reasoning.

        A reply that continues a message is recorded as one message with it, since a client sends them so in its next call.
        """
        calls = prompt.calls + len(message.get("tool_calls") or ())
        before, chain = prompt.messages, prompt.chain
        if prompt.continues:
            prefix, before, chain = before[-1].get("content") or "", before[:-1], chain[:-1]
            message = {**message, "content": prefix + (message.get("content") or "")}
        turn = Turn(
            prompt.parent,
            prompt.given_ids,
            completion,
            prompt.ids + completion.token_ids,
            calls,
            [*before, message],
            name,
        )
        if prompt.parent is not None:
            prompt.parent.children += 1
        self.turns.append(turn)
        if chain:
            self._by_conversation.setdefault(_link(chain[-1], message), []).append(turn)
        if name:
            self._by_name[name] = turn
        return turn

    def _recorded(self, fingerprint: str, names: Set[str]) -> Turn | None:
        """Return the turn that ends this conversation: of several that read alike, the one whose reasoning the signatures name.

        Without signatures it is the latest.
        """
        turns = self._by_conversation.get(fingerprint, ())
        if len(turns) < 2:
            return turns[0] if turns else None
        return max(reversed(turns), key=lambda turn: sum(one.name in names for one in _path(turn)))

    def ledgers(self) -> list[TokenLedger]:
        """Return a ledger for each path from a first to a last turn, in the order of the last turns."""
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
    """Return fingerprints of a conversation; entry k covers the template's input for the first k messages."""
    chain = [_digest([tools or [], dict(template_kwargs)])]
    for message in messages:
        chain.append(_link(chain[-1], message))
    return chain


def _link(before: str, message: Message) -> str:
    """Extend a fingerprint by role, text and calls only: clients add or omit empty fields and reformat JSON."""
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


_NAME = re.compile(r"[\w.:#~@+-]{1,200}")


class Sessions:
    """Registry of open sessions; with ``named_by_path`` a request path with an unknown session name opens that session."""

    def __init__(self, *, max_sessions: int = 10_000, named_by_path: bool = True) -> None:
        self.max_sessions, self.named_by_path = max_sessions, named_by_path
        self._by_name: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}

    def open(
        self,
        name: str,
        *,
        seed: int = 0,
        sampling: SamplingParams | None = None,
        allow: Callable[[Prompt], int] | None = None,
    ) -> Session:
        """Open a session with a new API key; see :class:`Session` for the arguments.

        Raises:
            ValueError: a session of this name is open.
        """
        if name in self._by_name:
            raise ValueError(f"session '{name}' is already open")
        session = Session(name, f"hone-{secrets.token_urlsafe(24)}", seed, sampling, allow)
        self._by_name[name] = self._by_key[session.key] = session
        return session

    def close(self, session: Session) -> None:
        """Close a session and invalidate its API key."""
        self._by_name.pop(session.name, None)
        self._by_key.pop(session.key, None)

    def by_key(self, key: str) -> Session | None:
        """Return the session of an API key, or None."""
        return self._by_key.get(key)

    def find(self, name: str) -> Session | None:
        return self._by_name.get(name)

    def named(self, name: str) -> Session:
        """Return the session of this name, opened if necessary."""
        if name not in self._by_name:
            if not self.named_by_path:
                raise ApiError(404, f"session '{name}' does not exist", code="session_not_found")
            if not _NAME.fullmatch(name):
                raise bad_request(
                    f"invalid session name '{name[:50]}': use 1 to 200 letters, digits and . : # ~ @ + - _"
                )
            if len(self._by_name) >= self.max_sessions:
                raise ApiError(
                    429,
                    f"{self.max_sessions} sessions are open, the maximum; end some with DELETE /sessions/<id>",
                    code="too_many_sessions",
                )
            self.open(name, seed=secrets.randbits(62))
        return self._by_name[name]
