"""Statistics of a dataset: lengths, turns, roles, kinds of problem, ground truths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hone.data.checks.rows import is_missing, text_of, truth_of
from hone.data.files import Row
from hone.data.media import PARTS
from hone.data.messages import plain

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


def statistics(rows: Sequence[Row], *, prompt_key: str, messages_key: str, reward_fn_key: str) -> dict[str, Any]:
    """Return counts and lengths in characters and turns, for the columns that exist."""
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    report: dict[str, Any] = {
        "rows": len(rows),
        "columns": {name: sum(row.values.get(name) is not None for row in rows) for name in columns},
    }
    if reward_fn_key in columns:
        report["data_sources"] = dict(Counter(str(row.values.get(reward_fn_key)) for row in rows).most_common())
    if prompt_key in columns:
        prompts = [plain(row.values.get(prompt_key)) for row in rows]
        report["prompt_forms"] = dict(Counter(map(form_of, prompts)).most_common())
        report["distinct_prompts"] = len({text_of(prompt) for prompt in prompts})
        report["prompt_characters"] = mean_and_quantiles([characters(prompt) for prompt in prompts])
    if messages_key in columns:
        chats = [plain(row.values.get(messages_key)) or [] for row in rows]
        turns = [message for chat in chats if isinstance(chat, list) for message in chat if isinstance(message, dict)]
        report["roles"] = dict(Counter(str(message.get("role")) for message in turns).most_common())
        report["turns"] = mean_and_quantiles([len(chat) for chat in chats])
        answers = [message for message in turns if message.get("role") == "assistant"]
        report["answer_characters"] = mean_and_quantiles(
            [len(str(message.get("content") or "")) for message in answers]
        )
    if "reward_model" in columns:
        truths = [truth_of(row) for row in rows]
        kinds = Counter("missing" if is_missing(truth) else type(truth).__name__ for truth in truths)
        report["ground_truths"] = dict(kinds.most_common())
    return report


def form_of(prompt: Any) -> str:
    """Return the form of a prompt: string, token ids, chat, multi-turn, multimodal, or the name of another type."""
    if isinstance(prompt, str):
        return "string"
    if not isinstance(prompt, list) or not prompt:
        return "empty" if prompt in (None, []) else type(prompt).__name__
    if all(type(item) is int for item in prompt):
        return "token ids"
    messages = [item for item in prompt if isinstance(item, dict)]
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    kinds = {str(part.get("type")) for content in contents for part in content if isinstance(part, dict)}
    if kinds & PARTS.keys():
        return "multimodal"
    return "multi-turn" if any(message.get("role") == "assistant" for message in messages) else "chat"


def characters(prompt: Any) -> int:
    """Return the number of characters of a prompt's text; for token ids, their number."""
    if isinstance(prompt, str):
        return len(prompt)
    if not isinstance(prompt, list):
        return 0
    if prompt and isinstance(prompt[0], int):
        return len(prompt)
    return sum(_length(message.get("content")) for message in prompt if isinstance(message, dict))


def mean_and_quantiles(numbers: Sequence[float]) -> dict[str, float]:
    """Return mean and quantiles by name (``p50``, ...), empty without numbers."""
    if not numbers:
        return {}
    ordered = sorted(numbers)
    places = {f"p{share * 100:g}": ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in QUANTILES}
    return {"mean": round(sum(ordered) / len(ordered), 2), **places}


def _length(content: Any) -> int:
    if isinstance(content, list):
        return sum(len(str(part.get("text") or "")) for part in content if isinstance(part, dict))
    return len(str(content or ""))
