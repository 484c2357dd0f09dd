"""Scorers of the text itself: length, format, words, repetition and script. Each can be one of several terms."""

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
"""Prefixes of the Unicode names of a language's letters."""
MAX_CHARACTERS = 20_000  # maximum number of characters of a response that are examined


@register_scorer("length", "length", whole_text=True)
def length_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    min_chars: int = 1,
    max_chars: int = 2000,
    margin: int | None = None,
) -> dict[str, Any]:
    """Score 1 for a response of ``min_chars`` to ``max_chars`` characters.

    It falls to 0 over ``margin`` more or fewer characters (by default the value of the nearer bound).
    """
    size = len(solution_str.strip())
    if not 0 <= min_chars <= max_chars:
        raise ValueError(f"min_chars={min_chars} and max_chars={max_chars} must be 0 <= min_chars <= max_chars")
    bound = min_chars if size < min_chars else max_chars
    missing, slack = max(min_chars - size, size - max_chars, 0), margin if margin is not None else bound
    score = 1.0 if not missing else max(0.0, 1.0 - missing / slack) if slack else 0.0
    return {"score": score, "chars": float(size)}


@register_scorer("format", "format", may_hang=True, whole_text=True)
def format_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    pattern: str | None = None,
) -> dict[str, Any]:
    """Score 1 for the right format: ``<think>...</think>``, once and not empty, then an answer.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: not used.
        extra_info: not used.
        pattern: regular expression that the whole response must match instead (``.`` also matches line ends).
    """
    if pattern is not None:
        try:
            fits = re.fullmatch(pattern, solution_str[:MAX_CHARACTERS].strip(), re.DOTALL) is not None
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a valid regular expression: {error}") from None
        return {"score": float(fits), "format": float(fits)}
    once = solution_str.count("<think>") == solution_str.count("</think>") == 1
    match = _THOUGHT.fullmatch(solution_str) if once else None
    fits = match is not None and bool(match["thought"].strip()) and bool(match["rest"].strip())
    return {"score": float(fits), "format": float(fits)}


@register_scorer("keywords", "keywords", whole_text=True)
def keywords_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    words: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Score the share of ``words`` (default: the ground truth) in the response, as whole words in any case."""
    required = _words(words, ground_truth)
    present = [word for word in required if _has_word(solution_str, word)]
    return {"score": len(present) / len(required), "pred": present}


@register_scorer("banned_words", "banned_words", whole_text=True)
def banned_words_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    words: Sequence[str] | None = None,
    penalty: float = 1.0,
) -> dict[str, Any]:
    """Score ``-penalty`` for a response with any of ``words`` (default: the ground truth), else 0.

    Words count as whole words in any case.
    """
    present = [word for word in _words(words, ground_truth) if _has_word(solution_str, word)]
    return {"score": -penalty if present else 0.0, "banned": float(len(present)), "pred": present}


@register_scorer("repetition", "repetition", whole_text=True)
def repetition_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    n: int = 4,
    penalty: float = 1.0,
) -> dict[str, Any]:
    """Score ``-penalty`` times the share of repeated n-grams of words, so 0 without repetition.

    Text without spaces uses n-grams of 4 ``n`` characters.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    units: Sequence[str] = solution_str[:MAX_CHARACTERS].split()
    if len(units) < n <= len(solution_str) // 8:
        units, n = solution_str[:MAX_CHARACTERS], 4 * n
    grams = Counter(tuple(units[start : start + n]) for start in range(len(units) - n + 1))
    total = sum(grams.values())
    repeated = 1.0 - len(grams) / total if total else 0.0
    return {"score": -penalty * repeated if repeated else 0.0, "repeated": repeated}


@register_scorer("language", "language", whole_text=True)
def language_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    language: str = "en",
) -> dict[str, Any]:
    """Score the share of letters in the script of ``language``, 0 without letters.

    It distinguishes scripts, not languages of one script, and penalises a drift into another script.
    """
    scripts = SCRIPTS.get(language.lower())
    if scripts is None:
        raise ValueError(f"language '{language}' is not one of {', '.join(SCRIPTS)}")
    letters = Counter(character for character in solution_str[:MAX_CHARACTERS] if character.isalpha())
    total = sum(letters.values())
    script_letters = sum(count for letter, count in letters.items() if unicodedata.name(letter, "").startswith(scripts))
    return {"score": script_letters / total if total else 0.0, "letters": float(total)}


def _words(words: Sequence[str] | None, ground_truth: Any) -> list[str]:
    """Return the words to search."""
    chosen = words if words is not None else ground_truth
    chosen = getattr(chosen, "tolist", lambda: chosen)()
    listed = [chosen] if isinstance(chosen, str) else chosen
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError(f"words must be a text or a non-empty list, not {chosen!r}")
    return [str(word) for word in listed]


def _has_word(text: str, word: str) -> bool:
    """Return whether a text has a word, not only as part of another one."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text[:MAX_CHARACTERS], re.IGNORECASE) is not None
