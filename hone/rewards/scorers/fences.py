"""Program in a response: its blocks of code, read line by line."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field

_FENCE = re.compile(r"(?P<before>.*?)(?P<mark>(?<!`)```++(?=[^`]*$)|(?<!~)~~~++)(?P<info>.*)$")
_OUTSIDE = re.compile(
    r"[\s>]*(?:[-*+]|\d+[.)])?\s*"
)  # what is allowed before a fence: indentation, a quote, a list's mark
_PYTHON = re.compile(r"[{\s.]*(?:language-)?(?:(?:i?python|py|pypy)[\d.]*(?![\w.+#-])|[\w./-]+\.py\b)", re.IGNORECASE)
_TAG = re.compile(r"[{.\w][\w.+#:/}-]*(?:[ ,].*[={].*)?")
_CODE = re.compile(r"\"\"\"|'''|\"(?:\\.|[^\"\\])*\"?|'(?:\\.|[^'\\])*'?|#.*|```+|^\s*~~~+")


@dataclass
class _Block:
    mark: str
    info: str
    before: str
    lines: list[str] = field(default_factory=list)
    quote: str = ""  # that of a string over several lines, which is open

    @property
    def is_python(self) -> bool:
        return _PYTHON.match(self.info) is not None

    @property
    def is_code(self) -> bool:
        return not self.info or self.is_python

    @property
    def text(self) -> str:
        text = "".join(self.lines)
        return textwrap.dedent(text) if text.lstrip("\r\n")[:1] in ("\t", " ") else text

    def inner(self, line: str) -> str:
        """Return a line without the indentation or the quote's marks of the fence."""
        if ">" in self.before:
            return re.sub(rf"^(?:\s*>){{1,{self.before.count('>')}}} ?", "", line)
        width = len(self.before) if _OUTSIDE.fullmatch(self.before) else 0
        return line[min(width, len(line) - len(line.lstrip(" \t"))) :]

    def add(self, line: str) -> bool:
        """Add a line, unless code has a fence there, outside of strings and comments; return whether it was added."""
        place, quote = 0, self.quote
        while match := (re.compile(rf"\\.|{quote}") if quote else _CODE).search(line, place):
            place, token = match.end(), match[0].strip()
            if not quote and token[:1] in ("`", "~"):
                return False
            if token == quote:
                quote = ""
            elif not quote and token in ('"""', "'''"):
                quote = token
        self.quote = quote
        self.lines.append(line)
        return True


def last_program(text: str) -> str | None:
    """Return the last block of Python code in a response, else its last block without a language.

    Blocks in a thought do not count. A fence in a string of the program belongs to the program.
    """
    blocks, cut = _blocks(text, strings=True)
    if cut and cut[-1].is_code:  # perhaps a quote that is none, or a fence in a comment
        blocks, cut = _blocks(text, strings=False)
    marked = [block.text for block in blocks if block.is_python]
    others = [block.text for block in blocks if not block.info] or [block.text for block in cut if not block.info]
    return marked[-1] if marked else others[-1] if others else None


def _blocks(text: str, *, strings: bool) -> tuple[list[_Block], list[_Block]]:
    """Return the blocks, and those that the end of the text cut off; among the first are cut ones of Python."""
    done: list[_Block] = []
    open_blocks: list[_Block] = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        block = open_blocks[-1] if open_blocks else None
        code = block is not None and block.is_code and strings
        if block is not None and code and not line.lstrip().startswith("</think>") and block.add(block.inner(line)):
            continue
        if "</think>" in line:
            done, open_blocks, block = [], [], None
            line = line.rpartition("</think>")[2]
        fence = _FENCE.match(line.strip("\r\n") if block is None else block.inner(line).strip("\r\n"))
        before, mark, info = (fence["before"], fence["mark"], fence["info"].strip()) if fence else ("", "", "")
        starts = bool(fence and _OUTSIDE.fullmatch(before))
        opens = bool(fence and (starts or mark[0] == "`") and (not info or _PYTHON.match(info) or _TAG.fullmatch(info)))
        if block is None:
            if opens or (starts and mark[0] == "`"):
                open_blocks.append(_Block(mark, info, before))
            continue
        ends = bool(fence) and mark[0] == block.mark[0] and len(mark) >= len(block.mark)
        if ends and (not info or (starts and not opens) or (code and not starts)):
            block.lines += [before] if before.strip() else []
            done.append(open_blocks.pop())
        elif starts and opens and (ends or not block.is_python):  # another block before the end of this one
            if block.is_python:
                done.append(open_blocks.pop())
            open_blocks.append(_Block(mark, info, before))
        else:
            block.lines.append(block.inner(line))
    done += [block for block in open_blocks if block.is_python]
    return [block for block in done if block.text.strip()], open_blocks
