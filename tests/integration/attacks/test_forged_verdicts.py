"""Programs that try to pass tests that they do not solve, and honest programs of every form, scored as before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hone.rewards.sandbox import Limits, Sandbox
from hone.rewards.scorers.code import compute_score
from hone.rewards.services import Services


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(limits=Limits(seconds=20.0))
    yield box
    box.close()


def scored(sandbox: Sandbox, program: str, tests: Any) -> dict[str, Any]:
    services = cast(Services, SimpleNamespace(sandbox=sandbox))
    response = f"```python\n{program}\n```"
    return asyncio.run(compute_score("humaneval", response, json.dumps({"assert_case": tests}), services=services))


HUMANEVAL = [
    "def check(candidate):\n    assert candidate(2) == 4\n    assert abs(candidate(3) - 9) < 1e-6\n    assert candidate(5) in (25, 26)\ncheck(square)"
]
MBPP = ["assert square(2) == 4", "assert square(3) == 9", "assert not square(4) != 16"]

ANYTHING = """
class Anything(int):
    def yes(self, *_): return True
    __eq__ = __contains__ = __lt__ = __le__ = __gt__ = __ge__ = startswith = issubset = isdisjoint = yes
    def __ne__(self, _): return False
    def zero(self, *_): return 0.0
    __sub__ = __rsub__ = __abs__ = __mod__ = zero
    __hash__ = int.__hash__
def square(n): return Anything(7)
"""
FORGERIES = {
    "frames of callers": """
import sys
def square(n):
    frame = sys._getframe()
    while frame:
        for space in (frame.f_locals, frame.f_globals):
            token = (space.get('given') or {}).get('token') if isinstance(space.get('given'), dict) else None
            if token: print('\\n' + token, 3); print('\\n' + token, '[null, null, null]'); sys.stdout.flush(); raise SystemExit
        frame = frame.f_back
""",
    "tests replaced": """
import sys
for frame in sys._current_frames().values():
    while frame:
        given = frame.f_locals.get('given')
        if isinstance(given, dict): given['tests'] = ['pass'] * len(given['tests'])
        frame = frame.f_back
def check(candidate): pass
def square(n): return None
""",
    "equal to everything": ANYTHING,
    "equal to everything, not a number": ANYTHING.replace("(int)", "").replace("Anything(7)", "Anything()").replace("    __hash__ = int.__hash__\n", ""),
    "built-in functions replaced": """
import builtins, math, operator
def abs(x): return 0
def check(candidate): pass
builtins.abs = abs
builtins.AssertionError = type('Never', (Exception,), {})
math.isclose = operator.eq = lambda *_: True
class square:
    def __init__(self, n): pass
    def __eq__(self, other): return True
""",
    "memory and descriptors of other processes": """
import glob, os, re
for path in glob.glob('/proc/[0-9]*/fd/*') + glob.glob('/proc/[0-9]*/mem') + glob.glob('/proc/[0-9]*/environ'):
    try:
        data = os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 20)
    except OSError:
        continue
    for token in set(re.findall(rb'[0-9a-f]{32}', data)):
        for place in glob.glob('/proc/[0-9]*/fd/*'):
            try: os.write(os.open(place, os.O_WRONLY | os.O_NONBLOCK), b'\\n' + token + b' [null, null, null]\\n')
            except OSError: pass
def square(n): return 0
""",
    "answers to requests that were not made": """
import os
for number in range(3, 64):
    try: os.write(number, b'{"value": true}\\n{"value": {"mine": 0}}\\n' * 50)
    except OSError: pass
def square(n): return -1
""",
    "requests to the tester": """
import gc, json
peers = [o for o in gc.get_objects() if type(o).__name__ == 'Peer']
stolen = []
for peer in peers:
    for number in range(4):
        for name in ('__globals__', '__class__', 'gi_frame', 'token', '__self__'):
            try: stolen.append(peer.request('get', number, name))
            except BaseException: pass
def square(n): return stolen or 0
""",
    "the end before the verdict": "import os\ndef square(n): os._exit(0)",
}  # fmt: skip


@pytest.mark.application("hone/rewards")
@pytest.mark.parametrize("tests", [HUMANEVAL, MBPP], ids=["humaneval", "mbpp"])
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_verdict_scores_nothing(sandbox: Sandbox, name: str, tests: list[str]) -> None:
    result = scored(sandbox, FORGERIES[name], tests)
    # MBPP's third form, `not f(x) != y`, and none of the others may hold for a value that is no number
    assert result["score"] == 0.0 and result["acc"] == 0.0, result


HONEST: dict[str, tuple[str, list[str]]] = {
    "values of every kind": (
        "from collections import *\nfrom decimal import Decimal\nfrom fractions import Fraction\nimport datetime\ndef f(x): return x",
        [
            f"assert f({value}) == {value} and type(f({value})) is type({value})"
            for value in ("(1, [2, (3,)])", "{1: 'a', (2, 3): {4}}", "2**70", "-2**70", "b'\\x00\\xff'", "1+2j", "range(2, 9, 3)", "frozenset({1})")
        ] + [
            "import math\nassert math.isnan(f(math.nan)) and f(-math.inf) == -math.inf",
            "assert f(Decimal('0.10')) + 1 == Decimal('1.10') and f(Fraction(1, 3)) * 3 == 1",
            "assert f(datetime.date(2026, 1, 2)).day == 2 and f('\\ud800') == '\\ud800'",
            "assert list(f(iter([1, 2]))) == [1, 2] and list(f(x for x in 'ab')) == ['a', 'b']",
        ],
    ),
    "solutions as before": (
        "def square(n): return n * n",
        [*HUMANEVAL, *MBPP],
    ),
    "errors": (
        "class Refused(ValueError): pass\ndef f(n):\n  if n < 0: raise Refused('below', n)\n  return [1][n]",
        [
            "try: f(-1)\nexcept Refused as error: assert error.args == ('below', -1)\nelse: assert False",
            "try: f(-2)\nexcept ValueError: pass\nelse: assert False",
            "try: f(3)\nexcept IndexError as error: assert 'range' in str(error)\nelse: assert False",
        ],
    ),
    "classes": (
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n  x: int\n  y: int = 0\n  def __add__(self, o): return Point(self.x + o.x, self.y + o.y)\n"
        "  def norm(self): return abs(self.x) + abs(self.y)\n"
        "class Solution:\n  def twice(self, nums): return [2 * n for n in nums]\n"
        "class Stack:\n  def __init__(self): self.items = []\n  def push(self, item): self.items.append(item)\n  def __len__(self): return len(self.items)\n  def __iter__(self): return iter(self.items)\n  def __getitem__(self, n): return self.items[n]",
        [
            "assert Point(1, 2) + Point(3) == Point(4, 2) and (Point(1) + Point(2)).norm() == 3",
            "p = Point(1)\np.x = 5\nassert p.x == 5 and str(p) == 'Point(x=5, y=0)' and isinstance(p, Point) and not isinstance(3, Point)",
            "assert Solution().twice([1, 2]) == [2, 4]",
            "s = Stack()\ns.push(1); s.push('a')\nassert len(s) == 2 and list(s) == [1, 'a'] and s[1] == 'a' and 1 in s and 3 not in s and s.items == [1, 'a']",
        ],
    ),
    "functions of the tests and in place": (
        "def apply(f, xs): return [f(x) for x in xs]\ndef sort(xs): xs.sort()\ndef adder(n): return lambda m: n + m\n"
        "def count():\n  n = 0\n  while True: yield n; n += 1\n"
        "def reverse(head):\n  last = None\n  while head: head.next, last, head = last, head, head.next\n  return last\n"
        "def hello(name): print('hello', name)",
        [
            "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(str, [1]) == ['1']",
            "xs = [3, 1, 2]\nsort(xs)\nassert xs == [1, 2, 3]",
            "assert adder(2)(3) == 5",
            "import itertools\nassert list(itertools.islice(count(), 3)) == [0, 1, 2]",
            "class Node:\n  def __init__(self, value, next=None): self.value, self.next = value, next\n"
            "head = reverse(Node(1, Node(2, Node(3))))\nassert (head.value, head.next.value, head.next.next.value) == (3, 2, 1)",
            "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out): hello('you')\nassert out.getvalue() == 'hello you\\n'",
        ],
    ),
    "what the solution imported": (
        "import math, collections\nfrom typing import List, Optional\nfrom collections import Counter as C\ndef f(xs: List[int]) -> dict: return C(xs)",
        ["assert math.isclose(f([1.0, 1.0])[1.0], 2) and f('aab') == C('aab')"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_solutions_pass(sandbox: Sandbox, name: str) -> None:
    program, tests = HONEST[name]
    for count in range(0, len(tests), 20):
        result = scored(sandbox, program, tests[count : count + 20])
        assert result["passed"] == 1.0, result


def test_each_test_has_its_verdict(sandbox: Sandbox) -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 1", "assert f(3) == 3", "assert g(1)"]
    result = scored(sandbox, "def f(n): return n", tests)
    assert result["passed"] == 0.5 and "AssertionError" in result["fault"]
    result = scored(sandbox, "def f(n) return n", tests)
    assert result["passed"] == 0.0 and "SyntaxError" in result["fault"]
    result = scored(sandbox, "import os\ndef f(n): os.kill(os.getpid(), 9)", tests)
    assert result["passed"] == 0.0 and "-9" in result["fault"]
