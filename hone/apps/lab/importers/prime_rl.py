"""Importer of the rollouts that prime-rl saves (``rollouts/step_<N>/``).

A line is a trace of verifiers: a graph of messages (``nodes``) with the tokens that each one adds, and named ``rewards``. An episode of
several agents is a line with ``traces``. Every path from the first message to a last one is a sequence. Lines of older releases have
``prompt``, ``completion``, ``reward``, ``metrics``, and ``trajectory`` with the tokens of each call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.apps.lab.importers.base import (
    Importer,
    Row,
    answer_text,
    conversation,
    episode,
    first_row,
    matching_files,
    number,
    openai_message,
    prompt_uid,
    read_json_lines,
    split_values,
)
from hone.data.images import content_text

_STEP = re.compile(r"step_(\d+)")
_STREAMS = {
    "rollout_log_probs": "logprobs",
    "old_log_probs": "trainer_logprobs",
    "ref_log_probs": "reference_logprobs",
    "entropy": "entropies",
    "advantages": "advantages",
}
"""Column of the archive to values of a node, one for each sampled token."""


def _files(source: Path) -> list[Path]:
    files = [*matching_files(source, "*rollouts.jsonl"), *matching_files(source, "traces.jsonl")]
    if not files:
        return []
    keys = first_row(files[0]).keys()
    return files if {"nodes"} <= keys or {"traces"} <= keys or {"prompt", "completion", "reward"} <= keys else []


def _read(path: Path) -> Iterator[Row]:
    named = next((int(match[1]) for part in reversed(path.parts) if (match := _STEP.fullmatch(part))), 0)
    evaluated = path.name.startswith("eval") or "evals" in path.parts
    for line in read_json_lines(path):
        shared = line.get("prime_rl") or {}
        for trace in line.get("traces", [line]):
            facts = {**shared, **((trace.get("info") or {}).get("prime_rl") or {})}
            step = number(facts.get("step"))
            validation = evaluated or facts.get("kind") == "eval"
            rows = _trace_rows(trace, facts) if "nodes" in trace else _legacy_rows(trace)
            for part, row in enumerate(rows):
                fate = "validation" if validation else row.pop("fate", "trained")
                yield {**row, "step": named if step is None else int(step), "part": part, "fate": fate}


def _trace_rows(trace: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Row]:
    nodes = trace["nodes"]
    rewards = {name: reward for name, reward in (trace.get("rewards") or {}).items() if reward is not None}
    terms, _ = split_values({**(trace.get("metrics") or {}), **{name: r["score"] for name, r in rewards.items()}})
    error = next((f"{e.get('type')}: {e.get('message')}" for e in reversed(trace.get("errors") or [])), None)
    failed = error is not None and not trace.get("ok")
    task = trace.get("task") or {}
    data = task.get("data") or {}
    timing = (trace.get("timing") or {}).get("agent") or {}
    shared = {
        "data_source": facts.get("env_name"),
        "ground_truth": data.get("answer"),
        "stop_reason": "error" if failed else None,
        "seconds": (timing.get("end") or 0) - (timing.get("start") or 0) or None,
        "score": None if failed else sum(r["score"] * r.get("weight", 1.0) for r in rewards.values()),
        "terms": terms,
        "error": error,
        **({"fate": "failed"} if failed else {}),
    }
    parents = {node.get("parent") for node in nodes}
    for leaf in [place for place in range(len(nodes)) if place not in parents]:
        path: list[Mapping[str, Any]] = []
        place: int | None = leaf
        while place is not None:
            path.insert(0, nodes[place])
            place = nodes[place].get("parent")
        first = next((at for at, node in enumerate(path) if node.get("sampled")), len(path))
        prompt = [openai_message(node["message"]) for node in path[:first]]
        after = [openai_message(node["message"]) for node in path[first:]]
        sampled = [node["message"].get("content") for node in path if node.get("sampled")]
        uid = task.get("key") or task.get("hash") or facts.get("group_id") or prompt_uid(prompt)
        yield {
            **shared,
            "uid": str(uid),
            "prompt": "\n".join(content_text(message.get("content")) for message in prompt),
            "messages": prompt,
            "text": "\n".join(content_text(content) for content in sampled),
            "episode": episode(after, error),
            **_node_tokens(path, facts),
        }


def _node_tokens(path: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns by token of a path; the prompt is what precedes the first sampled token."""
    ids = [token for node in path for token in node.get("token_ids") or ()]
    mask = [int(flag) for node in path for flag in node.get("mask") or ()]
    if not ids or len(ids) != len(mask):
        return {}
    begin = mask.index(1) if 1 in mask else len(mask)
    columns: dict[str, Any] = {"prompt_ids": ids[:begin], "response_ids": ids[begin:], "response_mask": mask[begin:]}
    for column, name in _STREAMS.items():
        if any(node.get(name) for node in path):
            columns[column] = [value for node in path for value in _spread(node.get("mask") or (), node.get(name))][
                begin:
            ]
    version = facts.get("policy_version")
    if isinstance(version, int):
        columns["token_versions"] = [version if flag else -1 for flag in mask[begin:]]
    return columns


def _spread(mask: Sequence[Any], values: Sequence[float] | None) -> Iterator[float]:
    """Yield a value for each token: the next one for a sampled token, else 0."""
    rest = iter(values or ())
    for flag in mask:
        yield next(rest, 0.0) if flag else 0.0


def _legacy_rows(line: Mapping[str, Any]) -> Iterator[Row]:
    text, messages = conversation(line["prompt"])
    terms, _ = split_values(line.get("metrics") or {})
    _, turns = conversation(line["completion"])
    extra = {"advantage": line["advantage"]} if number(line.get("advantage")) is not None else {}
    example = line.get("example_id")
    row = {
        "uid": prompt_uid(line["prompt"]) if example is None else f"{line.get('task') or 'example'}:{example}",
        "data_source": line.get("task"),
        "prompt": text,
        "messages": messages,
        "text": answer_text(line["completion"]),
        "ground_truth": line.get("answer"),
        "score": number(line["reward"]),
        "terms": terms,
        "extra": extra,
        "error": None if line.get("error") is None else str(line["error"]),
        "episode": None if turns is None else episode(turns),
    }
    segments = _merged(line.get("trajectory") or ())
    for tokens in segments or [{}]:
        yield {**row, **tokens}


def _merged(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, list[Any]]]:
    """Return the tokens of each segment: a call continues the segment while its prompt begins with all tokens of it."""
    segments: list[dict[str, list[Any]]] = []
    for tokens in (call.get("tokens") for call in calls):
        if not tokens:
            return []
        prompt, answer = list(tokens["prompt_ids"]), list(tokens["completion_ids"])
        known = segments[-1]["prompt_ids"] + segments[-1]["response_ids"] if segments else []
        if not segments or prompt[: len(known)] != known:
            segments.append({"prompt_ids": prompt, "response_ids": [], "response_mask": [], "rollout_log_probs": []})
            known = prompt
        given = prompt[len(known) :]
        segment = segments[-1]
        segment["response_ids"] += given + answer
        segment["response_mask"] += [0] * len(given) + [
            int(flag) for flag in tokens.get("completion_mask") or [1] * len(answer)
        ]
        segment["rollout_log_probs"] += [0.0] * len(given) + list(
            tokens.get("completion_logprobs") or [0.0] * len(answer)
        )
    return segments


PRIME_RL = Importer("prime-rl", "prime-rl: `rollouts/step_<N>/*rollouts.jsonl` or `traces.jsonl`", _files, _read)
