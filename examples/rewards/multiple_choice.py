"""One letter of several: the answer must commit itself.

Gamed by naming all letters, or by "A or B". So exactly one answer may be marked.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 for exactly one `Answer: LETTER` with the right letter."""
    marked = re.findall(r"(?im)^answer:\s*(.*)$", solution_str)
    letter = re.fullmatch(r"\(?([A-Ja-j])\)?\.?", marked[0].strip()) if len(marked) == 1 else None
    right = letter is not None and letter[1].upper() == str(ground_truth).upper()
    return {"score": float(right), "acc": float(right), "format": float(letter is not None)}
