"""Keep secrets out of the files of a run: command lines and configs are often shared.

A value is hidden if it is assigned to a name that means a credential (``api_key``, ``hf_token``, ``password``,
``secret``), or if it looks like one (``hf_...``, ``sk-...``, ``https://user:password@host``). Ordinary keys of a
training config, such as ``max_token_len``, ``pad_token``, ``prompt_key`` and ``reward_fn_key``, stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "<redacted>"

_SECRET_WORDS = {
    "password",
    "passwd",
    "passphrase",
    "secret",
    "secrets",
    "credential",
    "credentials",
    "apikey",
    "authorization",
}
_KEY_OWNERS = {"api", "access", "secret", "private", "auth", "account", "subscription", "encryption", "signing", "ssh"}
_TOKEN_OWNERS = {
    *("api", "auth", "access", "bearer", "refresh", "session", "security", "personal"),
    *("hf", "hub", "huggingface", "wandb", "mlflow", "github", "gh", "gitlab", "aws", "openai", "anthropic"),
}
_LOOKS_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16})\b"
)
_USERINFO = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")
_NAME = re.compile(r"(?P<name>[\w.-]+)['\"]?\s*[=:]\s*")
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s,}\]]+")


def is_secret_name(name: str) -> bool:
    """Return whether a value assigned to ``name`` (a key path, an option or an environment variable) is a credential.

    >>> [is_secret_name(n) for n in ("reward.api_key", "HF_TOKEN", "--password", "prompt_key", "pad_token")]
    [True, True, True, False, False]
    """
    last = re.split(r"[./]", name.strip("+~'\" "))[-1]
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", last)]
    if not words:
        return False
    if _SECRET_WORDS & set(words) or words in (["token"], ["auth"]):
        return True
    owner, kind = words[-2] if len(words) > 1 else "", words[-1]
    return (kind in {"key", "keys"} and owner in _KEY_OWNERS) or (
        kind in {"token", "tokens"} and owner in _TOKEN_OWNERS
    )


def redact_value(text: str) -> str:
    """Hide text that looks like a credential inside ``text``."""
    return _USERINFO.sub(HIDDEN, _LOOKS_SECRET.sub(HIDDEN, text))


def redact_text(text: str) -> str:
    """Hide credentials as :func:`redact_value` does, and every value assigned to a secret name inside ``text``.

    >>> redact_text("+reward.kwargs={api_key: abc123, max_tokens: 5}")
    '+reward.kwargs={api_key: <redacted>, max_tokens: 5}'
    """
    text, redacted, position = redact_value(text), [], 0
    while match := _NAME.search(text, position):
        redacted.append(text[position : match.end()])
        position = match.end()
        value = _VALUE.match(text, position)
        if value and is_secret_name(match["name"]):
            redacted.append(HIDDEN)
            position = value.end()
    return "".join([*redacted, text[position:]])


def redact_command(arguments: Sequence[str]) -> list[str]:
    """Hide credentials in a command line: ``key=value`` overrides, ``--key=value`` and ``--key value``.

    >>> redact_command(["hone", "train", "--hf-token", "abc", "reward.password=x y", "data.prompt_key=prompt"])
    ['hone', 'train', '--hf-token', '<redacted>', 'reward.password=<redacted>', 'data.prompt_key=prompt']
    """
    redacted: list[str] = []
    hide_next = False
    for argument in arguments:
        name, sign, _ = argument.partition("=")
        if hide_next:
            redacted.append(HIDDEN)
        elif sign and is_secret_name(name):
            redacted.append(f"{name}={HIDDEN}")
        else:
            redacted.append(redact_text(argument))
        hide_next = not hide_next and not sign and argument.startswith("-") and is_secret_name(argument)
    return redacted


def redact_tree(value: Any, secret: bool = False) -> Any:
    """Hide credentials in nested mappings and lists: everything below a secret key, and text that looks like one.

    >>> redact_tree({"password": 5, "auth": {"user": "me"}, "pad_token": "<pad>", "api_key": None})
    {'password': '<redacted>', 'auth': {'user': '<redacted>'}, 'pad_token': '<pad>', 'api_key': None}
    """
    if isinstance(value, Mapping):
        return {key: redact_tree(entry, secret or is_secret_name(str(key))) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(entry, secret) for entry in value]
    if secret and not isinstance(value, bool) and value not in (None, ""):
        return HIDDEN
    return redact_value(value) if isinstance(value, str) else value
