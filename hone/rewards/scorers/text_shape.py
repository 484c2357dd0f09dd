"""What can be said of a response by its text alone: length, form, words, repetition, script. Each works as a term beside others."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hone.rewards.scorers.base import register_scorer

_THOUGHT = re.compile(r"\s*<think>(?P<thought>.+?)</think>\s*(?P<rest>.+)", re.DOTALL)
SCRIPTS = {
    **dict.fromkeys(("en", "de", "fr", "es", "it", "pt", "vi", "tr", "pl", "latin"), ("LATIN",)),
    **dict.fromkeys(("ru", "uk", "bg", "cyrillic"), ("CYRILLIC",)),
    "zh": ("CJK",),
    "ja": ("CJK", "HIRAGANA", "KATAKANA"),
    "ko": ("HANGUL",),
    "ar": ("ARABIC",),
    "he": ("HEBREW",),
    "hi": ("DEVANAGARI",),
    "th": ("THAI",),
    "el": ("GREEK",),
}
"""Beginnings of the Unicode names of the letters that a language is written with."""
MOST = 20_000
"""Characters of a response that are looked at."""


@register_scorer("length", "length")
def length_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    min_chars: int = 1,
    max_chars: int = 2000,
    margin: int | None = None,
) -> dict[str, Any]:
    """1 for a response of ``min_chars`` to ``max_chars`` characters, falling to 0 over ``margin`` more or fewer (by default as
    many as the nearer bound).
    """
    size = len(solution_str.strip())
    if not 0 <= min_chars <= max_chars:
        raise ValueError(f"min_chars={min_chars} and max_chars={max_chars} are no range")
    bound = min_chars if size < min_chars else max_chars
    missing, slack = max(min_chars - size, size - max_chars, 0), margin if margin is not None else bound
    score = 1.0 if not missing else max(0.0, 1.0 - missing / slack) if slack else 0.0
    return {"score": score, "chars": float(size)}


@register_scorer("format", "format", may_hang=True)
def format_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    pattern: str | None = None,
) -> dict[str, Any]:
    """1 for a response of the right form: ``<think>...</think>``, once and not empty, and an answer behind it.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: not used.
        extra_info: not used.
        pattern: regular expression that the whole response must match instead (``.`` matches line ends too).
    """
    if pattern is not None:
        try:
            fits = re.fullmatch(pattern, solution_str[:MOST].strip(), re.DOTALL) is not None
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None
        return {"score": float(fits), "format": float(fits)}
    once = solution_str.count("<think>") == solution_str.count("</think>") == 1
    found = _THOUGHT.fullmatch(solution_str) if once else None
    fits = found is not None and bool(found["thought"].strip()) and bool(found["rest"].strip())
    return {"score": float(fits), "format": float(fits)}


@register_scorer("keywords", "keywords")
def keywords_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    words: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The share of ``words`` (by default those of the ground truth) that the response has, as whole words in any case."""
    wanted = _words(words, ground_truth)
    found = [word for word in wanted if _has(solution_str, word)]
    return {"score": len(found) / len(wanted), "pred": found}


@register_scorer("banned_words", "banned_words")
def banned_words_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    words: Sequence[str] | None = None,
    penalty: float = 1.0,
) -> dict[str, Any]:
    """``-penalty`` for a response with any of ``words`` (by default those of the ground truth), as whole words in any case; 0
    without.
    """
    found = [word for word in _words(words, ground_truth) if _has(solution_str, word)]
    return {"score": -penalty if found else 0.0, "banned": float(len(found)), "pred": found}


@register_scorer("repetition", "repetition")
def repetition_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    n: int = 4,
    penalty: float = 1.0,
) -> dict[str, Any]:
    """``-penalty`` times the share of n-grams of words that occurred before: 0 where nothing is repeated.

    Text without spaces is taken by characters (four times as many).
    """
    if n < 1:
        raise ValueError(f"n={n} is no length")
    parts: Sequence[str] = solution_str[:MOST].split()
    if len(parts) < n <= len(solution_str) // 8:
        parts, n = solution_str[:MOST], 4 * n
    grams = Counter(tuple(parts[start : start + n]) for start in range(len(parts) - n + 1))
    total = sum(grams.values())
    repeated = 1.0 - len(grams) / total if total else 0.0
    return {"score": -penalty * repeated if repeated else 0.0, "repeated": repeated}


@register_scorer("language", "language")
def language_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    language: str = "en",
) -> dict[str, Any]:
    """The share of letters in the script of ``language``, 0 without letters.

    It tells scripts, not languages that share one: it holds against answers that drift into another script.
    """
    scripts = SCRIPTS.get(language.lower())
    if scripts is None:
        raise ValueError(f"language '{language}' is none of {', '.join(SCRIPTS)}")
    letters = Counter(character for character in solution_str[:MOST] if character.isalpha())
    total = sum(letters.values())
    own = sum(count for letter, count in letters.items() if unicodedata.name(letter, "").startswith(scripts))
    return {"score": own / total if total else 0.0, "letters": float(total)}


def _words(words: Sequence[str] | None, ground_truth: Any) -> list[str]:
    """The words to look for."""
    chosen = words if words is not None else ground_truth
    chosen = getattr(chosen, "tolist", lambda: chosen)()
    found = [chosen] if isinstance(chosen, str) else chosen
    if not isinstance(found, list | tuple) or not found:
        raise ValueError(f"there are no words to look for: {chosen!r}")
    return [str(word) for word in found]


def _has(text: str, word: str) -> bool:
    """Whether a text has a word, and not only as part of another one."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text[:MOST], re.IGNORECASE) is not None
