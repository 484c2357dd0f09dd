"""OpenTelemetry: one trace per archived episode, with a span for each turn, each tool call and the score.

The variables of OpenTelemetry name the receiver: ``OTEL_EXPORTER_OTLP_ENDPOINT`` (``http://localhost:4318``), or
``OTEL_TRACES_EXPORTER=console`` for the terminal. MLflow 3.6 and later also receives these traces. The archive has times within an
episode, not the time of day: a trace ends when the file of its step was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from hone.insight.trackers.base import (
    TRACKERS,
    Rollouts,
    RunInfo,
    Tracker,
    ending,
    mean_advantage,
    prompt_of,
    require,
    shortened,
)

_BATCH = 512  # spans of one request


@TRACKERS.register("otel")
class OtelTracker(Tracker):
    """Export the sampled episodes of each archived step as traces; metrics are not exported. ``exporter``: a
    ``SpanExporter`` that takes the spans; None for the one that the environment names.
    """

    def __init__(self, info: RunInfo, exporter: Any = None) -> None:
        trace = require("opentelemetry.sdk.trace", tracker="otel")
        export = require("opentelemetry.sdk.trace.export", tracker="otel")
        memory = require("opentelemetry.sdk.trace.export.in_memory_span_exporter", tracker="otel")
        resources = require("opentelemetry.sdk.resources", tracker="otel")
        self._api = require("opentelemetry.trace", tracker="otel")
        if exporter is None and os.environ.get("OTEL_TRACES_EXPORTER") == "console":
            exporter = export.ConsoleSpanExporter()
        elif exporter is None:
            exporter = require(
                "opentelemetry.exporter.otlp.proto.http.trace_exporter", tracker="otel"
            ).OTLPSpanExporter()
        self._exporter, self._success = exporter, export.SpanExportResult.SUCCESS
        service = os.environ.get("OTEL_SERVICE_NAME", "hone")
        run = {"service.name": service, "hone.project": info.project, "hone.experiment": info.experiment}
        self._provider = trace.TracerProvider(resource=resources.Resource.create(run))
        self._ended = memory.InMemorySpanExporter()
        self._provider.add_span_processor(export.SimpleSpanProcessor(self._ended))
        self._tracer = self._provider.get_tracer("hone")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        del step, metrics

    def rollouts(self, rollouts: Rollouts) -> None:
        """Export one trace per episode; segments of an episode share one.

        Raises ConnectionError: the receiver did not take the spans.
        """
        episodes = {(record["uid"], record["index"]): record for record in rollouts.records}
        for record in episodes.values():
            self._trace(record, rollouts)
        spans = self._ended.get_finished_spans()
        self._ended.clear()
        for start in range(0, len(spans), _BATCH):
            if self._exporter.export(spans[start : start + _BATCH]) is not self._success:
                raise ConnectionError("the OpenTelemetry receiver did not take the spans")

    def finish(self, status: str) -> None:
        del status
        self._provider.shutdown()
        self._exporter.shutdown()

    def _trace(self, record: Mapping[str, Any], rollouts: Rollouts) -> None:
        seconds = record["seconds"] or 0.0
        began = rollouts.written - seconds
        root = self._tracer.start_span(
            "episode", start_time=_clock(began), attributes=_attributes({**_facts(record), "hone.kind": rollouts.kind})
        )
        if record["error"]:
            root.set_status(self._api.Status(self._api.StatusCode.ERROR, record["error"]))
        context = self._api.set_span_in_context(root)
        for name, start, end, attributes in spans_of(record):
            span = self._tracer.start_span(
                name, context, start_time=_clock(began + start), attributes=_attributes(attributes)
            )
            span.end(_clock(began + end))
        root.end(_clock(rollouts.written))


def spans_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield name, start, end (seconds from the start of the episode) and attributes of each span below an episode's.

    Without measured times, in an import for example, turns share the wait for the engine equally, and all follow one another.
    The score has no duration: the archive does not have one.
    """
    episode, seconds = record["episode"], record["seconds"] or 0.0
    if episode is None:
        yield "turn 1", 0.0, seconds, {"gen_ai.operation.name": "chat", "hone.text": shortened(record["text"])}
    else:
        yield from _parts(episode)
    terms = {f"hone.term.{name}": value for name, value in (record["terms"] or {}).items()}
    yield "score", seconds, seconds, {"hone.score": record["score"], "hone.error": record["error"], **terms}


def _parts(episode: Mapping[str, Any]) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield the spans of turns and calls, each turn before its calls."""
    turns, times, texts = episode["assistant_turns"], episode.get("turn_times") or [], _turn_texts(episode)
    measured, now = len(times) == turns, 0.0
    share = (episode.get("generate_seconds") or 0.0) / max(1, turns)
    for turn in range(turns):
        start, end = times[turn] if measured else (now, now + share)
        now = end
        rewards = episode["turn_rewards"]
        attributes = {"hone.turn": turn + 1, "hone.reward": rewards[turn] if turn < len(rewards) else None}
        attributes |= {
            "hone.times": "measured" if measured else "estimated",
            "hone.text": shortened(texts.get(turn, "")),
        }
        yield f"turn {turn + 1}", start, end, {"gen_ai.operation.name": "chat", **attributes}
        for call in (call for call in episode["tool_calls"] if call["turn"] == turn):
            started, seconds = call.get("started"), call.get("seconds") or 0.0
            start = now if started is None else started
            now = max(now, start + seconds)
            yield f"tool {call['name']}", start, start + seconds, _call_facts(call)


def _call_facts(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": call["name"],
        "hone.turn": call["turn"] + 1,
        "hone.status": call["status"],
        "hone.attempts": call["attempts"],
        "hone.reward": call["reward"],
        "hone.arguments": shortened(json.dumps(call["arguments"], ensure_ascii=False)),
        "hone.result": shortened(call["result"]),
    }


def _turn_texts(episode: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of each turn by its number in the episode; turns of sub-agents have theirs."""
    delegated = [(range(part["turn"], part["turn"] + part["turns"]), part["messages"]) for part in _parts_of(episode)]
    of_others = {turn for turns, _ in delegated for turn in turns}
    main = (turn for turn in range(episode["assistant_turns"]) if turn not in of_others)
    texts: dict[int, str] = {}
    for turns, messages in [(main, episode["messages"]), *delegated]:
        spoken = [message for message in messages if message["role"] == "assistant"]
        for turn, message in zip(turns, spoken, strict=False):
            content = message.get("content") or ""  # null in a message of tool calls alone
            texts[turn] = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return texts


def _parts_of(episode: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return episode.get("conversations") or []


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    expected = record["ground_truth"]
    return {
        "hone.step": record["step"],
        "hone.uid": record["uid"],
        "hone.index": record["index"],
        "hone.fate": record["fate"],
        "hone.score": record["score"],
        "hone.advantage": mean_advantage(record),
        "hone.end": ending(record),
        "hone.prompt": shortened(prompt_of(record)),
        "hone.answer": shortened(record["text"]),
        "hone.expected": expected if isinstance(expected, str) else None if expected is None else json.dumps(expected),
    }


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes without those that have no value, which OpenTelemetry refuses."""
    return {name: value for name, value in values.items() if value is not None}


def _clock(seconds: float) -> int:
    return round(seconds * 1e9)
