"""Checks of all rows of a dataset: each is a generator of findings about one question.

`hone data check` and the preflight rules share these functions. A finding counts all rows with the same problem and
names the first.
"""

from hone.data.checks.lengths import PromptLengths, overlong_prompts, prompt_lengths
from hone.data.checks.overlap import duplicates, overlap, rare_sources
from hone.data.checks.rewards import ground_truths, source_names, unknown_sources
from hone.data.checks.roles import conversations, prompts
from hone.data.checks.tool_limits import ToolResultLengths, tool_result_lengths, tool_turns
from hone.data.checks.tools import agent_names, tool_loops, tool_names, tool_outputs, tool_schemas

__all__ = [
    "PromptLengths",
    "ToolResultLengths",
    "agent_names",
    "conversations",
    "duplicates",
    "ground_truths",
    "overlap",
    "overlong_prompts",
    "prompt_lengths",
    "prompts",
    "rare_sources",
    "source_names",
    "tool_loops",
    "tool_names",
    "tool_outputs",
    "tool_result_lengths",
    "tool_schemas",
    "tool_turns",
    "unknown_sources",
]
