"""Programs that would be right for free, and right programs, for tests of every published form."""

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
    box = Sandbox(limits=Limits(seconds=10.0), max_concurrent=3)
    yield box
    box.close()


def scores(sandbox: Sandbox, cases: dict[str, tuple[str, Any, Any]], source: str = "code") -> dict[str, Any]:
    """The score of each case, or None without a verdict."""
    services = cast(Services, SimpleNamespace(sandbox=sandbox))

    async def one(program: str, truth: Any) -> Any:
        extra = truth.pop("extra", None) if isinstance(truth, dict) else None
        try:
            return (await compute_score(source, f"```python\n{program}\n```", truth, extra, services=services))["score"]
        except ValueError:
            return None

    async def every() -> list[Any]:
        return await asyncio.gather(*(one(program, truth) for program, truth, _ in cases.values()))

    return dict(zip(cases, asyncio.run(every()), strict=True))


def assert_scored(sandbox: Sandbox, cases: dict[str, tuple[str, Any, Any]], source: str = "code") -> None:
    found = scores(sandbox, cases, source)
    assert found == {name: case[2] for name, case in cases.items()}


CHECK = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0, 'below'\n"
PYTEST = "from solution import f\n\ndef test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(2) == 3\n"
UNITTEST = (
    "import unittest\n\nclass TestF(unittest.TestCase):\n    def setUp(self):\n        self.one = 1\n"
    "    def test_one(self):\n        self.assertEqual(f(self.one), 2)\n\nif __name__ == '__main__':\n    unittest.main()\n"
)
RIGHT, WRONG = "def f(x): return x + 1", "def f(x): return 0"
NOTHING = {
    "nothing": "x = 1",
    "exit": "import sys\nsys.exit(0)",
    "exit now": "import os\nos._exit(0)",
    "raise": "raise SystemExit",
}
FREE = {
    **NOTHING,
    "exit when called": "def f(*_): raise SystemExit(0)",
    "exit at once when called": "import os\ndef f(*_): os._exit(0)",
    "interrupt": "def f(*_): raise KeyboardInterrupt",
    "stop": "def f(*_): raise StopIteration",
    "skip": "import unittest\ndef f(*_): raise unittest.SkipTest('no')",
    "empty": "def f(*_): return []",
    "generator": "def f(*_):\n  return\n  yield",
    "no value": "def f(*_): pass",
    "not implemented": "def f(*_): return NotImplemented",
    "equal to all": "class E:\n  __eq__ = __ge__ = __le__ = __contains__ = lambda *_: True\n  __ne__ = lambda *_: False\n  __hash__ = lambda s: 2\ndef f(*_): return E()",
    "evil": "class E:\n  def __getattribute__(self, _): raise SystemExit\n  __eq__ = __repr__ = __hash__ = __str__ = __bool__ = __len__ = __iter__ = __getattribute__\ndef f(*_): return E()",
    "error of evil": "class E:\n  def __repr__(self): raise SystemExit\nclass F(Exception):\n  def __str__(self): raise SystemExit\ndef f(*_): raise F(E())",
    "power": "def f(*_): return 10**400",
    "five thousand digits": "def f(*_): return 10**5000",
    "infinite": "def f(*_): return float('inf')",
    "no number": "def f(*_): return float('nan')",
    "brackets": "def f(*_):\n  x = []\n  for _ in range(200000): x = [x]\n  return x",
    "itself": "def f(*_):\n  x = []\n  x.append(x)\n  return x",
    "shadows": "class math:\n  isclose = fabs = staticmethod(lambda *_, **__: True)\nnp = numpy = unittest = pytest = math\nabs = len = sorted = all = lambda *_: 1\ncheck = assertion = test_one = lambda *_: None\nclass AssertionError(Exception): pass\ndef f(*_): return 7",
    "sys.modules": "import sys, types, builtins\nm = types.ModuleType('math'); m.isclose = lambda *_, **__: True\nsys.modules.update(math=m, numpy=m, unittest=m, pytest=m)\nbuiltins.abs = lambda _: 0\nimport math\nnp = math\ndef f(*_): return 7",
}  # fmt: skip
TESTS = {
    "check": {"test": CHECK, "entry_point": "f"},
    "check by the row": {"test": CHECK, "extra": {"entry_point": "f"}},
    "check that calls itself": {"test": CHECK + "\ncheck(f)\n", "entry_point": "f"},
    "check below main": CHECK + "if __name__ == '__main__':\n    check(f)\n",
    "candidate alone": {"test": "assert candidate(1) == 2\nassert candidate(5) == 6", "entry_point": "f"},
    "pytest": PYTEST,
    "parametrised": "import pytest\n@pytest.mark.parametrize('x,y', [(1, 2), pytest.param(2, 3)])\n@pytest.mark.parametrize('z', [0])\ndef test_f(x, y, z): assert f(x) == y + z",
    "class of pytest": "class TestF:\n  def setup_method(self): self.x = 1\n  def test_f(self): assert f(self.x) == 2",
    "unittest": UNITTEST,
    "unittest, run by itself": UNITTEST.replace("unittest.main()", "import sys; sys.exit(not unittest.main())"),
    "loop over results": "for x, y in zip(map(f, [1, 2]), [2, 3]):\n  assert x == y",
    "loop over cases": "def check(g):\n  for x, y in [(1, 2), (2, 3)]: assert g(x) == y\ncheck(f)",
    "all": "assert all(map(lambda p: p, [f(1) == 2, f(3) == 4]))",
    "raises": "if f(1) != 2: raise ValueError('wrong')",
    "math": "assert math.isclose(f(1), 2)",
    "math imported": "import math\nassert math.isclose(f(1), 2, rel_tol=1e-9)",
    "math imported late": ["assert math.fabs(f(1) - 2) < 0.1", "import math\nassert math.isclose(f(3), 4)"],
    "isclose": "assert isclose(f(1), 2)",
    "isclose imported": "from math import isclose\nassert isclose(f(1), 2)",
    "numpy": "import numpy as np\nassert np.allclose(f(1), 2)\nnp.testing.assert_allclose(f(2), 3)",
    "numpy unimported": "assert np.isclose(f(1), 2)",
    "approx": "import pytest\ndef test_f(): assert f(1) == pytest.approx(2)",
    "abs": "assert abs(f(1) - 2) < 1e-6",
    "set-up before": ["import math", "xs = [1, 2]", "assert [f(x) for x in xs] == [2, 3]"],
    "definitions before": [CHECK, "check(f)"],
    "mbpp": {"test_list": ["assert f(1) == 2", "assert f(9) == 10"], "test_setup_code": "", "test_imports": ["import math"]},
    "imported module": "import solution\nassert solution.f(1) == 2",
    "in a set": "assert f(1) in {2} and f(1) in (2, 3)",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTS)
def test_only_right_programs_pass_tests_of_code(sandbox: Sandbox, name: str) -> None:
    def truth() -> Any:
        return dict(TESTS[name]) if isinstance(TESTS[name], dict) else TESTS[name]

    cases = {free: (program, truth(), 0.0) for free, program in FREE.items()}
    cases = {"right": (RIGHT, truth(), 1.0), "wrong": (WRONG, truth(), 0.0), **cases}
    if "numpy" in name and not sandbox.run_sync("import numpy").succeeded:  # not the program's fault
        cases = {case: (program, tests, None) for case, (program, tests, _) in cases.items()}
    assert_scored(sandbox, cases)


CALLS = {
    "values": {"fn_name": "f", "inputs": [[1], [-5]], "outputs": [2, -4]},
    "text": {"fn_name": "f", "inputs": ["1", "-5"], "outputs": ["2", "-4"]},
}


@pytest.mark.parametrize("name", CALLS)
def test_only_right_programs_pass_tests_of_calls(sandbox: Sandbox, name: str) -> None:
    cases = {free: (program, CALLS[name], 0.0) for free, program in FREE.items()}
    assert_scored(sandbox, {"right": (RIGHT, CALLS[name], 1.0), "wrong": (WRONG, CALLS[name], 0.0), **cases})


ROOT_CHECK = """

METADATA = {}


def check(candidate):
    import math
    import random
    rng = random.Random(42)
    import copy
    for _ in range(20):
        ncoeff = 2 * rng.randint(1, 4)
        coeffs = []
        for _ in range(ncoeff):
            coeff = rng.randint(-10, 10)
            if coeff == 0:
                coeff = 1
            coeffs.append(coeff)
        solution = candidate(copy.deepcopy(coeffs))
        assert math.fabs(poly(coeffs, solution)) < 1e-4
"""
ROOT = """import math
def poly(xs, x):
    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])
def find_zero(xs):
    begin, end = -1., 1.
    while poly(xs, begin) * poly(xs, end) > 0:
        begin *= 2.0
        end *= 2.0
    while end - begin > 1e-10:
        center = (begin + end) / 2.0
        if poly(xs, center) * poly(xs, begin) > 0:
            begin = center
        else:
            end = center
    return begin
"""
CLOSE_CHECK = """
def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)) and x:
        return all(isinstance(i, float) for i in x)
    return False

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert abs(out - exp) < atol
    else:
        assert out == exp, f"out: {out}, exp: {exp}"

def check(candidate):
    inputs = [[[1.0, 2.0, 3.0], 0.5], [[1.0, 2.8, 3.0], 0.3]]
    results = [False, True]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""
CLOSE = """from typing import List
def has_close_elements(numbers: List[float], threshold: float) -> bool:
    s = sorted(numbers)
    return any(b - a < threshold for a, b in zip(s, s[1:]))
"""
SUM_CHECK = """
def check(candidate):
    assert candidate(nums = [3,3],target = 6) == [0,1]
    assert candidate(nums = [-1,-2,-3,-4],target = -8) is None
"""
TWO_SUM = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        d = {}
        for i, n in enumerate(nums):
            if target - n in d:
                return [d[target - n], i]
            d[n] = i
"""
READS = """import unittest
from unittest.mock import patch
import os, json, tempfile
class TestCases(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.file = os.path.join(self.dir, "a.json")
        with open(self.file, "w") as f: json.dump({"a": 1}, f)
    def tearDown(self):
        os.remove(self.file)
    def test_case_1(self):
        self.assertEqual(task_func(self.file), 1)
    def test_case_2(self):
        with self.assertRaises(FileNotFoundError):
            task_func("/nonexistent")
    def test_isinstance(self):
        self.assertIsInstance(task_func(self.file), int)
"""
ROWS: dict[str, tuple[str, Any, Any]] = {
    "ROOT_CHECK": (ROOT, {"test":ROOT_CHECK,"entry_point":"find_zero"},1.0),
    "ROOT_CHECK wrong": (ROOT.replace("return begin","return 0.0"), {"test":ROOT_CHECK,"entry_point":"find_zero"},0.0),
    "HE+": (CLOSE, {"test":CLOSE_CHECK,"entry_point":"has_close_elements"},1.0),
    "HE+ wrong": ("def has_close_elements(a,b): return True", {"test":CLOSE_CHECK,"entry_point":"has_close_elements"},0.0),
    "HE+ json": (CLOSE, json.dumps({"task_id":"HumanEval/0","prompt":"...","canonical_solution":"..","test":CLOSE_CHECK,"entry_point":"has_close_elements"}),1.0),
    "SUM_CHECK": (TWO_SUM, {"test":SUM_CHECK,"entry_point":"Solution().twoSum"},1.0),
    "SUM_CHECK wrong": (TWO_SUM.replace("i]","i+1]"), {"test":SUM_CHECK,"entry_point":"Solution().twoSum"},0.0),
    "SUM_CHECK nothing": ("x=1", {"test":SUM_CHECK,"entry_point":"Solution().twoSum"},0.0),
    "READS": ("import json\ndef task_func(p):\n  with open(p) as f: return json.load(f)['a']", {"test":READS,"entry_point":"task_func"},1.0),
    "READS wrong": ("def task_func(p): return 1", {"test":READS,"entry_point":"task_func"},0.0),
    "MBPP sum": ("def sum(a,b):\n  s=0\n  for i in range(1,min(a,b)+1):\n    if a%i==0 and b%i==0: s+=i\n  return s", {"test_list":["assert sum(10,15) == 6","assert sum(100,150) == 93","assert sum(4,6) == 3"]},1.0),
    "MBPP sum wrong": ("def sum(a,b): return 6", {"test_list":["assert sum(10,15) == 6","assert sum(100,150) == 93","assert sum(4,6) == 3"]},1/3),
    "MBPP sum none": ("x=1", {"test_list":["assert sum(10,15) == 6"]},0.0),
    "MBPP set": ("def similar_elements(a,b): return tuple(set(a)&set(b))", {"test_list":["assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))"]},1.0),
    "LCB stdin": ("n=int(input())\nprint(sum(map(int,input().split())))", {"inputs":["3\n1 2 3\n"],"outputs":["6\n"]},1.0),
    "LCB func": (TWO_SUM, {"fn_name":"twoSum","inputs":["[2, 7, 11, 15]\n9","[3,2,4]\n6"],"outputs":["[0, 1]","[1, 2]"]},1.0),
    "LCB bool": ("class Solution:\n  def f(self, s: str) -> bool: return s == s[::-1]", {"fn_name":"f","inputs":['"aba"','"ab"'],"outputs":["true","false"]},1.0),
    "LCB str": ("class Solution:\n  def f(self, s: str) -> str: return s[::-1]", {"fn_name":"f","inputs":['"abc"'],"outputs":['"cba"']},1.0),
    "LCB float": ("class Solution:\n  def f(self, s): return s/3", {"fn_name":"f","inputs":['1'],"outputs":['0.33333']},0.0),
    "LCB float2": ("class Solution:\n  def f(self, s): return s/3", {"fn_name":"f","inputs":['1'],"outputs":['0.3333333']},1.0),
    "state": ("class Solution:\n  seen=0\n  def __init__(self): self.m=[]\n  def f(self, x):\n    self.m.append(x); return len(self.m)", {"fn_name":"f","inputs":[[1],[2]],"outputs":[1,1]},1.0),
    "list of one ok": ("def f(x): return [x]", {"fn_name":"f","inputs":[[1]],"outputs":[[1]]},1.0),
    "none": ("def f(x): return None", {"fn_name":"f","inputs":["1"],"outputs":["null"]},1.0),
    "text none": ("def f(x): return None", {"fn_name":"f","inputs":[[1]],"outputs":[None]},1.0),
    "true is not 1": ("def f(x): return True", {"fn_name":"f","inputs":[[1]],"outputs":[1]},0.0),
    "dict int keys": ("def f(x): return {1: 'a'}", {"fn_name":"f","inputs":[[1]],"outputs":[{"1": "a"}]},1.0),
    "dict json": ("def f(x): return {1: 'a'}", {"fn_name":"f","inputs":["1"],"outputs":['{"1": "a"}']},1.0),
    "tuple": ("def f(x): return (1,2)", {"fn_name":"f","inputs":["1"],"outputs":['[1,2]']},1.0),
    "decimal": ("from decimal import Decimal\ndef f(x): return Decimal('0.5')", {"fn_name":"f","inputs":["1"],"outputs":['0.5']},1.0),
    "long call out": ("def f(x): return 10**x", {"fn_name":"f","inputs":[[5000]],"outputs":[10**5000]},1.0),
    "long call out wrong": ("def f(x): return 10**x+1", {"fn_name":"f","inputs":[[5000]],"outputs":[10**5000]},0.0),
    "long call text": ("def f(x): return x+1", {"fn_name":"f","inputs":["9"*5000],"outputs":["1"+"0"*5000]},1.0),
    "long call text neg": ("def f(x): return -x", {"fn_name":"f","inputs":["9"*5000],"outputs":["-"+"9"*5000]},1.0),
    "long json truth": ("def f(x): return x[0]+1", '{"fn_name":"f","inputs":[[["9"]]],"outputs":["0"]}'.replace('"9"', "9"*5000).replace('"0"', "1"+"0"*5000),1.0),
    "long stdin": ("print(int(input())+1)", {"inputs":["9"*5000],"outputs":["1"+"0"*5000]},1.0),
    "long stdin wrong": ("print(int(input())+2)", {"inputs":["9"*5000],"outputs":["1"+"0"*5000]},0.0),
    "long stdin int truth": ("print(int(input())+1)", {"inputs":["9"*5000],"outputs":[10**5000]},1.0),
    "long stdin json": ("print(int(input())+1)", '{"inputs":["9"],"outputs":["0"]}'.replace('"9"', "9"*5000).replace('"0"', "1"+"0"*5000),1.0),
    "long vs float": ("print(1e308*10)", {"inputs":[""],"outputs":["1"+"0"*400]},0.0),
    "1e400 vs 1e500": ("print('1e400')", {"inputs":[""],"outputs":["1e500"]},0.0),
    "inf": ("print(float('inf'))", {"inputs":[""],"outputs":["inf"]},1.0),
    "nan": ("print(float('nan'))", {"inputs":[""],"outputs":["NaN"]},1.0),
    "nan vs num": ("print(float('nan'))", {"inputs":[""],"outputs":["1.5"]},0.0),
    "nan value": ("def f(): return float('nan')", {"fn_name":"f","inputs":[[]],"outputs":[float('nan')]},1.0),
    "leading zero": ("print('0110')", {"inputs":[""],"outputs":["110"]},0.0),
    "1_0": ("print('1_0')", {"inputs":[""],"outputs":["10"]},0.0),
    "1e3": ("print('1e3')", {"inputs":[""],"outputs":["1000"]},0.0),
    "1e3 rev": ("print('1000')", {"inputs":[""],"outputs":["1e3"]},0.0),
    "1000.0": ("print(1000.0)", {"inputs":[""],"outputs":["1000"]},1.0),
    "float int off by one": ("print(123456790.0)", {"inputs":[""],"outputs":["123456789"]},0.0),
    "float int off by one rev": ("print(123456790)", {"inputs":[""],"outputs":["123456789.0"]},0.0),
    "1e+18 for int": ("print(1e18)", {"inputs":[""],"outputs":["999999999999999999"]},0.0),
    "near int": ("print(1.9999999999)", {"inputs":[""],"outputs":["2"]},1.0),
    "1e-05": ("print(0.00001)", {"inputs":[""],"outputs":["0.00001"]},1.0),
    "arabic digits": ("print('١')", {"inputs":[""],"outputs":["1"]},0.0),
    "plus": ("print('+5')", {"inputs":[""],"outputs":["5"]},1.0),
    "mod": ("print((10**9+6))", {"inputs":[""],"outputs":["1000000005"]},0.0),
    "surrogates": ("print('\ud800')", {"inputs":[""],"outputs":["x"]},0.0),
    "nul": ("print('\0')", {"inputs":[""],"outputs":["x"]},0.0),
    "exit after right": ("import sys\nprint(9)\nsys.exit(0)", {"inputs":[""],"outputs":["9"]},1.0),
    "exit 1 after right": ("import sys\nprint(9)\nsys.exit(1)", {"inputs":[""],"outputs":["9"]},0.0),
    "empty outputs": ("pass", {"inputs":["1"],"outputs":[""]},None),
    "no assertions": ("def f(): pass", "f()",None),
    "print only": ("def f(): pass", "print(f())",None),
    "not code": ("def f(): pass", "the answer is 42",None),
    "check never": ("def f(x): return 2", {"test":"def check(candidate):\n    assert candidate(1) == 2"},None),
    "missing lib": ("def f(x): return 2", "import torchvision_xyz\nassert f(1)==2",None),
    "missing lib optional": ("def f(x): return 2", "try:\n    import torchvision_xyz\nexcept ImportError: pass\nassert f(1)==2",1.0),
    "sqlist": ("def f(x): return 2", [{"a":1}],None),
    "dicts": ("def f(x): return 2", {"tests":[{"input":"1","output":"2"}]},None),
    "fixture": ("def f(x): return 2", "def test_a(tmp_path): assert f(1)==2",None),
    "test helper w args": ("def f(x): return 2", "def test(g, x, y): assert g(x) == y\ntest(f, 1, 2)",1.0),
    "test helper wrong": ("def f(x): return 3", "def test(g, x, y): assert g(x) == y\ntest(f, 1, 2)",0.0),
    "for else": ("def f(x): return [1,3]", "for x in f(5):\n    if x == 3: break\nelse:\n    raise AssertionError",1.0),
    "try else": ("def f(x): raise ValueError", "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False",1.0),
    "try false": ("def f(x): return 1", "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass",0.0),
    "pytest raises": ("def f(x): raise ValueError('bad')", "import pytest\ndef test_a():\n    with pytest.raises(ValueError, match='ba'):\n        f(1)\n",1.0),
    "pytest raises not": ("def f(x): return 1", "import pytest\ndef test_a():\n    with pytest.raises(ValueError):\n        f(1)\n",0.0),
    "pytest raises own": ("class Bad(Exception): pass\ndef f(x): raise Bad(1)", "import pytest\nfrom solution import f, Bad\ndef test_a():\n    with pytest.raises(Bad):\n        f(1)\n",1.0),
    "kodcode": ("def add(a,b): return a+b", "from solution import add\n\ndef test_pos():\n    assert add(1,2) == 3\n\ndef test_neg():\n    assert add(-1,-2) == -3\n",1.0),
    "kodcode wrong": ("def add(a,b): return 3", "from solution import add\n\ndef test_pos():\n    assert add(1,2) == 3\n\ndef test_neg():\n    assert add(-1,-2) == -3\n",0.0),
    "kodcode missing": ("def sub(a,b): return 3", "from solution import add\n\ndef test_pos():\n    assert add(1,2) == 3\n",0.0),
    "import solution star": ("def add(a,b): return a+b", "from solution import *\n\ndef test_pos():\n    assert add(1,2) == 3\n",1.0),
    "counter shadow": ("class Counter:\n  __eq__=lambda *a: True\n  def __init__(s,*a): pass\ndef f(s): return Counter()", "assert f('aab') == Counter('aab')",0.0),
    "counter legit": ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == Counter('aab')",1.0),
    "deque import": ("def f(s): return 1", "from collections import deque\nassert f(deque([1])) == 1",1.0),
    "isclose op": ("from operator import ne as isclose\ndef f(s): return 7", "assert isclose(f(1), 2)",0.0),
    "math as": ("import operator as math\ndef f(s): return 7", "assert math.isclose(f(1), 2)",0.0),
    "leetcode calls prelude": ("class Solution:\n  def f(self, a: List[int]) -> Optional[int]:\n    return max(Counter(a).values())", {"fn_name":"f","inputs":[[[1,1,2]]],"outputs":[2]},1.0),
    "dataclass future": ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n  x: int\ndef f(a): return A(a).x", {"fn_name":"f","inputs":[[1]],"outputs":[1]},1.0),
    "answers deep": ("import os\ndef f(a):\n  for fd in range(3,20):\n    try: os.write(fd, b'['*200000+b'\\n')\n    except OSError: pass\n  return 1", {"fn_name":"f","inputs":[[1]],"outputs":[2]},0.0),
    "answers forged digits": ("import os\ndef f(a):\n  for fd in range(3,20):\n    try: os.write(fd, b'{\"value\": '+b'9'*5000+b'}\\n')\n    except OSError: pass\n  return 1", {"fn_name":"f","inputs":[[1]],"outputs":[2]},0.0),
    "systemexit second": ("def f(a):\n  if a==2: raise SystemExit\n  return a", {"fn_name":"f","inputs":[[1],[2],[3]],"outputs":[1,2,3]},2/3),
    "set return": ("def f(a): return {a}", {"fn_name":"f","inputs":[[1]],"outputs":[[1]]},1.0),
    "generator": ("def f(a): yield a; yield 2", {"fn_name":"f","inputs":[[1]],"outputs":[[1,2]]},1.0),
    "infinite gen": ("import itertools\ndef f(a): return itertools.count()", {"fn_name":"f","inputs":[[1]],"outputs":[[1,2]]},0.0),
    "infinite gen assert": ("import itertools\ndef f(a): return itertools.count()", "assert list(f(1)) == [1]",0.0),
    "zero calls": ("def f(): return 5", {"fn_name":"f","inputs":[""],"outputs":["5"]},1.0),
}  # fmt: skip


@pytest.mark.slow
def test_rows_of_every_published_form(sandbox: Sandbox) -> None:
    found = scores(sandbox, ROWS)
    wrong = {name: (found[name], row[2]) for name, row in ROWS.items() if found[name] != pytest.approx(row[2])}
    assert not wrong


def test_expected_values_in_lists_of_one_are_those_of_two_data_sets(sandbox: Sandbox) -> None:
    rows = {
        "wrapped": ("def f(x): return x", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}, 1.0),
        "lists": ("def f(x): return [x]", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}, 1.0),
        "not all": ("def f(x): return 1", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [1, 2]]}, 0.0),
    }
    for source in ("apps", "taco"):
        assert_scored(sandbox, rows, source)
