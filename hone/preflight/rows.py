"""Rules about all rows of the datasets: prompts, data sources, ground truths, duplicates."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hone.config.derived import RunSpec
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig
from hone.data.files import Row
from hone.errors import ConfigError, DataError, Finding
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Stage, error, rule

if TYPE_CHECKING:
    from hone.rewards.scorers import Scorer


@rule("R42", RLConfig, stage=Stage.FILES)
def prompts_are_sound(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Every prompt is text, token ids or messages in order, and every row has a data source."""
    from hone.data import checks

    for rows in (evidence.train_rows, evidence.val_rows):
        yield from checks.prompts(rows, config.data.prompt_key)
        yield from checks.source_names(rows, config.data.reward_fn_key)


@rule("R42", SFTConfig, stage=Stage.FILES)
def conversations_are_sound(config: SFTConfig, evidence: Evidence) -> Iterator[Finding]:
    """Every conversation is a list of messages in order, with an assistant message."""
    from hone.data import checks

    for rows in (evidence.train_rows, evidence.val_rows):
        yield from checks.conversations(rows, config.data.messages_key)


@rule("R81", SFTConfig, stage=Stage.FILES)
def tool_calls_are_sound(config: SFTConfig, evidence: Evidence) -> Iterator[Finding]:
    """Tool calls in conversations can be read, fit their schemas and have results."""
    from hone.data import checks
    from hone.data.checks.tools import NO_LIMIT

    policy, key = config.data.tool_call_errors, config.data.messages_key
    for rows in (evidence.train_rows, evidence.val_rows):
        named = [replace(row, values={**row.values, "tools": row.values.get(config.data.tools_key)}) for row in rows]
        check = checks.check_calls(named, messages_key=key, limit=NO_LIMIT)
        for finding in checks.call_findings(named, check, stops=policy == "error"):
            action = {
                "count": "they are trained on: data.tool_call_errors=drop leaves them out",
                "drop": "they are left out",
            }
            fix = f"{finding.error.fix}; {action[policy]}" if policy in action else finding.error.fix
            parts = {"why": finding.error.why, "where": finding.error.where, "code": finding.error.code}
            yield Finding(DataError(finding.error.what, fix=fix, **parts), finding.stops)


@rule("R42", RLConfig, stage=Stage.FILES)
def sampler_fits_the_rows(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """A mixture uses data sources of the rows, and a curriculum has a difficulty for every row."""
    from hone.data.curriculum import check_weights, difficulties

    rows, sampler = evidence.train_rows, config.data.sampler
    if not rows:
        return
    try:
        if sampler.name == "mixture":
            check_weights(sampler.weights, {str(row.values.get(config.data.reward_fn_key)) for row in rows})
        elif sampler.name == "difficulty" or (sampler.name, sampler.pass_rate_of) == ("pass_rate", "difficulty"):
            difficulties([(row.uid, row.values.get("extra_info") or {}) for row in rows], sampler.difficulty_key)
    except DataError as problem:
        yield Finding(problem, stops=True)


@rule("R82", RLConfig, stage=Stage.FILES)
def stages_have_gates_and_rows(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """The stages of a curriculum have gates with thresholds in range, and every stage has rows."""
    from hone.data.curriculum import RowFacts, read_stages, rows_of_stages

    sampler, key = config.data.sampler, config.data.reward_fn_key
    if sampler.name != "stages" or sampler.class_path is not None:
        return
    try:
        stages = read_stages(sampler.stages)
        values = [row.values for row in evidence.train_rows]
        facts = [RowFacts(row.get(key), row.get("agent_name"), row.get("extra_info") or {}) for row in values]
        if facts:
            rows_of_stages(stages, facts)
    except (ConfigError, DataError) as problem:
        yield Finding(problem, stops=True)


@rule("R43", RLConfig, stage=Stage.FILES)
def every_source_has_a_reward(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Every data source has a scorer."""
    from hone.data import checks
    from hone.rewards.scorers import SCORERS, scorer_for

    reward = config.reward
    if reward.scorer or reward.terms or reward.custom_reward_function.path or _needs_no_scorer(config):
        return
    known = sorted({pattern for name in SCORERS for pattern in SCORERS.get(name).data_sources})
    rows = [row for row in (*evidence.train_rows, *evidence.val_rows) if not _brings_reward(evidence, row)]
    yield from checks.unknown_sources(
        rows, config.data.reward_fn_key, lambda source: scorer_for(source) is not None, known
    )


@rule("R44", RLConfig, stage=Stage.FILES)
def every_row_has_a_ground_truth(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Rows that a scorer scores have a ground truth that it can read."""
    from hone.data import checks

    if _needs_no_scorer(config):
        return
    reward = config.reward
    built_in = reward.custom_reward_function.path is None and not reward.terms and _needs_truth(reward.scorer)
    for rows in (evidence.train_rows, evidence.val_rows):
        scored = [row for row in rows if not _brings_reward(evidence, row)]
        yield from checks.ground_truths(
            scored, built_in, _ground_truth_problem(config) if built_in else lambda row, truth: None
        )


@rule("R46", *TREES.values(), stage=Stage.FILES)
def an_epoch_has_steps(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """The rows fill at least one batch."""
    rows, batch = len(evidence.train_rows), config.data.train_batch_size
    if 0 < rows < batch:
        yield error(
            f"the training files hold {rows} rows, fewer than data.train_batch_size={batch}: 0 steps per epoch",
            why="incomplete batches are dropped, so nothing would be trained",
            fix=f"data.train_batch_size={rows} or less, or more data",
            where="data.train_batch_size",
        )


@rule("R47", RLConfig, SFTConfig, PreferenceConfig, RewardModelConfig, stage=Stage.FILES)
def rows_differ(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """Prompts are not duplicated, validation and training do not overlap, and no data source is too rare."""
    from hone.data import checks

    train, val = evidence.train_rows, evidence.val_rows
    if isinstance(config, PreferenceConfig | RewardModelConfig):
        return  # several pairs per prompt are usual
    key = config.data.prompt_key if isinstance(config, RLConfig) else config.data.messages_key
    yield from checks.duplicates(train, key, config.data.image_key)
    yield from checks.overlap(train, val, key, config.data.image_key)
    if isinstance(config, RLConfig):
        yield from checks.rare_sources(train, config.data.reward_fn_key, config.data.train_batch_size)


def _brings_reward(evidence: Evidence, row: Row) -> bool:
    """Return whether the agent loop of a row gives the reward, so that no scorer is needed."""
    loop = evidence.loops.loop_class(row)
    return loop is not None and loop.gives_reward


def _needs_no_scorer(config: RLConfig) -> bool:
    """Return whether a reward model alone gives the reward, or teachers alone change the policy."""
    judged_alone = config.reward.reward_model.enable and config.reward.reward_model.combine == "replace"
    return judged_alone or not RunSpec(config).learns_from_reward


def _needs_truth(scorer: str | None) -> bool:
    """Return whether the scorer of all rows, or that of each data source, compares with a ground truth."""
    from hone.rewards.scorers import SCORERS

    return scorer is None or scorer not in SCORERS or SCORERS.get(scorer).needs_truth


def _ground_truth_problem(config: RLConfig) -> Any:
    """Return a function that returns why the scorer of a row rejects its ground truth; for scorers that only read text."""
    from hone.rewards.scorers import SCORERS, scorer_for

    forced, key = config.reward.scorer if config.reward.scorer in SCORERS else None, config.data.reward_fn_key

    @functools.cache
    def reader(source: str) -> Scorer | None:
        scorer = SCORERS.get(forced) if forced else scorer_for(source)
        return scorer if scorer is not None and scorer.reads_text_only and scorer.is_installed() else None

    def complaint(row: Row, truth: Any) -> str | None:
        source = str(row.values.get(key))
        scorer = reader(source)
        if scorer is None:
            return None
        try:
            scorer.compute(
                data_source=source, solution_str="", ground_truth=truth, extra_info=row.values.get("extra_info")
            )
        except (ValueError, TypeError, KeyError) as problem:
            return f"{type(problem).__name__}: {problem}"
        return None

    return complaint
