"""Episodes as text."""

from __future__ import annotations

from support.archives import table

from hone.data.episode_log import CallRecord, CallStatus, EpisodeEnd, EpisodeLog
from hone.data.types import Sample, StopReason, Trajectory
from hone.insight.records import sampled_traces, trace, trajectory_record
from hone.insight.run_directory import RunDirectory


def record(log: EpisodeLog | None, index: int = 0, part: int = 0) -> dict:
    sample = Sample("row", [1], [{"role": "user", "content": "What is 6*7?"}], "x")
    made = Trajectory("row", index, [1], [2], [1], [0.0], [0.0], "42", StopReason.STOP, sample, episode=log, part=part)
    return trajectory_record(made, score=1.5, terms={"acc": 1.0})


def log() -> EpisodeLog:
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'},
    }
    return EpisodeLog(
        messages=[
            {"role": "assistant", "content": "", "reasoning_content": "hard", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "tool_call_id": "call_0", "content": "42"},
            {"role": "assistant", "content": "#### 42"},
        ],
        end=EpisodeEnd.ANSWER,
        assistant_turns=2,
        calls=[CallRecord("calculator", {"expression": "6*7"}, CallStatus.OK, "42", turn=0, attempts=2, reward=0.5)],
        turn_rewards=[0.5, 0.0],
    )


def test_an_episode_is_read_from_top_to_bottom():
    assert trace(record(log())) == (
        "row row, episode 0: score 1.5 (acc 1)\n\n"
        "user: What is 6*7?\n"
        'assistant, turn 1, reward 0.5: (thinks) hard (calls) calculator({"expression": "6*7"})\n'
        "    calculator: ok, 2 tries, reward 0.5\n"
        "tool calculator: 42\n"
        "assistant, turn 2: #### 42\n\n"
        "ended: answer\n"
    )
    broken = log()
    broken.error = "OSError: gone"
    assert trace(record(broken)).endswith("ended: answer\nerror: OSError: gone\n")


def test_some_of_a_step_are_written_next_to_the_records(tmp_path):
    records = [record(log(), index, part) for index in range(20) for part in (0, 1)]
    text = sampled_traces(table(1, records), 5)
    assert text is not None
    assert [line.split()[3] for line in text.splitlines() if line.startswith("row row")] == [
        "0:",
        "4:",
        "8:",
        "12:",
        "16:",
    ]
    assert sampled_traces(table(1, [record(None)])) is None
    directory = RunDirectory(tmp_path)
    directory.write_rollouts(3, table(3, records))
    assert (tmp_path / "rollouts/step_3.txt").read_text().count("ended: answer") == 8
    directory.write_rollouts(4, table(4, [record(None)]))
    assert not (tmp_path / "rollouts/step_4.txt").exists()
    directory.rewind(2)
    assert list((tmp_path / "rollouts").iterdir()) == []
