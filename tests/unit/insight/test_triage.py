"""Triage of failed episodes: constructed episodes of every kind, their first failing turn, bucket and change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.archives import archive

from hone.apps.lab.compare import Run
from hone.apps.lab.triage import Bar, Bucket, Kind, Triage, first_failure, has_failed, markdown, triage

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
SETTINGS = {
    "data.max_response_length": 64,
    f"{MULTI_TURN}.tool_config_path": "tools.yaml",
    f"{MULTI_TURN}.max_assistant_turns": 3,
    f"{MULTI_TURN}.max_episode_seconds": 20.0,
    f"{MULTI_TURN}.tool_timeout": 30.0,
    f"{MULTI_TURN}.format": "hermes",
    "reward.timeout": 30.0,
    "reward.custom_reward_function.path": "my_reward.py",
    "reward.custom_reward_function.name": "score",
    "data.train_files": "train.parquet",
}
Record = dict[str, Any]


def call(turn: int, status: str = "ok", name: str = "calculator", result: str = "4", **arguments: Any) -> Record:
    filled = None if status == "malformed" else arguments or {"expression": "2+2"}
    times = {"attempts": 1, "truncated": False, "left_out": 0, "reward": 0.0}
    return {"name": name, "arguments": filled, "status": status, "result": result, "turn": turn} | times


def episode(*calls: Record, end: str = "answer", turns: int = 3, error: str | None = None, **facts: float) -> Record:
    """A conversation of some turns, each with the text `turn N`."""
    messages = []
    for number in range(1, turns + 1):
        messages += [{"role": "assistant", "content": f"turn {number}"}, {"role": "user", "content": "go"}]
    return {
        "end": end,
        "messages": messages,
        "tool_calls": list(calls),
        "turn_rewards": [],
        "facts": facts,
        "error": error,
        "conversations": [],
        "assistant_turns": turns,
    }


def record(**values: Any) -> Record:
    """A wrong answer without anything special."""
    usual = {"uid": "train:0", "index": 0, "part": 0, "step": 1, "fate": "trained", "data_source": "sums", "text": "5"}
    judged = {"score": 0.0, "terms": {"acc": 0.0}, "extra": {}, "error": None, "cause": None}
    return {**usual, **judged, "ground_truth": "4", "stop_reason": "stop", "episode": None, **values}


def unjudged(cause: str, error: str, **values: Any) -> Record:
    return record(score=None, terms={}, cause=cause, error=error, fate="failed", **values)


CASES = {
    "scorer_down": (unjudged("timeout", "longer than 30 s"), 1, "reward.timeout=60 (now 30)"),
    "scorer_error": (unjudged("raised", "Traceback\nKeyError: 'x'"), 1, "my_reward.py:score: repair"),
    "episode_error": (
        unjudged("episode", "OSError: gone", episode=episode(end="error", turns=2, error="x\nOSError: gone")),
        *(2, "play one episode alone"),
    ),
    "tool_error": (
        unjudged("episode", "e", episode=episode(call(0), call(1, "error", result="ValueError: bad"), end="error")),
        *(2, "tools.yaml: run `calculator` alone"),
    ),
    "tool_timeout": (record(episode=episode(call(1, "timeout"))), 2, f"{MULTI_TURN}.tool_timeout=60 (now 30)"),
    "time_limit": (record(episode=episode(end="time")), 3, f"{MULTI_TURN}.max_episode_seconds=40 (now 20)"),
    "hacked": (record(score=1.0, terms={"acc": 0.0, "length": 1.0}), 1, "reward.terms with clip"),
    "right_rejected": (record(text="so it is 4"), 1, "my_reward.py:score: read how it finds the answer"),
    "no_ground_truth": (record(ground_truth=None), 1, "train.parquet: fill reward_model.ground_truth"),
    "hallucinated_tool": (
        record(episode=episode(call(0), call(1, "unknown_tool", name="calculater"))),
        *(2, "`calculater` is called, but not a tool"),
    ),
    "invalid_arguments": (
        record(episode=episode(call(0, "invalid_arguments"))),
        1,
        "tools.yaml: describe the arguments",
    ),
    "malformed_call": (record(episode=episode(call(2, "malformed", name=""))), 3, f"{MULTI_TURN}.format (now hermes)"),
    "repeated_call": (
        record(episode=episode(*(call(turn, result=str(turn)) for turn in range(4)), turns=4)),
        *(3, f"{MULTI_TURN}.max_tool_calls=4 (now no limit)"),
    ),
    "too_many_calls": (record(episode=episode(end="tool_calls")), 3, f"raise {MULTI_TURN}.max_tool_calls"),
    "cut": (record(stop_reason="length", text="it is per"), 1, "data.max_response_length=128 (now 64)"),
    "turn_limit": (record(episode=episode(end="assistant_turns")), 3, f"{MULTI_TURN}.max_assistant_turns=6 (now 3)"),
    "empty": (record(text=" "), 1, "hone data template"),
    "wrong_format": (record(terms={"acc": 0.0, "format": 0.0}), 1, "ask for the form"),
    "no_tool_call": (record(episode=episode(turns=1)), 1, "none yet: 1 of 1 prompts have a success"),
    "wrong_content": (record(episode=episode(call(0))), 3, "none yet: 1 of 1 prompts have a success"),
}
"""Kind to an episode that shows it, its first failing turn, and a part of the change."""


def triaged(folder: Path, *records: Record, settings: Record | None = None) -> Triage:
    rows = [{**one, "uid": f"train:{number // 2}", "index": number % 2} for number, one in enumerate(records)]
    archive(folder, 1, rows)
    return triage(Run("demo", folder, {}, [], SETTINGS if settings is None else settings))


def test_there_is_a_case_for_every_kind() -> None:
    assert set(CASES) == {kind.value for kind in Kind}
    assert {kind.bucket for kind in Kind} == set(Bucket)


@pytest.mark.parametrize("name", CASES)
def test_the_kind_and_its_turn_are_found_and_one_change_proposed(name: str, tmp_path: Path) -> None:
    failing, turn, change = CASES[name]
    played = episode(call(0)) if name == "no_tool_call" else None
    right = record(text="4", score=1.0, terms={"acc": 1.0, "format": 1.0}, episode=played)
    result = triaged(tmp_path, failing, right)
    (failure,) = result.failures
    assert (failure.kind, failure.turn) == (Kind(name), turn), failure
    if failing["episode"]:
        assert failure.text == f"turn {turn}"
    assert result.because == Kind(name) and result.change is not None and change in result.change
    data = result.record()
    assert data["failed"] == 1 and data["episodes"] == 2 and data["buckets"] == {Kind(name).bucket.value: 1}
    page = markdown(result)
    assert f"`{name}`" in page and result.change in page and f"step 1, uid train:0, episode 0, turn {turn}" in page


def test_the_earliest_turn_decides() -> None:
    both = episode(call(0, "invalid_arguments"), call(1, "unknown_tool", name="x"), end="tokens")
    assert first_failure(record(episode=both), Bar(0.5)).kind is Kind.INVALID_ARGUMENTS
    later = episode(call(1, "unknown_tool", name="x"), call(2, "invalid_arguments"), end="tokens")
    assert first_failure(record(episode=later), Bar(0.5)).kind is Kind.HALLUCINATED_TOOL


def test_a_missing_verdict_comes_before_what_the_model_did() -> None:
    played = episode(call(0, "unknown_tool", name="x"))
    assert first_failure(unjudged("crash", "gone", episode=played), Bar(0.5)).kind is Kind.SCORER_DOWN
    assert first_failure(unjudged("episode", "gone", episode=played), Bar(0.5)).kind is Kind.HALLUCINATED_TOOL


def test_the_same_result_makes_the_second_call_a_loop() -> None:
    twice = episode(call(0), call(1))
    assert first_failure(record(episode=twice), Bar(0.5)).kind is Kind.REPEATED_CALL
    other = episode(call(0), call(1, result="5"))
    assert first_failure(record(episode=other), Bar(0.5)).kind is Kind.WRONG_CONTENT


def test_turns_of_sub_agents_are_counted_where_they_were() -> None:
    """The conversation's turns are 0 and 3; the sub-agent's are 1 and 2."""
    main = episode(call(2, "unknown_tool", name="x"), turns=2)
    said = [{"role": "assistant", "content": f"part {number}"} for number in (1, 2)]
    main["conversations"] = [{"turn": 1, "turns": 2, "messages": said}]
    failure = first_failure(record(episode=main), Bar(0.5))
    assert (failure.turn, failure.turns, failure.text) == (3, 4, "part 2")


@pytest.mark.parametrize(
    ("values", "failed"),
    [
        ({"score": 0.9, "terms": {"acc": 0.0}}, True),  # accuracy decides where there is one
        ({"score": 0.1, "terms": {"acc": 1.0}}, False),
        ({"score": 0.4, "terms": {}}, True),
        ({"score": 0.6, "terms": {}}, False),
        ({"score": 0.9, "terms": {}, "episode": episode(solved=0.0)}, True),
        ({"score": 0.1, "terms": {}, "episode": episode(solved=1.0)}, False),
        ({"score": None, "terms": {"acc": 1.0}}, True),
    ],
)
def test_what_counts_as_failed(values: Record, failed: bool) -> None:
    assert has_failed(record(**values), Bar(0.5)) == failed


def test_equal_rewards_of_zero_are_all_failures_and_equal_ones_above_are_none(tmp_path: Path) -> None:
    for score, failed in ((0.0, 4), (1.0, 0)):
        result = triaged(tmp_path / str(score), *[record(score=score, terms={})] * 4)
        assert sum(task.failed for task in result.tasks) == failed
        assert (result.change is None) == (failed == 0)
    assert "0 of 4 episodes" in markdown(result)


def test_a_kind_with_a_fifth_decides_before_answers_that_are_only_wrong(tmp_path: Path) -> None:
    cut = record(stop_reason="length")
    assert triaged(tmp_path / "a", *[record()] * 4, cut).because is Kind.CUT
    assert triaged(tmp_path / "b", *[record()] * 5, cut).because is Kind.WRONG_CONTENT


def test_a_reward_that_pays_wrong_answers_half_of_a_right_one_is_no_hacking(tmp_path: Path) -> None:
    right = record(score=1.1, terms={"acc": 1.0})
    shaped = record(score=0.1, terms={"acc": 0.0, "form": 1.0})
    assert [one.kind for one in triaged(tmp_path / "a", right, shaped, record()).failures] == [Kind.WRONG_CONTENT] * 2
    paid = record(score=0.9, terms={"acc": 0.0, "form": 1.0})
    kinds = [one.kind for one in triaged(tmp_path / "b", right, paid, record()).failures]
    assert kinds == [Kind.HACKED, Kind.WRONG_CONTENT]


def test_prompts_without_a_success_ask_for_easier_rows_or_demonstrations(tmp_path: Path) -> None:
    change = triaged(tmp_path / "a", *[record()] * 4).change
    assert change is not None and "data.sampler.name=stages" in change
    right = record(score=1.0, terms={"acc": 1.0}, episode=episode(call(0)))
    change = triaged(tmp_path / "b", right, *[record()] * 5).change  # one of three prompts has a success
    assert change == "demonstrations of calls first (hone sft), with tools.yaml"


def test_tasks_are_apart_sampled_evenly_and_hopeless_prompts_counted(tmp_path: Path) -> None:
    rows = [record(data_source="hard", text=f"wrong {number}") for number in range(8)]
    rows += [record(data_source="easy", score=1.0, terms={"acc": 1.0}), record(data_source="easy")]
    archive(tmp_path, 1, [{**one, "uid": f"train:{n // 2}", "index": n % 2} for n, one in enumerate(rows)])
    result = triage(Run("demo", tmp_path, {}, [], SETTINGS), per_task=4)
    assert [(task.name, task.episodes, task.failed, task.hopeless) for task in result.tasks] == [
        ("hard", 8, 8, (4, 4)),
        ("easy", 2, 1, (0, 1)),
    ]
    assert [failure.text for failure in result.tasks[0].failures] == [f"wrong {number}" for number in (0, 2, 4, 6)]


def test_of_an_episode_in_parts_the_last_counts(tmp_path: Path) -> None:
    first = record(text="so far", uid="a", ground_truth="4")
    archive(tmp_path, 1, [first, {**first, "part": 1, "text": "it is 4"}])
    (failure,) = triage(Run("demo", tmp_path, {}, [], SETTINGS)).failures
    assert failure.kind is Kind.RIGHT_REJECTED


def test_the_newest_steps_are_read(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        archive(tmp_path, step, [record(step=step, text=f"of {step}")])
    run = Run("demo", tmp_path, {}, [], SETTINGS)
    assert [one.text for one in triage(run, steps=2).failures] == ["of 2", "of 3"]
    assert [one.text for one in triage(run, step=1).failures] == ["of 1"]
