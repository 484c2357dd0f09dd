"""Command-line overrides, parsed one by one with Hydra's parser, so that each malformed one is reported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

COMMAND_LINE = "command line"


def parse_overrides(lines: list[str]) -> tuple[list[Override], list[ConfigError]]:
    """Return the valid overrides, and the errors of the others."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    parser = OverridesParser.create()
    overrides, problems = [], []
    for line in lines:
        try:
            (override,) = parser.parse_overrides([line])
        except OverrideParseException as error:
            problems.append(_malformed(line, one_line(error)))
            continue
        if not override.key_or_group:
            problems.append(_malformed(line, "it has no key"))
        elif override.is_sweep_override():
            problems.append(
                ConfigError(
                    "has several values for one key",
                    why="a run needs one value; a comma outside brackets and quotes means a sweep",
                    fix=f"put brackets around a list: '{override.get_key_element()}=[...]'",
                    where=line,
                )
            )
        else:
            overrides.append(override)
    return overrides, problems


def _malformed(line: str, reason: str) -> ConfigError:
    if "=" not in line and not line.startswith("~"):
        fix = f"model.path={line}" if Path(line).is_dir() else f"data.train_files={line}"
        fix = f"write key=value: {fix}" if Path(line).exists() else "write key=value"
        return ConfigError(f"'{line}' is not an override", fix=fix, where=COMMAND_LINE)
    key, _, value = line.partition("=")
    open_bracket = any(value.count(left) != value.count(right) for left, right in ("[]", "{}", "()"))
    return ConfigError(
        f"'{line}' cannot be read as key=value: {reason}",
        why="spaces, commas, colons, brackets and braces in a value have a special meaning",
        fix="close every bracket"
        if open_bracket
        else f"quote the value for Hydra and for the shell: '{key}=\"{value}\"'",
        where=COMMAND_LINE,
    )


def override_value(override: Override) -> Any:
    from hydra.core.override_parser.types import QuotedString

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.text if isinstance(value, QuotedString) else value

    return plain(override.value())


def hydra_value(value: Any) -> str:
    """Return a value in Hydra's syntax, with quoted strings.

    >>> hydra_value(["a b", None, {"c": 1e-6}]), hydra_value("it's ${data.seed}")
    ("['a b',null,{c:1e-06}]", "'it\\\\'s ${data.seed}'")
    """
    if isinstance(value, list | tuple):
        return "[" + ",".join(hydra_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{hydra_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str):
        quoted = value.replace("\\'", "\\\\'").replace("'", "\\'")
        return f"'{quoted}'"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, with that of its cause."""
    messages = [error, error.__cause__] if error.__cause__ else [error]
    lines = [line.strip() for message in messages for line in str(message).splitlines()]
    noise = (
        "See https",
        "provider=",
        "Config search path",
        "Available options",
        "full_key:",
        "object_type=",
        "reference_type=",
        "To append to your config use",
    )
    return "; ".join(line for line in lines if line and not line.startswith(noise))
