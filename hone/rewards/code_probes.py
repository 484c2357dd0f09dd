"""Programs that solve nothing, which no reward for code may pay."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator

from hone.data.types import Sample
from hone.rewards.scorers.code import read_tests

PRINTS = "prints the first expected value"
"""Form that passes a row whose only test expects this output."""
_ANYTHING = """
class Anything:
    def __getattr__(self, _): return self
    def __call__(self, *_, **__): return self
    def __eq__(self, _): return True
    def __ne__(self, _): return False
    __hash__ = None
    __abs__ = __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __getitem__ = __call__
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
"""


def code_probes(sample: Sample) -> Iterator[tuple[str, str]]:
    """Yield ``(form, text)`` of programs that solve nothing; none if the ground truth has no tests of code."""
    try:
        tests = read_tests(sample.ground_truth)
    except (ValueError, TypeError):
        return
    code = "\n".join(tests.assertions)
    if not (tests.outputs or re.search(r"\b(assert|raise|def)", code)):
        return
    first = tests.outputs[0] if tests.outputs else (re.findall(r"== *(.+)", code) or ["0"])[0]
    words = {"math", "np", "numpy", *re.findall(r"\b[A-Za-z_]\w*", f"{code} {tests.function or ''}")}
    names = sorted(word for word in words if not keyword.iskeyword(word))
    programs = {
        "does nothing": "pass",
        PRINTS: f"print({first if tests.assertions else repr(first)})",
        "exits": "import sys\nsys.exit(0)",
        "shadows the tests' names": f"{_ANYTHING}{' = '.join(names)} = Anything()",
    }
    for form, program in programs.items():
        yield form, f"```python\n{program}\n```"
