"""Partial credit by steps: each right line of a calculation earns a share, the right end the rest.

Gamed by repeating a true line such as `1+1=2`: only lines that continue from the line before count, and each once.
"""

import re

LINE = re.compile(r"(-?\d+)([+*-])(-?\d+)=(-?\d+)")
COMPUTE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def compute_score(data_source, solution_str, ground_truth, extra_info, share=0.4):
    """``share`` for the steps of the worked solution that are reached in order, and the rest for the right end."""
    wanted = str(ground_truth).split()  # result of each step
    reached, before = 0, None
    for first, operator, second, result in LINE.findall(solution_str.replace(" ", "")):
        if reached == len(wanted) or COMPUTE[operator](int(first), int(second)) != int(result):
            break
        if result != wanted[reached] or (before is not None and first != before):
            break
        reached, before = reached + 1, result
    last = re.findall(r"-?\d+", solution_str)[-1:]
    right = reached == len(wanted) and last == wanted[-1:]
    return {"score": share * reached / len(wanted) + (1 - share) * right, "acc": float(right), "steps": float(reached)}
