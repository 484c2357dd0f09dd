"""Bisection of two runs: the stages of each step are compared in the order in which one feeds the next.

    config -> data -> prompt order -> tokens -> log-probs -> rewards -> advantages -> micro-batches -> loss -> weights

A stage is compared by the stored samples of the step where both runs have them, and by the metrics of the step.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hone.apps.lab.compare import Run, training_differences
from hone.apps.lab.confidence import stored_samples
from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.insight.coverage import read_coverage
from hone.insight.metrics import is_timing
from hone.insight.run_files import COVERAGE_FILE

Record = Mapping[str, Any]


class Stage(StrEnum):
    """Stages of a step, in their order."""

    CONFIG = "config"
    DATA = "data"
    ORDER = "prompt order"
    TOKENS = "tokens"
    LOG_PROBS = "log-probs"
    REWARDS = "rewards"
    ADVANTAGES = "advantages"
    MICRO_BATCHES = "micro-batches"
    LOSS = "loss"
    WEIGHTS = "weights"


METRICS: tuple[tuple[Stage, tuple[str, ...]], ...] = (
    (Stage.ORDER, ("prompt_length/", "training/epoch", "curriculum/", "coverage/")),
    (Stage.TOKENS, ("response_length/", "rollout/", "num_turns/", "episode/", "tool/", "forks/")),
    (Stage.LOG_PROBS, ("training/rollout_", "rollout_corr/", "actor/entropy", "actor/sum_pi_squared")),
    (Stage.REWARDS, ("critic/score/", "reward/", "critic/greedy_baseline/")),
    (
        Stage.ADVANTAGES,
        ("critic/rewards/", "critic/advantages/", "critic/returns/", "critic/values/", "actor/reward_kl"),
    ),
    (Stage.MICRO_BATCHES, ("global_seqlen/", "perf/total_num_tokens", "train/tokens")),
    (Stage.WEIGHTS, ("actor/lr", "critic/lr", "train/lr", "val-core/", "val-aux/", "val/")),
)
"""Prefixes of the metrics of each stage; all others are of the loss."""
COMPUTED = ("loss ", "gradient ")
"""Beginnings of the facts of a saved micro-batch that the update computed."""

_KEYS: tuple[tuple[Stage, tuple[str, ...]], ...] = (
    (Stage.ORDER, ("data.", "trainer.seed", "curriculum.")),
    (Stage.TOKENS, ("actor_rollout_ref.rollout.", "actor_rollout_ref.model.", "model.", "trainer.async_training.")),
    (Stage.REWARDS, ("reward.", "custom_reward_function.", "reward_model.")),
    (Stage.ADVANTAGES, ("algorithm.", "critic.", "actor_rollout_ref.ref.")),
    (
        Stage.MICRO_BATCHES,
        ("actor_rollout_ref.actor.ppo_m", "actor_rollout_ref.actor.ppo_epochs", "trainer.balance_batch"),
    ),
    (Stage.WEIGHTS, ("actor_rollout_ref.actor.optim.", "optim.", "critic.optim.")),
    (Stage.LOSS, ("actor_rollout_ref.actor.", "loss.")),
)
"""Prefixes of keys, and the first stage that they act on."""

TOKEN_COLUMNS = (
    *((Stage.LOG_PROBS, name) for name in ("old_log_probs", "ref_log_probs", "entropy")),
    *((Stage.ADVANTAGES, name) for name in ("values", "token_rewards", "advantages", "returns")),
    *((Stage.LOSS, name) for name in ("correction", "loss_mask", "new_log_probs")),
)
"""Columns of the rollout archive by token, after those of sampling, with the stage that computes them."""

_CAUSES = {
    Stage.DATA: "the dataset file, the chat template or the tokenizer changed",
    Stage.ORDER: "another seed, sampler or number of rows, or a run that was resumed at another place",
    Stage.TOKENS: "sampling: another seed, sampling parameter, engine or version of it",
    Stage.LOG_PROBS: "the model computes other probabilities: other weights, kernels, dtype or hardware",
    Stage.REWARDS: "the scorer: its code, a service that it calls, or a random number in it",
    Stage.ADVANTAGES: "the advantage estimator, the KL term in the reward, or the critic",
    Stage.MICRO_BATCHES: "how sequences are packed: token budget, mini-batches, number of ranks",
    Stage.LOSS: "the loss, the reference policy, or rounding in the update (kernels, dtype, threads)",
    Stage.WEIGHTS: "the optimizer: learning rate, its state, or the weights of a checkpoint",
}


@dataclass(frozen=True)
class RunTrace:
    """Records of a run for a comparison with another."""

    config: Mapping[str, Any]  # dotted key to value
    # versions, hardware, commit, hashes of the reward code, by name
    circumstances: Mapping[str, Any] = field(default_factory=dict)
    # uids of the prompts of each step, in the order in which they were drawn
    draws: Mapping[int, Sequence[str]] = field(default_factory=dict)
    # reader of the sample records of each step that has some
    samples: Mapping[int, Callable[[], Sequence[Record]]] = field(default_factory=dict)
    # reader of the facts of the saved micro-batch of a step, by name
    micro_batches: Mapping[int, Callable[[], Mapping[str, Any]]] = field(default_factory=dict)
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    # reader of the tensors of each checkpoint: name to hash and L2 norm
    weights: Mapping[int, Callable[[], Mapping[str, tuple[str, float]]]] = field(default_factory=dict)
    partial: Collection[int] = ()  # steps with some of their samples: one that is absent there means nothing


@dataclass(frozen=True)
class Divergence:
    """A value that differs."""

    stage: Stage
    step: int | None  # its step; None for the configuration
    sample: str | None  # ``uid/index`` of the sample; None for values of a whole step
    what: str  # name of the value, such as ``response token 5``
    good: Any  # value of the first run
    bad: Any  # value of the second run


@dataclass(frozen=True)
class Bisection:
    """Result of comparing two runs."""

    # first difference: of the configuration, else the first one that was observed; None if there is none
    first: Divergence | None
    observed: Divergence | None  # first difference in what the runs computed; None if there is none
    config: Mapping[str, tuple[Any, Any]]  # keys that differ, with both values
    circumstances: Mapping[str, tuple[Any, Any]]  # circumstances that differ, with both values
    cause: str  # likely cause in one sentence; empty without a difference
    steps: Sequence[int]  # steps that were compared
    with_samples: int  # number of those with samples of both runs


def bisect_runs(good: RunTrace, bad: RunTrace, *, tolerance: float = 0.0) -> Bisection:
    """Find the first thing that differs between two runs.

    A relative difference of numbers up to ``tolerance`` counts as none; 0 is for runs that repeat bit for bit.
    """
    config = training_differences(good.config, bad.config)
    names = {**good.circumstances, **bad.circumstances}
    pairs = {name: (good.circumstances.get(name), bad.circumstances.get(name)) for name in names}
    circumstances = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    steps = sorted({*good.metrics, *good.draws, *good.samples} & {*bad.metrics, *bad.draws, *bad.samples})
    observed = next((d for step in steps for d in _step_differences(good, bad, step, tolerance)), None)
    first = observed
    if config:
        key, (mine, other) = next(iter(config.items()))
        first = Divergence(Stage.CONFIG, None, None, key, mine, other)
    cause = _cause(observed, config, circumstances) if first else ""
    with_samples = len(set(steps) & set(good.samples) & set(bad.samples))
    return Bisection(first, observed, config, circumstances, cause, steps, with_samples)


def _step_differences(good: RunTrace, bad: RunTrace, step: int, tolerance: float) -> Iterator[Divergence]:
    """Yield differences of a step in the order of its stages."""
    by_stage: dict[Stage, list[Divergence]] = {stage: [] for stage in Stage}
    if step in good.samples and step in bad.samples:
        stored = good.samples[step](), bad.samples[step]()
        whole = step not in good.partial and step not in bad.partial
        for item in _sample_differences(step, *stored, tolerance, whole=whole):
            by_stage[item.stage].append(item)
    if step in good.draws and step in bad.draws:
        pairs = enumerate(zip_longest(good.draws[step], bad.draws[step]), 1)
        by_stage[Stage.ORDER] += [
            Divergence(Stage.ORDER, step, mine or other, f"prompt {place} of the step", mine, other)
            for place, (mine, other) in pairs
            if mine != other
        ][:1]
    if step in good.micro_batches and step in bad.micro_batches:
        mine, other = good.micro_batches[step](), bad.micro_batches[step]()
        names = dict.fromkeys([*mine, *other])
        for name in names:
            if not _same(mine.get(name), other.get(name), tolerance):
                stage = Stage.LOSS if name.startswith(COMPUTED) else Stage.MICRO_BATCHES
                by_stage[stage].append(Divergence(stage, step, None, name, mine.get(name), other.get(name)))
    for item in _metric_differences(step, good.metrics.get(step, {}), bad.metrics.get(step, {}), tolerance):
        by_stage[item.stage].append(item)
    yield from (item for stage in Stage if stage is not Stage.WEIGHTS for item in by_stage[stage])
    if step in good.weights and step in bad.weights:
        mine, other = good.weights[step](), bad.weights[step]()
        for name in dict.fromkeys([*mine, *other]):
            if not _same_tensor(mine.get(name), other.get(name), tolerance):
                yield Divergence(Stage.WEIGHTS, step, None, name, mine.get(name), other.get(name))
    yield from by_stage[Stage.WEIGHTS]


def _sample_differences(
    step: int, good: Sequence[Record], bad: Sequence[Record], tolerance: float, *, whole: bool
) -> Iterator[Divergence]:
    """Yield the differences between the samples of a step, in the order of the first run's; with ``whole`` also absent ones."""
    mine, other = _by_name(good), _by_name(bad)
    for name in mine:
        if name not in other:
            if whole:
                yield Divergence(Stage.ORDER, step, name, "sample", "present", "absent")
            continue
        pair = mine[name], other[name]
        for key in ("messages", "prompt", "ground_truth", "data_source", "prompt_ids"):
            if pair[0].get(key) != pair[1].get(key):
                yield Divergence(Stage.DATA, step, name, key, pair[0].get(key), pair[1].get(key))
        yield from _token_differences(step, name, *pair, tolerance)
        for key in ("score", "error"):
            if not _same(pair[0].get(key), pair[1].get(key), tolerance):
                yield Divergence(Stage.REWARDS, step, name, key, pair[0].get(key), pair[1].get(key))
        terms = pair[0].get("terms") or {}, pair[1].get("terms") or {}
        for key in dict.fromkeys([*terms[0], *terms[1]]):
            if not _same(terms[0].get(key), terms[1].get(key), tolerance):
                yield Divergence(Stage.REWARDS, step, name, f"term {key}", terms[0].get(key), terms[1].get(key))
        for stage, column in TOKEN_COLUMNS:
            yield from _column_differences(stage, step, name, column, pair, tolerance)
    for name in other:
        if name not in mine and whole:
            yield Divergence(Stage.ORDER, step, name, "sample", "absent", "present")


def _token_differences(step: int, name: str, good: Record, bad: Record, tolerance: float) -> Iterator[Divergence]:
    """Yield the first differing token of a response, and before it the first differing log-prob."""
    tokens = good.get("response_ids") or [], bad.get("response_ids") or []
    places = range(max(map(len, tokens)))
    token = next((n for n in places if tokens[0][n : n + 1] != tokens[1][n : n + 1]), None)
    log_probs = good.get("rollout_log_probs") or [], bad.get("rollout_log_probs") or []
    shared = min(*map(len, log_probs), len(places) if token is None else token)
    changed = next((n for n in range(shared) if not _same(log_probs[0][n], log_probs[1][n], tolerance)), None)
    if changed is not None:
        # Other probabilities of the same tokens come before the tokens that were drawn from them.
        stage = Stage.LOG_PROBS if token is None else Stage.TOKENS
        what = f"log-prob of response token {changed + 1}"
        yield Divergence(stage, step, name, what, log_probs[0][changed], log_probs[1][changed])
    if token is not None:
        values = [side[token] if token < len(side) else None for side in tokens]
        yield Divergence(Stage.TOKENS, step, name, f"response token {token + 1}", *values)
    elif good.get("response_mask") != bad.get("response_mask"):
        yield Divergence(Stage.TOKENS, step, name, "response_mask", good.get("response_mask"), bad.get("response_mask"))


def _column_differences(
    stage: Stage, step: int, name: str, column: str, pair: tuple[Record, Record], tolerance: float
) -> Iterator[Divergence]:
    """Yield the first difference of a column by token, where both runs stored it."""
    good, bad = (side.get(column) or () for side in pair)
    for number, (mine, other) in enumerate(zip(good, bad, strict=False), 1):
        if not _same(mine, other, tolerance):
            yield Divergence(stage, step, name, f"{column} of response token {number}", mine, other)
            return


def _by_name(records: Sequence[Record]) -> dict[str, Record]:
    """Return records by ``uid/index``; a prompt that a step has twice, and segments of an episode, get a number."""
    named: dict[str, Record] = {}
    for record in records:
        name = f"{record['uid']}/{record['index']}"
        number = 2
        while name in named:
            name = f"{record['uid']}/{record['index']} #{number}"
            number += 1
        named[name] = record
    return named


def _metric_differences(
    step: int, good: Mapping[str, float], bad: Mapping[str, float], tolerance: float
) -> Iterator[Divergence]:
    for name in dict.fromkeys([*good, *bad]):
        stage = next((stage for stage, prefixes in METRICS if name.startswith(prefixes)), None)
        if name == "step" or is_timing(name):
            continue
        if not _same(good.get(name), bad.get(name), tolerance):
            yield Divergence(stage or Stage.LOSS, step, None, name, good.get(name), bad.get(name))


def _same(mine: Any, other: Any, tolerance: float) -> bool:
    if isinstance(mine, float | int) and isinstance(other, float | int):
        if math.isnan(mine) and math.isnan(other):
            return True
        return mine == other or abs(mine - other) <= tolerance * max(abs(mine), abs(other), 1e-12)
    return mine == other


def _same_tensor(mine: tuple[str, float] | None, other: tuple[str, float] | None, tolerance: float) -> bool:
    if mine is None or other is None or mine == other:
        return mine == other
    return tolerance > 0 and _same(mine[1], other[1], tolerance)


def _cause(
    observed: Divergence | None,
    config: Mapping[str, tuple[Any, Any]],
    circumstances: Mapping[str, tuple[Any, Any]],
) -> str:
    """Return the likely cause: a key that acts on the observed stage, else a circumstance, else what can change the stage."""
    if observed is None:
        keys = ", ".join(list(config)[:3])
        return f"{keys} differs, but nothing that both runs recorded does"
    order = list(Stage)
    at_stage = [key for key in config if _acts_on(key) is observed.stage]
    earlier = [key for key in config if order.index(_acts_on(key)) <= order.index(observed.stage)]
    keys = at_stage or earlier or list(config)
    if keys:
        shown = ", ".join(f"{key} ({config[key][0]} -> {config[key][1]})" for key in keys[:3])
        return f"the configuration: {shown}"
    if observed.stage is Stage.REWARDS and "reward code" in circumstances:
        return "the code of the reward changed"
    if observed.what == "prompt_ids":
        return "the same messages became other tokens: the tokenizer or the chat template changed"
    if observed.stage is Stage.TOKENS and observed.what.startswith("log-prob"):
        return "the engine gave the same tokens other probabilities: " + _with(
            "other weights, kernels, dtype or hardware", circumstances
        )
    return _with(_CAUSES[observed.stage], circumstances)


def _with(cause: str, circumstances: Mapping[str, tuple[Any, Any]]) -> str:
    if not circumstances:
        return cause
    return f"{cause}; the runs also differ in: {', '.join(circumstances)}"


def _acts_on(key: str) -> Stage:
    return next((stage for stage, prefixes in _KEYS if key.startswith(prefixes)), Stage.LOSS)


_STEP = re.compile(r"step_(\d+)")


def read_trace(run: Run) -> RunTrace:
    """Return the trace of a run; samples, micro-batches and weights are read step by step."""
    archive = open_archive(run.path / "rollouts")
    samples = stored_samples(archive.folder)
    return RunTrace(
        config=run.config,
        circumstances=_circumstances(run.record),
        draws=_draws(run.path),
        samples={step: _listed(read) for step, read in samples.items()},
        micro_batches=_readers(run.path / "microbatches", _micro_batch),
        metrics={int(row["step"]): row for row in run.metrics},
        weights=_readers(run.path / "checkpoints", _weights),
        partial=[step for step in samples if not archive.complete(step)],
    )


def _circumstances(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what surrounds a run, from ``run.json``."""
    hardware = record.get("hardware") or {}
    git = record.get("git") or {}
    return {
        **{f"version of {name}": version for name, version in (record.get("versions") or {}).items()},
        **{name: hardware[name] for name in ("cpu", "gpus") if name in hardware},
        **{f"git {name}": value for name, value in git.items()},
        "reward code": sorted((record.get("rewards") or {}).values()),
        "agent contract": record.get("agent_contract") or {},
        "downloads": record.get("downloads") or {},
        "resumed at": [entry.get("from_step") for entry in record.get("resumed") or ()],
    }


def _draws(path: Path) -> dict[int, list[str]]:
    """Return the uids whose draws ended in each step, in the order of the draws."""
    if not (path / COVERAGE_FILE).exists():
        return {}
    by_step: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for draw in read_coverage(path).draws:
        by_step[draw.step].append((draw.draw, draw.uid))
    return {step: [uid for _, uid in sorted(draws)] for step, draws in by_step.items()}


def _listed(read: Callable[[], Any]) -> Callable[[], list[dict[str, Any]]]:
    return lambda: list(read())


def _readers(folder: Path, read: Callable[[Path], dict[str, Any]]) -> dict[int, Callable[[], dict[str, Any]]]:
    """Return a reader for each ``step_N`` below a folder."""

    def reader(path: Path) -> Callable[[], dict[str, Any]]:
        return lambda: read(path)

    matches = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return {int(match[1]): reader(path) for match, path in matches if match}


def _micro_batch(path: Path) -> dict[str, Any]:
    """Return the facts of a saved micro-batch: its size and packed tokens, then the loss and its gradients."""
    try:
        about = json.loads((path / "about.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise HoneError(
            f"the saved micro-batch cannot be read: {error}", where=str(path), fix="remove the folder", code="E-runs"
        ) from None
    packed = tensor_prints([path / "computed.safetensors"])
    return {
        **{f"{name} of the micro-batch": count for name, count in about["totals"].items()},
        **{f"packed {name}": packed[name][0] for name in ("input_ids", "position_ids") if name in packed},
        "loss of the micro-batch": about["loss"],
        **{f"gradient norm of {name}": norm for name, norm in about["gradient_norms"].items()},
    }


def _weights(path: Path) -> dict[str, tuple[str, float]]:
    files = sorted((path / "actor").glob("*.safetensors")) or sorted((path / "model").glob("*.safetensors"))
    return tensor_prints(files)


def tensor_prints(files: list[Path]) -> dict[str, tuple[str, float]]:
    """Return the hash and the L2 norm of every tensor of safetensors files."""
    import torch
    from safetensors import SafetensorError, safe_open

    prints = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    tensor = tensors.get_tensor(name).contiguous()
                    digest = hashlib.sha256(tensor.flatten().view(torch.uint8).numpy()).hexdigest()[:16]
                    prints[name] = digest, float(tensor.double().norm())
        except (OSError, SafetensorError) as error:
            raise HoneError(
                f"the file cannot be read: {error}", where=str(file), fix="remove the damaged checkpoint", code="E-runs"
            ) from None
    return prints
