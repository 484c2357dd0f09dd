"""How the boxes of the part Agents are played."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
from algorithms import last, metrics
from playing import Play, Wrong, changed


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


CLEAN = "\nhone data clean learn/broken.jsonl --out learn/sound.jsonl --rejected learn/rejected.jsonl"


def demonstrations(learn: Path) -> list[str]:
    rows = pq.read_table(learn / "calc/train.parquet")["messages"].to_pylist()
    called = sum(any(message["role"] == "tool" for message in messages) for messages in rows)
    return [str(called), str(len(read(learn / "broken.jsonl")) - len(read(learn / "sound.jsonl")))]


def given(learn: Path) -> list[str]:
    called = [line for line in read(learn / "episodes.jsonl") if line["episode"]["tool_calls"]]
    longer = next(line for line in called if line["episode"]["assistant_turns"] == 2)
    return [str(len(called)), str(sum(mask == 0 for mask in longer["response_mask"]))]


def stored(learn: Path, run: str, step: int) -> list[dict]:
    return pq.read_table(learn / run / f"rollouts/step_{step}.parquet").to_pylist()


def callers(learn: Path) -> list[str]:
    rows = [row for row in stored(learn, "agent", 1) if json.loads(row["episode"])["tool_calls"]]
    share = sum(row["score"] == 1 for row in rows) / len(rows)
    return [f"{last(learn, 'agent', 'tool/calls/mean'):.2f}", f"{share:.2f}"]


LOOP = '''cat > my_loops.py <<'END'
from hone.agents.base import AgentLoop


class Twice(AgentLoop):
    """Asks once more."""

    async def play(self, episode):
        await episode.generate()
        episode.append(self.context.tokenizer.encode(" again: ", add_special_tokens=False))
        SECOND
END
'''


def own(second: str) -> str:
    train = changed("own_loop")
    return "rm -rf learn/own_loop\n" + LOOP.replace("SECOND", second) + train[train.index("hone train") :]


def between(learn: Path) -> list[str]:
    return [str(stored(learn, "own_loop", 2)[0]["response_mask"].count(0))]


def played(learn: Path) -> list[str]:
    solved = [row["episode/fact/solved"] for row in metrics(learn, "game_run") if "episode/fact/solved" in row]
    turns = [json.loads(row["episode"])["assistant_turns"] for row in stored(learn, "game_run", 15)]
    return [f"{solved[0]:.2f}", str(max(turns))]


def gates(bound: str) -> str:
    return changed("gate", ("{at_least: 0.01}", f"{{at_least: {bound}}}"))


CALLS = "tool/calls/mean"


def measured(learn: Path, model: str = "agent") -> float:
    report = json.loads((learn / f"gate_{model}.json").read_text())
    return next(one["measured"] for one in report["conditions"] if CALLS in one["name"])


PLAYS = {
    "tool_data": Play(
        "calc/train.parquet",
        CLEAN,
        answers=demonstrations,
        wrong=[
            Wrong("sound.jsonl", "{text}"),
            Wrong("sound.jsonl", "cp learn/broken.jsonl learn/sound.jsonl; echo '{}' > learn/rejected.jsonl"),
            Wrong("sound.jsonl", CLEAN + "\nhead -9 learn/sound.jsonl > few && mv few learn/sound.jsonl"),
        ],
        after=[
            Wrong("answer 1", answers=["100", "9"]),
            Wrong("answer 2", answers=lambda learn: [demonstrations(learn)[0], "1"]),
        ],
    ),
    "agent_loop": Play(
        "episodes.jsonl",
        answers=given,
        wrong=[Wrong("episodes.jsonl", changed("agent_loop", ("--n 4", "--n 1")))],
        after=[Wrong("answer 1", answers=["81", "1"]), Wrong("answer 2", answers=lambda learn: [given(learn)[0], "0"])],
    ),
    "first_agent": Play(
        "agent",
        answers=callers,
        wrong=[
            Wrong(
                "agent steps",
                changed(
                    "first_agent",
                    ("trainer.total_training_steps=12 trainer.test_freq=12", "trainer.total_training_steps=1"),
                ),
            )
        ],
        do="rm -r learn/agent\n{text}",
        after=[
            Wrong("answer 1", answers=["9", "1"]),
            Wrong("answer 2", answers=lambda learn: [callers(learn)[0], "0.01"]),
        ],
    ),
    "own_loop": Play(
        "own_loop",
        own("await episode.generate()"),
        answers=between,
        wrong=[Wrong("turns", "{text}")],
        after=[Wrong("answer 1", answers=["0"])],
    ),
    "game": Play(
        "game_run",
        answers=played,
        after=[
            Wrong("answer 1", answers=["1.5", "3"]),
            Wrong("answer 2", answers=lambda learn: [played(learn)[0], "1"]),
        ],
    ),
    "gate": Play(
        "gate_start.json",
        gates("0.7"),
        answers=lambda learn: [f"{measured(learn):.2f}"],
        wrong=[Wrong("gate_start.json", gates("0.001")), Wrong("gate_agent.json", gates("1.9"))],
        after=[Wrong("answer 1", answers=["1.5"])],
    ),
}
