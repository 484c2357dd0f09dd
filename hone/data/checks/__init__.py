"""Checks of all rows of a dataset: each is a generator of findings about one question.

`hone data check` and the preflight rules share these functions. A finding counts all rows with the same problem and
names the first.
"""

from hone.data.checks.images import ImageCheck, check_images, media
from hone.data.checks.lengths import PromptLengths, overlong_prompts, prompt_lengths
from hone.data.checks.overlap import duplicates, overlap, rare_sources
from hone.data.checks.rewards import ground_truths, source_names, unknown_sources
from hone.data.checks.roles import conversations, prompts
from hone.data.checks.tool_calls import CallCheck, call_findings, check_calls, is_unsound, read_gates
from hone.data.checks.tools import (
    ToolResultLengths,
    agent_names,
    tool_names,
    tool_result_lengths,
    tool_schemas,
    tool_turns,
)

__all__ = [
    "CallCheck",
    "ImageCheck",
    "PromptLengths",
    "ToolResultLengths",
    "agent_names",
    "call_findings",
    "check_calls",
    "check_images",
    "conversations",
    "duplicates",
    "ground_truths",
    "media",
    "overlap",
    "overlong_prompts",
    "prompt_lengths",
    "prompts",
    "read_gates",
    "rare_sources",
    "source_names",
    "is_unsound",
    "tool_names",
    "tool_result_lengths",
    "tool_schemas",
    "tool_turns",
    "unknown_sources",
]
