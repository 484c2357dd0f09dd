"""Rules about distillation: settings that fit together, teachers with the policy's tokenizer, rows that have a teacher."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from hone.config.derived import RunSpec
from hone.config.distillation import (
    SAMPLED_MODES,
    TOP_K_MODES,
    WHOLE_MODES,
    DistillationConfig,
    TeacherConfig,
    is_address,
)
from hone.config.offline import SFTConfig, SFTDataConfig
from hone.config.tree import RLConfig
from hone.config.trees import model_block
from hone.errors import HoneError
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Findings, Stage, error, rule, warning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = "distillation"
SINGLE_TURN = "single_turn"
_PATIENCE = 60.0  # most seconds that a teacher's server may take for a check


@rule("R84")
def teachers_can_teach(config: RLConfig) -> Findings:
    """The settings of distillation fit together and the rest of the run."""
    settings = config.distillation
    if not settings.enable:
        return
    yield from _modes(settings)
    yield from _divergence(settings)
    actor, spec = config.actor_rollout_ref.actor, RunSpec(config)
    itself = settings.path is None and not settings.teachers
    obstacles = [
        (
            settings.by_advantage and spec.streams,
            "trainer.async_training.stream",
            "false",
            "distances of sampled tokens need old log-probs before the update, and a streamed batch gets them from it",
        ),
        (
            actor.preference_loss.loss_mode is not None,
            "actor_rollout_ref.actor.preference_loss.loss_mode",
            "null",
            "the preference loss replaces the policy loss, to which the teacher's distance belongs",
        ),
        (
            bool(config.trainer.save_microbatch_steps) and not settings.by_advantage,
            "trainer.save_microbatch_steps",
            "[]",
            "hone oracle recomputes the losses of the policy alone",
        ),
        (
            itself and settings.self_teacher == "current" and settings.enable_resource_pool,
            f"{BLOCK}.enable_resource_pool",
            "false",
            "the current weights are those of the actor's process",
        ),
        (
            itself and settings.self_teacher == "current" and settings.loss_mode in WHOLE_MODES,
            f"{BLOCK}.loss_mode",
            f"{settings.loss_mode}_topk",
            "the output layer of a divergence over the whole vocabulary is read once, from a teacher that does not change",
        ),
    ]
    for holds, key, value, why in obstacles:
        if holds:
            yield error(f"{BLOCK}.enable=true does not work with this value", why=why, fix=f"{key}={value}")
    if itself and settings.teacher_prompt is None and settings.task_weight == 0:
        yield warning(
            "the policy is its own teacher, and both have the same prompt",
            why="the distance is 0 at the start, so there is nothing to learn",
            fix=f"{BLOCK}.path=<teacher>, or {BLOCK}.teacher_prompt='{{prompt}} The solution is {{ground_truth}}.'",
        )


def _modes(settings: DistillationConfig) -> Findings:
    mode, key = settings.loss_mode, f"{BLOCK}.use_policy_gradient"
    if settings.by_advantage and mode not in SAMPLED_MODES:
        yield error(
            f"loss_mode={mode} cannot be an advantage",
            why="the divergence at a position is the same whatever token was sampled there, so its expected policy gradient is 0",
            fix=f"{key}=false, or {BLOCK}.loss_mode=k1",
        )
    if mode == "k1" and not settings.by_advantage:
        yield error(
            "loss_mode=k1 cannot be a loss of its own",
            why="the expected gradient of a log-prob over the policy's own samples is 0",
            fix=f"{key}=true, or {BLOCK}.loss_mode=k2",
        )


def _divergence(settings: TeacherConfig) -> Findings:
    mode = settings.loss_mode
    if not settings.tail_bucket and mode != "forward_kl_topk":
        yield error(
            f"tail_bucket=false works with forward_kl_topk only, not with {mode}",
            why="other divergences over some of the tokens are negative where the policy prefers other tokens",
            fix=f"{BLOCK}.tail_bucket=true",
        )
    if mode.startswith("jsd") and settings.beta == 1:
        yield error(
            "beta=1 makes the Jensen-Shannon divergence 0 for every policy",
            fix=f"{BLOCK}.beta=0.5, or {BLOCK}.loss_mode=reverse_kl",
        )


@rule("R84")
def stored_answers_have_a_teacher(config: SFTConfig) -> Findings:
    """Distillation on stored answers has a teacher, whose distances exist."""
    settings = config.distillation
    if not settings.enable:
        return
    yield from _divergence(settings)
    yield from _whole_distributions(settings)
    if settings.path is None:
        yield error(
            "distillation.enable=true without a teacher",
            why="the model itself has nothing to teach on the same answers",
            fix=f"{BLOCK}.path=<model directory or address of a server>, or {BLOCK}.enable=false",
        )


@rule("R84", Stage.FILES)
def teachers_share_the_tokenizer(config: RLConfig | SFTConfig, evidence: Evidence) -> Findings:
    """Every teacher has the tokenizer of the policy, or the distance compares spans of text."""
    settings = config.distillation
    if not settings.enable or evidence.tokenizer is None:
        return
    policy = evidence.tokenizer.get_vocab()
    on_policy = isinstance(config, RLConfig)
    for path in settings.models:
        if path is None or is_address(path):
            continue
        where = _key_of(config, path)
        try:
            teacher = _tokenizer_of(config, path).get_vocab()
        except HoneError as problem:
            yield error(
                f"the teacher '{path}' cannot be used: {problem.what}",
                why=problem.why,
                fix=f"{where}=<model directory>",
            )
            continue
        if teacher == policy or (on_policy and settings.loss_mode in SAMPLED_MODES):
            continue
        others, extra = (
            sum(teacher.get(token) != policy[token] for token in policy),
            len(teacher.keys() - policy.keys()),
        )
        works = f"{BLOCK}.loss_mode=k1, which compares spans of text" if on_policy else "`hone train` with loss_mode=k1"
        yield error(
            f"the teacher '{Path(path).name}' has another tokenizer: {others} of the policy's {len(policy)} tokens have another id or "
            f"none, and {extra} tokens of the teacher are not the policy's",
            why=f"loss_mode={settings.loss_mode} here compares both models at the same tokens",
            fix=f"{works}; or {where}=<a model with the tokenizer of the policy>",
            where=where,
        )


@rule("R84", Stage.FILES)
def spans_of_text_can_be_compared(config: RLConfig, evidence: Evidence) -> Findings:
    """A teacher with another tokenizer scores single answers in text, at temperature 1."""
    settings, rollout = config.distillation, config.actor_rollout_ref.rollout
    if not settings.enable or settings.loss_mode not in SAMPLED_MODES or evidence.tokenizer is None:
        return
    for path in settings.models:
        if path is None or is_address(path):
            continue
        try:
            teacher = _tokenizer_of(config, path)
        except HoneError:
            continue  # reported by teachers_share_the_tokenizer
        if teacher.get_vocab() == evidence.tokenizer.get_vocab():
            continue
        loops = {evidence.loops.name(row) for row in evidence.train_rows} - {SINGLE_TURN}
        obstacles = [
            (
                rollout.temperature not in (0, 1),
                f"rollout.temperature={rollout.temperature:g}",
                "log-probs of texts are those of temperature 1",
                "actor_rollout_ref.rollout.temperature=1",
            ),
            (
                RunSpec(config).keeps_support.value,
                "the policy's log-probs are over the tokens that top-k, top-p and min-p left",
                "the teacher's tokens are others, and their log-probs are over all",
                "actor_rollout_ref.rollout.keep_support=false",
            ),
            (
                bool(loops),
                f"rows are played by {', '.join(sorted(loops))}",
                "it scores single answers: the turns of others are rendered by the policy's template",
                f"actor_rollout_ref.rollout.agent.default_agent_loop={SINGLE_TURN}",
            ),
            (
                evidence.has_images,
                "rows have images",
                "a model with another tokenizer has other tokens for an image",
                "rows without images",
            ),
            (
                teacher.eos_token_id is None,
                "it has no end-of-sequence token",
                "the end of the policy's answer is compared with it",
                "an eos_token in the tokenizer_config.json of the teacher",
            ),
            (
                bool(evidence.tokenizer.chat_template) and not teacher.chat_template,
                "it has no chat template",
                "the prompt's messages are rendered by the teacher's own",
                "a chat_template in the tokenizer_config.json of the teacher",
            ),
        ]
        for holds, what, why, fix in obstacles:
            if holds:
                yield error(
                    f"the teacher '{Path(path).name}' has another tokenizer, and {what}",
                    why=why,
                    fix=f"{fix}, or a teacher with the tokenizer of the policy",
                    where=_key_of(config, path),
                )


@rule("R84")
def served_teachers_fit(config: RLConfig) -> Findings:
    """A teacher behind a server gives what the distance compares."""
    settings, rollout = config.distillation, config.actor_rollout_ref.rollout
    if not settings.enable or not settings.addresses:
        return
    mode, address = settings.loss_mode, next(iter(settings.addresses.values()))
    yield from _whole_distributions(settings)
    if rollout.temperature not in (0, 1):
        yield error(
            f"rollout.temperature={rollout.temperature:g} with the teacher '{address}', a server",
            why="a server gives log-probs of temperature 1, and the policy's are divided by its own",
            fix="actor_rollout_ref.rollout.temperature=1, or the directory of the teacher",
        )
    keeps = RunSpec(config).keeps_support
    if mode in SAMPLED_MODES and keeps.value:
        yield error(
            f"the policy's log-probs are over the tokens that top-k, top-p and min-p left, and those of '{address}' over all",
            why="the distance of a token would count how many tokens were left",
            fix="actor_rollout_ref.rollout.keep_support=false, or the directory of the teacher",
        )


def _whole_distributions(settings: TeacherConfig) -> Findings:
    mode = settings.loss_mode
    if mode in WHOLE_MODES and settings.addresses:
        yield error(
            f"loss_mode={mode} needs the weights of the teacher, and '{next(iter(settings.addresses.values()))}' is a server",
            why="a server gives log-probs of some tokens, not whole distributions",
            fix=f"{BLOCK}.loss_mode={mode}_topk, or the directory of the teacher",
        )


@rule("R84", Stage.FILES)
def served_teachers_answer(config: RLConfig | SFTConfig, evidence: Evidence) -> Findings:
    """The server of every teacher answers, with enough log-probs, for the policy's tokens."""
    settings = config.distillation
    if not settings.enable or not settings.addresses or evidence.tokenizer is None:
        return
    from hone.training.served_teacher import ServedTeacher, TeacherError

    if evidence.has_images:
        yield error(
            "rows have images, which a teacher's server does not get",
            why="its log-probs would be of answers to other prompts",
            fix="the directory of the teacher in place of an address, or rows without images",
            where=BLOCK,
        )
        return
    top = settings.topk if settings.loss_mode in TOP_K_MODES else 0
    data = config.data
    needed = data.max_length if isinstance(data, SFTDataConfig) else data.max_prompt_length + data.max_response_length
    patience = dataclasses.replace(settings.server, timeout=min(_PATIENCE, settings.server.timeout), retries=1)
    for address in settings.addresses.values():
        try:
            asyncio.run(ServedTeacher(address, patience).check(evidence.tokenizer, top, needed))
        except TeacherError as problem:
            where = _key_of(config, address)
            yield error(problem.what, why=problem.why, fix=problem.fix, where=where)


@rule("R84", Stage.FILES)
def every_row_has_a_teacher(config: RLConfig, evidence: Evidence) -> Findings:
    """Every data source has a teacher, and every row the fields of the teacher's prompt."""
    settings = config.distillation
    if not settings.enable:
        return
    rows, key = evidence.train_rows, config.data.reward_fn_key
    if settings.teachers and settings.path is None:
        sources = {str(row.values.get(key)) for row in rows} - settings.teachers.keys()
        if sources:
            yield error(
                f"data source {', '.join(sorted(sources))} has no teacher; {BLOCK}.teachers has those of "
                f"{', '.join(sorted(settings.teachers))}",
                fix=f"{BLOCK}.path=<teacher of all other data sources>",
                where=f"{BLOCK}.teachers",
            )
    if settings.teacher_prompt is not None:
        yield from _prompt_fields(config, evidence)


def _tokenizer_of(config: RLConfig | SFTConfig, path: str) -> PreTrainedTokenizerBase:
    from hone.data.tokenizer import load_tokenizer

    return load_tokenizer(path, trust_remote_code=model_block(config)[1].trust_remote_code)


def _key_of(config: RLConfig | SFTConfig, path: str) -> str:
    teachers = config.distillation.teachers.values() if isinstance(config, RLConfig) else ()
    return f"{BLOCK}.teachers" if path in map(str, teachers) else f"{BLOCK}.path"


def _prompt_fields(config: RLConfig, evidence: Evidence) -> Findings:
    from hone.data.teacher_prompt import KEY, fields_of, fields_of_row

    try:
        named = fields_of(str(config.distillation.teacher_prompt))
    except ValueError as problem:
        yield error(
            f"the braces of the teacher's prompt do not match: {problem}",
            fix="write a brace of the text itself twice: {{ or }}",
            where=KEY,
        )
        return
    every_column = config.reward.custom_reward_function.path is not None  # other columns are part of extra_info then
    for row in evidence.train_rows:
        truth = (row.values.get("reward_model") or {}).get("ground_truth")
        extra = {**(row.values if every_column else {}), **(row.values.get("extra_info") or {})}
        fields = fields_of_row("", truth, extra)
        missing = sorted(set(named) - fields.keys())
        if missing:
            yield error(
                f"{row.where} has no {', '.join(missing)}, which the teacher's prompt names; it has {', '.join(sorted(fields))}",
                why="the teacher would not see what it teaches from",
                fix=f"{KEY}=<a text with fields that every row has>, or rows with {', '.join(missing)}",
            )
            return
