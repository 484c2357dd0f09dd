"""Checks of all rows of a dataset: each is a generator of findings about one question.

`hone data check` and the preflight rules share these functions. A finding counts all rows with the same problem and
names the first.
"""

from hone.data.checks.rows import (
    ImageCheck,
    PromptLengths,
    check_images,
    conversations,
    duplicates,
    ground_truths,
    media,
    overlap,
    overlong_prompts,
    pair_shapes,
    prompt_lengths,
    prompts,
    rare_sources,
    same_prompt,
    source_names,
    text_of,
    unknown_sources,
)
from hone.data.checks.tools import (
    CallCheck,
    ToolResultLengths,
    agent_names,
    call_findings,
    check_calls,
    is_unsound,
    read_gates,
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
    "pair_shapes",
    "prompt_lengths",
    "prompts",
    "read_gates",
    "rare_sources",
    "same_prompt",
    "source_names",
    "text_of",
    "is_unsound",
    "tool_names",
    "tool_result_lengths",
    "tool_schemas",
    "tool_turns",
    "unknown_sources",
]
