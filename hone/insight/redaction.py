"""Keep secrets out of the files of a run: command lines and configs are often shared.

A value is hidden

- if it is assigned to a name that means a credential (``api_key``, ``openai_key``, ``hf_token``, ``password``, ``pwd``),
- if it looks like one (:data:`CREDENTIALS`: ``hf_...``, ``sk-...``, ``glpat-...``, a JSON web token, ...),
- in a URL: user information (``https://user:password@host``, ``https://token@host``) and query parameters such as ``token``,
- if it is the value of an environment variable that the run's configuration reads (:func:`hide_variables`).

Ordinary keys of a training config, such as ``max_token_len``, ``pad_token``, ``prompt_key`` and ``reward_fn_key``, stay. So do
interpolations: ``${oc.env:OPENAI_API_KEY}`` names a secret and does not contain it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "<redacted>"

CREDENTIALS = {
    "Hugging Face": r"(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "OpenAI, Anthropic, OpenRouter, DeepSeek": r"sk-[A-Za-z0-9_-]{20,}",
    "Stripe": r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "GitHub": r"gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}",
    "GitLab": r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct)-[A-Za-z0-9_.=-]{16,}|GR1348941[A-Za-z0-9_-]{16,}",
    "AWS": r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}",
    "Google": r"AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}",
    "Alibaba Cloud": r"LTAI[A-Za-z0-9]{12,30}",
    "JSON web token": r"eyJ[A-Za-z0-9_-]{6,}\.eyJ[A-Za-z0-9_-]{6,}(?:\.[A-Za-z0-9_-]*)?",
    "Slack": r"xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}|(?<=hooks\.slack\.com/services/)[A-Za-z0-9/]{20,}",
    "Discord": r"(?<=discord\.com/api/webhooks/)\d+/[A-Za-z0-9_-]{20,}",
    "Telegram": r"\d{8,10}:AA[A-Za-z0-9_-]{30,}",
    "npm, PyPI, Docker": r"npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{16,}|dckr_pat_[A-Za-z0-9_-]{20,}",
    "Databricks, Grafana, DigitalOcean": r"dapi[0-9a-f]{32}|gl(?:sa|c)_[A-Za-z0-9_=+/-]{20,}|do[opr]_v1_[0-9a-f]{40,}",
    "NVIDIA, Replicate, Groq, xAI, Perplexity": r"nvapi-[A-Za-z0-9_-]{20,}|r8_[A-Za-z0-9]{20,}|gsk_[A-Za-z0-9]{20,}"
    r"|xai-[A-Za-z0-9]{20,}|pplx-[A-Za-z0-9]{20,}",
    "Together, Fireworks, Cerebras, Tavily": r"tgp_v1_[A-Za-z0-9_-]{20,}|fw_[A-Za-z0-9]{20,}|csk-[A-Za-z0-9]{20,}"
    r"|tvly-[A-Za-z0-9-]{16,}",
    "Weights and Biases": r"wandb_v1_[A-Za-z0-9_-]{20,}",
    "SendGrid, Twilio, Mailgun": r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|SK[0-9a-f]{32}|key-[0-9a-f]{32}",
    "Azure storage": r"(?<=AccountKey=)[A-Za-z0-9+/=]{20,}|(?<=SharedAccessKey=)[A-Za-z0-9+/=]{20,}",
    "age": r"AGE-SECRET-KEY-1[A-Z0-9]{20,}",
}
"""Patterns of credentials that have a form of their own, by their issuer."""

_PROVIDERS = {
    "openai", "anthropic", "claude", "azure", "google", "gemini", "gcp", "aws", "huggingface", "hf", "hub", "wandb",
    "mlflow", "github", "gh", "gitlab", "slack", "discord", "telegram", "cohere", "mistral", "groq", "together", "xai",
    "replicate", "fireworks", "deepseek", "nvidia", "ngc", "databricks", "stripe", "twilio", "sendgrid", "npm", "pypi",
    "docker", "serper", "serpapi", "tavily", "bing", "brave", "exa", "perplexity", "openrouter", "dashscope", "qwen",
    "moonshot", "zhipu", "minimax", "modelscope", "comet", "neptune", "swanlab", "clearml", "kaggle", "pinecone",
    "weaviate", "qdrant", "elastic", "datadog", "sentry", "cerebras", "runpod", "modal", "vast", "lambda", "e2b",
}  # fmt: skip
_KEY_OWNERS = {
    "api", "access", "secret", "private", "auth", "account", "subscription", "encryption", "signing", "ssh", "license",
    "client", "service", "shared", "master", "deploy", "storage", *_PROVIDERS,
}  # fmt: skip
_TOKEN_OWNERS = {
    "api", "auth", "access", "bearer", "refresh", "session", "security", "personal", "id", "csrf", "oauth", "identity",
    "service", "server", "client", "bot", "app", "deploy", "registry", "proxy", "admin", "secret", "private", "sas",
    *_PROVIDERS,
}  # fmt: skip
_PASS_OWNERS = {
    "db", "database", "smtp", "mail", "email", "user", "admin", "root", "mysql", "postgres", "redis", "mongo",
}  # fmt: skip
_OWNERS = {
    "key": _KEY_OWNERS,
    "keys": _KEY_OWNERS,
    "token": _TOKEN_OWNERS,
    "tokens": _TOKEN_OWNERS,
    "pass": _PASS_OWNERS,
    "string": {"connection"},
}
"""Words that make a name ending in the key a credential when they precede it: ``openai_key``, ``auth_token``."""
_SECRET_WORDS = {
    "password", "passwords", "passwd", "passphrase", "passcode", "pwd", "pswd", "secret", "secrets", "credential",
    "credentials", "creds", "cred", "authorization", "bearer", "jwt", "cookie", "cookies", "sas", "dsn", "webhook",
}  # fmt: skip
_SECRET_NAMES = (["token"], ["auth"], ["pass"], ["pw"])
_QUERY_SECRETS = {"key", "sig", "signature", "code", "x-amz-signature", "x-amz-credential", "x-goog-signature"}

_LOOKS_SECRET = re.compile(r"(?<![A-Za-z0-9])(?:" + "|".join(CREDENTIALS.values()) + ")")
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_SCHEME = re.compile(r"(?i)\b(bearer|basic)(\s+)(?=[^\s'\",;]*[\d=_])[A-Za-z0-9._~+/=-]{12,}")
_USER_INFORMATION = re.compile(r"(?<=://)(?!git@)[^/\s?#'\"<>$]+(?=@)")
_QUERY = re.compile(r"(?<=[?&;])(?P<name>[\w.-]+)=(?P<value>[^&;\s'\"#]+)")
_NAME = re.compile(r"(?P<name>[\w.-]+)['\"]?\s*[=:]\s*")
_ASSIGNED = re.compile(r"(?P<name>[\w.-]+)=(?P<value>'[^']*'|\"[^\"]*\"|[^\s,;&}\]'\"]+)")
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|(?:(?i:bearer|basic|token)\s+)?(?:\$\{[^}]*\}|[^\s,}\]])+")
_INTERPOLATION = re.compile(r"\$\{[^${}]*\}")
_VARIABLE_DEFAULT = re.compile(r"(\$\{\s*oc\.env\s*:\s*\w+\s*,)(?!\s*null\s*\})[^${}]*(?=\})")
_LITERAL_PARTS = {"", "bearer", "basic", "token", "apikey"}
_SHORTEST_VARIABLE = 6

_variables: dict[str, str] = {}


def hide_variables(variables: Mapping[str, str]) -> None:
    """Hide the values of environment variables in messages and commands from now on, as ``${oc.env:NAME}``.

    Values of fewer than 6 characters and paths that exist remain: they are no secrets, and texts would become unreadable.
    """
    for name, value in variables.items():
        if len(value) >= _SHORTEST_VARIABLE and not os.path.exists(value):  # noqa: PTH110  # Path.exists raises for long names
            _variables[value] = f"${{oc.env:{name}}}"


def is_secret_name(name: str) -> bool:
    """Return whether a value assigned to ``name`` (a key path, an option or an environment variable) is a credential.

    >>> [is_secret_name(n) for n in ("reward.api_key", "HF_TOKEN", "--password", "openaiKey", "prompt_key", "pad_token")]
    [True, True, True, True, False, False]
    """
    last = re.split(r"[./]", name.strip("+~'\" "))[-1]
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", last)]
    if not words:
        return False
    if _SECRET_WORDS & set(words) or words in _SECRET_NAMES:
        return True
    owner, kind = words[-2] if len(words) > 1 else "", words[-1]
    if owner in _OWNERS.get(kind, ()):
        return True
    joined = next((end for end in _OWNERS if kind.endswith(end) and kind[: -len(end)] in _OWNERS[end]), None)
    return joined is not None or kind.endswith(("password", "passwd", "secret"))


def redact_value(text: str) -> str:
    """Hide what looks like a credential inside ``text``, in its URLs too.

    >>> redact_value("https://me@host/x?token=abc&n=1")
    'https://<redacted>@host/x?token=<redacted>&n=1'
    """
    text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}\2", text)
    text = _LOOKS_SECRET.sub(HIDDEN, text)
    text = _SCHEME.sub(rf"\1\2{HIDDEN}", text)
    text = _USER_INFORMATION.sub(HIDDEN, text)
    return _QUERY.sub(_hidden_parameter, text)


def redact_credentials(text: str) -> str:
    """Hide what has the form of a credential, and values of :func:`hide_variables`; names, URLs and prose stay.

    >>> redact_credentials("password=x, token hf_aBcDeFgHiJkLmNoPqRsTuVwX")
    'password=x, token <redacted>'
    """
    text = _variables_hidden(text)
    return _LOOKS_SECRET.sub(HIDDEN, _PRIVATE_KEY.sub(rf"\1{HIDDEN}\2", text))


def redact_text(text: str) -> str:
    """Hide credentials as :func:`redact_value` does, and every value assigned to a secret name inside ``text``.

    >>> redact_text("+reward.kwargs={api_key: abc123, max_tokens: 5}")
    '+reward.kwargs={api_key: <redacted>, max_tokens: 5}'
    """
    text, redacted, position = redact_value(_variables_hidden(text)), [], 0
    while match := _NAME.search(text, position):
        redacted.append(text[position : match.end()])
        position = match.end()
        value = _VALUE.match(text, position)
        if value and is_secret_name(match["name"]):
            redacted.append(_hidden(value[0]))
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
        name, sign, value = argument.partition("=")
        if hide_next:
            redacted.append(_hidden(argument))
        elif sign and is_secret_name(name):
            redacted.append(f"{name}={_hidden(value)}")
        else:
            redacted.append(redact_text(argument))
        hide_next = not hide_next and not sign and argument.startswith("-") and is_secret_name(argument)
    return redacted


def redact_entry(name: str, value: Any) -> Any:
    """Hide credentials in the value of a key, given by its dotted path."""
    return redact_tree(value, is_secret_name(name))


def redact_tree(value: Any, secret: bool = False) -> Any:
    """Hide credentials in nested mappings and lists: everything below a secret key, and text that looks like one.

    >>> redact_tree({"password": 5, "auth": {"user": "me"}, "pad_token": "<pad>", "api_key": "${oc.env:KEY}"})
    {'password': '<redacted>', 'auth': {'user': '<redacted>'}, 'pad_token': '<pad>', 'api_key': '${oc.env:KEY}'}
    """
    if isinstance(value, Mapping):
        return {key: redact_tree(entry, secret or is_secret_name(str(key))) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        if not secret and value and all(isinstance(entry, str) for entry in value):
            return [_in_tree(entry) for entry in _options_hidden(value)]
        return [redact_tree(entry, secret) for entry in value]
    if secret and not isinstance(value, bool) and value not in (None, ""):
        return _hidden(value)
    return _in_tree(value) if isinstance(value, str) else value


def _in_tree(text: str) -> str:
    """Hide what looks like a credential, and values of ``name=value``; prose ("Token: ...") stays."""
    return _ASSIGNED.sub(_hidden_assignment, redact_value(text))


def _options_hidden(words: Sequence[str]) -> list[str]:
    """Hide the word after an option that means a credential: ``["--api-key", "abc"]``."""
    before = ("", *words)
    return [
        _hidden(word) if option.startswith("-") and "=" not in option and is_secret_name(option) else word
        for option, word in zip(before, words, strict=False)
    ]


def _variables_hidden(text: str) -> str:
    for value in sorted(_variables, key=len, reverse=True):
        text = text.replace(value, _variables[value])
    return text


def _hidden(value: Any) -> str:
    """Return what is written for a secret: interpolations stay, without literal defaults of variables."""
    if isinstance(value, str) and "${" in value:
        literal = value
        while (inner := _INTERPOLATION.sub("", literal)) != literal:
            literal = inner
        if literal.strip("'\" ").lower() in _LITERAL_PARTS:
            return _VARIABLE_DEFAULT.sub(rf"\1{HIDDEN}", value)
    return HIDDEN


def _hidden_parameter(match: re.Match[str]) -> str:
    name = match["name"]
    secret = name.lower() in _QUERY_SECRETS or is_secret_name(name) or name.lower().endswith("-token")
    return f"{name}={_hidden(match['value'])}" if secret else match[0]


def _hidden_assignment(match: re.Match[str]) -> str:
    return f"{match['name']}={_hidden(match['value'])}" if is_secret_name(match["name"]) else match[0]
