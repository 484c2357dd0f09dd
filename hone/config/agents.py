"""The blocks ``rollout.multi_turn`` and ``rollout.agent``: multi-turn episodes and agent loops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import block, choice, named, number, texts


@dataclass
class CompactionConfig:
    """Rewriting of conversations that would outgrow their context, in episodes of any length. See docs/agents.md."""

    strategy: str | None = choice(None, "summarize", "drop_results")
    """summarize: the policy writes a summary, which replaces the conversation; drop_results: older tool results lose their contents.
    null: an episode ends where its conversation ends."""
    context_tokens: int | None = number(None, low=1)
    """Most tokens of one conversation, its prompt included; the engine and the model need no more. data.max_response_length then limits all
    conversations of an episode together."""
    keep_turns: int = number(1, low=0)
    """Latest turns that are kept unchanged, with the results of their calls; drop_results keeps at least one."""
    instruction: str = (
        "Summarize what you have done and found so far. Only the summary will be left of this conversation."
    )
    """Message that asks for a summary."""
    max_summary_tokens: int = number(256, low=1)
    """Most tokens of a summary."""
    reserve_tokens: int | None = number(None, low=0)
    """Tokens that stay free after a turn, for the results of its calls and then for the summary; null means enough for the longest."""


@dataclass
class MultiTurnConfig:
    """Multi-turn episodes: tools, simulated users, environments, and limits of an episode."""

    enable: bool = False
    """Play multi-turn episodes. data.max_response_length then limits everything after the prompt: sampled tokens, tool
    results and user turns together."""
    tool_config_path: str | None = texts(None, "path")
    """YAML file of tools: built-in ones, classes, functions, MCP servers. See docs/agents.md."""
    function_tool_path: Any = texts(None, "path")
    """Python file, or several, whose functions decorated with @tool are tools."""
    interaction_config_path: str | None = texts(None, "path")
    """YAML file of simulated users, which answer the model's turns."""
    max_assistant_turns: int | None = number(None, low=1)
    """Most turns of the policy in an episode; null means no limit (then another limit must be set)."""
    max_user_turns: int | None = number(None, low=1)
    """Most turns of a simulated user or an environment in an episode; null means no limit."""
    max_tool_calls: int | None = number(None, low=1)
    """Most tool calls executed in an episode. The next call gets an error result, and the episode ends when the following turn
    calls a tool again. null means no limit."""
    max_episode_seconds: float | None = number(None, above=0)
    """Wall time of an episode; null means no limit. It makes a run depend on the speed of the machine."""
    max_tokens_per_turn: int | None = number(None, low=1)
    """Most tokens sampled in one turn; null means the remainder of data.max_response_length."""
    max_parallel_calls: int = number(4, low=1)
    """Most tool calls executed in one turn; each further call gets an error result."""
    max_tool_response_length: int = number(256, low=1)
    """Longest tool result in tokens; a longer one is truncated, marked and counted."""
    tool_response_truncate_side: str = choice("middle", "left", "middle", "right")
    """Part of a long tool result that is removed: its beginning (left), its middle or its end (right)."""
    tool_timeout: float = number(30.0, above=0)
    """Seconds for one call; `timeout` of a tool in the tool file takes precedence."""
    tool_retries: int = number(1, low=0)
    """Retries of a call after a timeout or an error of the tool (not after invalid arguments)."""
    tool_concurrency: int = number(64, low=1)
    """Most concurrent calls of one tool; `concurrency` of a tool in the tool file takes precedence."""
    compaction: CompactionConfig = block(CompactionConfig)
    """Rewriting of conversations that would outgrow their context."""
    subagents: bool = False
    """Give the policy of the loop tool_agent a tool `delegate`, which plays a task in a conversation of its own, with the same tools
    and weights, and returns the last answer. The conversations of an episode are trained together with one reward."""
    format: str = "auto"
    """Format of the model's tool calls: auto (by its chat template), or a parser: hermes, qwen3_coder, harmony, llama3_json, gemma,
    pythonic, deepseek, kimi."""
    renderer: str = "auto"
    """Rendering of messages as tokens: auto (by the chat template), or a model family; see `hone data template`."""
    audit_dir: str | None = texts(None, "path")
    """Folder with an append-only log of every tool call, in chained lines, also of programs that use the endpoint; null keeps none. See
    `hone audit`."""
    tokenization_sanity_check_mode: str = choice("ignore_strippable", "strict", "ignore_strippable", "disable")
    """Compare the tokens of every episode with its conversation rendered again: strict counts every difference,
    ignore_strippable ignores white space, disable skips the check. Training always uses the sampled tokens."""


@dataclass
class ProgramConfig:
    """An agent that is an external program and uses an OpenAI-compatible endpoint. See docs/serving.md."""

    command: list[str] = field(default_factory=list)
    """Program with its arguments, run once per episode, such as [python,my_agent.py]. It gets OPENAI_BASE_URL, OPENAI_API_KEY,
    OPENAI_MODEL, the same variables of ANTHROPIC, and its row as JSON on standard input."""
    function: str | None = None
    """Import path of a function to call instead of a command (my_agent:play), preferably async. Its arguments are the row, and
    base_url, api_key and model by name."""
    timeout: float = number(600.0, above=0)
    """Time limit of one run in seconds; then the program is killed, and the episode counts as failed."""


@dataclass
class VerifiersConfig:
    """Environments of the library verifiers, run by the Python where they are installed. See docs/agents.md."""

    python: str | None = texts(None, "path")
    """Python of their virtual environment, such as ~/verifiers/bin/python; null means the Python of this run."""
    timeout: float = number(600.0, above=0)
    """Time limit of one episode in seconds; then it counts as failed."""


@dataclass
class AgentConfig:
    """The agent loop of episodes, their concurrency, and the handling of failed episodes."""

    default_agent_loop: str | None = named(None, "agent loop")
    """Agent loop of rows without the column agent_name: single_turn, tool_agent, interaction, environment, self_play,
    proposer_solver, program, verifiers, or an import path (my_loops:MyLoop). null means program if agent.program is set, else the loop
    that the files of multi_turn need, else single_turn."""
    max_concurrent_episodes: int | None = number(None, low=1)
    """Most concurrent episodes per rollout worker; null plays a whole batch at once."""
    max_retries: int = number(1, low=0)
    """Retries of a failed episode, with other random draws."""
    on_error: str = choice("stop", "stop", "drop")
    """Action when an episode failed in all retries: stop ends the run with the traceback; drop leaves the episode out of its group and
    counts it, up to reward.max_no_verdict_rate. A failure that a tool or environment reports as NoVerdict is always left out."""
    program: ProgramConfig = block(ProgramConfig)
    """Settings of the loop `program`."""
    verifiers: VerifiersConfig = block(VerifiersConfig)
    """Settings of the loop `verifiers`."""
    environment_python: dict[str, str] = field(default_factory=dict)
    """Python of environments whose package has its own virtual environment, by name: {textarena: ~/ta/bin/python}. Others run with the
    Python of this run. See `hone env list`."""
