"""Rules about what the tokenizer makes of the rows: lengths, the chat template, how turns end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig
from hone.errors import DataError, Finding, HoneError
from hone.preflight.evidence import Evidence, model_block, read_json
from hone.preflight.files import TOKENIZER_FILES
from hone.preflight.rules import Stage, error, rule, warning

_LOOKED_AT = 64
_READS_THE_END = {"gsm8k": "the number behind '####' within the last 300 characters"}
_FEW_TOKENS = 1024
_QUESTION = [{"role": "user", "content": "What is 1 + 1?"}]


@rule("R08", *TREES.values(), stage=Stage.TEMPLATE)
def tokenizer_loads(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """The tokenizer can be loaded, and has no more tokens than the model."""
    model = model_block(config)[1]
    path = model.tokenizer_path or model.path
    if path is None or not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        return  # told before
    if model.path is not None and (Path(model.path) / "config.json").is_file() and not evidence.model_settings:
        return  # a damaged config.json: told before
    try:
        tokenizer = evidence.load_tokenizer()
    except HoneError as found:
        if model.custom_chat_template is None or "chat template" not in found.what:  # else R39 tells
            yield Finding(found, stops=True)
        return
    entries = evidence.model_settings.get("vocab_size")
    if isinstance(entries, int) and len(tokenizer) > entries:
        yield error(
            f"the tokenizer in '{path}' has {len(tokenizer)} tokens, the model {entries}",
            why="the last ones have no embedding: training ends with an index error",
            fix=f"{model_block(config)[0]}.tokenizer_path=DIR of the model's own tokenizer",
            where=f"{model_block(config)[0]}.path",
        )


@rule("R36", RLConfig, stage=Stage.TEMPLATE)
def truncation_spares_the_system_message(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Cutting long prompts does not take their system message away."""
    yield from _length_findings(config, evidence, "R36")


@rule("R45", RLConfig, stage=Stage.TEMPLATE)
def prompts_fit(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Prompts are not longer than the limit, chat template included."""
    yield from _length_findings(config, evidence, "R45")


@rule("R46", RLConfig, stage=Stage.TEMPLATE)
def an_epoch_has_steps_after_dropping(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """The rows that are left when long ones are dropped fill at least one batch."""
    lengths, rows, batch = evidence.prompt_lengths, len(evidence.train_rows), config.data.train_batch_size
    if lengths is None or config.data.overlong_policy != "drop" or rows < batch:
        return
    left = rows - len(lengths.overlong)
    if left < batch:
        yield error(
            f"{rows} rows, {left} left after {len(lengths.overlong)} long prompts are dropped, "
            f"data.train_batch_size={batch}: 0 steps an epoch",
            why="an incomplete batch is left out, so nothing would be trained",
            fix=f"data.max_prompt_length={lengths.overlong[0]}, or data.train_batch_size={max(1, left)}",
            where="data.max_prompt_length",
        )


@rule("R39", RLConfig, stage=Stage.TEMPLATE)
def template_takes_the_prompts(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """The chat template renders the first prompts, and those that are long."""
    from hone.data.chat import render_prompt
    from hone.data.messages import plain

    tokenizer = evidence.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return
    refused = list(evidence.prompt_lengths.refused) if evidence.prompt_lengths else []
    for row in evidence.train_rows[:_LOOKED_AT]:
        prompt = plain(row.values.get(config.data.prompt_key))
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            try:
                render_prompt(tokenizer, prompt, config.data.apply_chat_template_kwargs)
            except DataError as said:
                refused.append((row.where, said.what))
            except (KeyError, TypeError):  # malformed messages: R42
                continue
    if refused:
        where, said = refused[0]
        yield error(
            f"{said} ({len(set(refused))} of the rows looked at)",
            why="these prompts cannot be turned into text",
            fix="check the roles and their order, or actor_rollout_ref.model.custom_chat_template=PATH.jinja",
            where=where,
        )


@rule("R39", SFTConfig, stage=Stage.TEMPLATE)
def template_only_appends(config: SFTConfig, evidence: Evidence) -> Iterator[Finding]:
    """The chat template renders the first conversations without rewriting earlier turns."""
    from hone.data.assistant_mask import render_conversations
    from hone.data.messages import check_messages, plain

    tokenizer, key = evidence.tokenizer, config.data.messages_key
    if tokenizer is None or not tokenizer.chat_template:
        return
    for row in evidence.train_rows[:_LOOKED_AT]:
        try:
            messages = check_messages(plain(row.values.get(key)), where=row.where, column=key)
        except DataError:
            continue  # R42
        if not any(message["role"] == "assistant" for message in messages):
            continue  # R42
        try:
            render_conversations(tokenizer, [messages], config.data.apply_chat_template_kwargs, [row.where])
        except DataError as said:
            yield error(said.what, why=said.why, fix=said.fix, where=row.where)
            return


@rule("R40", RLConfig, stage=Stage.TEMPLATE)
def turns_can_end(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """The token that ends a turn in the chat template ends a generation."""
    from hone.data.assistant_mask import render_conversations
    from hone.data.chat import special_tokens

    tokenizer, rollout = evidence.tokenizer, config.actor_rollout_ref.rollout
    if (
        tokenizer is None
        or not tokenizer.chat_template
        or rollout.ignore_eos
        or not _asks_in_messages(config, evidence)
    ):
        return
    chat = [*_QUESTION, {"role": "assistant", "content": "2"}]
    try:
        ((ids, mask),) = render_conversations(tokenizer, [chat], config.data.apply_chat_template_kwargs)
    except DataError:
        return  # R39 has looked at the rows themselves
    last = max((position for position, wrote in enumerate(mask) if wrote), default=None)
    if last is None or ids[last] not in special_tokens(tokenizer):
        return
    ends, text = stop_ids(config, evidence), str(tokenizer.decode([ids[last]]))
    if ids[last] not in ends and not any(stop in text for stop in rollout.stop):
        yield error(
            f"'{text}' ({ids[last]}) ends a turn of the chat template, and generation ends at {sorted(ends)} only",
            why="responses would run on to data.max_response_length, past their own end",
            fix=f"eos_token_id: [{', '.join(map(str, [*sorted(ends), ids[last]]))}] in the model's generation_config.json, "
            f"or actor_rollout_ref.rollout.stop=['{text}']",
            where="actor_rollout_ref.model.path",
        )


@rule("R41", RLConfig, stage=Stage.TEMPLATE)
def thinking_leaves_room(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Where the template opens a thinking block there is room for it, and the reward reads what comes after."""
    from hone.data.chat import render_texts
    from hone.rewards.scorers import scorer_for

    tokenizer = evidence.tokenizer
    if tokenizer is None or not tokenizer.chat_template or not _asks_in_messages(config, evidence):
        return
    try:
        (text,) = render_texts(tokenizer, [_QUESTION], True, config.data.apply_chat_template_kwargs)
    except DataError:
        return
    limit = config.data.max_response_length
    if not re.search(r"<think(ing)?>\s*\Z", text) or limit >= _FEW_TOKENS:
        return
    sources = {str(row.values.get(config.data.reward_fn_key)) for row in evidence.train_rows}
    names = {config.reward.scorer} if config.reward.scorer else {s.name for s in map(scorer_for, sources) if s}
    reads = next(
        (f"; scorer {name} reads {_READS_THE_END[name]}" for name in sorted(names) if name in _READS_THE_END), ""
    )
    yield warning(
        f"the chat template opens a thinking block, and data.max_response_length={limit} tokens must hold the thoughts and "
        f"the answer{reads}",
        why="answers that are cut in their thoughts get no reward, whatever they know",
        fix="data.apply_chat_template_kwargs={enable_thinking: false}, or data.max_response_length=4096",
        where="data.max_response_length",
    )


def stop_ids(config: RLConfig, evidence: Evidence) -> set[int]:
    """The tokens that end a response: of the tokenizer, and of the model's generation config."""
    named: Any = read_json(Path(config.actor_rollout_ref.model.path or "") / "generation_config.json").get(
        "eos_token_id"
    )
    own = evidence.tokenizer.eos_token_id if evidence.tokenizer is not None else None
    ends = [own, *(named if isinstance(named, list) else [named])]
    return {end for end in ends if isinstance(end, int)}


def _asks_in_messages(config: RLConfig, evidence: Evidence) -> bool:
    prompt = evidence.train_rows[0].values.get(config.data.prompt_key) if evidence.train_rows else None
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _length_findings(config: RLConfig, evidence: Evidence, code: str) -> Iterator[Finding]:
    from hone.data.checks import overlong_prompts

    lengths = evidence.prompt_lengths
    if lengths is not None:
        yield from (f for f in overlong_prompts(lengths, config.data.overlong_policy) if f.error.code == code)
