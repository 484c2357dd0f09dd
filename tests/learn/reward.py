"""How the boxes of the part Reward design are played."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
from algorithms import last, metrics
from playing import Play, Wrong, changed


def write(file: str, text: str) -> str:
    return f"cat > learn/{file} <<'END'\n{text}\nEND"


GRADED = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    text = solution_str.strip()
    if len(text) != 3 or not text.isdecimal():
        return {"score": 0.0, "acc": 0.0, "pred": text}
    places = sum(a == b for a, b in zip(text, ground_truth))
    return {"score": places / 3, "acc": float(text == ground_truth), "pred": text}"""
NUMERIC = r"""import math, re
def compute_score(data_source, solution_str, ground_truth, extra_info):
    pieces = solution_str.split("####")
    number = re.fullmatch(r"\s*(-?\d[\d,]*\.?\d*)\s*", pieces[-1]) if len(pieces) == 2 else None
    if number is None:
        return 0.0
    value, truth = float(number[1].replace(",", "")), float(ground_truth)
    return float(math.isclose(value, truth, rel_tol=0.01, abs_tol=1e-9))"""
REPAIRED = r"""import re
DO = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
def compute_score(data_source, solution_str, ground_truth, extra_info):
    pieces = solution_str.split("####")
    if len(pieces) != 2 or pieces[1].strip() != str(ground_truth):
        return 0.0
    steps = re.findall(r"(\d+)\s*([+*-])\s*(\d+)\s*=\s*(\d+)", pieces[0])
    shown = [int(d) == DO[o](int(a), int(b)) and d == str(ground_truth) for a, o, b, d in steps]
    return 1.0 if any(shown) else 0.5"""
DIGITS = 'print("".join(str((int(digit) + 1) % 10) for digit in input()))'
GREEDY = 'with open("big", "wb") as file:\n    for _ in range(10_000):\n        file.write(b"x" * 1_000_000)'
SHAPED = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    digits = "".join(filter(str.isdecimal, solution_str))
    if digits == ground_truth:
        return {"score": 1.0, "acc": 1.0}
    places = sum(a == b for a, b in zip(digits, ground_truth))
    return {"score": 0.1 * places + BONUS * (len(digits) == 3), "acc": 0.0}"""
DIFF = "\nhone reward diff stored learn/shaped.py:compute_score --run learn/flow --json > learn/diff.json || true"
OTHERS = ("length", "format", "keywords", "banned_words")


def placed(learn: Path) -> list[str]:
    first = pq.read_table(learn / "flow/rollouts/step_4.parquet", columns=["token_scores"]).to_pylist()[0]
    paid = last(learn, "flow", "critic/score/mean") - last(learn, "flow", "critic/rewards/mean")
    return [str(sum(score != 0 for score in first["token_scores"])), f"{paid:.3f}"]


def terms(task: float, *weights: float) -> str:
    """The run of the text with five terms of these weights."""
    text = changed("five_rewards")
    begin, end = text.index("'reward.terms="), text.index("' \\\n    trainer.default_local_dir=learn/terms")
    options = ("{max_chars: 3}", '{pattern: "\\d\\d\\d"}', '{words: ["5"]}', '{words: ["0"]}')
    listed = [f"{{scorer: digit_sequence, weight: {task}}}"]
    listed += [
        f"{{scorer: {name}, weight: {weight}, options: {option}}}"
        for name, weight, option in zip(OTHERS, weights, options, strict=True)
    ]
    return "rm -rf learn/terms\n" + text[:begin] + f"'reward.terms=[{', '.join(listed)}]" + text[end:]


def largest_term(learn: Path) -> list[str]:
    paid = {
        name: weight * last(learn, "terms", f"reward/{name}/mean")
        for name, weight in zip(OTHERS, (0.1, 0.05, 0.02, 0.03), strict=True)
    }
    return [max(paid, key=lambda name: paid[name])]


def smallest_term(learn: Path) -> list[str]:
    paid = {
        name: weight * last(learn, "terms", f"reward/{name}/mean")
        for name, weight in zip(OTHERS, (0.1, 0.05, 0.02, 0.03), strict=True)
    }
    return [min(paid, key=lambda name: paid[name])]


def golden(learn: Path) -> list[str]:
    lines = [json.loads(line) for line in (learn / "code.jsonl").read_text().splitlines()]
    return [str(sum(line["kind"] == "golden" for line in lines))]


def judged(learn: Path) -> list[str]:
    rows = metrics(learn, "judge_run")
    name = next(name for name in rows[-1] if name.startswith("val/") and name.endswith("accuracies"))
    return [f"{last(learn, 'judge_run', name):.2f}", f"{last(learn, 'judged', 'reward/rule/mean'):.2f}"]


def reordered(learn: Path) -> list[str]:
    return [f"{100 * json.loads((learn / 'diff.json').read_text())['reordered_pairs']:.1f}"]


PLAYS = {
    "signature": Play(
        "reward.py",
        write("reward.py", GRADED),
        answers=["0.67"],
        wrong=[
            Wrong("score", "{text}"),
            Wrong("reward.py", write("reward.py", GRADED.replace("return", "raise"))),
            Wrong("pred", write("reward.py", GRADED.replace('"pred": text', '"pred": ""'))),
            Wrong("acc", write("reward.py", GRADED.replace("float(text == ground_truth)", "1.0"))),
        ],
        after=[Wrong("answer 1", answers=["1"])],
    ),
    "flow": Play(
        "flow",
        answers=placed,
        wrong=[
            Wrong(
                "flow actor_rollout_ref.actor.use_kl_loss",
                "rm -rf learn/flow\n"
                + changed("flow", ("actor.use_kl_loss=false", "actor.use_kl_loss=true")).partition("hone runs")[0],
            )
        ],
        do="rm -r learn/flow\n{text}",
        after=[
            Wrong("answer 1", answers=["4", "0"]),
            Wrong("answer 2", answers=lambda learn: [placed(learn)[0], "0.9"]),
        ],
    ),
    "five_rewards": Play(
        "terms",
        terms(1, 0.1, 0.05, 0.02, 0.03),
        answers=largest_term,
        wrong=[Wrong("terms", "{text}"), Wrong("weights", terms(1, 0.3, 0.3, 0.3, 0.3))],
        after=[Wrong("answer 1", answers=smallest_term)],
    ),
    "write_reward": Play(
        "numeric.py",
        write("numeric.py", NUMERIC),
        wrong=[
            Wrong("right answers", "{text}"),
            Wrong("right answers", write("numeric.py", NUMERIC.replace(r"\.?\d*", "").replace("[,", "["))),
            Wrong("traps", write("numeric.py", NUMERIC.replace("len(pieces) == 2", "len(pieces) > 1"))),
            Wrong("traps", write("numeric.py", NUMERIC.replace("rel_tol=0.01", "rel_tol=0.1"))),
        ],
    ),
    "repair_reward": Play(
        "repaired.py",
        write("repaired.py", REPAIRED),
        wrong=[
            Wrong("right and shown", "{text}"),
            Wrong("right", write("repaired.py", REPAIRED.replace("else 0.5", "else 0.0"))),
            Wrong("right", write("repaired.py", REPAIRED.replace("1.0 if any(shown) else 0.5", "1.0"))),
            Wrong("traces", write("repaired.py", REPAIRED.replace("len(pieces) != 2", "len(pieces) < 2"))),
        ],
    ),
    "sandbox": Play(
        "digits.py",
        "{text}\n" + write("digits.py", DIGITS) + "\n" + write("greedy.py", GREEDY),
        answers=golden,
        wrong=[
            Wrong("digits.py", write("digits.py", DIGITS.replace(" % 10", ""))),
            Wrong("greedy.py", write("digits.py", DIGITS) + "\n" + write("greedy.py", GREEDY.replace("10_000", "1"))),
        ],
        after=[Wrong("answer 1", answers=["0"])],
    ),
    "reward_model": Play(
        "judge_run",
        answers=judged,
        wrong=[
            Wrong(
                "accuracy",
                changed("reward_model", ("optim.lr=1e-3 data", "optim.lr=0 data")).partition("hone export")[0],
            )
        ],
        do="rm -r learn/judge_run\n{text}",
        after=[
            Wrong("answer 1", answers=["0.01", "0"]),
            Wrong("answer 2", answers=lambda learn: [judged(learn)[0], "9"]),
        ],
    ),
    "shaping": Play(
        "shaped.py",
        write("shaped.py", SHAPED.replace("BONUS", "0.05")) + DIFF,
        answers=reordered,
        wrong=[
            Wrong("outcome", "{text}"),
            Wrong("order", write("shaped.py", SHAPED.replace("BONUS", "0.15")) + DIFF),
            Wrong("order", write("shaped.py", SHAPED.replace("BONUS", "0.0")) + DIFF),
        ],
        after=[Wrong("answer 1", answers=["99"])],
    ),
}
