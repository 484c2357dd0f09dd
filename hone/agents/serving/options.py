"""Options of ``hone serve`` in place of the configuration keys that a message names."""

from __future__ import annotations

from hone.errors import HoneError

OPTIONS = {
    "actor_rollout_ref.rollout.multi_turn.renderer": "--renderer",
    "actor_rollout_ref.rollout.multi_turn.format": "--parser",
    "actor_rollout_ref.model.custom_chat_template": "--chat-template",
    "model.custom_chat_template": "--chat-template",
}


def named_by_options(error: HoneError) -> HoneError:
    """Return the error with the options of ``hone serve`` where it names keys of a training run."""
    texts = {name: _translated(getattr(error, name)) for name in ("what", "why", "fix", "where")}
    return type(error)(texts["what"], why=texts["why"], fix=texts["fix"], where=texts["where"], code=error.code)


def _translated(text: str) -> str:
    for key, option in OPTIONS.items():
        text = text.replace(f"{key}=", f"{option} ").replace(key, option)
    return text
