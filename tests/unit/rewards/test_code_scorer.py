"""The parts of the code scorer that need no sandbox: programs in responses, comparison of values, tests that test nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.data.types import Sample
from hone.rewards.probes import code_probes
from hone.rewards.scorers.assertion_plan import plan_of
from hone.rewards.scorers.code import last_program, read_tests, same_output, same_value

PYTHON = ("python", "Python", "py", "python3", "py3", "python title='a.py'", "{.python .numberLines}", " python", "python:a.py", "python {1,3}")  # fmt: skip
OTHER = ("text", "bash", "json", "c++", "output", "pycon", "sh title='x'", "python-repl", "javascript", "plaintext")
PROGRAMS = (
    "print(9)\n",
    "def f(x):\n    return x + 1\n\n\nprint(f(1))\n",
    'def f():\n    """Doc.\n\n    ```python\n    f()\n    ```\n    """\n    return "```"\n',
    "s = '''\n~~~\n```\n'''\nprint(s)  # it's `s`\n",
    "if True:\n\tx = 'don\\'t'\n",
)
BODIES = ("1 2\n3\n", "$ python a.py\n", '{"a": "it\'s"}\n', "", ">>> f()\n9\n")
PROSE = (
    "The code:\n\n",
    "It's `x`, not ``y``.\n",
    "\n",
    "1. First\n2. Then\n",
    "It costs ~~~5~~~.\n",
    'He said """no""".\n',
)

blocks = st.tuples(
    st.sampled_from(PROSE),
    st.sampled_from(["```", "````", "~~~", "~~~~~"]),
    st.one_of(
        st.tuples(st.sampled_from(PYTHON), st.sampled_from(PROGRAMS), st.just(True)),
        st.tuples(st.sampled_from(OTHER), st.sampled_from(BODIES), st.just(False)),
    ),
    st.sampled_from(["", "  ", "    ", "> "]),
)


@given(st.lists(blocks, min_size=1, max_size=5), st.sampled_from(PROSE), st.sampled_from(["\n", "\r\n"]))
def test_the_last_block_of_python_is_found_between_blocks_of_any_language(parts: Any, end: str, newline: str) -> None:
    text, programs = "", []
    for prose, mark, (tag, body, is_python), margin in parts:
        lines = f"{mark}{tag}\n{body}{mark}\n".splitlines(keepends=True)
        text += prose + "".join(margin + line for line in lines)
        programs += [body] * is_python
    found = last_program((text + end).replace("\n", newline))
    assert found == (programs[-1].replace("\n", newline) if programs else None)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("````markdown\nSo:\n```python\nprint(9)\n```\n````\n", "print(9)\n"),
        ("```markdown\nSo:\n```python\nprint(9)\n```\n```\n", "print(9)\n"),
        ("```text\nnever closed\n\n```python\nprint(9)\n```\n", "print(9)\n"),
        ("```python\nfirst\n\nNo:\n```python\nprint(9)\n```\n", "print(9)\n"),
        ("Here: ```python\nprint(9)```", "print(9)"),
        ("```python\nprint(9)\n``` That prints nine, as it should.\n", "print(9)\n"),
        ("```python\nx = '''cut\n```\nMore text.", "x = '''cut\n"),
        ("```python\n    print(9)\n    print(8)\n```", "print(9)\nprint(8)\n"),
        ("1. Write:\n   ```py\n   if 1:\n       print(9)\n   ```", "if 1:\n    print(9)\n"),
        ("- ```python\n  print(9)\n  ```", "print(9)\n"),
        ("<think>\n```python\nprint(8)\n```\n</think>\n```\nprint(9)\n```", "print(9)\n"),
        ("<think>\n```python\nprint(8)\n</think>\nNine.", None),
        ("Use ```print(8)``` or:\n~~~python\nprint(9)\n~~~~", "print(9)\n"),
        ("```bash\npip install x\n```\n```\nprint(9)\n```\n```json\n{}\n```", "print(9)\n"),
        ("```cpp\nint x;\n```", None),
        ("```\nprint(9)", "print(9)"),
    ],
)
def test_fences_that_models_write(text: str, program: str | None) -> None:
    assert last_program(text) == program


ANSWERS: dict[str, tuple[str, str | None]] = {
    "deepseek": ("Okay, so I need to...\n</think>\n\nTo solve this, we use a stack.\n\n### Solution Code\n```python\nimport sys\n\ndef main():\n    print(9)\n\nmain()\n```\n\n### Explanation\n1. **Stack**: `[]`.\n","import sys\n\ndef main():\n    print(9)\n\nmain()\n"),
    "qwen bold": ("**Final Answer**\n\n```python\nprint(9)\n```\n**Complexity**: `O(n)`","print(9)\n"),
    "usage block then": ("```python\ndef f(x):\n    return x\n```\n\nExample usage:\n\n```python\nprint(f(3))\n```","print(f(3))\n"),
    "answer tag": ("<answer>\n```python\nprint(9)\n```\n</answer>","print(9)\n"),
    "answer tag one line": ("<answer>```python\nprint(9)\n```</answer>","print(9)\n"),
    "boxed": ("\\boxed{\n```python\nprint(9)\n```\n}","print(9)\n"),
    "eos": ("```python\nprint(9)\n```<|im_end|>","print(9)\n"),
    "eos glued": ("```python\nprint(9)```<|im_end|>","print(9)"),
    "bold lang": ("**Python**\n```Python\nprint(9)\n```","print(9)\n"),
    "space lang": ("``` python\nprint(9)\n```","print(9)\n"),
    "lang trailing space": ("```python \nprint(9)\n``` \n","print(9)\n"),
    "dedent list": ("1. Step one\n\n    ```python\n    def f():\n        return 1\n    ```\n\n2. x","def f():\n    return 1\n"),
    "details": ("<details>\n<summary>code</summary>\n\n```python\nprint(9)\n```\n\n</details>","print(9)\n"),
    "jupyter": ("```python\nIn [1]\n```\n```python\nprint(9)\n```","print(9)\n"),
    "diff": ("```diff\n- a\n+ b\n```\n```python\nprint(9)\n```","print(9)\n"),
    "mermaid": ("```mermaid\ngraph TD;\nA-->B;\n```\n\n```py\nprint(9)\n```","print(9)\n"),
    "sql": ("```sql\nSELECT 'it''s';\n```\n```python\nprint(9)\n```","print(9)\n"),
    "console": ("```console\n$ python3 a.py\n```\n```python\nprint(9)\n```\n```console\n9\n```","print(9)\n"),
    "untagged in then out": ("Input:\n```\n3\n1 2 3\n```\nOutput:\n```\n6\n```\n```python\nprint(9)\n```","print(9)\n"),
    "untagged then py then untagged": ("```\nx\n```\n```python\nprint(9)\n```\nOutput\n```\n9\n```\n","print(9)\n"),
    "tilde strike": ("~~old~~ new\n```python\nprint(9)\n```","print(9)\n"),
    "fstring": ("```python\nx = f\"\"\"{'a'}\"\"\"\nprint(x)\n```\ntext","x = f\"\"\"{'a'}\"\"\"\nprint(x)\n"),
    "rstring": ("```python\nx = r'\\'\nprint(9)\n```\ntext'''","x = r'\\'\nprint(9)\n"),
    "comment fence": ("```python\n# ```\nprint(9)\n```\nx","# ```\nprint(9)\n"),
    "comment end fence": ("```python\nprint(9)  # done\n```\nx","print(9)  # done\n"),
    "docstring quotes": ("```python\ndef f():\n    '''It's \"\"\" fine'''\n    return 1\n```\nx","def f():\n    '''It's \"\"\" fine'''\n    return 1\n"),
    "line cont": ("```python\nx = 'a\\\nb'\nprint(x)\n```\nx","x = 'a\\\nb'\nprint(x)\n"),
    "nested md in py string closed by bare": ('```python\nPROMPT = """\n```json\n{}\n```\n"""\nprint(9)\n```\n','PROMPT = """\n```json\n{}\n```\n"""\nprint(9)\n'),
    "5ticks": ("`````python\nprint(9)\n`````","print(9)\n"),
    "mixed case py": ("```PYTHON\nprint(9)\n```","print(9)\n"),
    "python=": ("```python=\nprint(9)\n```","print(9)\n"),
    "python,linenos": ("```python,linenos\nprint(9)\n```","print(9)\n"),
    "python 3.11": ("```python3.11\nprint(9)\n```","print(9)\n"),
    "ipython3": ("```ipython3\nprint(9)\n```","print(9)\n"),
    "path": ("```src/main.py\nprint(9)\n```","print(9)\n"),
    "path py": ("```python src/main.py\nprint(9)\n```","print(9)\n"),
    "filename": ("```python filename=main.py\nprint(9)\n```","print(9)\n"),
    "highlight": ("```python hl_lines=\"2 3\"\nprint(9)\n```","print(9)\n"),
    "cython": ("```cython\ncdef int x\n```\n```python\nprint(9)\n```","print(9)\n"),
    "quote nested": ("> > ```python\n> > print(9)\n> > ```","print(9)\n"),
    "quote blank": ("> ```python\n> def f():\n>\n>     return 1\n> ```","def f():\n\n    return 1\n"),
    "two cut": ("```python\nprint(1)\n```\nNow\n```python\nprint(9","print(9"),
    "tab indent": ("1.\t```python\n\tprint(9)\n\t```","print(9)\n"),
    "close less indented": ("   ```python\n   print(9)\n```\nx","print(9)\n"),
    "crlf quote": ("> ```python\r\n> print(9)\r\n> ```\r\n","print(9)\r\n"),
    "think text": ("I think ```x``` and </think>\n```python\nprint(9)\n```","print(9)\n"),
    "pre": ("Some `code`\n\n```python\nprint('</think>')\n```","print('</think>')\n"),
    "only text tag": ("```text\nprint(9)\n```",None),
    "md untagged inner": ("````\n```python\nprint(9)\n```\n````","print(9)\n"),
    "md tilde inner": ("~~~markdown\n```python\nprint(9)\n```\n~~~","print(9)\n"),
    "sentence ends in fence": ("Write it between ``` and ```.\n```python\nprint(9)\n```","print(9)\n"),
    "html comment": ("<!-- ```python -->\n```python\nprint(9)\n```","print(9)\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_as_models_write_them(name: str) -> None:
    text, program = ANSWERS[name]
    assert last_program(text) == program


@given(st.text(alphabet="`~\n '\"#>a\\", max_size=200))
def test_no_text_stops_the_reader(text: str) -> None:
    last_program(text)


integers = st.one_of(st.integers(), st.integers(10**6, 10**40), st.integers(0, 5).map(lambda n: 10**5000 + n))


def decimal(number: int) -> str:
    return str(number) if abs(number) < 10**4000 else f"1{number - 10**5000:05000}"


@given(integers, st.one_of(st.sampled_from([-1, 0, 1]), st.integers()))
def test_integers_are_compared_as_integers(number: int, change: int) -> None:
    other = number + change if number < 10**5000 else 10**5000 + abs(change) % 7
    same = number == other
    assert same_output(decimal(number), decimal(other)) is same
    assert same_output(f"a {decimal(number)}\nb", f"a  {decimal(other)} \nb\n\n") is same
    assert same_value(number, other) is same and same_value([number], [other]) is same
    if abs(number) < 2**53:
        assert same_value(float(number), other) is (float(number) == other)
        assert same_output(f"{number}.0", decimal(other)) is same


@given(st.floats(1e-3, 1e12), st.floats(-0.9e-6, 0.9e-6))
def test_other_numbers_have_a_tolerance(number: float, change: float) -> None:
    near, far = number * (1 + change), number * (1 + 3e-6)
    if not number.is_integer() and not near.is_integer():
        assert same_output(repr(near), repr(number)) and same_value(near, number)
    assert not same_output(repr(far), repr(number)) and not same_value([far], [number, 1])


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [("0110", "110", False), ("1_0", "10", False), ("1e3", "1000", False), ("1e-5", "0.00001", True), ("1000.0", "1000", True),
     ("+5", "5", True), ("-0", "0", True), ("1e400", "1e500", False), ("1e400", "inf", False), ("inf", "Infinity", True), ("nan", "NaN", True),
     ("nan", "0.5", False), ("inf", "1.5", False), ("1" + "0" * 400, "1e308", False),
     ("123456790.0", "123456789", False), ("1.9999999999", "2", True), ("\u0661", "1", False), (".5", "0.5", True), ("0x10", "16", False)],
)  # fmt: skip
def test_words_that_are_numbers(printed: str, wanted: str, same: bool) -> None:
    assert same_output(printed, wanted) is same and same_output(wanted, printed) is same


def test_a_large_float_is_rounded_only_where_it_is_expected() -> None:
    assert not same_output("1e+18", "999999999999999999") and not same_value(1e18, 10**18 - 1)
    assert same_output("999999999999999999", "1e+18") and same_value(10**18 - 1, 1e18)


def test_numbers_beyond_floats_are_not_equal_to_floats() -> None:
    assert not same_value(10**400, 0.5) and not same_value(0.5, 10**400) and not same_value(float("inf"), 10**400)
    assert same_value(float("nan"), float("nan")) and not same_value(float("nan"), 1)


ASSERTS = {
    "assert f(1) == 2": True,
    "f(1)": False,
    "print(f(1) == 2)": False,
    "def check(g): assert g(1)": False,
    "def check(g): assert g(1)\ncheck(f)": True,
    "def helper(g): assert g(1)\ndef check(g): helper(g)\nfor g in [f]: check(g)": True,
    "def test_f(): assert f(1)": True,
    "def test_f(): f(1)": False,
    "class TestF:\n  def test_f(self): assert f(1)": True,
    "class A:\n  def test_f(self): assert f(1)": False,
    "import unittest\nclass A(unittest.TestCase):\n  def test_f(self): self.assertTrue(f(1))": True,
    "if f(1) != 2: raise ValueError": True,
    "if __name__ == '__main__':\n  assert f(1)": True,
    "async def test_f(): assert f(1)": False,
    "the answer is 42": False,
    "42": False,
    "x =": False,
    "def test_f(tmp_path): assert f(tmp_path)": False,
}


@pytest.mark.parametrize("text", ASSERTS)
def test_tests_that_assert_nothing_give_no_verdict(text: str) -> None:
    if ASSERTS[text]:
        assert plan_of([text], None)["asserts"] == [True]
    else:
        with pytest.raises((ValueError, SyntaxError)):
            plan_of([text], None)


def test_what_tests_need_of_the_program() -> None:
    plan = plan_of(["import numpy as np", "from solution import g", "assert np.ones(2) == math.pi == f(g(k)).x"], None)
    assert plan["asserts"] == [False, False, True] and plan["names"] == ["f", "g", "k", "math"]
    assert plan["imports"]["np"] == ("numpy", "", False) and plan["modules"]["math"] == ("math", "", ["pi"])
    assert plan_of(["assert sum(1, 2) == 3"], None)["names"] == ["sum"]  # the function under test has a built-in name
    assert plan_of(["assert sum(f(1)) == 3"], None)["names"] == ["f"]
    assert plan_of(["def check(c): assert sum(c(x)) == 3"], "sum")["names"] == ["c", "check", "sum", "x"]


@pytest.mark.parametrize(
    "truth",
    [{"inputs": ["1"], "outputs": ["2"]}, {"fn_name": "f", "inputs": [[1]], "outputs": [2]}, ["assert f(1) == 2"],
     {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}],
)  # fmt: skip
def test_code_rows_are_probed_with_programs_that_solve_nothing(truth: Any) -> None:
    for ground_truth in (truth, json.dumps(truth)):
        probes = dict(code_probes(Sample("0", [], None, "code", ground_truth, {})))
        assert set(probes) == {"does nothing", "prints the first expected value", "exits", "shadows the tests' names"}
        for text in probes.values():
            compile(last_program(text) or "(", "probe", "exec")
        assert "2" in probes["prints the first expected value"]
    for other in ("42", None, 3.5, ["42"], "", {"answer": "42"}):
        assert not list(code_probes(Sample("0", [], None, "gsm8k", other, {})))


def test_tests_of_every_key_are_read() -> None:
    assert read_tests({"test_list": ["assert f(1)"], "test_imports": ["import math"], "test_setup_code": ""}).assertions == ("import math", "assert f(1)")  # fmt: skip
    tests = read_tests('{"test": "assert f(1)", "entry_point": "f"}', entry_point="g")
    assert (tests.assertions, tests.entry_point) == (("assert f(1)",), "f")
    assert read_tests("assert f(1)", entry_point="g").entry_point == "g"
    with pytest.raises(ValueError, match="no tests"):
        read_tests({"inputs": ["1"], "outputs": [""]})
