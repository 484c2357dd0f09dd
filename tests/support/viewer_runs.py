"""Invented runs in the format of a real one, for tests, pictures and benchmarks of the viewer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hone.config import load_config
from hone.config.tree import RLConfig
from hone.insight.archive.write import to_table, write_step, write_vocabulary
from hone.insight.coverage import CoverageLedger
from hone.insight.run_directory import RunDirectory
from hone.trainers.algorithm import Algorithm
from hone.trainers.stages import data_flow

PIECES = re.compile(r" ?[A-Za-z]+| ?\d|\n+|<[^<>]{1,40}>| ?[^\w\s]|\s")
NAMES = ("Maya", "Omar", "Lucy", "Ines", "Theo", "Noor", "Sam", "Ravi")
THINGS = ("apples", "stamps", "marbles", "books", "coins", "shells", "cards", "pencils")
OPENINGS = ("Let me work through this step by step.", "First, write down what is known.", "Start with what {name} has.")
CHECKS = (
    "Let me check that again.",
    "To verify, add the numbers once more.",
    "Wait, did I read the question correctly?",
)
CONFIG = """\
data: {train_files: data/train.parquet, train_batch_size: 48, max_response_length: 256}
actor_rollout_ref:
  model: {path: models/base}
  actor: {clip_ratio: 0.2, loss_agg_mode: token-mean, optim: {lr: 0.0003}}
  rollout: {name: native, 'n': 4, temperature: 1.0}
algorithm: {adv_estimator: grpo}
trainer: {total_training_steps: 100, seed: 1}
"""


@dataclass
class Invented:
    """One answer before it becomes a record: its text in pieces, with a 1 for those that the policy wrote."""

    pieces: list[tuple[str, int]]
    score: float
    terms: dict[str, float]
    stop_reason: str
    episode: dict[str, Any] | None = None
    error: str | None = None
    text: str = field(default="")

    def __post_init__(self) -> None:
        self.text = self.text or "\n".join(piece for piece, mask in self.pieces if mask)


class Vocabulary:
    """Ids of the pieces of all texts, in order of their first use."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<eos>": 0}

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(piece, len(self.ids)) for piece in PIECES.findall(text)]


class Writer:
    """Author of prompts and answers.

    Args:
        seed: seed of all choices.
        agents: share of prompts that are played with a calculator.
    """

    def __init__(self, seed: int, agents: float) -> None:
        self.random, self.agents = np.random.default_rng(seed), agents

    def prompt(self, row: int) -> dict[str, Any]:
        random = np.random.default_rng(row)
        first, more, less = (int(value) for value in (*random.integers(10, 60, 2), random.integers(2, 10)))
        name, thing = NAMES[row % len(NAMES)], THINGS[row // len(NAMES) % len(THINGS)]
        question = (
            f"{name} has {first} {thing}. {name} finds {more} more and gives {less} away. "
            f"How many {thing} does {name} have?"
        )
        return {
            "row": row,
            "numbers": (first, more, less),
            "name": name,
            "answer": first + more - less,
            "question": question,
            "difficulty": float(random.uniform()),
            "agent": random.uniform() < self.agents,
        }

    def answer(self, prompt: dict[str, Any], progress: float) -> Invented:
        """Write one answer; ``progress`` from 0 to 1 makes answers right more often, and longer."""
        if prompt["agent"]:
            return self._episode(prompt, progress)
        random, (first, more, less) = self.random, prompt["numbers"]
        right = random.uniform() < 0.1 + 0.85 * progress * (1.3 - prompt["difficulty"])
        result = prompt["answer"] if right else prompt["answer"] + int(random.choice([-10, -1, 1, 2, 10]))
        lines = [OPENINGS[random.integers(len(OPENINGS))].format(name=prompt["name"])]
        lines += [f"{first} + {more} = {first + more}", f"{first + more} - {less} = {result}"]
        for _ in range(random.poisson(0.3 + 4 * progress**2)):
            lines.append(CHECKS[random.integers(len(CHECKS))] + f" {first} + {more} - {less} = {result}.")
        cut = random.uniform() < 0.04 + 0.1 * progress**3
        formatted = random.uniform() > 0.1
        lines.append(f"#### {result}" if formatted else f"The answer is {result}.")
        text = "\n".join(lines)
        text = text[: int(len(text) * 0.7)] if cut else text
        accuracy = float(right and formatted and not cut)
        terms = {"accuracy": accuracy, "format": 0.1 * float(formatted and not cut)}
        return Invented([(text, 1)], sum(terms.values()), terms, "length" if cut else "stop")

    def _episode(self, prompt: dict[str, Any], progress: float) -> Invented:
        random, (first, more, less) = self.random, prompt["numbers"]
        right = random.uniform() < 0.3 + 0.6 * progress
        expression = f"{first} + {more} - {less}" if right else f"{first} + {more}"
        broken = random.uniform() < 0.3 * (1 - progress)
        calls, messages, pieces = [], [], []
        for turn, attempt in enumerate([True, False] if broken else [False]):
            arguments = {"expresion": expression} if attempt else {"expression": expression}
            result = (
                "error: missing argument 'expression'" if attempt else str(prompt["answer"] if right else first + more)
            )
            said = "I use the calculator." if turn == 0 else "The argument was misspelt; I call it again."
            shown = f'{{"name": "calculator", "arguments": {{"{next(iter(arguments))}": "{expression}"}}}}'
            pieces.append((f"{said}\n<tool_call>\n{shown}\n</tool_call>", 1))
            pieces.append((f"\n<tool_response>\n{result}\n</tool_response>\n", 0))
            function = {"name": "calculator", "arguments": shown}
            messages.append(
                {"role": "assistant", "content": said, "tool_calls": [{"id": f"c{turn}", "function": function}]}
            )
            messages.append({"role": "tool", "name": "calculator", "content": result})
            calls.append(
                {
                    "name": "calculator",
                    "arguments": arguments,
                    "status": "invalid_arguments" if attempt else "ok",
                    "result": result,
                    "turn": turn,
                    "attempts": 1,
                    "truncated": False,
                    "left_out": 0,
                    "reward": -0.1 if attempt else 0.0,
                    "seconds": round(float(random.exponential(0.4)), 3),
                }
            )
        result = prompt["answer"] if right else first + more
        pieces.append((f"#### {result}", 1))
        messages.append({"role": "assistant", "content": f"#### {result}"})
        terms = {"accuracy": float(right), "tools": -0.1 * broken}
        episode = {
            "end": "answer",
            "num_turns": 1 + len(messages),
            "assistant_turns": len(calls) + 1,
            "user_turns": 0,
            "reward": None,
            "turn_rewards": [call["reward"] for call in calls] + [0.0],
            "facts": {},
            "tool_calls": calls,
            "messages": messages,
            "error": None,
            "tokenization": None,
            "retries": 0,
            "conversations": [],
            "generate_seconds": 1.2,
            "tool_seconds": sum(call["seconds"] for call in calls),
        }
        return Invented(pieces, sum(terms.values()), terms, "stop", episode)


def records_of_step(
    writer: Writer, vocabulary: Vocabulary, step: int, rows: list[int], n: int, progress: float
) -> list[dict[str, Any]]:
    """Return the records of one step: ``n`` answers to each prompt."""
    random, records = writer.random, []
    for row in rows:
        prompt = writer.prompt(row)
        answers = [writer.answer(prompt, progress) for _ in range(n)]
        scores = np.array([answer.score for answer in answers])
        spread = scores.std()
        prompt_ids = vocabulary.encode(prompt["question"])
        for index, answer in enumerate(answers):
            advantage = float((scores[index] - scores.mean()) / (spread + 1e-6)) if spread > 0 else 0.0
            ids, mask = [], []
            for piece, sampled in answer.pieces:
                ids += (tokens := vocabulary.encode(piece))
                mask += [sampled] * len(tokens)
            if answer.stop_reason == "stop":
                ids.append(0)
                mask.append(1)
            sampled = np.array(mask, np.float32)
            noise = random.standard_normal((3, len(ids))).astype(np.float32)
            old = -np.abs(noise[0]) * 0.7 * sampled
            rollout = old + 0.004 * noise[1] * sampled * (1 + 30 * (random.uniform(size=len(ids)) < 0.01))
            new = np.minimum(old + sampled * (0.02 * np.sign(advantage) + 0.06 * noise[2]), 0)
            records.append(
                {
                    "step": step,
                    "uid": f"train:{row}",
                    "index": index,
                    "part": 0,
                    "fate": "trained" if spread > 0 or step % 3 else "filtered",
                    "data_source": "agents" if prompt["agent"] else "word_problems",
                    "row": row,
                    "seed": str(1000 * step + index),
                    "prompt": prompt["question"],
                    "messages": [{"role": "user", "content": prompt["question"]}],
                    "text": answer.text,
                    "ground_truth": str(prompt["answer"]),
                    "stop_reason": answer.stop_reason,
                    "seconds": round(0.4 + 0.01 * len(ids), 3),
                    "score": float(scores[index]),
                    "terms": answer.terms,
                    "episode": answer.episode,
                    "prompt_ids": prompt_ids,
                    "response_ids": ids,
                    "response_mask": mask,
                    "loss_mask": mask,
                    "token_versions": [step - 1 if value else -1 for value in mask],
                    "rollout_log_probs": rollout.tolist(),
                    "sampling_log_probs": rollout.tolist(),
                    "old_log_probs": old.tolist(),
                    "new_log_probs": new.tolist(),
                    "entropy": (np.abs(noise[1]) * sampled * (1.2 - progress)).tolist(),
                    "token_rewards": [0.0] * (len(ids) - 1) + [float(scores[index])],
                    "advantages": (advantage * sampled).tolist(),
                    "returns": (advantage * sampled).tolist(),
                    "correction": (np.minimum(np.exp(old - rollout), 2.0) * sampled).tolist(),
                }
            )
    return records


def metrics_of_step(records: list[dict[str, Any]], progress: float, random: np.random.Generator) -> dict[str, float]:
    """Return metrics under their real names."""
    scores = np.array([record["score"] for record in records])
    lengths = np.array([len(record["response_ids"]) for record in records])
    cut = np.mean([record["stop_reason"] == "length" for record in records])
    stages = {"gen": 1.9 + progress, "reward": 0.2, "old_log_prob": 0.8, "update_actor": 1.1, "update_weights": 0.05}
    return {
        "critic/rewards/mean": float(scores.mean()),
        "critic/score/mean": float(scores.mean()),
        "critic/score/min": float(scores.min()),
        "critic/score/max": float(scores.max()),
        "response_length/mean": float(lengths.mean()),
        "response_length/clip_ratio": float(cut),
        "actor/entropy": 0.8 * math.exp(-2 * progress) + 0.02 * float(random.uniform()),
        "actor/ppo_kl": 0.0008 * (1 + float(random.uniform())),
        "actor/grad_norm": 0.6 + 0.3 * float(random.uniform()),
        "actor/pg_clipfrac": 0.01 + 0.02 * float(random.uniform()),
        "actor/pg_loss": -0.004 * float(random.uniform()),
        "actor/lr": 3e-4 * (1 - progress),
        "reward/zero_std_group_ratio": float(np.mean(scores == scores.max())),
        "perf/throughput": 3500.0 + 200 * float(random.uniform()),
        "timing_s/step": sum(stages.values()),
        **{f"timing_s/{name}": seconds * (0.9 + 0.2 * float(random.uniform())) for name, seconds in stages.items()},
    }


def write_run(
    folder: Path,
    *,
    steps: int = 6,
    groups: int = 8,
    n: int = 4,
    prompts: int = 24,
    seed: int = 0,
    agents: float = 0.25,
    finished: bool = True,
) -> Path:
    """Write a run directory and return it.

    Args:
        folder: the directory.
        steps: training steps.
        groups: prompts per step, drawn in turn from ``prompts``.
        n: answers to a prompt.
        prompts: rows of the dataset.
        seed: seed of all choices.
        agents: share of prompts that are played with a calculator.
        finished: whether the run ended.
    """
    run = RunDirectory(folder)
    command = ["hone", "train", "--preset=grpo", "actor_rollout_ref.actor.optim.lr=3e-4", "trainer.seed=1"]
    config = load_config(RLConfig, ["algorithm.adv_estimator=grpo"])
    run.start(seed=seed, config_yaml=CONFIG, command=command, flow=data_flow(config, Algorithm.planned(config)))
    writer, vocabulary, ledger = Writer(seed, agents), Vocabulary(), CoverageLedger(run.coverage)
    for step in range(1, steps + 1):
        append_step(run, writer, vocabulary, ledger, step, steps, groups, n, prompts)
    if finished:
        run.update_status("finished", exit_reason="all steps done", last_step=steps)
    run.close()
    return folder


def append_step(
    run: RunDirectory,
    writer: Writer,
    vocabulary: Vocabulary,
    ledger: CoverageLedger,
    step: int,
    steps: int,
    groups: int,
    n: int,
    prompts: int,
) -> None:
    """Add one step to a run: records, metrics and fates."""
    progress = (step - 1) / max(1, steps - 1)
    rows = [((step - 1) * groups + number) % prompts for number in range(groups)]
    records = records_of_step(writer, vocabulary, step, rows, n, progress)
    write_vocabulary(run.path / "rollouts", list(vocabulary.ids))
    write_step(run.path / "rollouts", step, to_table(records))
    for number, row in enumerate(rows):
        group = records[number * n : (number + 1) * n]
        draw = ledger.draw(row=row, epoch=0)
        ledger.admit(draw, uid=f"{step}:{row}", source=group[0]["data_source"])
        ledger.finish(draw)
        reward = float(np.mean([record["score"] for record in group]))
        tokens = float(np.mean([len(record["response_ids"]) for record in group]))
        if group[0]["fate"] == "filtered":
            ledger.filtered(draw, "equal answers", reward=reward, tokens=tokens)
        else:
            ledger.trained(draw, lag=0, reward=reward, tokens=tokens)
    ledger.write(step)
    run.log_metrics(step, metrics_of_step(records, progress, writer.random))
