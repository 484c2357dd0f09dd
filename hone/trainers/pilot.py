"""Pilot of a run: one real generation, to measure lengths, pass rate and groups without learning signal.

The probability that all n answers to a prompt are equally good (a dead group: no advantage, no gradient) comes from a beta-binomial
model of the pass rates. Prompts differ, so it exceeds ``p^n + (1 - p)^n`` of the mean pass rate p. Mean and spread are fitted to the
answers by moments; with one answer per prompt the spread is taken as 0.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from hone.agents.base import EpisodeContext
from hone.agents.player import Player
from hone.algorithms import advantage_estimators
from hone.cluster.context import prepare_torch, run_image_processor, run_tokenizer
from hone.config.tree import RLConfig
from hone.data.episode_log import CallStatus
from hone.data.seeding import derive_seed
from hone.data.statistics import mean_and_quantiles
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import ConfigError, Finding
from hone.generation.build import build_engine
from hone.models.loading import load_policy
from hone.rewards.manager import RewardManager
from hone.rewards.score import Score
from hone.trainers.inputs import prompt_dataset, training_sampling

PROMPTS = 32
GROUP_SIZES = (2, 4, 8, 16, 32)
_MAX_ANSWERS = 8
_MAX_DEAD_SHARE, _MAX_CUT_SHARE, _MAX_SCORING_SHARE = 0.5, 0.25, 0.3
_MAX_LIMITED_CALLS_SHARE = 0.1


@dataclass(frozen=True)
class ToolUse:
    """Statistics of the tool calls of episodes.

    Attributes:
        episodes: share of the episodes with at least one call.
        cut: share of the calls whose result was truncated.
        over_limit: share of the calls that were not executed because of a limit.
        most_in_a_turn: largest number of calls in a turn.
    """

    calls: int = 0
    episodes: float = 0.0
    cut: float = 0.0
    over_limit: float = 0.0
    most_in_a_turn: int = 0

    @classmethod
    def count(cls, played: Sequence[Trajectory]) -> ToolUse:
        """Count the calls of episodes."""
        logs = [t.episode for t in played if t.part == 0]
        calls = [(number, call) for number, log in enumerate(logs) if log is not None for call in log.calls]
        if not calls:
            return cls()
        return cls(
            calls=len(calls),
            episodes=len({number for number, _ in calls}) / len(logs),
            cut=sum(call.truncated for _, call in calls) / len(calls),
            over_limit=sum(call.status is CallStatus.OVER_LIMIT for _, call in calls) / len(calls),
            most_in_a_turn=max(Counter((number, call.turn) for number, call in calls).values()),
        )


@dataclass(frozen=True)
class Pilot:
    """Result of the pilot.

    Attributes:
        answers: answers per prompt.
        prompt_lengths: prompt lengths in tokens, by quantile.
        response_lengths: response lengths in tokens, by quantile.
        cut: share of responses that reached the limit.
        pass_rate: share of responses that pass: ``acc`` = 1, or a positive reward without ``acc``.
        failed: share of responses that could not be scored.
        dead_groups: probability that a group of n has no learning signal, by n.
        generation_seconds: seconds of generation in the pilot.
        reward_seconds: seconds of scoring in the pilot.
        tokens: number of generated tokens.
    """

    prompts: int
    answers: int
    prompt_lengths: dict[str, float]
    response_lengths: dict[str, float]
    cut: float
    pass_rate: float
    reward: float
    failed: float
    dead_groups: dict[int, float]
    generation_seconds: float
    reward_seconds: float
    tokens: int
    tools: ToolUse = ToolUse()


def run_pilot(config: RLConfig, prompts: int = PROMPTS) -> Pilot:
    """Load the policy, answer the first prompts as training would, and score the answers.

    Raises:
        HoneError: model, data or reward is invalid.
    """
    model_config = config.actor_rollout_ref.model
    device = prepare_torch(config.trainer)
    tokenizer = run_tokenizer(config)
    max_samples = config.data.train_max_samples
    dataset = prompt_dataset(
        config, config.data.train_files, tokenizer, prompts if max_samples < 0 else min(prompts, max_samples)
    )
    samples = [dataset[index] for index in range(len(dataset))]

    def model() -> Any:
        with torch.no_grad():
            return load_policy(model_config, device=device, seed=config.trainer.seed).eval()

    engine = build_engine(config, model=model, tokenizer=tokenizer, device=device, shares_weights=True)
    manager = RewardManager(config.reward)
    try:
        manager.check(dataset.data_sources())
        return asyncio.run(_pilot(config, samples, engine, tokenizer, manager))
    finally:
        manager.close()
        engine.close()


async def _pilot(config: RLConfig, samples: list[Sample], engine: Any, tokenizer: Any, manager: RewardManager) -> Pilot:
    n = min(config.actor_rollout_ref.rollout.n, _MAX_ANSWERS)

    def seed_of(uid: str, index: int) -> int:
        return derive_seed(config.trainer.seed, "pilot", uid, index)

    begun = time.monotonic()
    sampling = training_sampling(config, tokenizer)
    context = EpisodeContext.from_config(config, tokenizer, run_image_processor(config, tokenizer))
    try:
        played = await Player(engine, context).play(samples, sampling, n=n, seed_of=seed_of)
    finally:
        context.close()
    generated = time.monotonic()
    scores = await manager.score(played)
    return summarise(played, scores, n, generated - begun, time.monotonic() - generated)


def summarise(
    played: Sequence[Trajectory], scores: Sequence[Score], n: int, generation_seconds: float, reward_seconds: float
) -> Pilot:
    """Summarise answers that are ordered in groups of ``n`` per prompt."""
    judged = [score for score in scores if score.error is None]
    groups = [
        [score.passes for _, score in group if score.error is None]
        for _, group in groupby(zip(played, scores, strict=True), lambda pair: pair[0].uid)
    ]
    passes = [round(n * sum(group) / len(group)) for group in groups if group] or [0]
    lengths = [len(t.response_ids) for t in played]
    return Pilot(
        prompts=len(groups),
        answers=n,
        prompt_lengths=mean_and_quantiles([len(t.prompt_ids) for t in played]),
        response_lengths=mean_and_quantiles(lengths),
        cut=sum(t.stop_reason is StopReason.LENGTH for t in played) / len(played),
        pass_rate=sum(score.passes for score in judged) / max(1, len(judged)),
        reward=sum(score.total for score in judged) / max(1, len(judged)),
        failed=sum(score.error is not None for score in scores) / len(scores),
        dead_groups={size: dead_probability(passes, n, size) for size in GROUP_SIZES},
        generation_seconds=generation_seconds,
        reward_seconds=reward_seconds,
        tokens=sum(lengths),
        tools=ToolUse.count(played),
    )


def dead_probability(passes: Sequence[int], k: int, n: int) -> float:
    """Return the probability that n answers to one prompt all pass or all fail.

    Args:
        passes: number of passing answers out of ``k``, for each prompt.
        k: answers to each prompt.
        n: size of the group.
    """
    mean = sum(passes) / (k * len(passes))
    if mean in (0.0, 1.0):
        return 1.0
    variance = sum((count / k - mean) ** 2 for count in passes) / max(1, len(passes) - 1)
    correlation = (k * variance / (mean * (1 - mean)) - 1) / (k - 1) if k > 1 else 0.0
    if correlation <= 1e-6:
        return mean**n + (1 - mean) ** n
    strength = 1 / min(correlation, 0.999) - 1
    a, b = mean * strength, (1 - mean) * strength
    return _rising(a, a + b, n) + _rising(b, a + b, n)


def pilot_findings(pilot: Pilot, config: RLConfig) -> list[Finding]:
    """Return warnings about the pilot's numbers."""
    return [*_findings(pilot, config), *_tool_findings(pilot.tools, config)]


def _findings(pilot: Pilot, config: RLConfig) -> Iterator[Finding]:
    n, key = config.actor_rollout_ref.rollout.n, "actor_rollout_ref.rollout.n"
    dead = _at(pilot, n)
    if "groups" in advantage_estimators.get(config.algorithm.adv_estimator).needs and dead > _MAX_DEAD_SHARE:
        better = next((size for size in GROUP_SIZES if size > n and pilot.dead_groups[size] <= _MAX_DEAD_SHARE), None)
        fix = (
            f"{key}={better} ({pilot.dead_groups[better]:.0%})"
            if better
            else "use easier prompts, or a better starting model"
        )
        problem = f"pass rate {pilot.pass_rate:.0%}, n={n}: {dead:.0%} of the groups would give no gradient"
        yield _warning(
            "R20", problem, "all answers of such a group pass or all fail, so all advantages are 0", fix, key
        )
    if pilot.cut > _MAX_CUT_SHARE:
        limit = config.data.max_response_length
        problem = f"{pilot.cut:.0%} of the responses reach data.max_response_length={limit} tokens"
        why = "truncated answers are rarely right, so the policy learns to be short"
        yield _warning("R64", problem, why, f"data.max_response_length={2 * limit}", "data.max_response_length")
    together = pilot.generation_seconds + pilot.reward_seconds
    if pilot.reward_seconds > _MAX_SCORING_SHARE * together and pilot.reward_seconds > 1:
        problem = f"scoring takes {pilot.reward_seconds:.1f} s, generation {pilot.generation_seconds:.1f} s"
        fix = f"reward.num_workers={2 * config.reward.num_workers}, or use an asynchronous function"
        yield _warning("R53", problem, "training waits for scoring", fix, "reward.num_workers")


def _tool_findings(tools: ToolUse, config: RLConfig) -> Iterator[Finding]:
    """Yield warnings about tool calls affected by limits (R37)."""
    several, block = config.actor_rollout_ref.rollout.multi_turn, "actor_rollout_ref.rollout.multi_turn"
    if tools.cut > _MAX_LIMITED_CALLS_SHARE:
        limit, key = several.max_tool_response_length, f"{block}.max_tool_response_length"
        problem = f"{tools.cut:.0%} of {tools.calls} tool results were cut to {limit} tokens"
        why = "the model sees only a part of each result"
        yield _warning("R37", problem, why, f"{key}={2 * limit}, or use tools with shorter results", key)
    if tools.over_limit > _MAX_LIMITED_CALLS_SHARE:
        crowded = tools.most_in_a_turn > several.max_parallel_calls
        name = "max_parallel_calls" if crowded else "max_tool_calls"
        limit = getattr(several, name)
        enough = tools.most_in_a_turn if crowded else 2 * (limit or 1)
        problem = f"{tools.over_limit:.0%} of {tools.calls} tool calls were not executed: {name}={limit}"
        if crowded:
            problem += f", and a turn made {tools.most_in_a_turn}"
        why = "the model receives an error in place of these results"
        yield _warning("R37", problem, why, f"{block}.{name}={enough}", f"{block}.{name}")


def _warning(code: str, problem: str, why: str, fix: str, where: str) -> Finding:
    return Finding(ConfigError(problem, why=why, fix=fix, where=where, code=code), stops=False)


def describe(pilot: Pilot, config: RLConfig) -> str:
    """Return the pilot's numbers as text."""
    count = pilot.prompts * pilot.answers
    sequences = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    quantiles = ("p50", "p90", "p99", "p100")

    def shown(lengths: dict[str, float]) -> str:
        return ", ".join(f"{'max' if name == 'p100' else name} {lengths[name]:g}" for name in quantiles)

    dead = ", ".join(f"{share:.0%} with n={size}" for size, share in pilot.dead_groups.items())
    rate = pilot.tokens / max(pilot.generation_seconds, 1e-9)
    generation, reward = (seconds * sequences / count for seconds in (pilot.generation_seconds, pilot.reward_seconds))
    tools = []
    if pilot.tools.calls or config.actor_rollout_ref.rollout.multi_turn.enable:
        use = pilot.tools
        tools = [
            f"  tool calls         {use.calls}, in {use.episodes:.0%} of the episodes; {use.cut:.0%} of the results cut, "
            f"{use.over_limit:.0%} not executed"
        ]
    return "\n".join(
        [
            f"pilot: {pilot.prompts} prompts x {pilot.answers} = {count} responses",
            f"  prompt tokens      {shown(pilot.prompt_lengths)}",
            f"  response tokens    {shown(pilot.response_lengths)}; {pilot.cut:.0%} reach the limit",
            f"  reward             mean {pilot.reward:.3g}, {pilot.pass_rate:.1%} pass (acc is 1, or the reward is above 0), {pilot.failed:.0%} without a verdict",
            f"  equal rewards      in all n answers to a prompt, which then teaches nothing: {dead}",
            *tools,
            f"  generation         {pilot.generation_seconds:.1f} s, {rate:,.0f} tokens/s",
            f"  scoring            {1000 * pilot.reward_seconds / count:.2g} ms per response",
            f"  step of {sequences} sequences: about {generation:.0f} s of generation and {reward:.2g} s of scoring",
        ]
    )


def _at(pilot: Pilot, n: int) -> float:
    """Return the dead-group probability at ``n``, interpolated linearly between computed sizes."""
    sizes = sorted(pilot.dead_groups)
    low = max((size for size in sizes if size <= n), default=sizes[0])
    high = min((size for size in sizes if size >= n), default=sizes[-1])
    share = (n - low) / (high - low) if high > low else 0.0
    return (1 - share) * pilot.dead_groups[low] + share * pilot.dead_groups[high]


def _rising(a: float, total: float, n: int) -> float:
    """Return E[p^n] of a beta distribution by log-gamma functions."""
    return math.exp(math.lgamma(a + n) - math.lgamma(a) + math.lgamma(total) - math.lgamma(total + n))
