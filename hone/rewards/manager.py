"""Reward manager: score responses by a custom reward function, built-in scorers, or a sum of terms, and place rewards on tokens.

A reward is on the last sampled token, unless the scorer returned turn or token rewards. :class:`JudgedRewards` adds what a run has: a
reward model's scores, and the length penalty of training.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hone.config.reward import RewardConfig
from hone.data.types import Trajectory
from hone.errors import RewardError
from hone.rewards.rubric import Rubric
from hone.rewards.score import Cause, Score
from hone.rewards.scorers import SCORERS, scorer_for
from hone.rewards.services import Services
from hone.rewards.sources import ScorerSource, Source, function_source
from hone.rewards.terms import Term, combine, read_terms
from hone.rewards.worker import NoVerdictRate, Outcome, failed, is_usable, shown_number

logger = logging.getLogger("hone.rewards")


class RewardManager:
    """Manager that scores trajectories in parallel, with a time limit for each call.

    Reward functions, and built-in scorers that may hang (symbolic mathematics, verifiers of other packages), run in worker
    processes. Scorers that only read text run in this process. Scorers that use a sandbox, a judge or a server run concurrently. A
    call that raises, times out, ends its process or returns no finite number gives no verdict: it is tried again where the cause may
    pass (``reward.max_retries``), then counted, up to ``reward.max_no_verdict_rate``.

    Args:
        config: config block ``reward``.

    Raises:
        RewardError: a function cannot be loaded or called, or an option is unknown.
        ConfigError: ``reward.scorer`` or an entry of ``reward.terms`` is invalid.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.services = Services(config)
        self.terms = read_terms(config.terms)
        self._rate, self._traceback_logged = NoVerdictRate(config.max_no_verdict_rate), False
        self._custom = config.custom_reward_function.path is not None
        _check_exclusive(config, bool(self.terms))
        self.sources: list[Source] = []
        try:
            for term in self.terms:
                self.sources.append(self._source_of(term))
            if not self.terms:
                self.sources.append(self._only_source())
        except BaseException:
            self.close()
            raise

    @property
    def _is_global(self) -> bool:
        """True if the configuration chooses the scorer, not each row's data source."""
        return self._custom or bool(self.terms) or self.config.scorer is not None

    @property
    def reads_episodes(self) -> bool:
        return any(source.reads_episodes for source in self.sources)

    @property
    def may_probe(self) -> bool:
        return all(source.may_probe for source in self.sources)

    def check(self, data_sources: Mapping[str, int], self_scored: Collection[str] = ()) -> None:
        """Check, before any generation, that every data source can be scored.

        ``self_scored``: data sources whose episodes compute their reward.

        Raises RewardError: a data source has no scorer, or its scorer needs a missing package or service.
        """
        scored = (
            data_sources
            if self._is_global
            else {name: n for name, n in data_sources.items() if name not in self_scored}
        )
        for source in self.sources:
            source.check(scored)

    def identity(self, data_sources: Mapping[str, int]) -> dict[str, str]:
        return {name: version for source in self.sources for name, version in source.identity(data_sources).items()}

    async def score(self, trajectories: Sequence[Trajectory], *, training: bool = False) -> list[Score]:
        """Score each trajectory; scores are in the same order.

        ``training``: True to normalise terms as ``reward.terms`` configures; validation leaves them unchanged. Raises
        RewardError: more responses than ``max_no_verdict_rate`` have no verdict, or a trajectory's data source has no
        scorer.
        """
        allowed = self._rate.allowed(len(trajectories))
        episode_rewards = [None if self._is_global else _episode_reward(trajectory) for trajectory in trajectories]
        unscored = [
            t
            for t, reward in zip(trajectories, episode_rewards, strict=True)
            if reward is None and _episode_error(t) is None
        ]
        answered = iter(await self._outcomes(unscored, allowed, training) if unscored else [])
        outcomes: list[Outcome | None] = []
        for trajectory, reward, turn in zip(trajectories, episode_rewards, first_turns(trajectories), strict=True):
            error = _episode_error(trajectory)
            if error is not None:
                outcomes.append(Outcome(failed(f"the episode failed: {error}", Cause.EPISODE)))
                continue
            outcome = next(answered) if reward is None else Outcome(Score(reward))
            if outcome is not None:
                outcome.score = _checked(_with_episode(outcome.score, trajectory, turn))
            outcomes.append(outcome)
        self._tolerate(trajectories, outcomes, self._rate)
        scores = [outcome.score for outcome in outcomes if outcome is not None]
        assert len(scores) == len(trajectories), "responses that were skipped are more than allowed"
        return scores

    def close(self) -> None:
        for source in self.sources:
            source.close()
        self.services.close()

    # sources ---------------------------------------------------------------------------------------------------------

    def _only_source(self) -> Source:
        if self._custom:
            return function_source(self.config.custom_reward_function, self.config)
        forced = SCORERS.get(self.config.scorer) if self.config.scorer else None
        return ScorerSource(forced, self.config.scorer_kwargs, self.config, self.services)

    def _source_of(self, term: Term) -> Source:
        if term.function is not None:
            return function_source(term.function, self.config)
        return ScorerSource(SCORERS.get(str(term.scorer)), term.options, self.config, self.services)

    async def _outcomes(self, trajectories: Sequence[Trajectory], allowed: int, training: bool) -> list[Outcome | None]:
        columns = await asyncio.gather(*(self._tried(source, trajectories, allowed) for source in self.sources))
        for column in columns:
            for outcome, trajectory in zip(column, trajectories, strict=True):
                if outcome is not None and outcome.score.error is None:
                    outcome.score = place(outcome.score, trajectory)
        if not self.terms:
            return columns[0]
        rows = [[column[row] for column in columns] for row in range(len(trajectories))]
        complete_rows = [[o for o in row if o is not None] for row in rows]
        scored = [number for number, row in enumerate(complete_rows) if len(row) == len(columns)]
        scores = combine(
            self.terms,
            [[complete_rows[number][term].score for number in scored] for term in range(len(columns))],
            [trajectories[number] for number in scored],
            normalized=training,
        )
        # a row that one source skipped keeps the failure of another, which must not be lost
        outcomes = [next((o for o in row if o.score.error is not None), None) for row in complete_rows]
        for number, score in zip(scored, scores, strict=True):
            outcomes[number] = Outcome(score, next((o.traceback for o in complete_rows[number] if o.traceback), None))
        return outcomes

    async def _tried(self, source: Source, trajectories: Sequence[Trajectory], allowed: int) -> list[Outcome | None]:
        """Return a source's outcomes; responses without a verdict are tried again where the cause may pass.

        Those that the source skipped, because too many failed before them, are tried again too, unless the failures will remain.
        """
        outcomes = await source.outcomes(trajectories, allowed)
        for _ in range(self.config.max_retries):
            rows = [row for row, outcome in enumerate(outcomes) if outcome is None or _may_pass(outcome.score)]
            lasting = sum(o is not None and o.score.failed and not _may_pass(o.score) for o in outcomes)
            if not rows or lasting > allowed:
                break
            again = await source.outcomes([trajectories[row] for row in rows], allowed)
            for row, outcome in zip(rows, again, strict=True):
                outcomes[row] = outcome or outcomes[row]
        return outcomes

    # missing verdicts ------------------------------------------------------------------------------------------------

    def _tolerate(
        self,
        trajectories: Sequence[Trajectory],
        outcomes: Sequence[Outcome | None],
        rate: NoVerdictRate,
        scorer: str | None = None,
    ) -> None:
        """Log missing verdicts; raise if there are more than allowed. ``scorer`` names a scorer that is not a source."""
        bad = [
            (t, o) for t, o in zip(trajectories, outcomes, strict=True) if o is not None and o.score.error is not None
        ]
        too_many = rate.add(len(bad), len(outcomes)) or any(outcome is None for outcome in outcomes)
        if not bad:
            return
        trajectory, first = bad[0]
        causes = Counter(str(outcome.score.cause) for _, outcome in bad)
        scorer = scorer or " and ".join(source.name_of(trajectory) for source in self.sources)
        where = f"data_source '{trajectory.sample.data_source}', row {trajectory.sample.uid}, by {scorer}"
        at_least = "at least " if any(outcome is None for outcome in outcomes) else ""
        shown = ", ".join(f"{count} {cause}" for cause, count in causes.most_common())
        summary = f"{at_least}{len(bad)} of {len(outcomes)} responses have no verdict ({shown})"
        logger.warning("%s; the first (%s): %s", summary, where, first.score.error)
        self._log_traceback(outcome.traceback for _, outcome in bad)
        if not too_many:
            return
        repair = "fix the reward function" if self._custom else "see the first error"
        longer = f", or reward.timeout={2 * self.config.timeout:g}" if Cause.TIMEOUT in causes else ""
        raise RewardError(
            f"{summary}; the first ({where}): {first.score.error}",
            why=f"reward.max_no_verdict_rate={self.config.max_no_verdict_rate:g} of the latest {rate.counted} responses may lack one; "
            "the rest would be a biased selection",
            fix=f"{repair}{longer}, or accept more: reward.max_no_verdict_rate=<share>",
            where="reward",
        )

    def _log_traceback(self, traces: Any) -> None:
        trace = next((trace for trace in traces if trace), None)
        if trace is not None and not self._traceback_logged:
            self._traceback_logged = True
            logger.error("the first traceback of the reward function (later ones are only counted):\n%s", trace)


def _may_pass(score: Score) -> bool:
    return score.cause is not None and Cause(score.cause).may_pass


def _check_exclusive(config: RewardConfig, terms: bool) -> None:
    """Check that only one kind of reward is configured, and that the reward manager has an effect."""
    custom = config.custom_reward_function.path is not None
    if custom and config.scorer:
        raise RewardError(
            f"both reward.scorer={config.scorer} and a custom reward function are set",
            why="one of them would be ignored",
            fix="reward.scorer=null or reward.custom_reward_function.path=null",
        )
    if terms and (custom or config.scorer):
        other = "reward.scorer" if config.scorer else "reward.custom_reward_function.path"
        raise RewardError(
            f"both reward.terms and {other} are set",
            why="one of them would be ignored",
            fix=f"{other}=null, or add it as one of the terms",
        )
    functions = custom or any("function" in term for term in config.terms)
    if config.reward_manager == "batch" and not functions:
        raise RewardError(
            "reward.reward_manager=batch needs a custom reward function, and none is set",
            why="built-in scorers score one response at a time",
            fix="reward.reward_manager=naive or reward.custom_reward_function.path=FILE.py",
            where="reward.reward_manager",
        )


def _episode_error(trajectory: Trajectory) -> str | None:
    """Return the error of a failed episode in one line, or None."""
    if trajectory.episode is None or trajectory.episode.error is None:
        return None
    lines = trajectory.episode.error.strip().splitlines() or ["unknown"]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def _episode_reward(trajectory: Trajectory) -> float | None:
    return None if trajectory.episode is None else trajectory.episode.reward


def _checked(score: Score) -> Score:
    """Return the score, failed if its total or the reward of a turn is not usable; an episode may have computed both."""
    unusable = [number for number in (score.total, *score.placed.values()) if not is_usable(number)]
    return failed(f"total or turn reward is {shown_number(unusable[0])}") if unusable and score.error is None else score


def _with_episode(score: Score, trajectory: Trajectory, first_turn: int) -> Score:
    """Add the episode's turn rewards and its metrics to a score."""
    log = trajectory.episode
    if log is None or score.error is not None:
        return score
    score.terms = log.facts | score.terms
    ends = turn_ends(trajectory.response_mask)
    earned = log.turn_rewards[first_turn : first_turn + len(ends)]
    if any(earned):
        score.total += sum(earned)
        score.terms.setdefault("turn_rewards", sum(earned))
        place_rewards(score, zip(ends, earned, strict=False))
    return score


def turn_ends(response_mask: Sequence[int]) -> list[int]:
    """Return the last token of each assistant turn; a turn is a run of sampled tokens.

    >>> turn_ends([1, 1, 0, 0, 1, 0])
    [1, 4]
    """
    last = len(response_mask) - 1
    return [
        token
        for token, sampled in enumerate(response_mask)
        if sampled and (token == last or not response_mask[token + 1])
    ]


def first_turns(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the index of each trajectory's first turn in its episode, above 0 only for later segments."""
    order = sorted(range(len(trajectories)), key=lambda i: trajectories[i].part)
    counted: dict[tuple[str, int], int] = {}
    first = [0] * len(trajectories)
    for index in order:
        trajectory = trajectories[index]
        episode = (trajectory.uid, trajectory.index)
        first[index] = counted.get(episode, 0)
        counted[episode] = first[index] + len(turn_ends(trajectory.response_mask))
    return first


def place(score: Score, trajectory: Trajectory) -> Score:
    """Fill ``placed`` from a scorer's turn and token rewards; a response without a mask, as in trials, stays unchanged.
    Returns the score, or a failed one if the number of rewards is not that of turns or tokens.
    """
    if not trajectory.response_mask:
        return score
    ends = turn_ends(trajectory.response_mask)
    for rewards, positions, unit in (
        (score.turn_rewards, ends, "turn"),
        (score.token_rewards, range(len(trajectory.response_ids)), "token"),
    ):
        if rewards is None:
            continue
        if len(rewards) != len(positions):
            return failed(f"returned {len(rewards)} {unit}_rewards for a response of {len(positions)} {unit}s")
        place_rewards(score, zip(positions, rewards, strict=True))
    return score


def place_rewards(score: Score, rewards: Iterable[tuple[int, float]]) -> None:
    for token, reward in rewards:
        if reward:
            score.placed[token] = score.placed.get(token, 0.0) + reward


def share_rewards(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> list[Score]:
    """Give every segment of an episode the reward of the complete episode.

    Segments of an episode share one score: the last segment's score plus the turn rewards of the others. Each turn reward is
    placed in its segment; all else in the last segment.
    """
    rows: dict[tuple[str, int], list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        rows.setdefault((trajectory.uid, trajectory.index), []).append(row)
    shared, first = list(scores), first_turns(trajectories)
    for segment_rows in rows.values():
        if len(segment_rows) > 1:
            segment_rows = sorted(segment_rows, key=lambda row: trajectories[row].part)
            earned = [_earned(trajectories[row], first[row]) if scores[row].placed else {} for row in segment_rows]
            before = sum(sum(turns.values()) for turns in earned[:-1])
            complete = scores[segment_rows[-1]]
            for row, turns in zip(segment_rows[:-1], earned, strict=False):
                shared[row] = _segment_score(complete, before, turns, complete.total + before - sum(turns.values()))
            shared[segment_rows[-1]] = _segment_score(complete, before, complete.placed, before)
    return shared


def _segment_score(complete: Score, before: float, placed: dict[int, float], elsewhere: float) -> Score:
    if complete.error is not None:
        return complete
    unshaped = None if complete.unshaped is None else complete.unshaped + before
    terms = dict(complete.terms)
    if before:
        terms["turn_rewards"] = terms.get("turn_rewards", 0.0) + before
    return dataclasses.replace(
        complete,
        total=complete.total + before,
        unshaped=unshaped,
        terms=terms,
        placed=dict(placed),
        elsewhere=elsewhere,
    )


def _earned(trajectory: Trajectory, first_turn: int) -> dict[int, float]:
    """Return the turn rewards of a segment by the last token of each turn."""
    if trajectory.episode is None:
        return {}
    ends = turn_ends(trajectory.response_mask)
    return dict(zip(ends, trajectory.episode.turn_rewards[first_turn : first_turn + len(ends)], strict=False))


def token_rewards(score: Score, response_mask: Sequence[int]) -> dict[int, float]:
    """Return the reward of every token that has one; they sum to the total without rewards in other segments.

    A reward placed on a token that the policy did not sample moves to the last sampled token before it, else to the first.
    """
    sampled = [token for token, is_sampled in enumerate(response_mask) if is_sampled]
    last = sampled[-1] if sampled else len(response_mask) - 1
    rewards: dict[int, float] = {}
    for token, reward in score.placed.items():
        before = [position for position in sampled if position <= token]
        target = before[-1] if before else (sampled or [last])[0]
        rewards[target] = rewards.get(target, 0.0) + reward
    rest = score.total - sum(score.placed.values()) - score.elsewhere
    rewards[last] = rewards.get(last, 0.0) + rest
    return rewards


class JudgedRewards(RewardManager):
    """Reward manager that also uses the scores of a reward model (``reward.reward_model``), alone or added.

    With a reward model, the terms of a score are ``rm``, the model's raw score; ``rule``, the reward function's or built-in scorer's
    total, if any; and its terms. A generative reward model adds its text as ``judgement``.

    Args:
        required: whether rewards change the policy. Otherwise every answer has reward 0 if a data source has no scorer.
        max_response_length: tokens near which training penalises responses (``reward.overlong_buffer``).
    """

    def __init__(self, config: RewardConfig, *, required: bool = True, max_response_length: int = 0) -> None:
        super().__init__(config)
        self._max_response_length = max_response_length
        self.settings, self.with_rules, self._required = config.reward_model, True, required
        self._judge_rate = NoVerdictRate(config.max_no_verdict_rate)

    @functools.cached_property
    def rubric(self) -> Rubric:
        """Rubric of a generative reward model."""
        return Rubric.from_config(self.config.judge)

    def check(self, data_sources: Mapping[str, int], self_scored: Collection[str] = ()) -> None:
        """Check that every data source can be scored; with ``combine=replace`` the model alone suffices.

        Raises:
            RewardError: with ``combine=add`` a data source has no scorer, or a scorer's package is missing.
        """
        unknown = [
            source
            for source in data_sources
            if not self._is_global and source not in self_scored and scorer_for(source) is None
        ]
        if self.settings.enable and self.settings.combine == "replace" and unknown:
            self.with_rules = False
            logger.info("no scorer for data_source %s: only the reward model scores", ", ".join(sorted(unknown)))
        elif unknown and not self._required:
            self.with_rules = False
            logger.info("no scorer for data_source %s: rewards are 0", ", ".join(sorted(unknown)))
        else:
            super().check(data_sources, self_scored)

    async def score(
        self,
        trajectories: Sequence[Trajectory],
        judged: Sequence[float] | None = None,
        *,
        judgements: Sequence[str] | None = None,
        training: bool = False,
    ) -> list[Score]:
        """Score each trajectory; scores are in the same order.

        Args:
            judged: reward model's score of each; None without a reward model.
            judgements: texts of a generative reward model; a text without a score gives no verdict.
            training: True to normalise terms, and to penalise responses near the length limit.

        Raises:
            RewardError: as :meth:`RewardManager.score`, or a score of the model is not finite.
        """
        scores = await self._judged(trajectories, judged, judgements, training=training)
        if training:
            scores = penalised(scores, trajectories, self.config, self._max_response_length)
        return scores

    async def _judged(
        self,
        trajectories: Sequence[Trajectory],
        judged: Sequence[float] | None,
        judgements: Sequence[str] | None,
        *,
        training: bool,
    ) -> list[Score]:
        if judged is None and not self.with_rules:
            return [Score(0.0) for _ in trajectories]
        if judged is None:
            return await super().score(trajectories, training=training)
        for value, trajectory in zip(judged, trajectories, strict=True):
            if judgements is None and not math.isfinite(value):
                raise RewardError(
                    f"the reward model gives row {trajectory.uid} the score {value}",
                    why="training needs finite rewards",
                    fix="train the reward model again with a lower optim.lr, or actor_rollout_ref.actor.dtype=float32",
                    where="reward.reward_model.path",
                )
        scores = [Score(0.0) for _ in judged]
        if self.with_rules:
            scores = await super().score(trajectories, training=training)
        scores = [self._combined(value, score) for value, score in zip(judged, scores, strict=True)]
        return scores if judgements is None else self._with_judgements(trajectories, scores, judged, judgements)

    def _with_judgements(
        self,
        trajectories: Sequence[Trajectory],
        scores: Sequence[Score],
        judged: Sequence[float],
        judgements: Sequence[str],
    ) -> list[Score]:
        """Add the judgements to the scores; a judgement without a score gives no verdict, as for a failing scorer."""
        results, outcomes = [], []
        for score, value, judgement in zip(scores, judged, judgements, strict=True):
            result = dataclasses.replace(score, extra=score.extra | {"judgement": judgement[-500:]})
            if not math.isfinite(value):
                result = failed(f"the reward model gave {self.rubric.missing(judgement)}", Cause.SERVICE)
                result = result if score.error is None else score
            results.append(result)
            outcomes.append(Outcome(result if score.error is None else Score(0.0)))  # other errors are already counted
        self._tolerate(trajectories, outcomes, self._judge_rate, "the reward model")
        return results

    def _combined(self, value: float, rule: Score) -> Score:
        if not self.with_rules:
            return Score(self.settings.coef * value, {"rm": value})
        added = self.settings.combine == "add"
        return dataclasses.replace(
            rule,
            total=self.settings.coef * value + (rule.total if added else 0.0),
            terms=rule.terms | {"rule": rule.total, "rm": value},
            placed=rule.placed if added else {},
        )


def penalised(
    scores: Sequence[Score], trajectories: Sequence[Trajectory], config: RewardConfig, max_response_length: int
) -> list[Score]:
    """Return the scores less the penalty of ``reward.overlong_buffer``; the segments of an episode share one length."""
    overlong = config.overlong_buffer
    if not (overlong.enable or config.reward_manager == "dapo"):
        return list(scores)
    import torch

    from hone.algorithms import overlong_penalty

    lengths = torch.tensor(episode_lengths(trajectories))
    penalties = overlong_penalty(lengths, max_response_length, overlong.len, overlong.penalty_factor).tolist()
    result = []
    for score, penalty in zip(scores, penalties, strict=True):
        terms = {"overlong_reward": penalty, "overlong": float(penalty < 0)} if overlong.log else {}
        changes = {"total": score.total + penalty, "unshaped": score.total, "terms": score.terms | terms}
        result.append(dataclasses.replace(score, **changes))
    return result


def episode_lengths(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the response tokens of each trajectory's episode, over all segments, which share one limit."""
    total: Counter[tuple[str, int]] = Counter()
    for trajectory in trajectories:
        total[trajectory.uid, trajectory.index] += len(trajectory.response_ids)
    return [total[trajectory.uid, trajectory.index] for trajectory in trajectories]
