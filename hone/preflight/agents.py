"""Rules about multi-turn episodes: loops, tools, users and environments that rows name, and limits of episodes."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hone.agents.tool_agent import compaction_reserve
from hone.config.derived import longest_sequence
from hone.config.tree import RLConfig
from hone.data.files import Row
from hone.errors import DataError, HoneError
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Findings, Stage, error, error_of, rule, warning

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
SINGLE = ("single_turn", "single_turn_agent")


LOOKED_AT = 64
"""Rows whose system messages are read."""
LEAST_WORDS = 3
"""Words below which a description says nothing."""
SAME_WORDS = 0.8
"""Share of common words from which on two descriptions are nearly the same."""
LARGEST_SHARE = 0.5
"""Share of a sequence above which tool schemas leave too little to prompts and answers."""
_NAMED = re.compile(
    r"""(?:\b(?:call|use|invoke|run|tools?|functions?)|调用|使用)[\s:：]*(?:
    (?P<quote>[`'"])(?P<quoted>\w+)(?P=quote) | (?P<bare>[A-Za-z]+(?:_+\w+)+)(?![\w(]) )
    | "name":\s*"(?P<called>\w+)",\s*"arguments" | <tool>\s*(?P<tag>\w+)\s*</tool>""",
    re.IGNORECASE | re.VERBOSE,
)
_LISTED = re.compile(r"(?:available|following) (?:tools|functions)[^:\n]*:(.*(?:\n+[ \t]*[-*].*)*)", re.IGNORECASE)
_ENTRY = re.compile(
    r"(?:^|\n)\s*[-*]\s*`?(\w+)`?\s*(?:[:：(]|$)|(?:^|,|\band\b)\s*`?(\w+)`?(?=\s*(?:,|\.|and\b|$))", re.MULTILINE
)
_NEGATED = re.compile(r"(?:never|not|n't|cannot)\s*$", re.IGNORECASE)
_NAMELESS = re.compile(r"\W*\w?\W*|(?:tool|func(?:tion)?|fn)_?\d*", re.IGNORECASE)


@rule("R38")
def episodes_are_bounded(config: RLConfig) -> Findings:
    """Multi-turn episodes have a limit besides their tokens."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    bounds = (
        multi_turn.max_assistant_turns,
        multi_turn.max_user_turns,
        multi_turn.max_tool_calls,
        multi_turn.max_episode_seconds,
    )
    if multi_turn.enable and all(bound is None for bound in bounds):
        yield error(
            "multi-turn episodes have no limit: max_assistant_turns, max_user_turns, max_tool_calls and "
            "max_episode_seconds are all null",
            why=f"a policy that repeats the same tool call would use all {config.data.max_response_length} tokens",
            fix=f"{MULTI_TURN}.max_assistant_turns=8",
            where=MULTI_TURN,
        )


@rule("R80")
def sandboxes_outlive_episodes(config: RLConfig) -> Findings:
    """The program or sandbox of an episode lives longer than the episode and its scoring."""
    rollout = config.actor_rollout_ref.rollout
    episode, agent = rollout.multi_turn.max_episode_seconds, rollout.agent
    loop = agent.default_agent_loop or ("program" if agent.program.command or agent.program.function else None)
    lives = {"program": agent.program.timeout, "verifiers": agent.verifiers.timeout}.get(str(loop))
    if rollout.multi_turn.enable and episode is not None and lives is not None and lives < episode:
        key = f"actor_rollout_ref.rollout.agent.{loop}.timeout"
        yield warning(
            f"the loop '{loop}' ends an episode after {lives:g} s, before its limit max_episode_seconds={episode:g}",
            why="a long episode breaks instead of ending at its limit, and has no verdict",
            fix=f"{key}={episode + config.reward.timeout:g}, or {MULTI_TURN}.max_episode_seconds={lives:g}",
        )


@rule("R33", Stage.FILES)
def several_turns_are_played(config: RLConfig, evidence: Evidence) -> Findings:
    """Configured tools and users are used by the loops of the rows, and rows that need tools get them."""
    multi_turn, rows = config.actor_rollout_ref.rollout.multi_turn, evidence.train_rows
    files = [
        name for name in ("tool_config_path", "function_tool_path", "interaction_config_path") if vars(multi_turn)[name]
    ]
    played = Counter(map(evidence.loops.name, rows))
    turns = {name: count for name, count in played.items() if name not in SINGLE}
    ignored = [row for row in rows if row.values.get("tools") and evidence.loops.name(row) in SINGLE]
    if ignored:
        yield error(
            f"{len(ignored)} of {len(rows)} training rows have tools, but their agent loop plays a single turn",
            why="the model would not see the tools and could not call them",
            fix=f"set agent_name=tool_agent in these rows, {MULTI_TURN}.enable=true and {MULTI_TURN}.tool_config_path=FILE.yaml; "
            "or remove the column tools",
            where="data.train_files",
        )
    if turns and not multi_turn.enable:
        names = ", ".join(f"{name} ({count} rows)" for name, count in turns.items())
        yield error(
            f"rows use the agent loops {names}, but {MULTI_TURN}.enable=false",
            why="multi-turn episodes are longer and need limits, so they must be enabled",
            fix=f"{MULTI_TURN}.enable=true {MULTI_TURN}.max_assistant_turns=8",
        )
    elif multi_turn.enable and rows and not turns:
        yield error(
            f"{MULTI_TURN}.enable=true, but all {len(rows)} training rows use the agent loop single_turn"
            + (f", which does not use {' and '.join(files)}" if files else ""),
            why="the model would not see the tools and could not call them",
            fix="actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
            + ("" if files else f" {MULTI_TURN}.tool_config_path=FILE.yaml"),
            where=MULTI_TURN,
        )
    elif not multi_turn.enable and files:
        yield error(
            f"{MULTI_TURN}.{files[0]} is set, but {MULTI_TURN}.enable=false",
            why="the file would not be used",
            fix=f"{MULTI_TURN}.enable=true {MULTI_TURN}.max_assistant_turns=8",
            where=f"{MULTI_TURN}.{files[0]}",
        )
    if (
        turns.get("tool_agent")
        and multi_turn.enable
        and not (multi_turn.tool_config_path or multi_turn.function_tool_path)
    ):
        yield error(
            f"{turns['tool_agent']} rows use the agent loop tool_agent, but no file defines tools",
            why="the model has no tool to call",
            fix=f"{MULTI_TURN}.tool_config_path=FILE.yaml, with the line `- name: calculator` under `tools:`",
        )


@rule("R34", Stage.FILES)
def conversations_begin_with_messages(config: RLConfig, evidence: Evidence) -> Findings:
    """Prompts of multi-turn episodes are lists of messages."""
    rows = [*evidence.train_rows, *evidence.val_rows]
    flat = [row for row in rows if _is_flat(row.values[config.data.prompt_key]) and _needs_messages(evidence, row)]
    if flat:
        yield error(
            f"{len(flat)} of {len(rows)} prompts are plain text or token ids, but their episodes have several turns",
            why="the chat template renders the following turns and needs messages",
            fix='write them as [{"role": "user", "content": "..."}], or set agent_name=single_turn in these rows',
            where=flat[0].where,
        )


@rule("R48", Stage.FILES)
def agents_and_tools_exist(config: RLConfig, evidence: Evidence) -> Findings:
    """Agent loops, tools, users and environments named in rows exist, and their files can be read."""
    from hone.agents.tool_agent import AGENT_LOOPS
    from hone.data import checks

    rows = [*evidence.train_rows, *evidence.val_rows]
    imported = {str(row.values["agent_name"]) for row in rows if ":" in str(row.values.get("agent_name"))}
    default = config.actor_rollout_ref.rollout.agent.default_agent_loop
    for name in sorted(imported | ({default} if default else set())):
        yield from error_of(AGENT_LOOPS.get, name)
    yield from checks.agent_names(rows, {*AGENT_LOOPS.names(), *imported})
    known_tools = set(evidence.setting.toolbox) if evidence.setting is not None else set()
    if evidence.setting is not None and "interaction" in set(map(evidence.loops.name, rows)):
        assert evidence.setting.interactions
    yield from checks.tool_names(rows, known_tools)
    yield from _environments(rows, config.actor_rollout_ref.rollout.agent.environment_python)
    _check_noise(rows)


def _check_noise(rows: Sequence[Row]) -> None:
    """Raise the error of the first row whose noise of a tool is not valid."""
    from hone.agents.tools.base import noise_of_row

    for row in rows:
        extra = row.values.get("extra_info")
        tools = extra.get("tools_kwargs") if isinstance(extra, Mapping) else None
        for name, entry in tools.items() if isinstance(tools, Mapping) else ():
            if isinstance(entry, Mapping) and entry.get("noise"):
                try:
                    noise_of_row(str(name), entry["noise"])
                except DataError as problem:
                    problem.where = f"{row.where}, {problem.where}"
                    raise


@rule("R35", Stage.TEMPLATE)
def tools_are_shown(config: RLConfig, evidence: Evidence) -> None:
    """The chat template shows the tools to the model and can render further turns."""
    setting = evidence.setting
    chats = [row for row in evidence.train_rows[:1] if _needs_messages(evidence, row)]
    if setting is None or not chats or evidence.tokenizer is None:
        return
    try:
        schemas = setting.toolbox.schemas()
    except HoneError:
        return  # R48 reports it
    setting.renderer.prompt([{"role": "user", "content": "What is 1 + 1?"}], schemas or None)


@rule("R96", Stage.FILES)
def tools_are_described(config: RLConfig, evidence: Evidence) -> Findings:
    """The schemas of tools say what each tool and argument is for, and differ from each other."""
    if evidence.setting is None:
        return
    try:
        schemas = evidence.setting.toolbox.schemas()
    except HoneError:
        return  # R48 reports it
    faults = list(schema_faults([schema["function"] for schema in schemas]))
    if faults:
        yield warning(
            "; ".join(faults[:4]) + (f"; and {len(faults) - 4} more" if len(faults) > 4 else ""),
            why="the policy chooses a tool and writes its arguments from the schema alone",
            fix="a sentence on what each tool does and when, and on each argument with its unit or format (docstring or schema)",
            where=f"{MULTI_TURN}.tool_config_path",
        )


def schema_faults(functions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what the function schemas leave unsaid, and pairs of tools whose descriptions have nearly the same words."""
    words: dict[str, set[str]] = {}
    for function in functions:
        name, about = function["name"], str(function.get("description") or "")
        if _NAMELESS.fullmatch(name):
            yield f"the name of tool '{name}' does not say what it does"
        if len(_words(about)) < LEAST_WORDS:
            yield f"tool '{name}' says only '{about.strip()}'" if about.strip() else f"tool '{name}' has no description"
        words[name] = set(_words(about))
        silent = list(_silent(function.get("parameters") or {}, words[name]))
        if silent:
            yield f"tool '{name}' does not say what {', '.join(silent)} is"
    for (one, these), (other, those) in itertools.combinations(words.items(), 2):
        if len(these & those) >= max(LEAST_WORDS, SAME_WORDS * len(these | those)):
            yield f"tools '{one}' and '{other}' have nearly the same description"


def _words(text: str) -> list[str]:
    """Return the words of a text; each character of Chinese, Japanese and Korean counts as one."""
    return re.findall(
        r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+", text.lower()
    )


def _silent(schema: Mapping[str, Any], said: Collection[str], place: str = "") -> Iterator[str]:
    """Yield the arguments, also those within others, of which neither their own description nor that of the tool says anything."""
    for argument, part in (schema.get("properties") or {}).items():
        part, name = part if isinstance(part, Mapping) else {}, str(argument)
        repeated = {"the", "a", "an", *_words(name), str(part.get("type"))}
        described = set(_words(str(part.get("description") or ""))) - repeated
        if name.lower() not in said and not described and not part.keys() & {"enum", "const"}:
            yield place + name
        inner = part.get("items") if isinstance(part.get("items"), Mapping) else part
        yield from _silent(inner or {}, said, f"{place}{name}.")


def named_tools(system: str) -> list[str]:
    """Return the names that a system message calls tools, in order; what it forbids to call is none."""
    names = [
        match[str(match.lastgroup)] for match in _NAMED.finditer(system) if not _NEGATED.search(system[: match.start()])
    ]
    for listed in _LISTED.finditer(system):
        names += [first or second for first, second in _ENTRY.findall(listed[1])]
    return list(dict.fromkeys(names))


@rule("R96", Stage.TEMPLATE)
def tools_and_system_prompts_agree(config: RLConfig, evidence: Evidence) -> Findings:
    """Tool schemas leave tokens to the prompts, and system messages neither repeat them nor name other tools."""
    setting, question, limit = evidence.setting, [{"role": "user", "content": "?"}], longest_sequence(config)
    if setting is None or setting.tokenizer is None:
        return
    try:
        schemas, renderer = setting.toolbox.schemas(), setting.renderer
        taken = len(renderer.prompt(question, schemas or None)) - len(renderer.prompt(question))
    except HoneError:
        return  # R35 and R48 report it
    if taken > LARGEST_SHARE * limit:
        yield warning(
            f"the schemas of {len(schemas)} tools take {taken} of the {limit} tokens of a prompt and a response",
            why="each episode reads them again, and long prompts and answers do not fit next to them",
            fix=f"shorter descriptions, fewer tools, or data.max_prompt_length={3 * taken} where the model reads that much",
            where=f"{MULTI_TURN}.tool_config_path",
        )
    names = {schema["function"]["name"] for schema in schemas}
    for row in evidence.train_rows[:LOOKED_AT]:
        system = " ".join(system_texts(row.values.get(config.data.prompt_key)))
        others = [name for name in named_tools(system) if name not in names] if names else []
        if others:
            yield warning(
                f"the system message names tools that are not configured: {', '.join(others[:4])} ({', '.join(sorted(names))} are)",
                why="the policy then calls what does not exist, and each such call is an error",
                fix="the configured names in the system message, or the missing tool in the tool file",
                where=row.where,
            )
            return
        if '"parameters"' in system and any(f'"{name}"' in system for name in names):
            yield warning(
                "the system message has tool schemas, which the chat template shows as well",
                why="every turn reads them twice, and a changed tool would have two descriptions",
                fix="leave the schemas out of the system message",
                where=row.where,
            )
            return


def system_texts(prompt: Any) -> list[str]:
    """Return the texts of a prompt's system messages."""
    messages = [] if _is_flat(prompt) else prompt
    return [
        text
        for message in messages
        if message.get("role") == "system" and isinstance(text := message.get("content"), str)
    ]


@rule("R37")
def tool_results_fit(config: RLConfig) -> Findings:
    """A single tool result leaves tokens for the other turns."""
    multi_turn, response_length = config.actor_rollout_ref.rollout.multi_turn, config.data.max_response_length
    if multi_turn.enable and (multi_turn.tool_config_path or multi_turn.function_tool_path):
        longest = multi_turn.max_tool_response_length
        if longest >= response_length:
            yield warning(
                f"max_tool_response_length={longest} tokens for one tool result, but calls, results and the answer together have "
                f"data.max_response_length={response_length}",
                why="an episode ends at the first long result, before the model can answer",
                fix=f"data.max_response_length={2 * longest}; or {MULTI_TURN}.max_tool_response_length={max(1, response_length // 4)} "
                "if results are that short, to which errors of calls are cut, too",
                where=f"{MULTI_TURN}.max_tool_response_length",
            )


@rule("R37")
def conversations_fit(config: RLConfig) -> Findings:
    """A conversation that is rewritten has space for its prompt, a turn, the results of its calls, and the summary."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    compaction, turn, where = multi_turn.compaction, multi_turn.max_tokens_per_turn, f"{MULTI_TURN}.compaction"
    if compaction.strategy is None:
        return
    if compaction.context_tokens is None or turn is None:
        key, value = (
            (f"{where}.context_tokens", 8192) if turn is not None else (f"{MULTI_TURN}.max_tokens_per_turn", 1024)
        )
        yield error(
            f"{where}.strategy={compaction.strategy} without {key}",
            why="a conversation is rewritten while the next turn still fits",
            fix=f"{key}={value}",
        )
        return
    prompt, reserve = config.data.max_prompt_length, compaction_reserve(multi_turn)
    if prompt + turn + reserve > compaction.context_tokens:
        yield error(
            f"context_tokens={compaction.context_tokens} < {prompt + turn + reserve}: data.max_prompt_length={prompt} + "
            f"max_tokens_per_turn={turn} + {reserve} tokens for results and summary",
            why="a new conversation would be rewritten before its first result",
            fix=f"{where}.context_tokens={2 * (prompt + turn + reserve)}, or smaller limits of turns, results and summaries",
        )


@rule("R37", Stage.TEMPLATE)
def tool_limits_cover_the_prompts(config: RLConfig, evidence: Evidence) -> Findings:
    """The limits on tool results and calls allow what the prompts show."""
    from hone.data.checks import tool_result_lengths, tool_turns

    multi_turn, tokenizer, key = config.actor_rollout_ref.rollout.multi_turn, evidence.tokenizer, config.data.prompt_key
    if not multi_turn.enable or tokenizer is None:
        return
    limit = multi_turn.max_tool_response_length
    lengths = tool_result_lengths(evidence.train_rows, key, tokenizer, limit)
    if lengths.long:
        yield warning(
            f"{len(lengths.long)} of {lengths.results} tool results in the prompts ({len(lengths.long) / lengths.results:.0%}) "
            f"are longer than {MULTI_TURN}.max_tool_response_length={limit} tokens (longest {lengths.long[0]})",
            why="results would be truncated in the episode that are complete in its prompt",
            fix=f"{MULTI_TURN}.max_tool_response_length={lengths.long[0]}",
            where=lengths.where,
        )
    turns = tool_turns(evidence.train_rows, key)
    crowded = [count for count in turns if count > multi_turn.max_parallel_calls]
    if crowded:
        yield warning(
            f"{len(crowded)} of {len(turns)} turns with tool calls in the prompts make up to {max(crowded)} calls, but "
            f"{MULTI_TURN}.max_parallel_calls={multi_turn.max_parallel_calls}",
            why="the model imitates its prompt, and calls beyond the limit are not executed",
            fix=f"{MULTI_TURN}.max_parallel_calls={max(crowded)}",
        )


def _needs_messages(evidence: Evidence, row: Row) -> bool:
    loop = evidence.loops.loop_class(row)
    return loop is not None and loop.needs_messages


def _is_flat(prompt: Any) -> bool:
    return not (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict))


def _environments(rows: list[Row], pythons: Mapping[str, str]) -> Findings:
    """Yield the errors of environments named in rows that cannot be built."""
    from hone.agents.environments.base import make_environment

    seen: set[str] = set()
    for row in rows:
        spec = (row.values.get("extra_info") or {}).get("environment")
        if not isinstance(spec, dict) or (key := repr((spec.get("name"), spec.get("options")))) in seen:
            continue
        seen.add(key)
        yield from error_of(make_environment, str(spec.get("name")), spec.get("options") or {}, pythons)
