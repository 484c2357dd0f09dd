"""Rules about tokenizer and chat template: lengths of prompts, rendering, end of turns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.config.offline import PreferenceConfig, SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block
from hone.data.files import Row
from hone.errors import DataError, HoneError
from hone.preflight.evidence import Evidence
from hone.preflight.files import TOKENIZER_FILES
from hone.preflight.reading import read_json
from hone.preflight.rules import Findings, Stage, error, rule, warning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOOKED_AT = 64
_READS_THE_END = {"gsm8k": "the number after '####' within the last 300 characters"}
_FEW_TOKENS = 1024
_QUESTION = [{"role": "user", "content": "What is 1 + 1?"}]


@rule("R08", Stage.TEMPLATE)
def tokenizer_loads(config: AnyConfig, evidence: Evidence) -> Findings:
    """The tokenizer can be loaded and does not have more tokens than the model."""
    model = model_block(config)[1]
    path = model.tokenizer_path or model.path
    if path is None or not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        return  # the rule about model directories reports it
    if model.path is not None and (Path(model.path) / "config.json").is_file() and not evidence.model_settings:
        return  # a damaged config.json: reported there too
    try:
        tokenizer = evidence.load_tokenizer()
    except HoneError as problem:
        if model.custom_chat_template is None or "chat template" not in problem.what:  # else R39 reports it
            raise
        return
    entries = evidence.model_settings.get("vocab_size")
    if isinstance(entries, int) and len(tokenizer) > entries:
        yield error(
            f"the tokenizer in '{path}' has {len(tokenizer)} tokens, but the model has vocab_size={entries}",
            why="the last tokens have no embedding, so training fails with an index error",
            fix=f"{model_block(config)[0]}.tokenizer_path=DIR of the model's tokenizer",
            where=f"{model_block(config)[0]}.path",
        )


@rule("R36", Stage.TEMPLATE)
def truncation_spares_the_system_message(config: RLConfig, evidence: Evidence) -> Findings:
    """Truncating long prompts does not remove their system message."""
    yield from _length_findings(config, evidence, "R36")


@rule("R45", Stage.TEMPLATE)
def prompts_fit(config: RLConfig, evidence: Evidence) -> Findings:
    """Prompts with their chat template are not longer than the limit."""
    yield from _length_findings(config, evidence, "R45")


@rule("R46", Stage.TEMPLATE)
def an_epoch_has_steps_after_dropping(config: RLConfig, evidence: Evidence) -> Findings:
    """The rows left after dropping long prompts fill at least one batch."""
    lengths, rows, batch = evidence.prompt_lengths, len(evidence.train_rows), config.data.train_batch_size
    if lengths is None or config.data.overlong_policy != "drop" or rows < batch:
        return
    left = rows - len(lengths.overlong)
    if left < batch:
        yield error(
            f"{rows} rows, {left} left after {len(lengths.overlong)} long prompts are dropped, fewer than "
            f"data.train_batch_size={batch}: 0 steps per epoch",
            why="incomplete batches are dropped, so nothing would be trained",
            fix=f"data.max_prompt_length={lengths.overlong[0]}, or data.train_batch_size={max(1, left)}",
        )


@rule("R39", Stage.TEMPLATE)
def template_takes_the_prompts(config: RLConfig, evidence: Evidence) -> Findings:
    """The chat template renders the first prompts and the long ones."""
    from hone.data.chat import render_prompt
    from hone.data.messages import plain

    tokenizer = evidence.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return
    refused = list(evidence.prompt_lengths.refused) if evidence.prompt_lengths else []
    for row in evidence.train_rows[:_LOOKED_AT]:
        prompt = plain(evidence.as_shown(row.values.get(config.data.prompt_key)))
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            try:
                render_prompt(tokenizer, prompt, config.data.apply_chat_template_kwargs)
            except DataError as message:
                refused.append((row.where, message.what))
            except (KeyError, TypeError):  # malformed messages: R42
                continue
    if refused:
        where, message = refused[0]
        yield error(
            f"{message} ({len(set(refused))} of the checked rows)",
            why="these prompts cannot be rendered as text",
            fix="check the roles and their order, or actor_rollout_ref.model.custom_chat_template=PATH.jinja",
            where=where,
        )


@rule("R39", Stage.TEMPLATE)
def template_takes_the_preferences(config: PreferenceConfig, evidence: Evidence) -> None:
    """The chat template shows the first preferences whole."""
    from hone.data.preferences import check_prompts, preference_columns, sides_of_row
    from hone.data.responses import render_sides

    if evidence.tokenizer is None or not evidence.tokenizer.chat_template:
        return
    columns = preference_columns(config.data)
    for row in evidence.train_rows[:_LOOKED_AT]:
        try:
            sides = [side for side in sides_of_row(row, columns) if side.is_chat]
        except DataError:
            continue  # R42
        try:
            check_prompts(render_sides(sides, evidence.tokenizer, config.data.apply_chat_template_kwargs), row.where)
        except DataError as problem:
            problem.where = row.where
            raise


@rule("R39", Stage.TEMPLATE)
def template_only_appends(config: SFTConfig, evidence: Evidence) -> Findings:
    """The chat template shows the first conversations whole, without rewriting earlier turns."""
    from hone.data.assistant_mask import rewritten

    tokenizer, data = evidence.tokenizer, config.data
    if tokenizer is None or not tokenizer.chat_template:
        return
    changed: tuple[int, int, str, str] | None = None
    rows = evidence.train_rows[:_LOOKED_AT]
    for tried in rendered(rows, tokenizer, data.messages_key, data.tools_key, data.apply_chat_template_kwargs):
        if tried.problem is not None:
            tried.problem.where = tried.row.where
            raise tried.problem
        if changed is None and (changed := rewritten(tokenizer, tried.messages, tried.kwargs)) is not None:
            number, at, alone, whole = changed
            yield warning(
                f"the chat template renders the text before message {number} differently once more messages follow: "
                f"from character {at} it is {alone!r} in generation and {whole!r} here",
                why="the model is trained on contexts that it does not read during generation",
                fix="split the conversations so that each row ends with one assistant turn, "
                "or model.custom_chat_template=PATH of a template that only appends",
                where=tried.row.where,
            )


@dataclass(frozen=True)
class Tried:
    """A conversation that was rendered, with what the template or the mask refuses in it."""

    row: Row
    messages: list[dict[str, Any]]
    kwargs: dict[str, Any]
    tokens: int
    problem: DataError | None


def rendered(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, key: str, tools_key: str, kwargs: Mapping[str, Any]
) -> Iterator[Tried]:
    """Render the conversations of rows as training does; rows that R42 refuses are left out."""
    from hone.data.assistant_mask import render_conversations
    from hone.data.messages import check_messages, plain, schemas_of

    for row in rows:
        try:
            messages = check_messages(plain(row.values.get(key)), where=row.where, column=key)
            tools = schemas_of(row.values.get(tools_key), row.where)
        except DataError:
            continue
        if not any(message["role"] == "assistant" for message in messages):
            continue
        its_kwargs = {**kwargs, **({"tools": tools} if tools else {})}
        try:
            ((ids, _),) = render_conversations(tokenizer, [messages], its_kwargs, [row.where])
        except DataError as problem:
            yield Tried(row, messages, its_kwargs, 0, problem)
        else:
            yield Tried(row, messages, its_kwargs, len(ids), None)


@rule("R40", Stage.TEMPLATE)
def turns_can_end(config: RLConfig, evidence: Evidence) -> Findings:
    """The token that ends a turn in the chat template also ends generation."""
    from hone.data.assistant_mask import end_of_turn

    tokenizer, rollout = evidence.tokenizer, config.actor_rollout_ref.rollout
    if tokenizer is None or rollout.ignore_eos or not _asks_in_messages(config, evidence):
        return
    last = end_of_turn(tokenizer, config.data.apply_chat_template_kwargs)
    if last is None:
        return
    ends, text = stop_ids(config, evidence), str(tokenizer.decode([last]))
    if last not in ends and not any(stop in text for stop in rollout.stop):
        yield error(
            f"'{text}' ({last}) ends a turn of the chat template, but generation stops only at {sorted(ends)}",
            why="responses would continue after their end, up to data.max_response_length",
            fix=f"eos_token_id: [{', '.join(map(str, [*sorted(ends), last]))}] in the model's generation_config.json, "
            f"or actor_rollout_ref.rollout.stop=['{text}']",
            where="actor_rollout_ref.model.path",
        )


@rule("R40", Stage.TEMPLATE)
def turns_end(config: SFTConfig | PreferenceConfig, evidence: Evidence) -> Findings:
    """The chat template ends a turn with a token, so that the model learns to stop."""
    from hone.data.assistant_mask import end_of_turn

    tokenizer = evidence.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return
    last = end_of_turn(tokenizer, config.data.apply_chat_template_kwargs)
    if last is None:
        yield warning(
            "no special token ends an assistant turn of the chat template",
            why="the model does not learn to stop: its answers continue to their longest length",
            fix="model.custom_chat_template=PATH of a template that ends the assistant's turns with a token such as "
            f"{tokenizer.eos_token or '<|im_end|>'}",
            where="model.path",
        )


@rule("R41", Stage.TEMPLATE)
def thinking_fits(config: RLConfig, evidence: Evidence) -> Findings:
    """A template that opens a thinking block leaves enough tokens for the answer."""
    from hone.data.chat import render_texts

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
    named = sorted(_scorers(config, evidence) & _READS_THE_END.keys())
    reads = f"; scorer {named[0]} reads {_READS_THE_END[named[0]]}" if named else ""
    yield warning(
        f"the chat template opens a thinking block, and thoughts and answer together have data.max_response_length={limit} "
        f"tokens{reads}",
        why="responses that are truncated while thinking get no reward",
        fix="data.apply_chat_template_kwargs={enable_thinking: false}, or data.max_response_length=4096",
        where="data.max_response_length",
    )


@rule("R93", Stage.TEMPLATE)
def marks_of_answers_are_text(config: RLConfig, evidence: Evidence) -> Findings:
    """The marks that a reward looks for are text to the tokenizer, not special tokens, which are cut before scoring."""
    tokenizer = evidence.tokenizer
    if tokenizer is None:
        return
    cut = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = sorted(token for token in cut if token.strip() and token not in str(tokenizer.chat_template))
    for reader, text in _readers(config, evidence):
        for token in special:
            if token in text:
                yield warning(
                    f"{reader} reads {token!r}, which is a special token ({tokenizer.convert_tokens_to_ids(token)}) of the tokenizer",
                    why="special tokens are cut from the text that a reward gets, so it never sees this one",
                    fix=f'"special": false for {token!r} in tokenizer.json, or another mark in prompts and reward',
                    where="reward",
                )


def _readers(config: RLConfig, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield what scores responses, with its code: the docstring of a scorer names the marks that it reads."""
    from hone.rewards.scorers import SCORERS
    from hone.rewards.terms import read_terms

    try:
        terms = read_terms(config.reward.terms)
    except HoneError:
        return  # another rule reports it
    functions = [term.function for term in terms if term.function] if terms else [config.reward.custom_reward_function]
    files = [function.path for function in functions if function.path]
    names = {term.scorer for term in terms} if terms else set() if files else _scorers(config, evidence)
    for file in files:
        if Path(file).is_file():
            yield file, Path(file).read_text(encoding="utf-8", errors="replace")
    for name in [name for name in SCORERS if name in names]:
        yield f"scorer {name}", inspect.getsource(SCORERS.get(name).compute)


def _scorers(config: RLConfig, evidence: Evidence) -> set[str]:
    from hone.rewards.scorers import scorer_for

    sources = {str(row.values.get(config.data.reward_fn_key)) for row in evidence.train_rows}
    return {config.reward.scorer} if config.reward.scorer else {s.name for s in map(scorer_for, sources) if s}


def stop_ids(config: RLConfig, evidence: Evidence) -> set[int]:
    """Return the tokens that end a response, from the tokenizer and the model's generation config."""
    from_model: Any = read_json(Path(config.actor_rollout_ref.model.path or "") / "generation_config.json").get(
        "eos_token_id"
    )
    tokenizer_eos = evidence.tokenizer.eos_token_id if evidence.tokenizer is not None else None
    ends = [tokenizer_eos, *(from_model if isinstance(from_model, list) else [from_model])]
    return {end for end in ends if isinstance(end, int)}


def _asks_in_messages(config: RLConfig, evidence: Evidence) -> bool:
    prompt = evidence.train_rows[0].values.get(config.data.prompt_key) if evidence.train_rows else None
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _length_findings(config: RLConfig, evidence: Evidence, code: str) -> Findings:
    from hone.data.checks import overlong_prompts

    lengths = evidence.prompt_lengths
    if lengths is not None:
        yield from (f for f in overlong_prompts(lengths, config.data.overlong_policy) if f.error.code == code)
