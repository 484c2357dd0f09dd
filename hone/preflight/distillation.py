"""Rules about distillation: settings that fit together, teachers with the policy's tokenizer, rows that have a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hone.config.derived import RunSpec
from hone.config.distillation import SAMPLED_MODES, WHOLE_MODES, DistillationConfig
from hone.config.tree import RLConfig
from hone.errors import HoneError
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Finding, Stage, error, rule, warning

BLOCK = "distillation"


@rule("R84", RLConfig)
def teachers_can_teach(config: RLConfig) -> Iterator[Finding]:
    """The settings of distillation fit together and the rest of the run."""
    settings = config.distillation
    if not settings.enable:
        return
    yield from _modes(settings)
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
            yield error(f"{BLOCK}.enable=true does not work with this value", why=why, fix=f"{key}={value}", where=key)
    if itself and settings.teacher_prompt is None and settings.task_weight == 0:
        yield warning(
            "the policy is its own teacher, and both have the same prompt",
            why="the distance is 0 at the start, so there is nothing to learn",
            fix=f"{BLOCK}.path=<teacher>, or {BLOCK}.teacher_prompt='{{prompt}} The solution is {{ground_truth}}.'",
            where=f"{BLOCK}.path",
        )


def _modes(settings: DistillationConfig) -> Iterator[Finding]:
    mode, key = settings.loss_mode, f"{BLOCK}.use_policy_gradient"
    if settings.by_advantage and mode not in SAMPLED_MODES:
        yield error(
            f"loss_mode={mode} cannot be an advantage",
            why="the divergence at a position is the same whatever token was sampled there, so its expected policy gradient is 0",
            fix=f"{key}=false, or {BLOCK}.loss_mode=k1",
            where=key,
        )
    if mode == "k1" and not settings.by_advantage:
        yield error(
            "loss_mode=k1 cannot be a loss of its own",
            why="the expected gradient of a log-prob over the policy's own samples is 0",
            fix=f"{key}=true, or {BLOCK}.loss_mode=k2",
            where=key,
        )
    if not settings.tail_bucket and mode != "forward_kl_topk":
        yield error(
            f"tail_bucket=false works with forward_kl_topk only, not with {mode}",
            why="other divergences over some of the tokens are negative where the policy prefers other tokens",
            fix=f"{BLOCK}.tail_bucket=true",
            where=f"{BLOCK}.tail_bucket",
        )
    if mode.startswith("jsd") and settings.beta == 1:
        yield error(
            "beta=1 makes the Jensen-Shannon divergence 0 for every policy",
            fix=f"{BLOCK}.beta=0.5, or {BLOCK}.loss_mode=reverse_kl",
            where=f"{BLOCK}.beta",
        )


@rule("R84", RLConfig, stage=Stage.FILES)
def teachers_share_the_tokenizer(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Every teacher has the tokenizer of the policy."""
    if not config.distillation.enable or evidence.tokenizer is None:
        return
    from hone.data.tokenizer import load_tokenizer

    policy = evidence.tokenizer.get_vocab()
    for path in config.distillation.models:
        if path is None:
            continue
        where = next((f"{BLOCK}.teachers" for p in config.distillation.teachers.values() if p == path), f"{BLOCK}.path")
        try:
            trusted = config.actor_rollout_ref.model.trust_remote_code
            teacher = load_tokenizer(path, trust_remote_code=trusted).get_vocab()
        except HoneError as problem:
            yield error(
                f"the teacher '{path}' cannot be used: {problem.what}",
                why=problem.why,
                fix=f"{where}=<model directory>",
                where=where,
            )
            continue
        others = [token for token in policy if teacher.get(token) != policy[token]]
        if others or len(teacher) != len(policy):
            extra = len(teacher.keys() - policy.keys())
            yield error(
                f"the teacher '{Path(path).name}' has another tokenizer: {len(others)} of the policy's {len(policy)} tokens have "
                f"another id or none, and {extra} tokens of the teacher are not the policy's",
                why="a teacher scores the token ids that the policy samples",
                fix=f"{where}=<a model with the tokenizer of the policy>, or `hone sft` on the teacher's answers as text",
                where=where,
            )


@rule("R84", RLConfig, stage=Stage.FILES)
def every_row_has_a_teacher(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
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


def _prompt_fields(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
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
                where=KEY,
            )
            return
