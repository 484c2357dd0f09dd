"""The blocks ``rollout.multi_turn`` and ``rollout.agent``: episodes of several turns, and how they are played."""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.config.fields import block, choice, named, number, texts


@dataclass
class MultiTurnConfig:
    """Episodes of several turns: tools, simulated users, environments, and how far an episode may go."""

    enable: bool = False
    """Play episodes of several turns. data.max_response_length then bounds everything behind the prompt: sampled tokens, tool
    results and user turns together."""
    tool_config_path: str | None = texts(None, "path")
    """YAML file of tools: built-in ones, classes, functions, MCP servers. See docs/agents.md."""
    function_tool_path: str | None = texts(None, "path")
    """Python file whose functions decorated with @tool are tools."""
    interaction_config_path: str | None = texts(None, "path")
    """YAML file of simulated users, which answer the model's turns."""
    max_assistant_turns: int | None = number(None, low=1)
    """Most turns of the policy in an episode; null is no limit (then another limit must be set)."""
    max_user_turns: int | None = number(None, low=1)
    """Most turns of a simulated user or an environment in an episode; null is no limit."""
    max_tool_calls: int | None = number(None, low=1)
    """Most tool calls carried out in an episode; for one more the model is told so, and the episode ends when its next turn
    calls again. null is no limit."""
    max_episode_seconds: float | None = number(None, above=0)
    """Wall time of an episode; null is no limit. It makes a run depend on the speed of the machine."""
    max_tokens_per_turn: int | None = number(None, low=1)
    """Most tokens sampled in one turn; null means what is left of data.max_response_length."""
    max_parallel_calls: int = number(4, low=1)
    """Most calls carried out in one turn; for every further one the model is told that it was not carried out."""
    max_tool_response_length: int = number(256, low=1)
    """Longest tool result in tokens; a longer one is cut, and the cut is marked and counted."""
    tool_response_truncate_side: str = choice("middle", "left", "middle", "right")
    """Which part of a long result is cut away: its beginning (left), its middle or its end (right)."""
    tool_timeout: float = number(30.0, above=0)
    """Seconds for one call; a tool's own `timeout` in the tool file wins."""
    tool_retries: int = number(1, low=0)
    """How often a call is tried again after a timeout or an error of the tool (not after invalid arguments)."""
    tool_concurrency: int = number(64, low=1)
    """Most calls of one tool under way at a time; a tool's own `concurrency` in the tool file wins."""
    format: str = "auto"
    """How the model writes tool calls: auto (by its chat template), or a parser: hermes, qwen3_coder, harmony, llama3_json, gemma,
    pythonic, deepseek, kimi."""
    renderer: str = "auto"
    """How messages are put behind tokens: auto (by the chat template), or a model family; see `hone data template`."""
    tokenization_sanity_check_mode: str = choice("ignore_strippable", "strict", "ignore_strippable", "disable")
    """Compare the tokens of every episode with its conversation rendered anew: strict counts every difference,
    ignore_strippable not those of white space, disable does not look. The tokens trained on are the sampled ones in any
    case."""


@dataclass
class ProgramConfig:
    """An agent that is a program of its own: all it knows is the address of an OpenAI-compatible endpoint. See docs/serving.md."""

    command: list[str] = field(default_factory=list)
    """Program with its arguments, run once an episode, as in [python,my_agent.py]. It gets OPENAI_BASE_URL, OPENAI_API_KEY,
    OPENAI_MODEL, and its row as JSON on standard input."""
    function: str | None = None
    """Function in place of a command, as an import path (my_agent:play), best an async one. It is called with the row, and with
    base_url, api_key and model by name."""
    timeout: float = number(600.0, above=0)
    """Seconds that one run of it may take; then it is killed, and the episode counts as broken."""


@dataclass
class VerifiersConfig:
    """Environments of the library verifiers, played in the Python where they are installed. See docs/agents.md."""

    python: str | None = texts(None, "path")
    """Python of that virtual environment, as in ~/verifiers/bin/python. null is the Python of this run."""
    timeout: float = number(600.0, above=0)
    """Seconds that one episode may take; then it counts as broken."""


@dataclass
class AgentConfig:
    """Which agent loop plays an episode, how many at a time, and what becomes of one that breaks."""

    default_agent_loop: str | None = named(None, "agent loop")
    """Loop of rows without the column agent_name: single_turn, tool_agent, interaction, environment, program, verifiers, or an
    import path (my_loops:MyLoop). null means program where agent.program names one, what the files of multi_turn call for, else
    single_turn."""
    max_concurrent_episodes: int | None = number(None, low=1)
    """Most episodes under way at a time on each rollout worker; null plays all of a batch at once."""
    max_retries: int = number(1, low=0)
    """How often an episode that broke is played again, with other random draws."""
    on_error: str = choice("stop", "stop", "drop")
    """What to do when it still breaks: stop ends the run with its trace; drop replaces its whole group by the next prompt, and
    counts it (in validation the episode has score 0 and an error)."""
    max_error_rate: float = number(0.2, low=0, high=1)
    """With on_error=drop: largest share of broken groups in a step; with more the run stops."""
    program: ProgramConfig = block(ProgramConfig)
    """The agent of the loop `program`."""
    verifiers: VerifiersConfig = block(VerifiersConfig)
    """What the loop `verifiers` plays with."""
