"""Traces of episodes: spans with the times, parents and values of the archive."""

import pytest
from support.archives import archive

from hone.insight.run_directory import RunDirectory
from hone.insight.trackers import RunInfo
from hone.insight.trackers.base import CompositeTracker, JsonlTracker
from hone.insight.trackers.otel import OtelTracker, spans_of

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

CALL = {"name": "search", "arguments": {"q": "x"}, "status": "ok", "result": "found", "turn": 0, "attempts": 2}
CALL |= {"truncated": False, "left_out": 0, "reward": 0.25, "seconds": 0.5, "started": 1.0}
EPISODE = {
    "messages": [
        {"role": "assistant", "content": "let me look"},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "4"},
    ],
    "end": "answer",
    "assistant_turns": 2,
    "turn_rewards": [0.25, 0.0],
    "tool_calls": [CALL],
    "conversations": [],
    "error": None,
    "generate_seconds": 2.0,
    "tool_seconds": 0.5,
    "turn_times": [[0.0, 1.0], [1.5, 2.5]],
}


@pytest.fixture
def info(tmp_path):
    return RunInfo(RunDirectory(tmp_path), "project", "experiment", "a: 1\n", 10)


def exported(info, records, samples=None):
    exporter = memory.InMemorySpanExporter()
    trackers = CompositeTracker(JsonlTracker(info), {"otel": OtelTracker(info, exporter)}, info, samples)
    path = archive(info.run_dir.path, 3, records)
    trackers.log(3, {"critic/rewards/mean": 0.5})
    spans = exporter.get_finished_spans()
    trackers.log(4, {})
    assert len(exporter.get_finished_spans()) == len(spans) and trackers.errors == {}  # nothing is exported twice
    trackers.finish("finished")
    return spans, path.stat().st_mtime


def test_an_episode_is_a_trace_of_its_turns_calls_and_score(info):
    record = {"uid": "a", "index": 1, "seconds": 3.0, "score": 0.5, "terms": {"format": 1.0}, "episode": EPISODE}
    spans, written = exported(info, [{**record, "prompt": "2+2", "ground_truth": "4", "text": "4"}])
    by_name = {span.name: span for span in spans}
    assert [span.name for span in spans] == ["turn 1", "tool search", "turn 2", "score", "episode"]
    assert len({span.context.trace_id for span in spans}) == 1
    root = by_name["episode"]
    assert root.parent is None and {span.parent.span_id for span in spans[:-1]} == {root.context.span_id}
    begin = written - 3.0
    times = {name: [(at / 1e9 - begin) for at in (span.start_time, span.end_time)] for name, span in by_name.items()}
    expected = {"turn 1": [0, 1], "tool search": [1, 1.5], "turn 2": [1.5, 2.5], "score": [3, 3], "episode": [0, 3]}
    assert all(times[name] == pytest.approx(expected[name], abs=1e-5) for name in expected) and len(times) == 5
    values = dict(root.attributes)
    assert values["hone.step"] == 3 and values["hone.uid"] == "a" and values["hone.index"] == 1
    assert values["hone.score"] == 0.5 and values["hone.end"] == "answer" and values["hone.expected"] == "4"
    assert values["hone.prompt"] == "2+2" and values["hone.kind"] == "rollouts" and "hone.advantage" not in values
    tool = dict(by_name["tool search"].attributes)
    assert (
        tool["gen_ai.tool.name"] == "search" and tool["hone.arguments"] == '{"q": "x"}' and tool["hone.attempts"] == 2
    )
    assert by_name["turn 1"].attributes["hone.text"] == "let me look" and by_name["turn 2"].attributes["hone.turn"] == 2
    assert dict(by_name["score"].attributes) == {"hone.score": 0.5, "hone.term.format": 1.0}
    assert root.resource.attributes["service.name"] == "hone" and root.resource.attributes["hone.project"] == "project"


def test_an_answer_without_tools_is_one_turn_and_segments_share_a_trace(info):
    plain = {"uid": "a", "seconds": 2.0, "text": "four", "score": None, "error": "the scorer timed out"}
    segments = [{"uid": "b", "seconds": 3.0, "part": part, "episode": EPISODE} for part in (0, 1)]
    spans, _ = exported(info, [plain, *segments])
    roots = [span for span in spans if span.name == "episode"]
    assert [root.attributes["hone.uid"] for root in roots] == ["a", "b"]
    assert roots[0].status.status_code.name == "ERROR" and roots[0].status.description == "the scorer timed out"
    assert roots[1].status.status_code.name == "UNSET"
    assert [span.name for span in spans if span.context.trace_id == roots[0].context.trace_id] == [
        "turn 1",
        "score",
        "episode",
    ]


def test_times_that_were_not_measured_are_estimated_in_order():
    call = {**CALL, "started": None}
    episode = {**EPISODE, "turn_times": [], "tool_calls": [call, {**call, "name": "add"}]}
    record = {"episode": episode, "seconds": 4.0, "terms": None, "score": 1.0, "error": None, "text": "4"}
    spans = [(name, start, end) for name, start, end, _ in spans_of(record)]
    assert spans == [
        ("turn 1", 0.0, 1.0),
        ("tool search", 1.0, 1.5),
        ("tool add", 1.5, 2.0),
        ("turn 2", 2.0, 3.0),
        ("score", 4.0, 4.0),
    ]


def test_turns_of_sub_agents_have_their_own_texts():
    other = {"turn": 1, "turns": 1, "messages": [{"role": "assistant", "content": "from the sub-agent"}]}
    times = [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    episode = {**EPISODE, "assistant_turns": 3, "conversations": [other], "turn_times": times, "tool_calls": []}
    record = {"episode": episode, "seconds": 3.0, "terms": None, "score": 1.0, "error": None, "text": "4"}
    texts = [values["hone.text"] for name, _, _, values in spans_of(record) if name.startswith("turn")]
    assert texts == ["let me look", "from the sub-agent", "4"]
    other["messages"][0]["content"] = None
    assert next(values["hone.text"] for name, _, _, values in spans_of(record) if name == "turn 2") == ""


def test_a_receiver_that_refuses_is_counted_and_its_spans_are_not_kept(info):
    class Refusing(memory.InMemorySpanExporter):
        def export(self, spans):
            super().export(spans)
            return type(super().export([])).FAILURE

    exporter = Refusing()
    trackers = CompositeTracker(JsonlTracker(info), {"otel": OtelTracker(info, exporter)}, info)
    for step in (1, 2):
        archive(info.run_dir.path, step, [{"seconds": 1.0}])
        trackers.log(step, {})
    assert trackers.errors == {"otel": 2} and len(exporter.get_finished_spans()) == 6
