"""Signatures of reward functions: Hone's, and that of TRL, which takes lists of completions and columns.

    def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)      one response
    def reward(completions, prompts=..., **columns)                                       lists, recognised by ``completions``

A function of the second kind gets one list entry per response of the call: the completion (where the prompt is chat messages, the
messages after it: one of the assistant, or those of the episode with its tool messages), ``completion_ids``, and the columns
``prompts``, ``ground_truth``, ``data_source`` and those of ``extra_info``. A function of the first kind may also take
``last_answer`` (``last_answers`` where the arguments are lists): the last turn without thoughts and tool calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hone.rewards.target import ARGUMENTS, PLURALS

CONVERSATIONS = "conversations_of_responses"
"""Name under which the pool sends the conversations, which only functions of the second kind receive."""


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name; one of TRL's has ``completions``."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


class Adapted:
    """Reward function that takes the arguments the pool sends, whatever its own signature.

    Args:
        function: the user's function.
        kwargs: additional keyword arguments of every call.
        batch: True if the arguments of a call are lists.
    """

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any], *, batch: bool) -> None:
        self.function, self.kwargs, self.batch = function, dict(kwargs), batch
        self.by_columns = takes(function, "completions")
        self._answer = "last_answers" if batch else "last_answer"
        self._with_answer = takes(function, self._answer) and self._answer not in kwargs
        names = PLURALS if batch else ARGUMENTS
        self.arguments = (*names, self._answer) if self._with_answer else names

    @property
    def is_async(self) -> bool:
        """True if calls return a coroutine."""
        called = type(self.function).__call__
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(called)

    def __call__(self, **arguments: Any) -> Any:
        """Call the function; return its value, or a coroutine of it."""
        conversations = arguments.pop(CONVERSATIONS, None)
        if not self.by_columns and self._with_answer:
            extras = arguments["extra_infos"] if self.batch else [arguments["extra_info"]]
            answers = [extra.get("last_answer") for extra in extras]
            arguments[self._answer] = answers if self.batch else answers[0]
        if not self.by_columns:
            return self.function(**arguments, **self.kwargs)
        value = self.function(**self._columns(arguments, conversations), **self.kwargs)
        return self._awaited(value) if inspect.isawaitable(value) else self._one_or_all(value)

    async def _awaited(self, value: Any) -> Any:
        return self._one_or_all(await value)

    def _one_or_all(self, values: Any) -> Any:
        if self.batch:
            return values
        if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == 1:
            return values[0]
        raise ValueError(f"returned {values!r} for a list of 1 completion, not a list of 1 number")

    def _columns(self, arguments: Mapping[str, Any], conversations: Any) -> dict[str, list[Any]]:
        if self.batch:
            texts, truths = arguments["solution_strs"], arguments["ground_truths"]
            sources, extras = arguments["data_sources"], arguments["extra_infos"]
        else:
            texts, truths = [arguments["solution_str"]], [arguments["ground_truth"]]
            sources, extras = [arguments["data_source"]], [arguments["extra_info"]]
        held = conversations or [{"prompt": None, "turns": None, "ids": []}] * len(texts)
        names = dict.fromkeys(name for extra in extras for name in extra)
        columns = {name: [extra.get(name) for extra in extras] for name in names}
        completions = [
            text if one["prompt"] is None else one["turns"] or [{"role": "assistant", "content": text}]
            for text, one in zip(texts, held, strict=True)
        ]
        columns |= {"prompts": [one["prompt"] for one in held], "completions": completions, "data_source": sources}
        columns["completion_ids"] = [list(one["ids"]) for one in held]
        return {"ground_truth": truths, **columns}
