"""Checks of the part Agents."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

from hone.apps.learn.work import CHECKS, Work


def calls_tool(row: dict[str, Any]) -> bool:
    """Return whether a demonstration has a call."""
    return any(message.get("tool_calls") for message in row["messages"])


def lines(work: Work, name: str) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file of the learner."""
    return [json.loads(line) for line in work.path(name).read_text(encoding="utf-8").splitlines()]


@CHECKS.register("tool_data")
def tool_data(work: Work) -> str:
    """Demonstrations with calls, a file without the broken ones, and an imitator."""
    rows = work.rows("calc/train.parquet", "messages")
    run = work.run("calc_sft", 150)
    work.path("calc_start/config.json")
    broken, sound = work.rows("broken.jsonl", "messages"), work.rows("sound.jsonl", "messages")
    rejected = lines(work, "rejected.jsonl")
    bad = [row for row, unsound in zip(broken, _unsound(work, "broken.jsonl"), strict=True) if unsound]
    work.require(len(bad) > 0, "broken.jsonl", "rows with broken calls, as the program of the text writes them", "none")
    left = sum(_unsound(work, "sound.jsonl"))
    work.require(left == 0, "sound.jsonl", "no row with a broken call", f"{left} of {len(sound)}")
    wanted = [row for row in broken if row not in bad]
    work.require(sound == wanted, "sound.jsonl", f"the {len(wanted)} sound rows, unchanged", f"{len(sound)} rows")
    work.require(len(rejected) == len(bad), "rejected.jsonl", f"{len(bad)} rejected rows", len(rejected))
    count = sum(map(calls_tool, rows))
    work.answer_number(1, count, look="Count the rows whose messages have tool_calls.")
    work.answer_number(2, len(bad), look="`hone data clean` prints the number.")
    loss = work.metric(run, "train/loss")
    return f"{count} of {len(rows)} demonstrations call the tool; {len(bad)} broken rows left out; SFT loss {loss:.2f}."


def _unsound(work: Work, name: str) -> list[bool]:
    """Return for each row of a file whether a call makes it unfit for training."""
    from hone.data.checks import check_calls, is_unsound
    from hone.data.files import EVERY_COLUMN, read_rows

    rows = read_rows(str(work.path(name)), required=(), optional=EVERY_COLUMN)
    defects = check_calls(rows, messages_key="messages", limit=2000).defects
    return [is_unsound(defects.get(number, [])) for number in range(len(rows))]


@CHECKS.register("agent_loop")
def agent_loop(work: Work) -> str:
    """Episodes with calls, whose results are given and not sampled."""
    episodes = lines(work, "episodes.jsonl")
    work.require(len(episodes) == 80, "episodes.jsonl", "80 episodes, 4 of each of 20 prompts", len(episodes))
    called = [episode for episode in episodes if (episode["episode"] or {}).get("tool_calls")]
    work.require(
        bool(called), "episodes.jsonl", "an episode that calls the calculator", "none: are the tools switched on?"
    )
    longer = [episode for episode in called if episode["episode"]["assistant_turns"] > 1]
    work.require(bool(longer), "turns", "an episode that continues after its call", "none")
    for episode in longer:
        mask = episode["response_mask"]
        work.require(
            0 in mask and len(mask) == len(episode["response_ids"]), "mask", "given tokens with mask 0", "none"
        )
    work.answer_number(1, len(called), look="Count the episodes whose tool_calls are not empty.")
    given = longer[0]["response_mask"].count(0)
    work.answer_number(2, given, look="Count the zeros in response_mask of the first episode of two turns.")
    return f"{len(called)} of {len(episodes)} episodes call the tool; {given} given tokens in the first of two turns."


@CHECKS.register("first_agent")
def first_agent(work: Work) -> str:
    """A run with tools, in which calls and scores rose."""
    run = work.run("agent", 12, {"actor_rollout_ref.rollout.multi_turn.enable": True})
    rows = [row for row in run.metrics if "tool/calls/mean" in row]
    scores = [row["critic/score/mean"] for row in rows]
    early, late = mean(scores[:3]), mean(scores[len(scores) // 2 :])
    work.require(
        late > early + 0.03,
        "score",
        f"a mean score of the second half above {early:.2f}, that of the first three steps",
        f"{late:.2f}",
    )
    calls = [row["tool/calls/mean"] for row in rows]
    work.require(
        calls[-1] > calls[0], "calls", f"more calls than {calls[0]:.2f} an episode at the end", f"{calls[-1]:.2f}"
    )
    work.answer_number(1, calls[-1], tolerance=0.011, look="hone runs show learn/agent --metric tool/calls/mean")
    stored = work.samples(run, 1, ["score", "episode"])
    right = [record["score"] == 1 for record in stored if record["episode"]["tool_calls"]]
    work.require(bool(right), "agent rollouts", "episodes with a call in step 1", "none")
    share = sum(right) / len(right)
    work.answer_number(
        2, share, tolerance=0.011, look=f"{len(right)} episodes of step 1 called the tool; count those with score 1."
    )
    return f"calls an episode {calls[0]:.2f} -> {calls[-1]:.2f}, score {early:.2f} -> {late:.2f}; {share:.2f} of the callers right in step 1."


@CHECKS.register("own_loop")
def own_loop(work: Work) -> str:
    """A run of the learner's loop: two turns an episode, with the appended text between them and mask 0 on it."""
    run = work.run("own_loop", 2)
    loop = str(run.config.get("actor_rollout_ref.rollout.agent.default_agent_loop"))
    work.require(":" in loop, "loop", "a loop of your own, such as my_loops:Twice", loop)
    given: list[int] = []
    for record in work.samples(run, 2, ["episode", "response_mask", "response_ids"]):
        mask = record["response_mask"]
        turns = record["episode"]["assistant_turns"] if record["episode"] else 1
        work.require(turns == 2, "turns", "two turns in every episode", turns)
        given.append(mask.count(0))
        inside = mask[mask.index(0) : len(mask) - mask[::-1].index(0)] if 0 in mask else []
        work.require(
            bool(inside) and not any(inside) and mask[-1] == 1,
            "mask",
            "one run of given tokens between two sampled turns",
            str(mask),
        )
    work.answer_number(
        1, given[0], look="Count the zeros in response_mask of the first row of rollouts/step_2.parquet."
    )
    return f"{len(given)} episodes of two turns, with {given[0]} given tokens between them."


@CHECKS.register("game")
def game(work: Work) -> str:
    """A run of games in which more were solved, over several turns."""
    run = work.run("game_run", 15)
    solved = [row["episode/fact/solved"] for row in run.metrics if "episode/fact/solved" in row]
    early, late = sum(solved[:3]) / 3, sum(solved[-3:]) / 3
    work.require(
        late > early + 0.02,
        "solved",
        f"more games solved in the last three steps than in the first three, {early:.2f}",
        f"{late:.2f}",
    )
    turns = [record["episode"]["assistant_turns"] for record in work.samples(run, 15, ["episode"])]
    work.require(max(turns) >= 2, "turns", "games of two turns or more", max(turns))
    work.answer_number(1, solved[0], tolerance=0.011, look="hone runs show learn/game_run --metric episode/fact/solved")
    work.answer_number(2, max(turns), look="Take the largest assistant_turns in the episodes of step 15.")
    return f"games solved {early:.2f} -> {late:.2f}; {sum(turns) / len(turns):.1f} turns a game in step 15."


CALLS = "tool/calls/mean"


@CHECKS.register("gate")
def gate(work: Work) -> str:
    """A gate that refuses the imitator because it guesses, and lets the trained agent pass."""
    reports = {
        name: json.loads(work.path(f"gate_{name}.json").read_text(encoding="utf-8")) for name in ("start", "agent")
    }
    calls = {}
    for name, report in reports.items():
        conditions = {one["name"]: one for one in report["conditions"]}
        listed = [condition for condition in conditions if CALLS in condition]
        wanted = bool(listed) and "at_least" in conditions
        work.require(wanted, f"gate_{name}.json", f"the conditions at_least and {CALLS}", ", ".join(conditions))
        calls[name] = conditions[listed[0]]
    refused, passed = calls["start"], calls["agent"]
    same = refused["bound"] == passed["bound"]
    work.require(same, "bound", "the same suite for both", f"{refused['bound']} and {passed['bound']}")
    work.require(
        not refused["passed"],
        "gate_start.json",
        f"the imitator refused: calls an episode at least above its {refused['measured']:.2f}",
        f"a bound of {refused['bound']:g}",
    )
    everything = all(one["passed"] for one in reports["agent"]["conditions"])
    bound = f"at least {passed['bound']:g}"
    work.require(
        everything,
        "gate_agent.json",
        f"the trained agent passes, with {passed['measured']:.2f} calls an episode",
        bound,
    )
    work.answer_number(1, passed["measured"], tolerance=0.011, look="It is `measured` in learn/gate_agent.json.")
    return f"{bound} calls an episode: the imitator has {refused['measured']:.2f}, the agent {passed['measured']:.2f}."
