"""A dataset looked at on its own, without a configuration: every check that its columns allow, and its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.data import checks
from hone.data.files import Row, read_all
from hone.data.statistics import characters, statistics
from hone.errors import ConfigError, DataError, Finding, HoneError

KINDS = {"rl": "prompt", "sft": "messages", "prefer": "chosen"}
"""What a dataset can be for, and the column that says so."""


@dataclass(frozen=True)
class DatasetOptions:
    """How to look at a dataset; the attributes are options of `hone data check`."""

    prompt_key: str = "prompt"
    messages_key: str = "messages"
    reward_fn_key: str = "data_source"
    tokenizer: str | None = None
    max_prompt_length: int = 512
    truncation: str = "error"
    batch_size: int = 64
    max_tool_characters: int = 2000
    custom_reward: bool = False
    agents: tuple[str, ...] = (
        "single_turn",
        "single_turn_agent",
        "tool_agent",
        "interaction",
        "environment",
        "program",
    )


@dataclass
class DatasetReport:
    """What was found.

    Attributes:
        kinds: what the dataset can be used for.
        findings: errors first.
        numbers: see :func:`hone.data.statistics.statistics`; of the files that were checked.
        lengths: characters of each prompt or conversation, for histograms; token lengths where a tokenizer was given.
    """

    kinds: list[str]
    findings: list[Finding]
    numbers: dict[str, Any]
    lengths: dict[str, list[int]] = field(default_factory=dict)

    @property
    def stops(self) -> bool:
        """Whether a run with this dataset would not start."""
        return any(found.stops for found in self.findings)


def check_dataset(files: Sequence[str], val_files: Sequence[str], options: DatasetOptions) -> DatasetReport:
    """Check dataset files.

    Raises:
        DataError: a file cannot be read, or has no column that a run could use.
        ModelError: the tokenizer cannot be loaded.
    """
    rows, val = read_all(list(files)), read_all(list(val_files))
    columns = {name for row in rows for name in row.values}
    names = {"rl": options.prompt_key, "sft": options.messages_key, "prefer": "chosen"}
    kinds = [kind for kind, column in names.items() if column in columns]
    if "rl" in kinds and options.reward_fn_key not in columns and len(kinds) > 1:
        kinds.remove("rl")  # the prompt belongs to a pair
    if not kinds:
        raise DataError(
            f"no column {', '.join(names.values())}; the columns are {', '.join(sorted(columns))}",
            where=str(files[0]),
            fix="name the column with --prompt-key or --messages-key; `hone data convert` makes these columns of other forms",
            code="R42",
        )
    found: list[Finding] = []
    lengths: dict[str, list[int]] = {}
    for kind in kinds:
        found += {"rl": _prompts, "sft": _conversations, "prefer": _pairs}[kind](rows, val, options)
    if "rl" in kinds:
        lengths["prompt_characters"] = [characters(row.values.get(options.prompt_key)) for row in rows]
        found += _tokens(rows, options, lengths)
    elif "sft" in kinds:
        lengths["conversation_characters"] = [characters(row.values.get(options.messages_key)) for row in rows]
    numbers = statistics(
        rows, prompt_key=options.prompt_key, messages_key=options.messages_key, reward_fn_key=options.reward_fn_key
    )
    return DatasetReport(kinds, sorted(found, key=lambda f: not f.stops), numbers, lengths)


def _prompts(rows: list[Row], val: list[Row], options: DatasetOptions) -> list[Finding]:
    from hone.rewards.scorers import SCORERS, scorer_for

    found: list[Finding] = []
    for part in (rows, val):
        found += checks.prompts(part, options.prompt_key)
        found += checks.source_names(part, options.reward_fn_key)
        found += checks.tool_schemas(part, options.prompt_key)
        found += checks.agent_names(part, options.agents)
        found += checks.tool_names(part, ())
        found += checks.ground_truths(part, required=not options.custom_reward)
    if not options.custom_reward:
        known = sorted({pattern for name in SCORERS for pattern in SCORERS.get(name).data_sources})
        every = [*rows, *val]
        found += checks.unknown_sources(every, options.reward_fn_key, lambda name: scorer_for(name) is not None, known)
    found += checks.duplicates(rows, options.prompt_key)
    found += checks.overlap(rows, val, options.prompt_key)
    found += checks.rare_sources(rows, options.reward_fn_key, options.batch_size)
    if len(rows) < options.batch_size:
        found.append(
            Finding(
                ConfigError(
                    f"{len(rows)} rows do not fill one batch of {options.batch_size}",
                    why="an incomplete batch is left out, so an epoch would have 0 steps",
                    fix=f"data.train_batch_size={len(rows)} or less (here --batch-size), or more data",
                    where="data.train_batch_size",
                    code="R46",
                ),
                stops=False,
            )
        )
    return found


def _conversations(rows: list[Row], val: list[Row], options: DatasetOptions) -> list[Finding]:
    found: list[Finding] = []
    for part in (rows, val):
        found += checks.conversations(part, options.messages_key)
        found += checks.tool_loops(part, options.messages_key)
        found += checks.tool_outputs(part, options.messages_key, options.max_tool_characters)
    found += checks.duplicates(rows, options.messages_key)
    found += checks.overlap(rows, val, options.messages_key)
    return found


def _pairs(rows: list[Row], val: list[Row], options: DatasetOptions) -> list[Finding]:
    found: list[Finding] = []
    for part in (rows, val):
        same = [row for row in part if row.values.get("chosen") == row.values.get("rejected")]
        if same:
            error = DataError(
                f"{len(same)} of {len(part)} rows: chosen and rejected are equal, or one is missing",
                why="there is nothing to prefer",
                fix="remove these rows",
                where=same[0].where,
                code="R42",
            )
            found.append(Finding(error, stops=True))
    return found


def _tokens(rows: list[Row], options: DatasetOptions, lengths: dict[str, list[int]]) -> list[Finding]:
    """Lengths in tokens, chat template included, where a tokenizer is given."""
    if options.tokenizer is None:
        return []
    from hone.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer)
    sound = [row for row in rows if row.values.get(options.prompt_key)]
    try:
        measured = checks.prompt_lengths(sound, options.prompt_key, tokenizer, options.max_prompt_length)
        every = checks.prompt_lengths(sound[:2000], options.prompt_key, tokenizer, 0)
    except HoneError as error:
        return [Finding(error, stops=True)]
    lengths["prompt_tokens"] = every.overlong
    found = list(checks.overlong_prompts(measured, options.truncation))
    if measured.refused:
        where, said = measured.refused[0]
        error = DataError(
            said, where=where, fix="check the roles and their order, or take another chat template", code="R39"
        )
        found.append(Finding(error, stops=True))
    return found
