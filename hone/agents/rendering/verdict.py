"""What a chat template does with conversations of several turns, found out by rendering short ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import Message
from hone.agents.parsers import TOOL_PARSERS
from hone.agents.rendering import probes, renderer_for
from hone.agents.rendering.comparison import EMPTY_THOUGHTS
from hone.agents.rendering.renderer import Renderer
from hone.errors import DataError

AT_RESULTS, AT_USER, WITH_THOUGHTS = (
    f"append-only {where}" for where in ("at tool results", "at a user's message", "with thoughts")
)
_SPLITS = {
    AT_RESULTS: "rewrites earlier turns at tool results: every turn is a training sample of its own",
    AT_USER: "append-only within a turn of the user, splits at the next one",
    WITH_THOUGHTS: "append-only, but earlier thoughts are removed at a user's message: samples are split there",
}
"""Where a template rewrites its history, most often first, and what follows from it."""


class Outcome(StrEnum):
    """Result of a check."""

    GOOD = "ok"
    NOTE = "note"
    """Works, in another way than one might expect."""
    SPLITS = "splits"
    """Earlier turns are rewritten here, so that another training sample begins."""
    BAD = "fails"


@dataclass(frozen=True)
class Check:
    """One question asked of a template, and its answer in words."""

    name: str
    outcome: Outcome
    said: str


@dataclass(frozen=True)
class TemplateReport:
    """All answers about one template.

    Attributes:
        renderer: family that renders it.
        parser: format of its tool calls.
        checks: in the order in which they were made.
    """

    renderer: str
    parser: str
    checks: tuple[Check, ...]

    @property
    def usable(self) -> bool:
        """Whether conversations can be trained on with this template."""
        return all(check.outcome is not Outcome.BAD for check in self.checks)

    @property
    def verdict(self) -> str:
        """The answers in one line."""
        bad = [check.name for check in self.checks if check.outcome is Outcome.BAD]
        if bad:
            return f"not usable as it is: {', '.join(bad)}"
        split = {check.name for check in self.checks if check.name in _SPLITS and check.outcome is Outcome.SPLITS}
        return "append-only" if not split else next(text for name, text in _SPLITS.items() if name in split)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "verdict": self.verdict,
            "usable": self.usable,
            "renderer": self.renderer,
            "parser": self.parser,
            "checks": [{"name": c.name, "outcome": c.outcome.value, "said": c.said} for c in self.checks],
        }


def examine(
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Collection[int],
    *,
    tools: bool = True,
    renderer: str = "auto",
    parser: str = "auto",
    template_kwargs: Mapping[str, Any] | None = None,
) -> TemplateReport:
    """Return what the tokenizer's chat template does.

    Args:
        tokenizer: with a chat template.
        stop_ids: tokens at which a generation ends without Hone (the tokenizer's and those of the generation config).
        tools: look at tools, calls and results, too.
        renderer: as in ``multi_turn.renderer``.
        parser: as in ``multi_turn.format``.
        template_kwargs: extra arguments of the template.

    Raises:
        DataError: there is no chat template, or it refuses even a single question.
    """
    made = renderer_for(tokenizer, renderer, parser=parser, template_kwargs=template_kwargs)
    checks = [*_asking(made, stop_ids)]
    shown = [*_tools(made)] if tools else []
    works = tools and all(check.outcome is not Outcome.BAD for check in shown)
    checks += [*shown, *_appending(made, tools=works)]
    named = "text_tools" if made.tools_as_text else made.family.name
    return TemplateReport(named, _parser_name(made), tuple(checks))


def _parser_name(made: Renderer) -> str:
    return next(name for name in TOOL_PARSERS if TOOL_PARSERS.get(name) is type(made.parser))


def _asking(made: Renderer, stop_ids: Collection[int]) -> Iterator[Check]:
    asked = made.rendered([probes.ASKED])
    plain = made.rendered([probes.ASKED], ask=False)
    prompt = asked.text.removeprefix(plain.text)
    if asked.text.startswith(plain.text) and prompt:
        yield Check("generation prompt", Outcome.GOOD, repr(prompt))
    else:
        yield Check(
            "generation prompt", Outcome.NOTE, "the template adds none: the model must begin its turn by itself"
        )
    if made.opens_thoughts:
        yield Check("thinking", Outcome.NOTE, "the generation prompt opens a block of thoughts, in which answers begin")
    closers = {closer: made.tokenizer.convert_tokens_to_ids(closer) for closer in made.closers}
    if not closers:
        yield Check(
            "end of turn", Outcome.BAD, "no special token ends an assistant turn, so generations cannot end with one"
        )
        return
    ends = {token: number for token, number in closers.items() if number in made.stop_token_ids}
    unstopped = [f"{token} ({number})" for token, number in ends.items() if number not in stop_ids]
    if unstopped and len(unstopped) == len(ends):
        said = (
            f"{', '.join(unstopped)} ends turns, and generation_config.json does not name it; Hone stops there in episodes of "
            "several turns, other engines do not"
        )
        yield Check("end of turn", Outcome.NOTE, said)
    else:
        yield Check("end of turn", Outcome.GOOD, ", ".join(f"{token} ({number})" for token, number in ends.items()))


def _tools(made: Renderer) -> Iterator[Check]:
    if made.tools_as_text:
        yield Check("tools", Outcome.NOTE, "the template shows none; they are written into the messages as text")
    else:
        try:
            made.prompt([probes.ASKED], [probes.TOOL])
        except DataError as error:
            yield Check("tools", Outcome.BAD, error.what)
            return
        yield Check("tools", Outcome.GOOD, "schemas are shown in the prompt")
    yield _calls(made)
    yield _results(made)


def _calls(made: Renderer) -> Check:
    """Whether a call that the template writes is read back."""
    try:
        asked = made.prompt([probes.ASKED], [probes.TOOL])
        whole = made.prompt([probes.ASKED, probes.calling(probes.call())], [probes.TOOL], generation_prompt=False)
    except DataError as error:
        return Check("tool calls", Outcome.BAD, error.what)
    turn = whole[len(asked) :]
    shown = str(made.tokenizer.decode(turn)).strip()
    calls = made.parse(turn, [probes.TOOL]).calls
    if [(call.name, call.arguments) for call in calls] == [("get_weather", {"city": "Rome"})]:
        return Check("tool calls", Outcome.GOOD, f"{shown!r} is read back by {_parser_name(made)}")
    if "get_weather" not in shown:
        return Check("tool calls", Outcome.BAD, "the template leaves calls of earlier turns out")
    return Check(
        "tool calls", Outcome.BAD, f"{shown!r} is not read by {_parser_name(made)}: choose another multi_turn.format"
    )


def _results(made: Renderer) -> Check:
    turn: list[int] = []
    try:
        made.bridge(turn, [probes.result(0, "sunny")], [probes.TOOL])
        made.bridge(turn, [probes.result(0, "sunny"), probes.result(1, "rainy")], [probes.TOOL])
    except DataError as error:
        return Check("tool results", Outcome.BAD, error.what)
    try:
        made.rendered([probes.ASKED, probes.calling(probes.call(), probes.call(1)), probes.result(), probes.result(1)])
    except DataError:
        return Check(
            "tool results", Outcome.NOTE, "shown; a turn has one call, so results of several are shown one by one"
        )
    return Check("tool results", Outcome.GOOD, "shown, several of one turn as well")


def _appending(made: Renderer, *, tools: bool) -> Iterator[Check]:
    """Whether what was played stays as it was, and whether bridges are what a whole rendering has in their place."""
    steps: list[tuple[str, Sequence[Message], Sequence[Message]]] = [
        (AT_USER, [probes.ASKED, probes.ANSWERED], [probes.ASKED_AGAIN]),
        (
            WITH_THOUGHTS,
            [probes.ASKED, probes.thinking(probes.ANSWERED)],
            [probes.ASKED_AGAIN],
        ),
    ]
    if tools:
        steps.insert(0, (AT_RESULTS, [probes.ASKED, probes.calling(probes.call())], [probes.result()]))
    for name, messages, new in steps:
        yield _appended(made, name, messages, new)


def _appended(made: Renderer, name: str, messages: Sequence[Message], new: Sequence[Message]) -> Check:
    schemas = [probes.TOOL] if new[0]["role"] == "tool" else None
    try:
        asked = made.prompt(messages[:-1], schemas)
        before = made.prompt(messages, schemas, generation_prompt=False)
        after = made.prompt([*messages, *new], schemas)
    except DataError as error:
        return Check(name, Outcome.BAD, error.what)
    turn = _turn(made, before[len(asked) :])
    if before[: len(asked)] != asked:
        return Check(name, Outcome.BAD, "an assistant turn does not begin with the generation prompt it was asked with")
    thoughts = messages[-1].get("reasoning_content")
    if thoughts and thoughts not in str(made.tokenizer.decode(turn)):
        return Check(
            name, Outcome.GOOD, "the template shows no thoughts apart from the content; those that are sampled stay"
        )
    reason = made.split_reason(messages, new, schemas, history_ids=asked + turn)
    if reason is not None:
        return Check(name, Outcome.SPLITS, f"{reason}; samples are split there")
    played = asked + turn + made.bridge(turn, new, schemas)
    differing = [(a, b) for a, b in zip(played, after, strict=False) if a != b]
    if len(played) == len(after) and not differing:
        return Check(name, Outcome.GOOD, "token for token")
    if len(played) == len(after) and all({a, b} <= set(made.closer_ids) for a, b in differing):
        ends = [str(made.tokenizer.decode([token])) for token in differing[0]]
        return Check(
            name, Outcome.GOOD, f"token for token, but {ends[0]} stays where the template later shows {ends[1]}"
        )
    return Check(name, Outcome.NOTE, "the history stays, but a whole rendering would have other tokens in places")


def _turn(made: Renderer, ids: list[int]) -> list[int]:
    """An assistant turn up to the token that ends it, without an empty block of thoughts (which templates show at the end only)."""
    empty = EMPTY_THOUGHTS.match(str(made.tokenizer.decode(ids)))
    if empty:
        ids = ids[len(made.tokenizer(empty[0], add_special_tokens=False)["input_ids"]) :]
    ends = [position for position, token in enumerate(ids) if made.turn_ended([token])]
    return ids[: ends[-1] + 1] if ends else ids
