"""Signatures of reward functions: Hone's, and that of TRL, which takes lists of completions and columns.

    def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)      one response
    def reward(completions, prompts=..., **columns)                                       lists, recognised by ``completions``

A function of the second kind gets one list entry per response of the call: the completion (a list with an assistant message where
the prompt is chat messages), and the columns ``prompts``, ``ground_truth``, ``data_source`` and those of ``extra_info``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PROMPT, PROMPTS = "prompt_messages", "prompts_messages"
"""Names under which the pool sends the prompts, which only functions of the second kind receive."""


def takes_completions(function: Callable[..., Any]) -> bool:
    """Return whether a function has TRL's signature."""
    try:
        return "completions" in inspect.signature(function).parameters
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
        self.by_columns = takes_completions(function)

    @property
    def is_async(self) -> bool:
        """True if calls return a coroutine."""
        called = type(self.function).__call__
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(called)

    def __call__(self, **arguments: Any) -> Any:
        """Call the function; return its value, or a coroutine of it."""
        prompts = arguments.pop(PROMPTS if self.batch else PROMPT, None)
        if not self.by_columns:
            return self.function(**arguments, **self.kwargs)
        value = self.function(**self._columns(arguments, prompts), **self.kwargs)
        return self._awaited(value) if inspect.isawaitable(value) else self._one_or_all(value)

    async def _awaited(self, value: Any) -> Any:
        return self._one_or_all(await value)

    def _one_or_all(self, values: Any) -> Any:
        if self.batch:
            return values
        if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == 1:
            return values[0]
        raise ValueError(f"returned {values!r} for a list of 1 completion, not a list of 1 number")

    def _columns(self, arguments: Mapping[str, Any], prompts: Any) -> dict[str, list[Any]]:
        if self.batch:
            texts, truths = arguments["solution_strs"], arguments["ground_truths"]
            sources, extras = arguments["data_sources"], arguments["extra_infos"]
        else:
            texts, truths = [arguments["solution_str"]], [arguments["ground_truth"]]
            sources, extras, prompts = [arguments["data_source"]], [arguments["extra_info"]], [prompts]
        prompts = prompts or [None] * len(texts)
        names = dict.fromkeys(name for extra in extras for name in extra)
        columns = {name: [extra.get(name) for extra in extras] for name in names}
        completions = [
            text if prompt is None else [{"role": "assistant", "content": text}]
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        columns |= {"prompts": prompts, "completions": completions, "data_source": sources}
        return {"ground_truth": truths, **columns}
