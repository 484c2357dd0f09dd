"""Rules about all rows of the datasets: prompts, sources, truths, duplicates, images; and the reward, tried on a few rows."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hone.config.derived import RunSpec
from hone.config.offline import PreferenceConfig, RewardModelConfig, SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block, parallel_block
from hone.data.files import ANSWER_COLUMNS, Row, file_list
from hone.errors import ConfigError, DataError, Finding, HoneError
from hone.generation.options import sends_adapter
from hone.preflight.evidence import Evidence
from hone.preflight.layouts import actor_processes
from hone.preflight.rules import Check, Findings, Stage, error, rule
from hone.training.backends.registry import BACKENDS, backend_of

if TYPE_CHECKING:
    from hone.rewards.scorers import Scorer
_ENGINES = ("native", "vllm")
_COMPARED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Models whose images were compared between vLLM and the trainer."""
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "ulysses_sequence_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
)


@rule("R42", Stage.FILES)
def prompts_are_sound(config: RLConfig, evidence: Evidence) -> Findings:
    """Every prompt is text, token ids or messages in order, and every row has a data source."""
    from hone.data import checks

    for rows in (evidence.train_rows, evidence.val_rows):
        yield from checks.prompts(rows, config.data.prompt_key)
        yield from checks.source_names(rows, config.data.reward_fn_key)


@rule("R42", Stage.FILES)
def conversations_are_sound(config: SFTConfig, evidence: Evidence) -> Findings:
    """Every conversation is a list of messages in order, with an assistant message."""
    from hone.data import checks

    for rows in (evidence.train_rows, evidence.val_rows):
        yield from checks.conversations(rows, config.data.messages_key)


@rule("R81", Stage.FILES)
def tool_calls_are_sound(config: SFTConfig, evidence: Evidence) -> Findings:
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


@rule("R42", Stage.FILES)
def sampler_fits_the_rows(config: RLConfig, evidence: Evidence) -> None:
    """A mixture uses data sources of the rows, and a curriculum has a difficulty for every row."""
    from hone.data.curriculum import check_weights, difficulties

    rows, sampler = evidence.train_rows, config.data.sampler
    if not rows:
        return
    if sampler.name == "mixture":
        check_weights(sampler.weights, {str(row.values.get(config.data.reward_fn_key)) for row in rows})
    elif sampler.name == "difficulty" or (sampler.name, sampler.pass_rate_of) == ("pass_rate", "difficulty"):
        difficulties([(row.uid, row.values.get("extra_info") or {}) for row in rows], sampler.difficulty_key)


@rule("R82", Stage.FILES)
def stages_have_gates_and_rows(config: RLConfig, evidence: Evidence) -> None:
    """The stages of a curriculum have gates with thresholds in range, and every stage has rows."""
    from hone.data.curriculum import RowFacts, read_stages, rows_of_stages

    sampler, key = config.data.sampler, config.data.reward_fn_key
    if sampler.name != "stages" or sampler.class_path is not None:
        return
    stages = read_stages(sampler.stages)
    values = [row.values for row in evidence.train_rows]
    facts = [RowFacts(row.get(key), row.get("agent_name"), row.get("extra_info") or {}) for row in values]
    if facts:
        rows_of_stages(stages, facts)


@rule("R43", Stage.FILES)
def every_source_has_a_reward(config: RLConfig, evidence: Evidence) -> Findings:
    """Every data source has a scorer."""
    reward = config.reward
    if reward.scorer or reward.terms or reward.custom_reward_function.path or _needs_no_scorer(config):
        return
    rows = [row for row in (*evidence.train_rows, *evidence.val_rows) if not _brings_reward(evidence, row)]
    yield from unknown_sources(rows, config.data.reward_fn_key)


def unknown_sources(rows: Sequence[Row], key: str) -> Findings:
    """Yield a finding about the data sources that no built-in scorer scores."""
    from hone.data import checks
    from hone.rewards.scorers import SCORERS, scorer_for

    known = sorted({pattern for name in SCORERS for pattern in SCORERS.get(name).data_sources})
    yield from checks.unknown_sources(rows, key, lambda source: scorer_for(source) is not None, known)


@rule("R44", Stage.FILES)
def every_row_has_a_ground_truth(config: RLConfig, evidence: Evidence) -> Findings:
    """Rows that a scorer scores have a ground truth that it can read."""
    from hone.data import checks
    from hone.rewards.bench import needs_truths

    if _needs_no_scorer(config):
        return
    built_in = needs_truths(config.reward)
    for rows in (evidence.train_rows, evidence.val_rows):
        scored = [row for row in rows if not _brings_reward(evidence, row)]
        yield from checks.ground_truths(
            scored,
            built_in,
            _ground_truth_problem(config) if built_in else lambda row, truth: None,
            answer_key=config.data.answer_key,
            others=lambda: _answer_columns(evidence),
        )


def _answer_columns(evidence: Evidence) -> Collection[str]:
    """Return the columns of the training files' first row that may hold the right answer."""
    try:
        files = file_list(evidence.config.data.train_files)
        (row,) = evidence.read_rows(files, required=(), optional=ANSWER_COLUMNS, max_rows=1)
    except HoneError:
        return ()
    return row.values


@rule("R46", Stage.FILES)
def an_epoch_has_steps(config: AnyConfig, evidence: Evidence) -> Findings:
    """The rows fill at least one batch."""
    rows, batch = len(evidence.train_rows), config.data.train_batch_size
    if 0 < rows < batch:
        yield error(
            f"the training files hold {rows} rows, fewer than data.train_batch_size={batch}: 0 steps per epoch",
            why="incomplete batches are dropped, so nothing would be trained",
            fix=f"data.train_batch_size={rows} or less, or more data",
        )


@rule("R47", Stage.FILES)
def rows_differ(config: AnyConfig, evidence: Evidence) -> Findings:
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


def _ground_truth_problem(config: RLConfig) -> Any:
    """Return a function that returns why the scorer of a row rejects its ground truth; for scorers that only read text."""
    from hone.rewards.scorers import SCORERS, scorer_for

    forced, key = config.reward.scorer if config.reward.scorer in SCORERS else None, config.data.reward_fn_key

    @functools.cache
    def reader(source: str) -> Scorer | None:
        scorer = SCORERS.get(forced) if forced else scorer_for(source)
        return scorer if scorer is not None and scorer.reads_text_only and scorer.is_installed() else None

    def problem_of(scorer: Scorer, source: str, truth: Any, extra_info: Any = None) -> str | None:
        try:
            scorer.compute(data_source=source, solution_str="", ground_truth=truth, extra_info=extra_info)
        except (ValueError, TypeError, KeyError) as problem:
            return f"{type(problem).__name__}: {problem}"
        return None

    once = functools.cache(problem_of)  # many rows have the same answer

    def complaint(row: Row, truth: Any) -> str | None:
        source = str(row.values.get(key))
        scorer = reader(source)
        if scorer is None:
            return None
        if isinstance(truth, str) and scorer.compute.__module__.startswith("hone."):  # these read no extra_info
            return once(scorer, source, truth)
        return problem_of(scorer, source, truth, row.values.get("extra_info"))

    return complaint


@rule("R47", Stage.FILES)
def pairs_differ_in_quality(config: PreferenceConfig | RewardModelConfig, evidence: Evidence) -> Findings:
    """The chosen answers are not mostly longer, shorter, more or less formatted than the rejected ones, and copy no prompt."""
    from hone.data import checks

    data = config.data
    yield from checks.pair_shapes(evidence.train_rows, data.prompt_key, (data.chosen_key, data.rejected_key))


@rule("R86", Stage.FILES)
def rows_are_read_whole(config: AnyConfig, evidence: Evidence) -> Findings:
    """Rows have no media that the model does not read, and as many images as places for them."""
    yield from (Finding(problem, stops=True) for problem in evidence.media)


@rule("R86", Stage.FILES)
def frozen_tower_exists(config: AnyConfig, evidence: Evidence) -> Findings:
    """A vision tower that is frozen exists."""
    from hone.data.image_processor import reads_images

    path, model = model_block(config)
    kind = evidence.model_settings.get("model_type")
    if model.freeze_vision_tower and kind is not None and not reads_images(evidence.model_settings):
        yield error(
            f"{path}.freeze_vision_tower=true, but a model of type {kind} has no vision tower that Hone trains",
            why="nothing would be frozen",
            fix=f"{path}.freeze_vision_tower=false",
        )


@rule("R86", Stage.FILES)
def run_reads_images(config: AnyConfig, evidence: Evidence) -> Findings:
    """Engine and training backend read images, if rows have some."""
    if evidence.has_images:
        yield from image_limits(config, str(evidence.model_settings.get("model_type")))


def _backend_limits(config: AnyConfig) -> Findings:
    """Yield an error if the training backend or its layout does not read images."""
    parallel, key = parallel_block(config), parallel_block(config).key
    try:
        entry = backend_of(parallel, actor_processes(config))
    except ConfigError:
        return  # R70 reports it
    if entry not in (BACKENDS.get("local"), BACKENDS.get("fsdp2")):
        yield error(
            f"rows have images, but {key('strategy')}={parallel.strategy} does not read them",
            why="only the backends local and fsdp2 have a vision tower",
            fix=f"{key('strategy')}=fsdp2",
        )
        return
    for name in _SIZES:
        if (size := getattr(parallel, name)) > 1:
            yield error(
                f"rows have images, but {key(name)}={size} divides a row over processes, which is not supported with images",
                why="the tokens of an image would be computed without its pixels",
                fix=f"{key(name)}=1: FSDP2 divides the parameters over the same processes",
            )


def image_limits(config: AnyConfig, kind: str = "qwen3_vl") -> Findings:
    """Yield an error for each setting with which a run reads no images. ``kind``: ``model_type`` of the model."""
    yield from _backend_limits(config)
    if isinstance(config, RewardModelConfig):
        yield error(
            "rows have images, but reward models do not read them",
            why="transformers has no scalar model of this kind",
            fix="leave such rows out, or describe the images in the text",
            where="model.path",
        )
    if isinstance(config, RLConfig):
        yield from _engine_limits(config, kind)
        if RunSpec(config).critic.value:
            yield error(
                "rows have images, but critics do not read them",
                why="transformers has no value model of this kind",
                fix="algorithm.adv_estimator=grpo, which needs no critic",
            )


def _engine_limits(config: RLConfig, kind: str) -> Findings:
    """Yield an error if the engine does not read images."""
    rollout, block = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.name not in _ENGINES:
        yield error(
            f"rows have images, but the engine {rollout.name} does not get them",
            why=f"Hone sends images to {' and '.join(_ENGINES)} only",
            fix=f"{block}.name=native",
        )
    elif rollout.name == "vllm" and kind not in _COMPARED:
        yield error(
            f"rows have images, but Hone does not send them to vLLM for a model of type {kind}",
            why="only Qwen2-VL, Qwen2.5-VL and Qwen3-VL were compared with the trainer there",
            fix=f"{block}.name=native",
        )
    elif sends_adapter(config):
        yield error(
            f"rows have images, but {block}.merge_lora=false",
            why="vLLM takes no adapter of a vision tower",
            fix=f"{block}.merge_lora=true",
        )


_QUESTIONS = {
    "R49": "Correct answers score higher than garbage, and not all answers get the same reward.",
    "R50": "The reward function can be loaded and called with the arguments of a run.",
    "R51": "The reward function returns a finite number for every response, always with the same terms.",
    "R52": "The reward function neither fails nor hangs in a worker process.",
    "R53": "Scoring a step takes at most a minute.",
    "R54": "Rewards have the magnitude that KL penalties and clip ranges assume.",
}


def _findings_with_code(code: str) -> Check:
    def check(config: RLConfig, evidence: Evidence) -> Findings:
        yield from (finding for finding in evidence.reward_findings if finding.error.code == code)

    check.__doc__, check.__name__ = _QUESTIONS[code], f"reward_{code}"
    return check


for _code in _QUESTIONS:
    rule(_code, Stage.REWARD)(_findings_with_code(_code))
