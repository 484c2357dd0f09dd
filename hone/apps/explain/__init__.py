"""Explain any term: a configuration key, a metric, a code, a detector, a method, or a word of the glossary."""

from __future__ import annotations

from hone.apps.explain.lookup import Explanation, explain

__all__ = ["Explanation", "explain"]
