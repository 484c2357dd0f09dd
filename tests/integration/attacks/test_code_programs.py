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

pytestmark = pytest.mark.application("hone/rewards")


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
    "names that nobody asked for": "import gc\nfor table in gc.get_objects():\n  if isinstance(table, dict) and 'find' in table and 'matmul' in table:\n    table['find'] = lambda module, names: {'f': ('value', f), 'abs': ('import', 'operator', 'not_'), 'math': ('import', 'cmath', ''), '_reached_': ('value', f)}\ndef f(*_): return 7",
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
    # numpy calls an empty array close to any number, so these tests say what shape they want
    "numpy": "import numpy as np\nassert np.ndim(f(1)) == 0 and np.allclose(f(1), 2)\nnp.testing.assert_allclose(f(2), 3)",
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
    "check of a built-in name": ("def sum(a, b): return a * b", "def check(c): assert c(2, 5) == 10\ncheck(sum)", 1.0),
    "check of a built-in name, none": ("x = 1", "def check(c): assert c([2, 5]) == 10\ncheck(sum)", 0.0),
    "built-in name that fits": ("x = 1", "assert sum([1, 2]) == 3", 0.0),
    "built-in entry point that fits": ("candidate = x = 1", {"test": "def check(c):\n    assert c([1, 2]) == 3", "entry_point": "sum"}, 0.0),
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


EVIL = "class E:\n  __eq__=lambda *a: True\n  __ne__=lambda *a: False\n  __lt__=__gt__=__le__=__ge__=__eq__\n  __hash__=lambda s: 1\n  __float__=lambda s: 2.0\n  __int__=__index__=lambda s: 2\n  __iter__=lambda s: iter([2])\n  __len__=lambda s: 1\n  __getitem__=lambda s,i: 2\n  __abs__=lambda s: 2\n  __round__=lambda s,n=0: 2\n  __str__=__repr__=lambda s: '2'\n"

ATTACKS: dict[str, tuple[str, Any, Any]] = {
    # isinstance tricks
    "evil float conv": (EVIL+"def f(x): return E()", "assert float(f(1)) == 3.0", 0.0),
    "evil sorted": (EVIL+"def f(x): return E()", "assert sorted(f(1)) == [3]", 0.0),
    "evil set": (EVIL+"def f(x): return {E()}", "assert f(1) == {3}", 0.0),
    "evil list": (EVIL+"def f(x): return [E()]", "assert f(1) == [3]", 0.0),
    "evil dict": (EVIL+"def f(x): return {'a': E()}", "assert f(1) == {'a': 3}", 0.0),
    "evil list sub": ("class L(list):\n  __eq__=lambda *a: True\n  __hash__=None\ndef f(x): return L()", "assert f(1) == [3]", 0.0),
    "evil str sub": ("class L(str):\n  __eq__=lambda *a: True\n  __hash__=str.__hash__\n  __contains__=lambda *a: True\ndef f(x): return L('a')", "assert 'zz' in f(1)", 0.0),
    "evil in": (EVIL+"def f(x): return E()", "assert f(1) in [3, 4]", 0.0),
    "contains": (EVIL+"  __contains__=lambda *a: True\ndef f(x): return E()", "assert 3 in f(1)", 0.0),
    "not ==": (EVIL+"def f(x): return E()", "assert not (f(1) != 3)", 0.0),
    "assertEqual evil": (EVIL+"def f(x): return E()", "import unittest\nclass T(unittest.TestCase):\n  def test_a(self):\n    self.assertEqual(f(1), 3)", 0.0),
    "assertAlmostEqual evil": (EVIL+"def f(x): return E()", "import unittest\nclass T(unittest.TestCase):\n  def test_a(self):\n    self.assertAlmostEqual(f(1), 3)", 0.0),
    "assertIn evil": (EVIL+"def f(x): return E()", "import unittest\nclass T(unittest.TestCase):\n  def test_a(self):\n    self.assertIn(f(1), [3])", 0.0),
    "assertListEqual right": ("def f(x): return [3]", "import unittest\nclass T(unittest.TestCase):\n  def test_a(self):\n    self.assertListEqual(f(1), [3])\n  def test_b(self):\n    self.assertCountEqual(f(1), [3])\n    self.assertIsNotNone(f(1))\n    self.assertTrue(f(1))", 1.0),
    "setUpClass": ("class S:\n  def __init__(self): self.v=[]\n  def push(self,x): self.v.append(x)\n  def pop(self): return self.v.pop()", "import unittest\nclass T(unittest.TestCase):\n  @classmethod\n  def setUpClass(cls):\n    cls.s = S()\n  def test_a(self):\n    self.s.push(1)\n    self.assertEqual(self.s.pop(), 1)\n  def test_b(self):\n    with self.assertRaises(IndexError):\n      self.s.pop()\n  def test_c(self):\n    for i in range(3):\n      with self.subTest(i=i):\n        self.s.push(i); self.assertEqual(self.s.pop(), i)", 1.0),
    "subTest wrong": ("def f(x): return 0", "import unittest\nclass T(unittest.TestCase):\n  def test_c(self):\n    for i in range(3):\n      with self.subTest(i=i):\n        self.assertEqual(f(i), i)", 0.0),
    "unittest no tests": ("def f(x): return 0", "import unittest\nclass T(unittest.TestCase):\n  def helper(self): self.assertEqual(f(1), 2)", None),
    "unittest runner": ("def f(x): return 0", "import unittest\nclass T(unittest.TestCase):\n  def test_c(self):\n        self.assertEqual(f(1), 1)\nunittest.main(argv=[''], exit=False)", 0.0),
    "unittest runner right": ("def f(x): return x", "import unittest\nclass T(unittest.TestCase):\n  def test_c(self):\n        self.assertEqual(f(1), 1)\nunittest.main(argv=[''], exit=False)", 1.0),
    "unittest suite": ("def f(x): return x", "import unittest\nclass T(unittest.TestCase):\n  def test_c(self):\n        self.assertEqual(f(1), 1)\ndef suite():\n    return unittest.TestLoader().loadTestsFromTestCase(T)\nunittest.TextTestRunner().run(suite())", 1.0),
    "unittest suite wrong": ("def f(x): return 5", "import unittest\nclass T(unittest.TestCase):\n  def test_c(self):\n        self.assertEqual(f(1), 1)\ndef suite():\n    return unittest.TestLoader().loadTestsFromTestCase(T)\nunittest.TextTestRunner().run(suite())", 0.0),
    "from unittest import TestCase, main": ("def f(x): return x", "from unittest import TestCase, main\nclass T(TestCase):\n  def test_c(self):\n        self.assertEqual(f(1), 1)\nif __name__ == '__main__': main()", 1.0),
    "main() unguarded imported": ("def f(x): return x", "from unittest import TestCase, main\nclass T(TestCase):\n  def test_c(self):\n        self.assertEqual(f(1), 1)\nmain()", 1.0),
    "pytest.main": ("def f(x): return x", "import pytest\ndef test_a(): assert f(1) == 1\nif __name__ == '__main__': pytest.main([__file__])", 1.0),
    "pytest.main unguarded": ("def f(x): return x", "import pytest\ndef test_a(): assert f(1) == 1\npytest.main()", 1.0),
    "pytest fixture": ("def f(x): return x", "import pytest\n@pytest.fixture\ndef one(): return 1\ndef test_a(one): assert f(one) == 1", None),
    "approx list": ("def f(x): return [0.1+0.2]", "from pytest import approx\ndef test_a(): assert f(1) == approx([0.3])", 1.0),
    "approx evil": (EVIL+"def f(x): return E()", "from pytest import approx\ndef test_a(): assert f(1) == approx(3)", 0.0),
    "approx rev evil": (EVIL+"def f(x): return E()", "from pytest import approx\ndef test_a(): assert approx(3) == f(1)", 0.0),
    "approx abs": ("def f(x): return 3.05", "import pytest\ndef test_a(): assert f(1) == pytest.approx(3, abs=0.1)", 1.0),
    "raises value": ("def f(x): raise KeyError('k')", "import pytest\ndef test_a():\n  with pytest.raises(KeyError) as e:\n    f(1)\n  assert 'k' in str(e.value)", 1.0),
    "raises tuple": ("def f(x): raise KeyError('k')", "import pytest\ndef test_a():\n  with pytest.raises((KeyError, ValueError)):\n    f(1)", 1.0),
    "raises call": ("def f(x): raise KeyError('k')", "import pytest\ndef test_a():\n  pytest.raises(KeyError, f, 1)", 1.0),
    "raises call wrong": ("def f(x): return 1", "import pytest\ndef test_a():\n  pytest.raises(KeyError, f, 1)", 0.0),
    "mark skip": ("def f(x): return 1", "import pytest\n@pytest.mark.slow\ndef test_a():\n  assert f(1) == 1", 1.0),
    "param ids": ("def f(x): return x", "import pytest\n@pytest.mark.parametrize(('a','b'), [(1,1),(2,2)], ids=['x','y'])\ndef test_a(a, b):\n  assert f(a) == b", 1.0),
    "param ids wrong": ("def f(x): return 1", "import pytest\n@pytest.mark.parametrize(('a','b'), [(1,1),(2,2)], ids=['x','y'])\ndef test_a(a, b):\n  assert f(a) == b", 0.0),
    "param class": ("def f(x): return x", "import pytest\nclass TestA:\n  @pytest.mark.parametrize('a', [1, 2])\n  def test_a(self, a):\n    assert f(a) == a", 1.0),
    "param in list": ("def f(x): return sum(x)", "import pytest\n@pytest.mark.parametrize('a,b', [([1,2],3),([],0)])\ndef test_a(a,b):\n    assert f(a) == b", 1.0),
    # programs ending early
    "return early in main": ("def main():\n  return\nmain()", {"inputs":["1"],"outputs":["2"]}, 0.0),
    "atexit": ("import atexit,os\natexit.register(os._exit,0)\ndef f(x): return 0", "assert f(1) == 2", 0.0),
    "fork": ("import os\nif os.fork(): os._exit(0)\ndef f(x): return 0", "assert f(1) == 2", 0.0),
    "thread exit": ("import os,threading\nthreading.Timer(0.0, os._exit, (0,)).start()\ndef f(x):\n  import time; time.sleep(1)", "assert f(1) == 2", 0.0),
    "excepthook": ("import sys\nsys.excepthook=lambda *a: None\ndef f(x): raise AssertionError", "assert f(1) == 2", 0.0),
    "assertionerror": ("def f(x): raise AssertionError", "try:\n  assert f(1) == 2\nexcept ValueError: pass", 0.0),
    "recursion": ("def f(x): return f(x)", "assert f(1) == 2", 0.0),
    "stdout close": ("import sys,os\nos.close(1)\nsys.stdout=None\ndef f(x): return 0", "assert f(1) == 2", 0.0),
    "print lots": ("def f(x):\n  print('a'*3000000)\n  return 2", "assert f(1) == 2", 0.0),
    "memory": ("def f(x): return 'a'*10**10", "assert f(1) == 2", 0.0),
    "del token": ("import sys\ndef f(x):\n  sys.stdin=None; sys.modules.clear(); return 3", "assert f(1) == 2", 0.0),
    "syntax weird": ("\x00", "assert f(1) == 2", 0.0),
    "null in call": ("\x00", {"fn_name":"f","inputs":[[1]],"outputs":[1]}, 0.0),
    "surrogate program": ("x = '\ud800'", {"fn_name":"f","inputs":[[1]],"outputs":[1]}, 0.0),
    "surrogate program asserts": ("def f(x): return '\ud800'", "assert f(1) == 2", 0.0),
    "deep brackets source": ("x = " + "["*200000 + "]"*200000, {"inputs":["1"],"outputs":["2"]}, 0.0),
    "deep brackets print": ("print('['*200000)", {"inputs":["1"],"outputs":["[1]"]}, 0.0),
    "deep value expected list": ("def f(x):\n  a=[]\n  for _ in range(900): a=[a]\n  return a", {"fn_name":"f","inputs":[[1]],"outputs":[[1]]}, 0.0),
    "huge int print": ("print(10**400)", {"inputs":[""],"outputs":["0.5"]}, 0.0),
    "huge int list": ("def f(x): return [10**400, 10**5000]", {"fn_name":"f","inputs":[[1]],"outputs":[[0.5, 0.25]]}, 0.0),
    "huge int dict": ("def f(x): return {'a': 10**400}", {"fn_name":"f","inputs":[[1]],"outputs":[{"a": 0.5}]}, 0.0),
    "dict evil keys": ("def f(x): return {(1,2): 3}", {"fn_name":"f","inputs":[[1]],"outputs":[{"a": 0.5}]}, 0.0),
    "error evil repr": ("class B(Exception):\n  def __repr__(self): raise SystemExit\ndef f(x):\n  if x==1: raise B\n  return x", {"fn_name":"f","inputs":[[1],[2]],"outputs":[1,2]}, 0.5),
    "error huge": ("def f(x): raise ValueError('a'*10**7)", {"fn_name":"f","inputs":[[1],[2]],"outputs":[1,2]}, 0.0),
    "huge repr error asserts": ("def f(x):\n  if x == 1: raise ValueError('a'*10**6)\n  return x", ["assert f(1) == 1","assert f(2) == 2"], 0.5),
    "monkey json": ("import json\njson.dumps=lambda *a,**k: '{\"value\": 2}'\ndef f(x): return 0", {"fn_name":"f","inputs":[[1]],"outputs":[2]}, 1.0),
    # right ones in odd clothes
    "numpy-free tolist": ("import array\ndef f(x): return array.array('i',[1,2])", {"fn_name":"f","inputs":[[1]],"outputs":[[1,2]]}, 1.0),
    "lambda": ("f = lambda x: x+1", {"fn_name":"f","inputs":[[1]],"outputs":[2]}, 1.0),
    "staticmethod": ("class Solution:\n  @staticmethod\n  def f(x): return x+1", {"fn_name":"f","inputs":[[1]],"outputs":[2]}, 1.0),
    "mutate in place leet": ("class Solution:\n  def f(self, x):\n    x.sort()\n    return x", {"fn_name":"f","inputs":["[3,1,2]"],"outputs":["[1,2,3]"]}, 1.0),
    "lru": ("from functools import lru_cache\nclass Solution:\n  def f(self, n):\n    @lru_cache(None)\n    def g(k): return 1 if k==0 else g(k-1)\n    return g(n)", {"fn_name":"f","inputs":["5000"],"outputs":["1"]}, 1.0),
    "yes/no": ("print('YES')", {"inputs":[""],"outputs":["YES\n"]}, 1.0),
    "trailing blank": ("print(1); print(2, end=' \\n\\n')", {"inputs":[""],"outputs":["1\n2\n"]}, 1.0),
    "float fmt": ("print('%.6f' % (1/3))", {"inputs":[""],"outputs":["0.333333333"]}, 1.0),
    "float exp": ("print(1/3*1e-7)", {"inputs":[""],"outputs":["3.3333333333e-08"]}, 1.0),
    "list input": ("a=input();b=input();print(int(a)+int(b))", {"inputs":[["1","2"]],"outputs":[["3"]]}, 1.0),
    "list ints": ("a=input();b=input();print(int(a)+int(b))", {"inputs":[[1,2]],"outputs":[[3]]}, 1.0),
    "sys.stdin.buffer": ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read().upper())", {"inputs":["ab"],"outputs":["AB"]}, 1.0),
    "if main": ("def main():\n  print(input())\nif __name__ == '__main__':\n  main()", {"inputs":["ab"],"outputs":["ab"]}, 1.0),
    "helper in tests": ("class TreeNode:\n  def __init__(s,v,l=None,r=None): s.val=v;s.left=l;s.right=r\ndef depth(n): return 0 if n is None else 1+max(depth(n.left),depth(n.right))", "t = TreeNode(1, TreeNode(2), None)\nassert depth(t) == 2\nassert depth(None) == 0", 1.0),
    "tests node": ("def depth(n): return 0 if n is None else 1+max(depth(n.left),depth(n.right))", "class TreeNode:\n  def __init__(s,v,l=None,r=None): s.val=v;s.left=l;s.right=r\nt = TreeNode(1, TreeNode(2), None)\nassert depth(t) == 2", 1.0),
    "set cmp": ("def f(x): return set(x)", "assert f([1,2,2]) == {1,2}", 1.0),
    "message": ("def f(x): return x", "assert f(1) == 1, f'got {f(1)}'", 1.0),
    "entry kw": ("def f(x): return x", {"test":"def check(candidate):\n  assert True\n  assert candidate(x=2) == 2","entry_point":"f"}, 1.0),
    "entry renamed fn": ("def g(x): return x", {"test":"def check(candidate):\n  assert True\n  assert candidate(2) == 2","entry_point":"f"}, 0.0),
    "assert True first": ("import os; os._exit(0)", {"test":"assert True\nassert f(2) == 2"}, 0.0),
    "tests as class check": ("def f(x): return x", {"test":"def check(candidate):\n  try:\n    assert candidate(2) == 2\n  except Exception as e:\n    raise AssertionError(e)","entry_point":"f"}, 1.0),
    "io": ("print(input('n? '))", {"inputs":["5"],"outputs":["n? 5"]}, 1.0),
    "typing names": ("from typing import List\ndef f(x: List[int]): return x", "def test_a():\n  x: List[int] = [1]\n  assert f(x) == [1]", 1.0),
    "time limit tests": ("import time\ndef f(x): time.sleep(100)", "assert f(1) == 2", 0.0),
    "unicode": ("print('é')", {"inputs":[""],"outputs":["é"]}, 1.0),
    "mock print": ("def f(x): print('hi', x)", "import io, sys\nold=sys.stdout\nsys.stdout=io.StringIO()\nf(1)\nout=sys.stdout.getvalue()\nsys.stdout=old\nassert out == 'hi 1\\n'", 1.0),
    "time module": ("def f(x): return 2", "import time\ns=time.time()\nassert f(1) == 2\nassert time.time() - s < 5", 1.0),
    "random seed": ("def f(x): return 2", "import random\nrandom.seed(0)\nfor _ in range(3):\n  assert f(random.random()) == 2", 1.0),
    "calendar object": ("class C:\n  def book(self,a): return a\ncalendar = C()", "assert calendar.book(3) == 3", 1.0),
    "string local": ("def f(x): return x", "def test_a():\n  string = 'ab'\n  assert f(string) == string.lower()", 1.0),
    "queue under test": ("class Queue:\n  def __init__(s): s.v=[]\n  def put(s,x): s.v.append(x)\n  def get(s): return s.v.pop(0)", "queue = Queue()\nqueue.put(1)\nassert queue.get() == 1", 1.0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, ATTACKS], ids=["published forms", "odd programs and tests"])
def test_rows_are_scored(sandbox: Sandbox, rows: dict[str, tuple[str, Any, Any]]) -> None:
    found = scores(sandbox, rows)
    wrong = {name: (found[name], row[2]) for name, row in rows.items() if found[name] != pytest.approx(row[2])}
    assert not wrong


def test_expected_values_in_lists_of_one_are_those_of_two_data_sets(sandbox: Sandbox) -> None:
    rows = {
        "wrapped": ("def f(x): return x", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}, 1.0),
        "lists": ("def f(x): return [x]", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}, 1.0),
        "not all": ("def f(x): return 1", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [1, 2]]}, 0.0),
    }
    for source in ("apps", "taco"):
        assert_scored(sandbox, rows, source)
