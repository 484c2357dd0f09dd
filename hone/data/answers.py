r"""Reader of answers in text: which part of a response is its answer, and which number or letter it states.

Scorers, judges and the conversion of datasets read with these functions, so that all agree on what a text says.
A number may have a sign (also U+2212), separators of thousands, an exponent, a denominator, a currency and a percent sign.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

TAIL = 1000  # characters at the end of a response that are searched if no answer is marked
_MAX_DIGITS, _MAX_UNIT = 300, 80  # maximum lengths: of a number and of what an exponent makes of it, and of a unit

_TURN_MARKS = re.compile(
    r"(?P<open><(?:seed:)?(?P<tag>think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)>|\[THINK\]|◁think▷|<\|begin_of_thought\|>)"
    r"|(?P<close></(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>)"
    r"|(?P<call><tool_calls?>|<function_?call>|<function=[^<>\s]*>|<start_function_call>|<\|?tool[▁_]calls?(?:[▁_]section)?[▁_]begin\|>"
    r"|<｜tool▁calls▁begin｜>|<\|tool_call>|<tool_response>)"
    r"|(?P<called></tool_calls?>|</function_?call>|</function>|<end_function_call>|<\|?tool[▁_]calls?(?:[▁_]section)?[▁_]end\|>"
    r"|<｜tool▁calls▁end｜>|<tool_call\|>|</tool_response>)|(?P<line>\[TOOL_CALLS\][^\n]*|<\|python_tag\|>[^\n]*)"
)
_HARMONY = re.compile(
    r"\A\s*(?:<\|start\|>assistant)?(?:(?:<\|channel\|>)?(?:analysis|commentary).*assistant\s*(?:<\|channel\|>)?final(?:<\|message\|>)?"
    r"|<\|channel\|>final<\|message\|>)(?P<final>.*)",
    re.DOTALL,
)

_CHARACTERS = {
    0x2212: "-",
    0xFE63: "-",
    0x2010: "-",
    0x2011: "-",
    0x2013: "-",
    0x2019: "'",
    0x00A0: "\u202f",
    0x2009: "\u202f",
}
_CHARACTERS |= {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\!,?|\\[,;: ]|\u202f)(?=\d{3}(?!\d))")
_SPACING = re.compile(r"\\[!,;: ]|~|\\q?quad\b|\u202f|\\(?:left|right|big|Big|displaystyle)(?![a-z])\s?")
_EMPHASIS = re.compile(r"(?<![\w)\]}*])(?:\*{1,3}|__)(?=[^\s*])|(?<=[^\s*])(?:\*{1,3}|__)(?![\w(\[{*])|`")
_DOLLARS = re.compile(r"\$\$?([^$]*)\$\$?|\\[()]|\\\[|\\\]")
_MACRO = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname|boxed|fbox|bold|bm)\s*\{([^{}]*)\}"
)
_PREFIX = re.compile(r"\A[a-zA-Z](?:_\w|\([a-zA-Z]\))?\s*=\s*(?=[^=]+\Z)")

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d{1,3}(?:'\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!,?\d)|\d+)(?:\.\d+)?|\.\d+)(?!\.?\d)"
_FRAC = re.compile(
    rf"(?P<sign>-\s*)?\\frac\s*(?:\{{\s*(?P<top>[-+]?\s*{_DIGITS})\s*\}}|(?P<t>\d))\s*(?:\{{\s*(?P<bottom>[-+]?\s*{_DIGITS})\s*\}}|(?P<b>\d))"
)
_TEN = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|×|·|\*)\s*10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))")
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])(?P<sign>[-+]))?(?P<money>[$€£¥₹¤]\s?)?(?P<inner>(?<=[$€£¥₹¤])[-+])?"
    rf"(?<![\w.^\\])(?<!\d/)(?<!\^\{{)(?<!_\{{)(?<!\^[-+])(?P<digits>{_DIGITS})"
    r"(?:[eE](?P<e>[-+]?\d+)(?!\w)|\^(?:\{(?P<power>[-+]?\d+)\}|(?P<pow>[-+]?\d+)))?"
    rf"(?:\s+(?P<top>\d+)/(?P<bottom>\d+)(?!\w|/)|\s?/\s?(?P<under>{_DIGITS})(?!\w|\s?/\s?\d))?"
    r"(?:\s+(?P<scale>hundred|thousand|million|billion|trillion)\b)?(?P<percent>\s*%|\s+per\s?cent\b)?"
)
_UNIT = re.compile(
    r"\s*(?P<unit>(?:(?:\\(?:text|mbox|mathrm|textrm|operatorname)\s*\{[^{}0-9]*\}|\^?\s*\{?\\circ\}?|°|_\{?\d+\}?|(?:square|cubic|sq|cu)\b\.?"
    r"|[a-zA-Z]{2,}|(?<=/)[a-zA-Z])[.,]?(?:\s*\^\{?[-\d]\}?)?\s*/?\s*){0,4})"
)
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNIT = re.compile(
    r"\b(?:and|or|to|pi|sqrt|sin|cos|tan|log|ln|exp|mod|times|plus|minus|over|is|are|not|if|for|inf|infinity|because|i|but|so|then|where)\b"
)
_UNIT_NAMES = {
    "dollar": "$",
    "usd": "$",
    "¤": "$",
    "percent": "%",
    "per cent": "%",
    "degree": "°",
    "deg": "°",
    "circ": "°",
}
_UNIT_NAMES |= {
    "centimeter": "cm",
    "meter": "m",
    "kilometer": "km",
    "metre": "m",
    "hour": "h",
    "hr": "h",
    "sec": "s",
    "minute": "min",
    "second": "s",
}

_STATED = re.compile(
    r"\banswer(?:\s+to\b[^.\n:=]{0,60}?)?,?\s*(?:(?:is|would be|should be|must be)\b(?!\s+(?:not|in|on|given|the same)\b)\s*:?|:|=)\s*"
    r"|\bfinal answer\W{0,4}\n\s*",
    re.IGNORECASE,
)
_HEADING = re.compile(r"\W*(?:the\s+)?(?:final\s+)?(?:answer|solution|result)\W*", re.IGNORECASE)
_ADVERBS = re.compile(
    r"\A(?:(?:therefore|thus|then|simply|just|exactly|approximately|about|equal to|option|choice)\b,?\s*)+",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.;!?](?=\s|\Z)")

_LABEL = re.compile(
    r"(?<![\w'])(?:\(\s*([A-Za-z])\s*\)|\[\s*([A-Za-z])\s*\]|([A-Z])\s*[):\]]|([A-Z])\.(?=\s*\S))(?!\w)"
)
_CAPITAL = re.compile(r"(?<![\w'&.-])([A-Z])(?![\w'&-])(?!\.\w)")
_ONE_LETTER = re.compile(r"\W*([A-Za-z])\W*")
_CHOSEN = re.compile(
    r"\b(?:answer|option|choice|pick|choose|select|go with)(?:\s+is\b|\s*[:=])?\s*(?:(?:option|choice|letter)\s+)?"
    r"(?P<mark>[^\w\n]{0,8})(?P<letter>[A-Za-z])(?![\w'])(?P<rest>[^\n]{0,40})",
    re.IGNORECASE,
)
_GUESS = re.compile(r"\W{0,4}(?:or|and|and/or|,|/)\s*\W{0,3}[A-Z]\b")


# turns ----------------------------------------------------------------------------------------------------------------


def last_answer(text: str, extra_info: Mapping[str, Any] | None = None) -> str:
    """Return the last turn of the policy without thoughts and tool calls.

    The turn is the last assistant message of ``extra_info["episode"]``, if the text holds it. Otherwise it is what follows the last
    call in the text, or the text around the call if nothing follows. An unclosed thought is not an answer.

    >>> last_answer('<think>3?</think>I look.<tool_call>{"name": "f"}</tool_call>\\n<think>so</think>\\n**7**')
    '**7**'
    """
    spoken = _visible(text)
    episode = (extra_info or {}).get("episode")
    messages = episode.get("messages") if isinstance(episode, Mapping) else None
    turns = [m for m in messages or () if isinstance(m, Mapping) and m.get("role") == "assistant"]
    if turns:
        content = turns[-1].get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
        content = str(content or "").strip()
        if content in text and (content or spoken != text.strip()):
            return _visible(content)
    return spoken


def _visible(text: str) -> str:
    """Return the text after the last call (or around it) and outside thoughts."""
    kept: list[str] = []  # pieces of the turn so far
    before: list[str] = []  # pieces of the turn that ended in the last call
    begin, inside = 0, ""
    for mark in _TURN_MARKS.finditer(text):
        kind = str(mark.lastgroup) if mark.lastgroup != "tag" else "open"
        if inside == "open" and kind != "close" or inside == "call" and kind != "called":
            continue
        if not inside:
            kept.append(text[begin : mark.start()])
        if kind == "close" and not inside:  # the prompt opened the thought
            kept = []
        elif kind in ("call", "line") or inside == "call":
            before, kept = (kept if any(map(str.strip, kept)) else before), []
        inside, begin = kind if kind in ("open", "call") else "", mark.end()
    if not inside:
        kept.append(text[begin:])
    said = "".join(kept if any(map(str.strip, kept)) else before).strip()
    if (match := _HARMONY.match(said)) is None:
        return said
    return match["final"].strip().removesuffix("<|return|>").removesuffix("<|end|>").strip()


# marks ----------------------------------------------------------------------------------------------------------------


def tagged_answer(text: str, tag: str = "answer") -> str | None:
    tagged = _tag(text, tag)
    return tagged[1] if tagged else None


def after_hashes(text: str) -> str | None:
    line = _hashes(text)
    return line[1] if line else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` (or ``\fbox``) with balanced braces, or None."""
    box = _box(text)
    return box[1] if box else None


def final_answer(text: str, *, stated: bool = False) -> tuple[str, bool]:
    """Return the answer in a response, and whether it was marked as such.

    It is in the last box, ``<answer>`` or line after ``####``. With ``stated``, "answer is" and "Answer:" mark it too, if nothing
    else does. Without a mark the answer is the whole text.
    """
    marks = [mark for mark in (_box(text), _tag(text, "answer"), _hashes(text)) if mark is not None]
    if marks:
        marked = max(marks)[1]
        sentence = _MACRO.sub(r"\1", marked)  # "the answer is 42" in a box
        return (_STATED.search(sentence) and stated_answer(sentence)) or marked, True
    answer = stated_answer(text) if stated else None
    return (answer, True) if answer else (text.strip(), False)


def stated_answer(text: str, *, colon: bool = False) -> str | None:
    """Return the rest of the sentence after the last "answer is" or "Answer:"; with ``colon`` only of the latter."""
    text = _EMPHASIS.sub("", text)
    matches = [match for match in _STATED.finditer(text) if not colon or match.group().rstrip().endswith(":")]
    if not matches:
        return None
    rest = text[matches[-1].end() :]
    opened = re.match(r"[\s\\\[($]*\n", rest)  # a formula in lines of its own
    line = rest[opened.end() if opened else 0 :].partition("\n")[0]
    return _ADVERBS.sub("", _SENTENCE_END.split(line, maxsplit=1)[0].strip()).strip() or None


def _tag(text: str, tag: str) -> tuple[int, str] | None:
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return (start, text[start + len(tag) + 2 : end].strip()) if start >= 0 else None


def _hashes(text: str) -> tuple[int, str] | None:
    before, mark, rest = text.rstrip("# \n\t").rpartition("####")
    if not mark:
        before, mark, rest = text.rpartition("####")
    lines = [line.strip() for line in rest.splitlines() if line.strip()]
    if len(lines) > 1 and _HEADING.fullmatch(lines[0]):  # a heading, and the answer below it
        del lines[0]
    return (len(before), lines[0] if lines else "") if mark else None


def _box(text: str) -> tuple[int, str] | None:
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    match = re.match(r"\\f?box(?:ed)?\s*(?:(\{)|([^\s{}$\\]+))", text[start:]) if start >= 0 else None
    if match is None:
        return None
    if match[2]:
        return start, match[2]
    begin, depth = start + match.end(), 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return start, text[begin:position].strip()
    return None


# numbers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """Number in a text."""

    value: Fraction  # its exact value, without the factor 1/100 of a percent sign
    text: str  # its digits with sign, exponent and denominator, without separators and currency
    unit: str = ""  # name of its unit (``%``, ``$``, ``cm``), empty without one
    exact: bool = True  # False for a decimal, which may be rounded

    def agrees(self, other: Number) -> bool:
        """Return whether two numbers are equal; a unit may be missing, and 50% is 50 and 0.5."""
        if self.unit and other.unit and self.unit != other.unit:
            return False
        shares = [number.value / 100 if number.unit == "%" else number.value for number in (self, other)]
        return self.value == other.value or ("%" in (self.unit, other.unit) and shares[0] == shares[1])


def plain_text(text: str) -> str:
    """Return a text without markdown, dollar signs around formulas, LaTeX's spacing, and a stop at its end.

    Minus signs, digits of full width and separators of thousands get one form.
    """
    text = _THOUSANDS.sub(",", text.translate(_CHARACTERS))
    text = _EMPHASIS.sub("", text.replace("\\$", "¤").replace("\\%", "%"))
    text = _SPACING.sub(" ", _DOLLARS.sub(r"\1", text)).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return text.replace("{,}", ",").strip().rstrip(".,;: ").strip()


def find_numbers(text: str) -> list[Number]:
    """Return the numbers of a text, in order.

    >>> [number.text for number in find_numbers("From −3 to 3/4, at $1,234.50 or 1e3; x2 and H2O are none.")]
    ['-3', '3/4', '1234.50', '1e3']
    """
    return [number for match in _NUMBER.finditer(_in_line(text)) if (number := _number(match)) is not None]


def leading_number(text: str) -> tuple[Number | None, str]:
    """Return the number that a text begins with (None without one), and what follows it."""
    text = _in_line(_unwrapped(text))
    match = _NUMBER.match(text, re.match(r"[^\w.$€£¥₹¤+-]*", text).end())  # pyright: ignore[reportOptionalMemberAccess]
    if match is None or re.match(r"[.,]\d", text[match.end() :]):
        return None, text
    return _number(match), text[match.end() :]


_INTEGER = re.compile(r"-?[1-9][0-9]{0,17}|0")


def read_number(text: str) -> Number | None:
    """Return the number that a text is, with its unit next to it; None for any other text.

    >>> read_number("**$1,234**."), read_number("5 or 6"), read_number("(1,234)")
    (Number(value=Fraction(1234, 1), text='1234', unit='$', exact=True), None, None)
    """
    if _INTEGER.fullmatch(text):  # most true answers
        return Number(Fraction(int(text)), text)
    text = _PREFIX.sub("", _in_line(text))
    while whole := _MACRO.fullmatch(text):
        text = _in_line(whole[1])
    text = re.sub(r"\A([-+])\s+", r"\1", text)
    match = _NUMBER.match(text)
    number = _number(match) if match else None
    if match is None or number is None or len(text) - match.end() > _MAX_UNIT:
        return None
    rest = _UNIT.fullmatch(text, match.end())
    if rest is None or _NO_UNIT.search(rest["unit"].casefold()):
        return None
    return replace(number, unit=number.unit or _unit_name(rest["unit"]))


def _in_line(text: str) -> str:
    r"""Return a plain text with fractions and powers of ten of LaTeX in the form 3/4 and 1e3."""

    def inline(match: re.Match[str]) -> str:
        top, bottom = (
            (match[name] or match[short]).replace(" ", "") for name, short in (("top", "t"), ("bottom", "b"))
        )
        minus = "-" * ((bool(match["sign"]) + top.startswith("-") + bottom.startswith("-")) % 2)
        space = " " if text[: match.start()][-1:].isdigit() and not match["sign"] else ""
        return f"{space}{minus}{top.lstrip('+-')}/{bottom.lstrip('+-')}"

    text = plain_text(text)
    if "\\frac" in text:
        text = _FRAC.sub(inline, text)
    return _TEN.sub(lambda match: f"e{match[1] or match[2]}", text)


def _number(match: re.Match[str]) -> Number | None:
    if len(match.group()) > _MAX_DIGITS:
        return None
    digits = match["digits"].replace(",", "").replace("'", "")
    text = f"0{digits}" if digits.startswith(".") else digits
    value, power, exact = Fraction(text), match["power"] or match["pow"], "." not in digits
    size = abs(int(match["e"] or power or 0)) * (len(digits) if power else 1)
    if size > _MAX_DIGITS:
        return None
    try:
        if match["e"]:
            value, text = value * Fraction(10) ** int(match["e"]), f"{text}e{int(match['e'])}"
        elif power:
            value = value ** int(power)
            text = str(value)
        if match["top"]:
            value += Fraction(int(match["top"]), int(match["bottom"]))
            text = str(value)
        elif match["under"]:
            under = match["under"].replace(",", "").replace("'", "")
            value, text = value / Fraction(under), f"{text}/{under}"
    except ZeroDivisionError:
        return None
    if match["scale"]:
        value *= _SCALES[match["scale"]]
        text = str(value)
    minus = "-" in (match["sign"], match["inner"])
    unit = "%" if match["percent"] else _unit_name(match["money"] or "")
    return Number(-value if minus else value, "-" * minus + text, unit, exact)


def _unit_name(text: str) -> str:
    name = " ".join(_MACRO.sub(r" \1 ", text).replace("\\circ", "circ").replace("square", "sq").casefold().split())
    name = name.strip(" .,^{}")
    name = _UNIT_NAMES.get(name) or name
    return _UNIT_NAMES.get(name.removesuffix("s")) or (name.removesuffix("s") if len(name) > 2 else name)


# comparison -----------------------------------------------------------------------------------------------------------


def same_answer(answer: str, truth: str) -> bool | None:
    r"""Return whether two answers are equal as numbers, words or text; None if they are formulas of different form.

    >>> same_answer(r"\frac{1}{2}", "0.5"), same_answer(r"\text{No}", "Yes"), same_answer("x+1", "1+x")
    (True, False, None)

    Raises:
        ValueError: the true answer is empty.
    """
    left, right = normal_text(answer), normal_text(truth)
    if not right:
        raise ValueError("the ground truth is empty")
    if left == right or not left:
        return left == right
    given, expected = read_number(answer), read_number(truth)
    if given is not None and expected is not None:
        if given.agrees(expected):
            return True
        units = given.unit and expected.unit and given.unit != expected.unit
        return False if units or (given.exact and expected.exact) else None
    if re.search(r"\d[, ]+\d", left + ";" + right) and re.sub("[, ]", "", left) == re.sub("[, ]", "", right):
        return False  # a list is not one number
    if expected is not None and re.search(r",|\b(?:and|or)\b", left) and len(find_numbers(answer)) > 1:
        return False
    label = re.fullmatch(r"\(?([A-Za-z])\)?", right)
    if label is not None and ("(" in right or "\\text" in truth or right.isupper()):
        return chosen_letter(answer, marked=True) == label[1].upper() or (None if right == label[1] else False)
    if _is_words(left, answer) or _is_words(right, truth):
        return left.casefold() == right.casefold()
    return None


def normal_text(text: str) -> str:
    r"""Return a text in a form for comparison: without spacing, ``x =``, macros of fonts and a final stop; never without words."""
    text = _PREFIX.sub("", _unwrapped(text))
    if not re.search(r"[(\[{]", text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", re.sub(r"\s+", " ", text))
    text = re.sub(r"\\frac\s?(\d)\s?(\d)", r"\\frac{\1}{\2}", re.sub(r"\\sqrt\s?(\w)", r"\\sqrt{\1}", text))
    return re.sub(r"(?<![\d.])\.(?=\d)", "0.", re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)).strip()


def _unwrapped(text: str) -> str:
    """Return a plain text without macros of fonts and boxes; a macro next to a number stays a unit."""
    text = plain_text(text)
    for _ in range(4):  # nested
        inner = _MACRO.sub(r" \1 ", text)
        if inner == text:
            break
        text = inner
    return plain_text(text)


def _is_words(text: str, source: str) -> bool:
    letters = text.replace(" ", "").replace("-", "").replace("'", "")
    return letters.isalpha() and (
        len(letters) > 3 or (len(letters) > 1 and re.search(r"\\(?:text|mbox)", source) is not None)
    )


# letters --------------------------------------------------------------------------------------------------------------


def chosen_letter(text: str, *, marked: bool = False) -> str | None:
    r"""Return the letter of the choice that a text names, None without one or with several. Words of prose are no letters.

    Args:
        text: the response, or with ``marked`` the answer in it.
        marked: True if the text is an answer alone.

    >>> chosen_letter("The answer is a bit unclear, but I pick C"), chosen_letter("B) a dog", marked=True)
    ('C', 'B')
    """
    if not marked:
        answer, has_mark = final_answer(text)
        if has_mark:
            return chosen_letter(answer, marked=True)
        text = _EMPHASIS.sub("", text[-TAIL:])
        chosen = [
            match for match in _CHOSEN.finditer(text) if not _is_prose(match["letter"], match["mark"], match["rest"])
        ]
        if chosen:
            return None if _GUESS.match(chosen[-1]["rest"]) else chosen[-1]["letter"].upper()
        text = text.rstrip()[-40:]
    text = _unwrapped(text[:TAIL])
    alone = _ONE_LETTER.fullmatch(text)
    if alone is not None:
        return alone[1].upper()
    labels = {next(filter(None, match.groups())).upper() for match in _LABEL.finditer(text)}
    letters = labels or {m[1] for m in _CAPITAL.finditer(text) if not _is_prose(m[1], "", text[m.end() :])}
    return letters.pop() if len(letters) == 1 else None


def _is_prose(letter: str, before: str, after: str) -> bool:
    """Return whether a letter is a word, as "a" and "I" are, and not a label."""
    if "(" in before or "[" in before or re.match(r"\s*[)\]:*]|\.?\s*\Z|[.,;]\s", after):
        return False
    return letter.islower() or (
        letter in "AI" and re.match(r"\s+(?!(?:or|and|is|because)\b)['’a-z]", after) is not None
    )
