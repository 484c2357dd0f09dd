"""Sources of the values of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.config.check import Provenance
from hone.config.environment import written_leaves
from hone.config.keys import documentation

DEFAULT, DERIVED = "default", "derived"


def explained(config: Any, provenance: Provenance) -> Iterator[tuple[str, Any, str]]:
    """Yield ``(path, value, source)`` of every key: its origin, ``default``, or ``derived from`` other keys.

    Values from the environment are interpolations. A default that refers to other keys (``runs/${trainer.project_name}``) is derived from them.
    """
    defaults = {key.path: key.default for key in documentation(type(config))}
    for path, value in written_leaves(config):
        default = defaults[path]
        if path in provenance:
            yield path, value, provenance[path]
        elif isinstance(default, str) and "${" in default:
            yield path, value, f"{DERIVED} from {default}"
        else:
            yield path, value, DEFAULT
