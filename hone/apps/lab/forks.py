"""Forks of a recorded episode: success when it is continued from any of its turns, by the model of its run."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.agents.base import EpisodeContext
from hone.agents.forking import RecordedTurn, ReplayClient, change_last_message, recorded_turns
from hone.agents.player import Player
from hone.agents.tool_agent import ChatLoop
from hone.apps.lab.compare import find_run
from hone.apps.lab.rewards.comparison import stored_episodes
from hone.config import RLConfig
from hone.config.trust import run_config
from hone.data.files import file_list
from hone.data.image_processor import load_image_processor
from hone.data.seeding import derive_seed
from hone.data.types import Sample, Trajectory, row_of
from hone.errors import ConfigError, HoneError
from hone.generation.protocol import Engine, SamplingParams
from hone.insight.archive.read import images_of
from hone.rewards.manager import RewardManager, share_rewards
from hone.rewards.score import Score
from hone.trainers.evaluation import open_model, weights_of
from hone.trainers.inputs import prompt_dataset, training_sampling
from hone.training.export import find_actor


def draw(points: Sequence[tuple[int, float, tuple[float, float]]], title: str, path: Path) -> None:
    """Write a picture of (turn, success of continuations from before it, its interval); the file extension chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    turns, success = [turn for turn, _, _ in points], [value for _, value, _ in points]
    below = [value - low for _, value, (low, _) in points]
    above = [high - value for _, value, (_, high) in points]
    figure, axes = pyplot.subplots(figsize=(max(5.0, 0.6 * len(points) + 2), 3.2))
    axes.errorbar(
        turns, success, yerr=[[max(0.0, x) for x in below], [max(0.0, x) for x in above]], marker="o", capsize=3
    )
    axes.set(
        xlabel="turns replayed before the fork", ylabel="success of continuations", ylim=(-0.05, 1.05), title=title
    )
    axes.set_xticks(turns)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForkRequest:
    """Request of `hone episode fork`; the attributes are its options."""

    run: str
    uid: str
    root: Path = Path("runs")
    turn: int | None = None  # turn before which the episode is forked, from 0; None forks before every turn
    samples: int = 8  # continuations of each fork
    step: int | None = None  # None takes the latest step of the row
    index: int | None = None  # None takes the first episode of the row
    model: str | None = None  # that continues; None takes the run's newest checkpoint
    content: str | None = None  # of the last message before the turn, in place of the recorded one
    temperature: float | None = None  # None takes the run's
    seed: int = 1


@dataclass(frozen=True)
class Fork:
    """Continuations from one turn."""

    turn: int  # number of replayed turns
    text: str  # what the policy said in the turn that follows in the record; empty after the last
    rewards: list[float]  # reward of every continuation with a verdict
    passed: list[bool]  # whether each of them passes

    @property
    def success(self) -> float:
        """Share of continuations that pass; nan without any."""
        return sum(self.passed) / len(self.passed) if self.passed else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the success (Wilson 1927)."""
        count, z = len(self.passed), 1.96
        if not count:
            return 0.0, 1.0
        centre = (self.success + z * z / (2 * count)) / (1 + z * z / count)
        half = (
            z / (1 + z * z / count) * math.sqrt(self.success * (1 - self.success) / count + z * z / (4 * count * count))
        )
        return max(0.0, centre - half), min(1.0, centre + half)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "success": self.success if self.passed else None, "interval": list(self.interval)}


@dataclass(frozen=True)
class ForkedEpisode:
    """A recorded episode and its forks; with all turns, the last one is the episode itself."""

    step: int
    uid: str
    index: int
    score: float | None  # its own reward; None without a verdict
    forks: list[Fork]


def fork(request: ForkRequest) -> ForkedEpisode:
    """Continue a recorded episode from its turns."""
    folder = find_run(request.run, request.root).path
    config = run_config(folder)
    step, record, segments = _recorded(folder, config, request)
    turns = recorded_turns(segments)
    chosen = list(range(len(turns))) if request.turn is None else [request.turn]
    if not 0 <= chosen[0] < len(turns):
        raise HoneError(
            f"the episode has {len(turns)} turns, 0 to {len(turns) - 1}, and no turn {request.turn}",
            fix=f"--turn {len(turns) - 1}",
            where="--turn",
        )
    limit = config.data.max_prompt_length + config.data.max_response_length
    engine, tokenizer = open_model(request.model or str(folder), limit)
    images = load_image_processor(weights_of(request.model or str(folder)), tokenizer)
    context = EpisodeContext.from_config(config, tokenizer, images)
    try:
        sample = _sample(config, tokenizer, segments[0], folder / "rollouts")
        sampling = training_sampling(_with_model(config, request.model or str(folder)), tokenizer)
        if request.temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=request.temperature)
        continuations = Continuations(engine, context, sample, sampling, turns, request.seed)
        played = [continuations.play(turn, request.samples, request.content) for turn in chosen]
        scores = _scores(config, [trajectory for group in played for trajectory in group])
    finally:
        context.close()
    forks = []
    for turn, group in zip(chosen, played, strict=True):
        judged = [scores.pop(0) for _ in group]
        judged = [s for s, t in zip(judged, group, strict=True) if s.error is None and t.part == 0]
        text = str(tokenizer.decode(turns[turn].token_ids, skip_special_tokens=True))
        forks.append(Fork(turn, text, [score.total for score in judged], [score.passes for score in judged]))
    stored = Score(record["score"] or 0.0, record["terms"], error=record["error"])
    if request.turn is None and stored.error is None:
        forks.append(Fork(len(turns), "", [stored.total], [stored.passes]))
    return ForkedEpisode(step, request.uid, record["index"], stored.verdict, forks)


class Continuations:
    """Player of the continuations of one recorded episode."""

    def __init__(
        self,
        engine: Engine,
        context: EpisodeContext,  # context of the run's episodes
        sample: Sample,
        sampling: SamplingParams,
        turns: Sequence[RecordedTurn],
        seed: int,
    ) -> None:
        self._engine, self._context, self._sample = engine, context, sample
        self._sampling, self._turns, self._seed = sampling, turns, seed
        loop = Player(engine, context).loop_of(sample)
        if context.multi_turn.subagents:
            raise ConfigError(
                "episodes with sub-agents cannot be forked",
                why="their conversations run at the same time, and the record does not say in which order",
                fix="fork episodes of a run with actor_rollout_ref.rollout.multi_turn.subagents=false",
                where="agent_name",
            )
        if loop.several_turns and not isinstance(loop, ChatLoop):
            raise ConfigError(
                f"episodes of the loop '{type(loop).__name__}' cannot be forked",
                why="its program holds the conversation, and cannot be put into the middle of one",
                fix="fork episodes of single_turn, tool_agent, interaction or environment",
                where="agent_name",
            )

    def play(self, turn: int, count: int, content: str | None = None) -> list[Trajectory]:
        """Return ``count`` continuations from a turn, with another ``content`` of the last message before it if given.

        Raises:
            EpisodeError: the conversation does not repeat.
        """
        player = Player(
            self._engine, self._context, ReplayClient(self._engine, self._turns, turn, changed=content is not None)
        )
        loop = player.loop_of(self._sample)
        if content is not None:
            if turn == 0 or not isinstance(loop, ChatLoop):
                raise ConfigError(
                    "there is no message of a tool, a user or an environment before turn 0",
                    fix="fork at a later turn",
                    where="--turn",
                )
            change_last_message(loop, turn, content)

        def seed_of(uid: str, index: int) -> int:
            return derive_seed(self._seed, "fork", turn, uid, index)

        return asyncio.run(player.play([self._sample], self._sampling, n=count, seed_of=seed_of))


def _recorded(folder: Path, config: RLConfig, request: ForkRequest) -> tuple[int, dict[str, Any], list[Trajectory]]:
    """Return step, record and segments of the episode to fork."""
    data = config.data
    columns = {"reward_fn_key": data.reward_fn_key, "prompt_key": data.prompt_key}
    rows = [
        (step, record, trajectory)
        for step, record, trajectory in stored_episodes(folder / "rollouts", file_list(data.train_files), **columns)
        if record["uid"] == request.uid and request.step in (None, step) and request.index in (None, record["index"])
    ]
    if not rows:
        raise HoneError(
            f"no recorded episode of row {request.uid}"
            + (f" in step {request.step}" if request.step is not None else "")
            + (f" with index {request.index}" if request.index is not None else ""),
            fix=f"`hone runs samples {request.run}` lists episodes; trainer.rollout_dump_freq=1 records those of every step",
            where="UID",
            code="E-runs",
        )
    step, first, _ = max(rows, key=lambda row: (row[0], -row[1]["index"]))
    segments = [row for row in rows if row[0] == step and row[1]["index"] == first["index"]]
    segments.sort(key=lambda row: row[1]["part"])
    return step, segments[0][1], [trajectory for _, _, trajectory in segments]


def _sample(config: RLConfig, tokenizer: Any, recorded: Trajectory, archive: Path) -> Sample:
    dataset = prompt_dataset(config, config.data.train_files, tokenizer, config.data.train_max_samples)
    name = row_of(recorded.uid)
    row = next((row for row in map(dataset.__getitem__, range(len(dataset))) if row.uid == name), None)
    sample = recorded.sample if row is None else row
    images = images_of(archive, recorded.prompt_ids)
    return dataclasses.replace(sample, prompt_ids=list(recorded.prompt_ids), images=images)


def _with_model(config: RLConfig, model: str) -> RLConfig:
    """Return the configuration with the model that continues, whose generation settings name the stop tokens."""
    roles = config.actor_rollout_ref
    chosen = dataclasses.replace(roles.model, path=str(find_actor(model)))
    return dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(roles, model=chosen))


def _scores(config: RLConfig, trajectories: Sequence[Trajectory]) -> list[Score]:
    numbered = [dataclasses.replace(t, uid=f"{t.uid}/{number}") for number, t in enumerate(trajectories)]
    rewards = RewardManager(dataclasses.replace(config.reward, max_no_verdict_rate=1.0))
    try:
        return share_rewards(numbered, asyncio.run(rewards.score(numbered)))
    finally:
        rewards.close()
