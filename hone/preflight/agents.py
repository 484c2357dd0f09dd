"""Rules about episodes of several turns: loops, tools, users and environments that rows name, and how far episodes may go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hone.config.tree import RLConfig
from hone.data.files import Row
from hone.errors import Finding, HoneError
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Stage, error, rule, warning

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
SINGLE = ("single_turn", "single_turn_agent")


@rule("R38", RLConfig)
def episodes_are_bounded(config: RLConfig) -> Iterator[Finding]:
    """Episodes of several turns have a bound besides their tokens."""
    several = config.actor_rollout_ref.rollout.multi_turn
    bounds = (several.max_assistant_turns, several.max_user_turns, several.max_tool_calls, several.max_episode_seconds)
    if several.enable and all(bound is None for bound in bounds):
        yield error(
            "episodes of several turns have no bound: max_assistant_turns, max_user_turns, max_tool_calls and "
            "max_episode_seconds are all null",
            why=f"a policy that calls the same tool again and again goes on for {config.data.max_response_length} tokens",
            fix=f"{MULTI_TURN}.max_assistant_turns=8",
            where=MULTI_TURN,
        )


@rule("R33", RLConfig, stage=Stage.FILES)
def several_turns_are_played(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Tools and users have files, and rows a loop that uses them."""
    several, rows = config.actor_rollout_ref.rollout.multi_turn, evidence.train_rows
    files = [
        name for name in ("tool_config_path", "function_tool_path", "interaction_config_path") if vars(several)[name]
    ]
    played = Counter(map(evidence.loops.name, rows))
    turns = {name: count for name, count in played.items() if name not in SINGLE}
    ignored = [row for row in rows if row.values.get("tools") and evidence.loops.name(row) in SINGLE]
    if ignored:
        yield error(
            f"{len(ignored)} of {len(rows)} training rows bring tools, and their episodes are a single turn",
            why="the tools would not be shown to the model, and never called",
            fix=f"agent_name=tool_agent for them, {MULTI_TURN}.enable=true and {MULTI_TURN}.tool_config_path=FILE.yaml; or rows "
            "without the column tools",
            where="data.train_files",
        )
    if turns and not several.enable:
        names = ", ".join(f"{name} ({count} rows)" for name, count in turns.items())
        yield error(
            f"rows are played by {names}, and {MULTI_TURN}.enable=false",
            why="episodes of several turns are longer and need bounds, so they are played only where that is asked for",
            fix=f"{MULTI_TURN}.enable=true {MULTI_TURN}.max_assistant_turns=8",
            where=f"{MULTI_TURN}.enable",
        )
    elif several.enable and rows and not turns:
        yield error(
            f"{MULTI_TURN}.enable=true, and all {len(rows)} training rows are played by the loop single_turn"
            + (f": {' and '.join(files)} would not be used" if files else ""),
            why="tools would not be shown to the model, and never called",
            fix="actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
            + ("" if files else f" {MULTI_TURN}.tool_config_path=FILE.yaml"),
            where=MULTI_TURN,
        )
    elif not several.enable and files:
        yield error(
            f"{MULTI_TURN}.{files[0]} is set, and {MULTI_TURN}.enable=false",
            why="its tools would never be called",
            fix=f"{MULTI_TURN}.enable=true {MULTI_TURN}.max_assistant_turns=8",
            where=f"{MULTI_TURN}.{files[0]}",
        )
    if turns.get("tool_agent") and several.enable and not (several.tool_config_path or several.function_tool_path):
        yield error(
            f"{turns['tool_agent']} rows are played by tool_agent, and no file names tools",
            why="there is nothing that the model could call",
            fix=f"{MULTI_TURN}.tool_config_path=FILE.yaml, with the line `- name: calculator` under `tools:`",
            where=f"{MULTI_TURN}.tool_config_path",
        )


@rule("R34", RLConfig, stage=Stage.FILES)
def conversations_begin_with_messages(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Prompts of episodes of several turns are messages."""
    rows = [*evidence.train_rows, *evidence.val_rows]
    flat = [row for row in rows if _is_flat(row.values[config.data.prompt_key]) and _needs_messages(evidence, row)]
    if flat:
        yield error(
            f"{len(flat)} of {len(rows)} prompts are plain text or token ids, and their episodes have several turns",
            why="a conversation is continued by the chat template, which needs messages",
            fix='write them as [{"role": "user", "content": "..."}], or agent_name=single_turn for these rows',
            where=flat[0].where,
        )


@rule("R48", RLConfig, stage=Stage.FILES)
def agents_and_tools_exist(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Agent loops, tools, users and environments that rows name exist, and their files can be read."""
    from hone.agents.catalogue import AGENT_LOOPS
    from hone.data import checks

    rows = [*evidence.train_rows, *evidence.val_rows]
    imported = {str(row.values["agent_name"]) for row in rows if ":" in str(row.values.get("agent_name"))}
    default = config.actor_rollout_ref.rollout.agent.default_agent_loop
    for name in sorted(imported | ({default} if default else set())):
        try:
            AGENT_LOOPS.get(name)
        except HoneError as found:
            yield Finding(found, stops=True)
    yield from checks.agent_names(rows, {*AGENT_LOOPS.names(), *imported})
    try:
        known = set(evidence.setting.toolbox) if evidence.setting is not None else set()
        if evidence.setting is not None and "interaction" in set(map(evidence.loops.name, rows)):
            assert evidence.setting.interactions
    except HoneError as found:
        yield Finding(found, stops=True)
        return
    yield from checks.tool_names(rows, known)
    yield from _environments(rows)


@rule("R35", RLConfig, stage=Stage.TEMPLATE)
def tools_are_shown(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """The chat template tells the model of its tools, and can be continued."""
    setting = evidence.setting
    chats = [row for row in evidence.train_rows[:1] if _needs_messages(evidence, row)]
    if setting is None or not chats or evidence.tokenizer is None:
        return
    try:
        schemas = setting.toolbox.schemas()
    except HoneError:
        return  # R48 has told
    try:
        setting.renderer.prompt([{"role": "user", "content": "What is 1 + 1?"}], schemas or None)
    except HoneError as found:
        yield Finding(found, stops=True)


@rule("R37", RLConfig)
def tool_results_leave_room(config: RLConfig) -> Iterator[Finding]:
    """A single tool result does not fill the room of all turns."""
    several, room = config.actor_rollout_ref.rollout.multi_turn, config.data.max_response_length
    if several.enable and (several.tool_config_path or several.function_tool_path):
        longest = several.max_tool_response_length
        if longest >= room:
            yield warning(
                f"a tool result may have max_tool_response_length={longest} tokens, and data.max_response_length={room} must "
                "hold calls, results and the answer",
                why="the episode ends with the first long result, before the model can answer",
                fix=f"data.max_response_length={4 * longest}, or {MULTI_TURN}.max_tool_response_length={max(1, room // 4)}",
                where=f"{MULTI_TURN}.max_tool_response_length",
            )


@rule("R37", RLConfig, stage=Stage.TEMPLATE)
def tool_limits_take_what_prompts_show(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """Tool results and calls as the prompts show them are within the limits of an episode."""
    from hone.data.checks import tool_result_lengths, tool_turns

    several, tokenizer, key = config.actor_rollout_ref.rollout.multi_turn, evidence.tokenizer, config.data.prompt_key
    if not several.enable or tokenizer is None:
        return
    limit = several.max_tool_response_length
    lengths = tool_result_lengths(evidence.train_rows, key, tokenizer, limit)
    if lengths.long:
        yield warning(
            f"{len(lengths.long)} of {lengths.results} tool results in the prompts ({len(lengths.long) / lengths.results:.0%}) "
            f"are longer than {MULTI_TURN}.max_tool_response_length={limit} tokens (longest {lengths.long[0]})",
            why="the results of an episode would be cut where those of its prompt are whole",
            fix=f"{MULTI_TURN}.max_tool_response_length={lengths.long[0]}",
            where=lengths.where,
        )
    turns = tool_turns(evidence.train_rows, key)
    crowded = [count for count in turns if count > several.max_parallel_calls]
    if crowded:
        yield warning(
            f"{len(crowded)} of {len(turns)} turns with tool calls in the prompts make up to {max(crowded)} calls, and "
            f"{MULTI_TURN}.max_parallel_calls={several.max_parallel_calls}",
            why="the model does as its prompt shows, and the calls beyond the limit are not carried out",
            fix=f"{MULTI_TURN}.max_parallel_calls={max(crowded)}",
            where=f"{MULTI_TURN}.max_parallel_calls",
        )


def _needs_messages(evidence: Evidence, row: Row) -> bool:
    loop = evidence.loops.of(row)
    return loop is not None and loop.needs_messages


def _is_flat(prompt: Any) -> bool:
    return not (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict))


def _environments(rows: list[Row]) -> Iterator[Finding]:
    """Every environment that rows name can be made."""
    from hone.agents.environments.base import make_environment

    seen: set[str] = set()
    for row in rows:
        spec = (row.values.get("extra_info") or {}).get("environment")
        if not isinstance(spec, dict) or (key := repr((spec.get("name"), spec.get("options")))) in seen:
            continue
        seen.add(key)
        try:
            make_environment(str(spec.get("name")), spec.get("options") or {})
        except HoneError as found:
            yield Finding(found, stops=True)
