"""Kinds of failure, each with the part of a run that it points to, and the first failing turn of an episode, by rules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hone.apps.lab.expected import TAIL, expected_pattern
from hone.insight.records import turn_messages


class Bucket(StrEnum):
    """Part of a run that a failure points to, in the order in which to look."""

    RUNTIME = "runtime"
    """Tools, environments, scorers or the sandbox did not work."""
    DATA = "data"
    """Rows, prompts or demonstrations."""
    REWARD = "reward"
    """The score is not what the task means."""
    CONFIG = "config"
    """A limit or a format of the configuration."""


class Kind(StrEnum):
    """Kind of failure."""

    SCORER_DOWN = "scorer_down"
    EPISODE_ERROR = "episode_error"
    TOOL_ERROR = "tool_error"
    TOOL_TIMEOUT = "tool_timeout"
    TIME_LIMIT = "time_limit"
    SCORER_ERROR = "scorer_error"
    HACKED = "hacked"
    RIGHT_REJECTED = "right_rejected"
    NO_GROUND_TRUTH = "no_ground_truth"
    HALLUCINATED_TOOL = "hallucinated_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    MALFORMED_CALL = "malformed_call"
    REPEATED_CALL = "repeated_call"
    TOO_MANY_CALLS = "too_many_calls"
    CUT = "cut"
    TURN_LIMIT = "turn_limit"
    EMPTY = "empty"
    NO_TOOL_CALL = "no_tool_call"
    WRONG_FORMAT = "wrong_format"
    WRONG_CONTENT = "wrong_content"


@dataclass(frozen=True)
class About:
    """Bucket and meaning of a kind of failure."""

    bucket: Bucket  # part of the run that it points to
    meaning: str  # what was seen, in a few words


KINDS: dict[Kind, About] = {
    Kind.SCORER_DOWN: About(Bucket.RUNTIME, "no verdict: the scorer, its service or the sandbox did not answer"),
    Kind.EPISODE_ERROR: About(Bucket.RUNTIME, "the environment, the agent loop or the engine failed"),
    Kind.TOOL_ERROR: About(Bucket.RUNTIME, "a tool raised an error"),
    Kind.TOOL_TIMEOUT: About(Bucket.RUNTIME, "a tool took too long"),
    Kind.TIME_LIMIT: About(Bucket.RUNTIME, "the episode ran out of time"),
    Kind.SCORER_ERROR: About(Bucket.REWARD, "no verdict: the reward function raised or returned no usable score"),
    Kind.HACKED: About(Bucket.REWARD, "a high reward for a wrong answer"),
    Kind.RIGHT_REJECTED: About(Bucket.REWARD, "the answer ends with the expected text, and the reward is low"),
    Kind.NO_GROUND_TRUTH: About(Bucket.DATA, "the row has no expected answer, others of its source have one"),
    Kind.HALLUCINATED_TOOL: About(Bucket.DATA, "a call of a tool that does not exist"),
    Kind.INVALID_ARGUMENTS: About(Bucket.DATA, "arguments that do not fit the tool's schema"),
    Kind.MALFORMED_CALL: About(Bucket.CONFIG, "a call that cannot be read"),
    Kind.REPEATED_CALL: About(Bucket.CONFIG, "the same call again and again"),
    Kind.TOO_MANY_CALLS: About(Bucket.CONFIG, "more calls than a limit allows"),
    Kind.CUT: About(Bucket.CONFIG, "cut at the limit of tokens"),
    Kind.TURN_LIMIT: About(Bucket.CONFIG, "ended by a limit of turns"),
    Kind.EMPTY: About(Bucket.CONFIG, "an answer without text"),
    Kind.NO_TOOL_CALL: About(Bucket.DATA, "no call, and most right answers of the task have one"),
    Kind.WRONG_FORMAT: About(Bucket.DATA, "an answer in which the scorer finds none"),
    Kind.WRONG_CONTENT: About(Bucket.DATA, "the right form, and a wrong answer"),
}
"""Every kind, those that hide the others first: the order decides between failures of the same turn."""


COLUMNS = (
    "step", "uid", "index", "part", "fate", "data_source", "text", "ground_truth", "stop_reason", "score", "terms",
    "extra", "error", "cause", "episode",
)  # fmt: skip
"""Columns of the archive that the rules read."""
REPEATS = 3
"""Times that the same call counts as a loop; two times count where the result was the same, too."""
PASSES = 0.5
"""Accuracy from which an answer is right."""
_BY_STATUS = {
    "malformed": Kind.MALFORMED_CALL,
    "unknown_tool": Kind.HALLUCINATED_TOOL,
    "invalid_arguments": Kind.INVALID_ARGUMENTS,
    "over_limit": Kind.TOO_MANY_CALLS,
    "timeout": Kind.TOOL_TIMEOUT,
    "error": Kind.TOOL_ERROR,
}
_BY_END = {
    "tokens": Kind.CUT,
    "context": Kind.CUT,
    "assistant_turns": Kind.TURN_LIMIT,
    "user_turns": Kind.TURN_LIMIT,
    "tool_calls": Kind.TOO_MANY_CALLS,
    "time": Kind.TIME_LIMIT,
    "aborted": Kind.EPISODE_ERROR,
    "error": Kind.EPISODE_ERROR,
}
_SHOWN = 300
"""Characters of a turn or an error that are shown."""


@dataclass(frozen=True)
class Failure:
    """First failure of one episode."""

    kind: Kind
    turn: int  # number of the failing turn, from 1
    turns: int  # of the episode
    evidence: str  # what shows it, with figures
    text: str  # of the turn, shortened
    task: str  # data source
    step: int
    uid: str
    index: int
    score: float | None  # None without a verdict
    # what the change depends on: the name of a tool, the reason of the end, the cause of a missing verdict
    detail: str = ""

    def record(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "bucket": KINDS[self.kind].bucket.value} | {
            name: value for name, value in vars(self).items() if name != "kind"
        }


@dataclass(frozen=True)
class Bar:
    """Bounds of a failure where no accuracy is recorded, and of a reward that is too high where one is."""

    score: float  # rewards below it are failures
    paid: float = 1.0  # reward from which a wrong answer is paid like a right one
    expects: frozenset[str] = frozenset()  # data sources of which some row has an expected answer
    calls: frozenset[str] = frozenset()  # data sources of which most right answers called a tool


def accuracy(record: Mapping[str, Any]) -> float | None:
    """Return the accuracy that the scorer (`acc`) or the environment (`solved`) reports; None without one."""
    facts = (record["episode"] or {}).get("facts") or {}
    known = (record["terms"] or {}).get("acc", facts.get("solved"))
    return None if known is None else float(known)


def has_failed(record: Mapping[str, Any], bar: Bar) -> bool:
    """Return whether an episode failed: no verdict, a wrong answer, or, where accuracy is unknown, a low reward."""
    known = accuracy(record)
    if record["score"] is None or known is None:
        return record["score"] is None or record["score"] < bar.score
    return known < PASSES


def first_failure(record: Mapping[str, Any], bar: Bar) -> Failure:
    """Return what failed first in a failed episode.

    The earliest failing turn decides. Of the failures of one turn, the one that comes first in :data:`KINDS` decides. A missing
    verdict of the scorer comes before all: without it nothing of the episode was judged.
    """
    episode = record["episode"] or {}
    texts = _texts(record)
    last = max(len(texts), 1)
    order = list(KINDS)
    first = min(_failures(record, episode, last, bar), key=lambda each: (each[1], order.index(each[0])))
    kind, turn, evidence, detail = first
    return Failure(
        kind,
        max(turn, 1),
        last,
        _short(evidence),
        _short(texts[turn - 1] if 0 < turn <= len(texts) else record["text"]),
        record["data_source"] or "unknown",
        *(record["step"], record["uid"], record["index"], record["score"]),
        detail,
    )


def _failures(
    record: Mapping[str, Any], episode: Mapping[str, Any], last: int, bar: Bar
) -> Iterator[tuple[Kind, int, str, str]]:
    """Yield kind, turn, evidence and detail of everything that is wrong; turn 0 comes before all turns."""
    cause, error = record["cause"] or "", record["error"] or ""
    if record["score"] is None and cause != "episode":
        kind = Kind.SCORER_ERROR if cause in ("raised", "invalid", "declined") else Kind.SCORER_DOWN
        yield kind, 0, f"{cause or 'no verdict'}: {_last_line(error)}", cause
    for call in episode.get("tool_calls") or []:
        if (kind := _BY_STATUS.get(call["status"])) is not None:
            yield kind, call["turn"] + 1, f"{_call(call)}: {_last_line(call['result'])}", call["name"] or ""
    yield from _repeated(episode.get("tool_calls") or [])
    end = episode.get("end") or ("tokens" if record["stop_reason"] == "length" else "")
    end = end if end not in ("answer", "done") or record["stop_reason"] != "length" else "turn_tokens"
    if end == "turn_tokens" or (kind := _BY_END.get(end)) is not None:
        kind = Kind.CUT if end == "turn_tokens" else _BY_END[end]
        yield kind, last, f"ended by {end}" + (f": {_last_line(episode['error'])}" if episode.get("error") else ""), end
    if record["score"] is None:
        if error:
            yield Kind.EPISODE_ERROR, last, _last_line(error), "error"
        return
    yield from _judged(record, last, bar)


def _judged(record: Mapping[str, Any], last: int, bar: Bar) -> Iterator[tuple[Kind, int, str, str]]:
    """Yield what is wrong with an answer that has a verdict."""
    terms, known, score = record["terms"] or {}, accuracy(record), record["score"]
    shown = ", ".join(f"{name} {value:g}" for name, value in {"score": score, **terms}.items())
    missing = record["ground_truth"] in (None, "", [], {})
    if missing and (record["data_source"] or "unknown") in bar.expects:
        yield Kind.NO_GROUND_TRUTH, last, f"ground_truth is {json.dumps(record['ground_truth'])}; {shown}", ""
    if known is not None and known < PASSES and score >= bar.paid:
        yield Kind.HACKED, last, f"{shown}: the reward counts as right, the answer is wrong", ""
    pattern = None if missing else expected_pattern(record["ground_truth"])
    if pattern is not None and pattern.search(record["text"][-TAIL:]):
        yield Kind.RIGHT_REJECTED, last, f"expected {json.dumps(record['ground_truth'])}; {shown}", ""
    if not record["text"].strip():
        yield Kind.EMPTY, last, f"no text; {shown}", ""
    calls = (record["episode"] or {}).get("tool_calls")
    if not calls and (record["data_source"] or "unknown") in bar.calls:
        yield Kind.NO_TOOL_CALL, last, shown, ""
    if terms.get("format", 1.0) < PASSES:
        yield Kind.WRONG_FORMAT, last, shown, ""
    wanted = "" if missing else f"expected {_short(json.dumps(record['ground_truth'], ensure_ascii=False), 80)}; "
    yield Kind.WRONG_CONTENT, last, f"{wanted}{shown}", ""


def _repeated(calls: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Kind, int, str, str]]:
    """Yield the call that begins to repeat: the third equal one, or the second if its result was the same, too."""
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for call in calls:
        if call["arguments"] is None:
            continue
        same = seen.setdefault(json.dumps([call["name"], call["arguments"]], sort_keys=True), [])
        same.append(call)
        again = len(same) > 1 and same[-1]["result"] == same[-2]["result"]
        if again or len(same) >= REPEATS:
            times = sum(
                1 for other in calls if (other["name"], other["arguments"]) == (call["name"], call["arguments"])
            )
            yield Kind.REPEATED_CALL, call["turn"] + 1, f"{_call(call)} {times} times", call["name"] or ""
            return


def _texts(record: Mapping[str, Any]) -> list[str]:
    """Return the text of each turn, calls included."""
    if not record["episode"]:
        return [record["text"]]
    return [
        " ".join(
            part
            for part in (
                message["content"] if isinstance(message.get("content"), str) else "",
                *(
                    f"{call['function']['name']}({call['function']['arguments']})"
                    for call in message.get("tool_calls") or []
                ),
            )
            if part
        )
        for message in turn_messages(record["episode"])
    ]


def _call(call: Mapping[str, Any]) -> str:
    arguments = "" if call["arguments"] is None else json.dumps(call["arguments"], ensure_ascii=False)
    return f"{call['name'] or '?'}({_short(arguments, 80)})"


def _last_line(text: str) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _short(text: str, length: int = _SHOWN) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 4]} ..."
