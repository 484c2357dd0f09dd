"""Report on how a chat template renders multi-turn conversations, by rendering short ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import Message
from hone.agents.parsers import TOOL_PARSERS
from hone.agents.rendering import renderer_for
from hone.agents.rendering import template as probes
from hone.agents.rendering.renderer import EMPTY_THOUGHTS, Renderer
from hone.agents.rendering.template import Ending
from hone.errors import DataError

AT_RESULTS, AT_USER, WITH_THOUGHTS = (
    f"append-only {where}" for where in ("at tool results", "at a user's message", "with thoughts")
)
_SPLITS = {
    AT_RESULTS: "rewrites earlier turns at tool results: every turn becomes a separate training sample",
    AT_USER: "append-only within a turn of the user, splits at the next one",
    WITH_THOUGHTS: "append-only, but earlier thoughts are removed at a user's message: samples are split there",
}
"""Consequence of each place where a template may rewrite its history, most frequent first."""


class Outcome(StrEnum):
    """Result of a check."""

    GOOD = "ok"
    NOTE = "note"
    """Works, with a restriction."""
    SPLITS = "splits"
    """Rewrites earlier turns, so that a new training sample begins."""
    BAD = "fails"


@dataclass(frozen=True)
class Check:
    """Check of a template: name, outcome and explanation."""

    name: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class TemplateReport:
    """All answers about one template."""

    renderer: str
    parser: str  # format of its tool calls
    checks: tuple[Check, ...]  # checks in the order in which they ran

    @property
    def usable(self) -> bool:
        """True if conversations rendered with this template can be trained on."""
        return all(check.outcome is not Outcome.BAD for check in self.checks)

    @property
    def verdict(self) -> str:
        """Summary of the checks in one line."""
        bad = [check.name for check in self.checks if check.outcome is Outcome.BAD]
        if bad:
            return f"not usable: {', '.join(bad)}"
        split = {check.name for check in self.checks if check.name in _SPLITS and check.outcome is Outcome.SPLITS}
        return "append-only" if not split else next(text for name, text in _SPLITS.items() if name in split)

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "usable": self.usable,
            "renderer": self.renderer,
            "parser": self.parser,
            "checks": [{"name": c.name, "outcome": c.outcome.value, "said": c.detail} for c in self.checks],
        }


def examine(
    tokenizer: PreTrainedTokenizerBase,  # tokenizer with a chat template
    stop_ids: Collection[int],  # end tokens of generation outside Hone (of the tokenizer and the generation config)
    *,
    tools: bool = True,  # True to check tools, calls and results too
    renderer: str = "auto",  # as in ``multi_turn.renderer``
    parser: str = "auto",  # as in ``multi_turn.format``
    template_kwargs: Mapping[str, Any] | None = None,  # extra arguments of the template
) -> TemplateReport:
    """Examine the tokenizer's chat template.

    Raises:
        DataError: there is no chat template, or it refuses a single question.
    """
    chosen = renderer_for(tokenizer, renderer, parser=parser, template_kwargs=template_kwargs)
    checks = [*_prompt_checks(chosen, stop_ids)]
    shown = [*_tool_checks(chosen)] if tools else []
    works = tools and all(check.outcome is not Outcome.BAD for check in shown)
    checks += [*shown, *_append_checks(chosen, tools=works)]
    named = "text_tools" if chosen.tools_as_text else chosen.family.name
    return TemplateReport(named, _parser_name(chosen), tuple(checks))


def _parser_name(renderer: Renderer) -> str:
    return next(name for name in TOOL_PARSERS if TOOL_PARSERS.get(name) is type(renderer.parser))


def _prompt_checks(renderer: Renderer, stop_ids: Collection[int]) -> Iterator[Check]:
    rendered = renderer.rendered([probes.ASKED])
    plain = renderer.rendered([probes.ASKED], ask=False)
    prompt = rendered.text.removeprefix(plain.text)
    if rendered.text.startswith(plain.text) and prompt:
        yield Check("generation prompt", Outcome.GOOD, repr(prompt))
    else:
        yield Check("generation prompt", Outcome.NOTE, "the template adds none: the model must begin its turn itself")
    if renderer.opens_thoughts:
        yield Check("thinking", Outcome.NOTE, "the generation prompt opens a reasoning block, in which answers begin")
    closers = {closer: renderer.tokenizer.convert_tokens_to_ids(closer) for closer in renderer.closers}
    if not closers:
        yield Check(
            "end of turn", Outcome.BAD, "no special token ends an assistant turn, so generations cannot end with one"
        )
        return
    ends = {token: number for token, number in closers.items() if number in renderer.stop_token_ids}
    unstopped = [f"{token} ({number})" for token, number in ends.items() if number not in stop_ids]
    if unstopped and len(unstopped) == len(ends):
        note = (
            f"{', '.join(unstopped)} ends turns, but generation_config.json does not list it; Hone stops there in episodes of "
            "several turns, other engines do not"
        )
        yield Check("end of turn", Outcome.NOTE, note)
    else:
        yield Check("end of turn", Outcome.GOOD, ", ".join(f"{token} ({number})" for token, number in ends.items()))


def _tool_checks(renderer: Renderer) -> Iterator[Check]:
    if renderer.tools_as_text:
        yield Check("tools", Outcome.NOTE, "the template has no tools; Hone writes them into the messages as text")
    else:
        try:
            renderer.prompt([probes.ASKED], [probes.TOOL])
        except DataError as error:
            yield Check("tools", Outcome.BAD, error.what)
            return
        yield Check("tools", Outcome.GOOD, "schemas are rendered into the prompt")
    yield _call_check(renderer)
    yield _result_check(renderer)


def _call_check(renderer: Renderer) -> Check:
    try:
        prompt_ids = renderer.prompt([probes.ASKED], [probes.TOOL])
        whole = renderer.prompt([probes.ASKED, probes.calling(probes.call())], [probes.TOOL], ending=Ending.CLOSED)
    except DataError as error:
        return Check("tool calls", Outcome.BAD, error.what)
    turn = whole[len(prompt_ids) :]
    shown = str(renderer.tokenizer.decode(turn)).strip()
    calls = renderer.parse(turn, [probes.TOOL]).calls
    if [(call.name, call.arguments) for call in calls] == [("get_weather", {"city": "Rome"})]:
        return Check("tool calls", Outcome.GOOD, f"{shown!r} is read back by {_parser_name(renderer)}")
    if "get_weather" not in shown:
        return Check("tool calls", Outcome.BAD, "the template omits calls of earlier turns")
    return Check(
        "tool calls",
        Outcome.BAD,
        f"{shown!r} is not read by {_parser_name(renderer)}: choose another multi_turn.format",
    )


def _result_check(renderer: Renderer) -> Check:
    turn: list[int] = []
    try:
        renderer.bridge(turn, [probes.result(0, "sunny")], [probes.TOOL])
        renderer.bridge(turn, [probes.result(0, "sunny"), probes.result(1, "rainy")], [probes.TOOL])
    except DataError as error:
        return Check("tool results", Outcome.BAD, error.what)
    try:
        renderer.rendered(
            [probes.ASKED, probes.calling(probes.call(), probes.call(1)), probes.result(), probes.result(1)]
        )
    except DataError:
        return Check(
            "tool results", Outcome.NOTE, "rendered; a turn has one call, so several results are rendered one by one"
        )
    return Check("tool results", Outcome.GOOD, "rendered, also several of one turn")


def _append_checks(renderer: Renderer, *, tools: bool) -> Iterator[Check]:
    """Check that played tokens stay unchanged, and that bridges equal a full rendering."""
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
        yield _append_check(renderer, name, messages, new)


def _append_check(renderer: Renderer, name: str, messages: Sequence[Message], new: Sequence[Message]) -> Check:
    schemas = [probes.TOOL] if new[0]["role"] == "tool" else None
    try:
        prompt_ids = renderer.prompt(messages[:-1], schemas)
        before = renderer.prompt(messages, schemas, ending=Ending.CLOSED)
        after = renderer.prompt([*messages, *new], schemas)
    except DataError as error:
        return Check(name, Outcome.BAD, error.what)
    turn = _turn(renderer, before[len(prompt_ids) :])
    if before[: len(prompt_ids)] != prompt_ids:
        return Check(name, Outcome.BAD, "an assistant turn does not begin with its generation prompt")
    thoughts = messages[-1].get("reasoning_content")
    if thoughts and thoughts not in str(renderer.tokenizer.decode(turn)):
        return Check(name, Outcome.GOOD, "the template has no separate reasoning; sampled reasoning stays")
    reason = renderer.split_reason(messages, new, schemas, history_ids=prompt_ids + turn)
    if reason is not None:
        return Check(name, Outcome.SPLITS, f"{reason}; samples are split there")
    played = prompt_ids + turn + renderer.bridge(turn, new, schemas)
    differing = [(a, b) for a, b in zip(played, after, strict=False) if a != b]
    if len(played) == len(after) and not differing:
        return Check(name, Outcome.GOOD, "token for token")
    if len(played) == len(after) and all({a, b} <= set(renderer.closer_ids) for a, b in differing):
        ends = [str(renderer.tokenizer.decode([token])) for token in differing[0]]
        return Check(
            name, Outcome.GOOD, f"token for token, but {ends[0]} stays where the template later shows {ends[1]}"
        )
    return Check(name, Outcome.NOTE, "the history stays, but a full rendering differs in some tokens")


def _turn(renderer: Renderer, ids: list[int]) -> list[int]:
    """Return an assistant turn up to its end token, without an empty reasoning block."""
    empty = EMPTY_THOUGHTS.match(str(renderer.tokenizer.decode(ids)))
    if empty:
        ids = ids[len(renderer.tokenizer(empty[0], add_special_tokens=False)["input_ids"]) :]
    ends = [position for position, token in enumerate(ids) if renderer.turn_ended([token])]
    return ids[: ends[-1] + 1] if ends else ids
