"""Codes of errors that are not preflight rules, read from ``error_codes.yaml``, and their table."""

from __future__ import annotations

import functools
from pathlib import Path

from hone.text import replace_between

_FILE = Path(__file__).with_name("error_codes.yaml")
BEGIN = "<!-- Generated from hone/apps/explain/error_codes.yaml by scripts/make_docs: do not edit from here -->"
END = "<!-- codes: to here -->"


@functools.cache
def error_codes() -> dict[str, str]:
    import yaml

    return yaml.safe_load(_FILE.read_text(encoding="utf-8"))


def codes_page(existing: str) -> str:
    """Return a page with a new table of the codes between the markers; the rest is unchanged."""
    rows = [f"| {code} | {meaning} |" for code, meaning in error_codes().items()]
    return replace_between(existing, BEGIN, END, "\n".join(["| Code | Raised for |", "|---|---|", *rows]))
