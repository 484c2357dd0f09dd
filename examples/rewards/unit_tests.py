"""Unit tests in the sandbox: the share of cases that a program passes, all or nothing above that.

Gamed by printing "all tests passed", by reading the tests, or by handling the public cases only. So the expected outputs stay outside the
sandbox, and half of the reward is for passing *every* case.
"""

import re

from hone.rewards.sandbox import Limits, run

LIMITS = Limits(seconds=5, memory_mb=256)


async def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Half the share of cases that the last Python block passes, and half for all of them."""
    block = re.findall(r"```python\n(.*?)```", solution_str, re.DOTALL)
    cases = list(zip(ground_truth["inputs"], ground_truth["outputs"], strict=True))
    passed = 0
    for given, expected in cases if block else ():
        result = await run(block[-1], stdin=given, limits=LIMITS)
        passed += result.ending == "finished" and result.exit_code == 0 and result.stdout.strip() == expected
    whole = bool(cases) and passed == len(cases)
    return {"score": 0.5 * passed / max(1, len(cases)) + 0.5 * whole, "acc": float(whole), "passed": float(passed)}
