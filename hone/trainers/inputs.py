"""Datasets and sampling parameters of a configuration, and its agent contract.

The contract is what a policy that was trained as an agent expects of the program that runs it: how a conversation becomes tokens, which
tools exist, and what a call gives. Each has a hash, so that a run, a checkpoint and an evaluation can be compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from hone.cluster.context import run_image_processor
from hone.config.data import DataConfig
from hone.config.derived import RunSpec
from hone.config.limits import MAX_SUPPORT
from hone.config.reward import RewardConfig
from hone.config.tree import RLConfig
from hone.data.custom import row_reader
from hone.data.files import file_list
from hone.data.prompts import PromptDataset, ShownOf
from hone.data.tokenizer import decoded, stop_tokens
from hone.data.types import Sample
from hone.errors import DataError
from hone.generation.constraints import configured_constraint
from hone.generation.protocol import SamplingParams
from hone.text import json_lines

if TYPE_CHECKING:
    from hone.agents.base import EpisodeContext


log = logging.getLogger(__name__)

_SHOWN = 400  # characters of the first prompt


def prompt_dataset(config: RLConfig, files: Any, tokenizer: PreTrainedTokenizerBase, max_samples: int) -> PromptDataset:
    """Load the prompts in ``files`` (a path or list of paths), with the tools of each row's agent loop."""
    from hone.agents.tool_agent import shown_of

    with _episode_context(config, tokenizer) as context:
        return _prompt_dataset(config, files, tokenizer, max_samples, shown_of(context))


@contextlib.contextmanager
def _episode_context(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[EpisodeContext]:
    from hone.agents.base import (
        EpisodeContext,  # tools and environments, which a driver that only trains does not import
    )

    context = EpisodeContext.from_config(config, tokenizer)
    try:
        yield context
    finally:
        context.close()


def _prompt_dataset(
    config: RLConfig, files: Any, tokenizer: PreTrainedTokenizerBase, max_samples: int, shown: ShownOf
) -> PromptDataset:
    data = config.data
    return PromptDataset(
        file_list(files),
        tokenizer,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        max_prompt_length=data.max_prompt_length,
        truncation=data.overlong_policy,
        max_samples=max_samples,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        shown_of=shown,
        all_columns=reads_columns(config.reward),
        read=row_reader(data, tokenizer),
        image_key=data.image_key,
        image_processor=run_image_processor(config, tokenizer),
        answer_key=data.answer_key,
        strings_as_messages=data.strings_as_messages,
    )


def show_first_prompt(dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Say how plain strings are shown to the model, and the first prompt as it reads it."""
    sample, (wanted, kept) = dataset[0], dataset.strings
    if wanted:
        raw = "data.strings_as_messages=false leaves them as they are"
        log.info("%d prompts are plain strings: each is the user's message in the chat template (%s)", wanted, raw)
    if kept:
        what = "prompts hold special tokens of the chat template, so they stay as they are; the first"
        log.warning("%d %s: %s", len(kept), what, kept[0])
    shown = decoded(tokenizer, sample.prompt_ids)
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN // 2]} ... {shown[-_SHOWN // 2 :]}"
    log.info("the first prompt (%s, %d tokens): %r", sample.uid, len(sample.prompt_ids), shown)


def run_contract(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the agent contract of a run; see :func:`agent_contract`."""
    with _episode_context(config, tokenizer) as context:
        return agent_contract(context)


def report_contract(earlier: Mapping[str, str], now: Mapping[str, str], what: str) -> None:
    """Warn if ``what`` plays episodes under another agent contract than the policy was trained with."""
    changes = contract_changes(earlier, now)
    if changes:
        log.warning(
            "%s under another agent contract: %s differ from those that the policy was trained with",
            what,
            " and ".join(changes),
        )


def quarantined_rows(data: DataConfig, dataset: PromptDataset) -> frozenset[str]:
    """Return the uids that ``data.quarantine`` names; empty without a file.

    Raises:
        DataError: the file cannot be read, a line has no uid, or it names all rows of the dataset.
    """
    if data.quarantine is None:
        return frozenset()
    named = read_quarantine(Path(data.quarantine))
    rows = [dataset[row].uid for row in range(len(dataset))]
    if rows and named.issuperset(rows):
        raise DataError(
            f"{data.quarantine} names all {len(rows)} rows of the dataset",
            why="nothing would be left to train on",
            fix="remove lines from it, or data.quarantine=null",
            where="data.quarantine",
        )
    log.info("%d of %d rows are in quarantine and left out", len(named.intersection(rows)), len(rows))
    return named


def read_quarantine(path: Path) -> frozenset[str]:
    """Return the uids of a quarantine file: JSON lines, each an object with ``uid``.

    Raises:
        DataError: the file cannot be read, or a line has no uid.
    """
    try:
        records = [json.loads(line) for line in json_lines(path.read_text(encoding="utf-8"))]
        return frozenset(str(record["uid"]) for record in records)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} cannot be read as a quarantine: {type(error).__name__}: {error}",
            why="rows that should be left out would be trained on",
            fix='write one JSON object a line, such as {"uid": "train:17", "reason": "failing_tasks"}',
            where="data.quarantine",
        ) from error


def reads_columns(reward: RewardConfig) -> bool:
    """Return whether a function of the user scores the rows, which may take any column."""
    terms = any(isinstance(term, dict) and term.get("function") for term in reward.terms)
    return reward.custom_reward_function.path is not None or terms


def self_scored(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, *datasets: PromptDataset | None
) -> frozenset[str]:
    """Return the data sources whose rows are all played by loops that compute rewards."""
    samples = [dataset[row] for dataset in datasets if dataset is not None for row in range(len(dataset))]
    with _episode_context(config, tokenizer) as context:
        return self_scored_by(context, samples)


def self_scored_by(context: EpisodeContext, samples: Sequence[Sample]) -> frozenset[str]:
    """Return the data sources whose samples are all played by loops that compute rewards."""
    from hone.agents.tool_agent import loop_class

    scored = {sample.data_source for sample in samples if not loop_class(context, sample).gives_reward}
    return frozenset({sample.data_source for sample in samples} - scored)


def training_sampling(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """Return the sampling parameters of training responses.

    Where the support of every token is kept, it has at most :data:`MAX_SUPPORT` tokens.
    """
    rollout, keeps_support = config.actor_rollout_ref.rollout, RunSpec(config).keeps_support.value
    top_k = rollout.top_k
    if keeps_support:
        top_k = min(top_k, MAX_SUPPORT) if top_k > 0 else MAX_SUPPORT
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_k=top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop_token_ids=stop_tokens(tokenizer, config.actor_rollout_ref.model.path),
        stop=tuple(rollout.stop),
        ignore_eos=rollout.ignore_eos,
        report_support=keeps_support,
        constraint=configured_constraint(rollout.constraint),
    )


def validation_sampling(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """Return the sampling parameters of validation responses."""
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=rollout.val_kwargs.temperature,
        top_k=rollout.val_kwargs.top_k,
        top_p=rollout.val_kwargs.top_p,
        stop_token_ids=stop_tokens(tokenizer, config.actor_rollout_ref.model.path),
        stop=tuple(rollout.stop),
        constraint=configured_constraint(rollout.constraint),
    )


VERSION = 1
"""Version of the semantics that no setting changes: statuses of calls, and the texts that the model reads for them."""
_RESULTS = (
    "max_parallel_calls",
    "max_tool_response_length",
    "tool_response_truncate_side",
    "tool_timeout",
    "tool_retries",
    "compaction",
)
_NAMES = {
    "chat_format": "the chat format",
    "tools": "the tools",
    "results": "what a call gives",
    "version": "the version",
}


def agent_contract(context: EpisodeContext) -> dict[str, str]:
    """Return version and hashes of the contract; empty if episodes have one turn."""
    from hone.agents.tool_agent import DELEGATE

    if not context.multi_turn.enable:
        return {}
    renderer, settings = context.renderer, vars(context.multi_turn)
    chat = {
        "template": getattr(context.tokenizer, "chat_template", None),
        "arguments": context.template_kwargs,
        "parser": type(renderer.parser).__name__,
        "tools_as_text": renderer.tools_as_text,
        "stops": list(renderer.stop_token_ids),
    }
    added = [DELEGATE] if context.multi_turn.subagents else []
    schemas = sorted([*context.toolbox.schemas(), *added], key=lambda schema: str(schema["function"]["name"]))
    return {
        "version": str(VERSION),
        "chat_format": _hash(chat),
        "tools": _hash(schemas),
        "results": _hash({name: settings[name] for name in _RESULTS}),
    }


def contract_changes(earlier: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return in words what differs between two contracts; nothing if one is empty, as for single turns."""
    if not earlier or not now:
        return []
    return [_NAMES.get(name, name) for name in _NAMES if earlier.get(name) != now.get(name)]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
