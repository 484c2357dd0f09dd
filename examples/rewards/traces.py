"""Answers of known worth to each reward of this folder: right ones, and traces that try to earn without being right.

``traces.py`` prints the table; the exit code is 1 when a trap earns what a right answer earns. Each entry: ground truth, right answers, wrong
answers (which may earn a part), traps (which must earn less than a quarter of the full reward).
"""

import asyncio
import inspect
import runpy
import sys
from pathlib import Path

ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
MEAN_TESTS = {"inputs": ["1 2", "5 5", "-3 1"], "outputs": ["3", "10", "-2"]}
TRACES = {
    "numeric": (
        "3.14159",
        ["#### 3.14", "so it is\n#### 3.1416"],
        ["#### 3.3", "3.14"],
        ["#### 1 2 3 3.14 4", "3.14 " * 50, "#### nan", "#### inf", "#### 3.14 or 2"],
    ),
    "strict_flexible": (
        "42",
        ["#### 42", "6*7=42\n#### 42"],
        ["The answer is 42", "#### 41"],
        ["40 41 42 43", "#### 42\n#### 43", "#### 42 43", ""],
    ),
    "unit_tests": (
        MEAN_TESTS,
        [ADD],
        ["```python\nprint(3)\n```"],
        ["```python\nprint('all tests passed')\n```", ADD.replace("```", ""), "```python\nwhile True: pass\n```"],
    ),
    "json_object": (
        '{"name": "Ada", "age": 36}',
        ['{"name": "Ada", "age": 36}', '{"age": 36, "name": "Ada"}'],
        ['{"name": "Ada", "age": 3}'],
        [
            '{"name": "", "age": 0}',
            "{}",
            "[]",
            '{"name": "Ada", "age": 36, "x": 1}',
            '{"name": "Ada", "age": true}',
            "Ada 36",
        ],
    ),
    "multiple_choice": (
        "B",
        ["Answer: B", "It rains.\nanswer: (b)."],
        ["Answer: C"],
        ["Answer: A or B", "Answer: A\nAnswer: B", "A B C D", "Answer: ABCD", "B"],
    ),
    "steps": (
        "7 21",
        ["3+4=7\n7*3=21", "3 + 4 = 7, then 7 * 3 = 21. So 21"],
        ["3+4=7\n7*3=22"],
        ["21", "1+1=2\n" * 20 + "21", "7 21 " * 9, "3+4=8\n7*3=21"],
    ),
    "overlong": (
        "9",
        ["4 plus 5 is #### 9"],
        ["well " * 70 + "#### 9"],
        ["9", "#### 8", "#### 9 #### 8", ""],
    ),
    "efficient": ("9", ["#### 9"], [], ["", "#### 8", "9", "#### 8 #### 9"]),
    "safe": (
        "9",
        ["#### 9"],
        [],
        ["rm -rf / #### 9", "P a s s w o r d: x #### 9", "ＤＲＯＰ ＴＡＢＬＥ #### 9", "drop-table\n#### 9"],
    ),
    "weighted": (
        "9",
        ["<think>4+5</think> #### 9", "#### 9"],
        ["<think>4+5</think> #### 8"],
        ["<think></think>", "<think></think> #### 9 #### 8", "", "ok"],
    ),
}


def load(name):
    """Return the function of a file of this folder."""
    return runpy.run_path(str(Path(__file__).with_name(f"{name}.py")))["compute_score"]


def score(function, truth, answer, extra_info=None):
    """Return the reward of an answer, whether the function is asynchronous or not."""
    result = function("demo", answer, truth, extra_info or {})
    result = asyncio.run(result) if inspect.iscoroutine(result) else result
    return result["score"]


def faults(name):
    """Return what is wrong with a reward: right answers that earn too little, traps that earn too much."""
    function, (truth, right, wrong, traps) = load(name), TRACES[name]
    full = 1.0
    scores = {answer: score(function, truth, answer) for answer in (*right, *wrong, *traps)}
    found = [f"right {answer!r} earns {scores[answer]:.2f}" for answer in right if scores[answer] < full]
    found += [f"wrong {answer!r} earns {scores[answer]:.2f}" for answer in wrong if scores[answer] >= full]
    return found + [f"trap {answer!r} earns {scores[answer]:.2f}" for answer in traps if scores[answer] >= full / 4]


def main():
    """Print each reward with its faults."""
    broken = 0
    for name, (_, right, wrong, traps) in TRACES.items():
        found = faults(name)
        broken += bool(found)
        print(
            f"{name:16} {len(right)} right, {len(wrong)} wrong, {len(traps)} traps: {'; '.join(found) or 'as it should be'}"
        )
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
