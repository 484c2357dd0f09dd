"""Checks of the part Reward design."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from statistics import mean
from typing import Any

from hone.apps.learn.checks.algorithms import close, shown
from hone.apps.learn.work import CHECKS, Work

RIGHT_NUMBERS = (
    ("#### 42", "42"),
    ("six times seven\n#### 42", "42"),
    ("#### -7", "-7"),
    ("#### 1,000", "1000"),
    ("#### 2.51", "2.5"),
    ("####0", "0"),
    ("####  3.1416 ", "3.14159"),
)
"""Answers that a tolerant numeric reward must pay, with their truths."""
TRAPS_OF_NUMBERS = (
    ("42", "42"),
    ("", "42"),
    (" ".join(map(str, range(100))), "42"),
    ("#### 41 #### 42", "42"),
    ("#### 42 43", "42"),
    ("#### 142", "42"),
    ("#### 43", "42"),
    ("#### nan", "42"),
    ("#### inf", "42"),
    ("#### 42 or so", "42"),
    ("#### 0.5", "0"),
    ("#### -42", "42"),
    ("#### forty-two", "42"),
)
"""Answers that it must not pay."""


def scores(work: Work, file: str, answers: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return what the learner's ``compute_score`` gives to each answer with its truth, as dicts with ``score``."""
    results = work.call(file, "compute_score", [["learn", text, truth, {}] for text, truth in answers])
    as_dicts = [result if isinstance(result, dict) else {"score": result} for result in results]
    for (text, _), result in zip(answers, as_dicts, strict=True):
        number = isinstance(result.get("score"), int | float) and not isinstance(result.get("score"), complex)
        work.require(number, "score", f"a number for {text!r}", str(result.get("score")))
    return as_dicts


@CHECKS.register("signature")
def signature(work: Work) -> str:
    """A graded reward that passes the bench of `hone reward test`, with acc and pred."""
    from hone.config.reward import CustomRewardConfig, RewardConfig
    from hone.data.prompts import scored_rows
    from hone.rewards.bench import bench_findings, run_bench

    answers = [
        ("490", "490"),
        ("491", "490"),
        ("401", "490"),
        ("123", "490"),
        ("49", "490"),
        ("490 490", "490"),
        ("", "490"),
        ("x", "490"),
    ]
    given = scores(work, "reward.py", answers)
    wanted = [1, 2 / 3, 1 / 3, 0, 0, 0, 0, 0]
    seen = [float(result["score"]) for result in given]
    work.require(
        close(seen, wanted, 0.01),
        "score",
        f"{shown(wanted)} for {', '.join(repr(text) for text, _ in answers)}",
        shown(seen),
    )
    right = [result.get("acc") for result in given]
    work.require(right[0] == 1 and not any(right[1:]), "acc", "acc 1 for the right answer and 0 for others", str(right))
    work.require(str(given[1].get("pred")) == "491", "pred", "pred 491 for the text 491", str(given[1].get("pred")))
    path = str(work.path("reward.py"))
    config = RewardConfig(custom_reward_function=CustomRewardConfig(path=path, name="compute_score"), num_workers=1)
    rows = scored_rows(str(work.path("data/val.parquet")), reward_fn_key="data_source", limit=4)
    bad = [
        finding.error for finding in bench_findings(run_bench(config, rows, adversarial=True), config) if finding.stops
    ]
    work.require(not bad, "hone reward test", "no finding that stops a run", bad[0].what if bad else "")
    work.answer_number(1, seen[1], tolerance=0.011, look="Two of the three digits of 491 are those of 490.")
    return "graded, with acc and pred; it passes `hone reward test`."


@CHECKS.register("flow")
def flow(work: Work) -> str:
    """Scores on the last sampled token, and rewards lowered by a KL penalty."""
    run = work.run("flow", 4, {"algorithm.use_kl_in_reward": True, "actor_rollout_ref.actor.use_kl_loss": False})
    records = work.samples(run, 4, ["score", "token_scores", "response_mask"])
    placed = []
    for record in records:
        given = record["token_scores"]
        work.require(given is not None, "token_scores", "scores of tokens without the penalty", "none")
        last = max(place for place, mask in enumerate(record["response_mask"]) if mask)
        work.require(
            all(value == 0 for place, value in enumerate(given) if place != last)
            and abs(given[last] - record["score"]) < 1e-5,
            "placement",
            f"the score {record['score']:.3f} on token {last + 1} alone",
            shown(given),
        )
        placed.append(sum(value != 0 for value in given))
    row = {int(row["step"]): row for row in run.metrics}[4]
    paid = row["critic/score/mean"] - row["critic/rewards/mean"]
    work.answer_number(1, placed[0], look="Count the values of token_scores that are not 0 in the first row.")
    work.answer_number(2, paid, tolerance=0.0011, look="Subtract the last values of the two metrics.")
    return (
        f"{sum(placed)} of {len(records)} answers have a score, each on its last token; the KL penalty cost {paid:.3f}."
    )


@CHECKS.register("five_rewards")
def five_rewards(work: Work) -> str:
    """Five terms whose weights put the outcome first, and whose sum is the score of every answer."""
    run = work.run("terms", 2)
    terms = {term["scorer"]: term for term in run.config.get("reward.terms") or [] if "scorer" in term}
    others = ("length", "format", "keywords", "banned_words")
    missing = [name for name in ("digit_sequence", *others) if name not in terms]
    work.require(not missing, "terms", f"the terms digit_sequence, {', '.join(others)}", f"no {', '.join(missing)}")
    weights = {name: float(term.get("weight", 1.0)) for name, term in terms.items()}
    side = sum(weights[name] for name in others)
    work.require(
        weights["digit_sequence"] == 1 and 0 < side < 0.3 and min(weights.values()) > 0,
        "weights",
        "weight 1 for digit_sequence and less than 0.3 for the other four together, all above 0",
        ", ".join(f"{name} {weight:g}" for name, weight in weights.items()),
    )
    for record in work.samples(run, 2, ["text", "score", "terms"]):
        total = sum(weights[name] * record["terms"][name] for name in weights)
        work.require(abs(total - record["score"]) < 1e-5, "sum", f"{total:.3f} for {record['text']!r}", record["score"])
    row = {int(row["step"]): row for row in run.metrics}[2]
    paid = {name: weights[name] * row[f"reward/{name}/mean"] for name in others}
    best = max(paid.values())

    def explain(given: str) -> str:
        return f"it contributed {paid[given]:.4f}" if given in paid else f"there is no term {given}"

    work.answer_among(1, {name for name in paid if paid[name] > best - 1e-9}, explain)
    return "contributions in step 2: " + ", ".join(f"{name} {value:.3f}" for name, value in paid.items()) + "."


@CHECKS.register("write_reward")
def write_reward(work: Work) -> str:
    """A numeric reward that pays all right forms and none of the traps."""
    for answers, wanted, field in ((RIGHT_NUMBERS, 1.0, "right answers"), (TRAPS_OF_NUMBERS, 0.0, "traps")):
        for (text, truth), result in zip(answers, scores(work, "numeric.py", answers), strict=True):
            case = f"{wanted:g} for {text[:40]!r} where {truth} is right"
            work.require(float(result["score"]) == wanted, field, case, result["score"])
    return f"{len(RIGHT_NUMBERS)} right answers paid, {len(TRAPS_OF_NUMBERS)} traps not."


SHOWN = (("40+2=42\n#### 42", "42"), ("6 * 7 = 42, therefore\n#### 42", "42"), ("first 1+1=2, then 2+7=9\n#### 9", "9"))
BARE = (("#### 42", "42"), ("because\n#### 42", "42"), ("40+2=41\n#### 42", "42"), ("1+1=2\n#### 42", "42"))
GAMING = (
    ("because " * 20, "42"),
    ("because " + " ".join(map(str, range(100))), "42"),
    ("40+2=42", "42"),
    ("because #### 142", "42"),
    ("40+1=41\n#### 41\n#### 42", "42"),
    ("40+1=41\n#### 41", "42"),
    ("40+2=42\n#### 42\n#### 43", "42"),
    ("40+2=42\n#### 42 43 44", "42"),
    ("#### 42\n40+2=42 and so on", "42"),
    ("", "42"),
)


@CHECKS.register("repair_reward")
def repair_reward(work: Work) -> str:
    """The repaired reward: work that is shown, answers without it, and traces that gamed the old one."""
    for answers, low, high, field in (
        (SHOWN, 1, 1, "right and shown"),
        (BARE, 0.5, 0.9, "right"),
        (GAMING, 0, 0.25, "traces"),
    ):
        for (text, truth), result in zip(answers, scores(work, "repaired.py", answers), strict=True):
            bound = "1" if low == high else f"{low:g} to {high:g}"
            reward = float(result["score"])
            fits = low <= reward <= high and (field != "traces" or reward < high)
            work.require(fits, field, f"{bound} for {text[:50]!r} where {truth} is right", reward)
    old = [float(result["score"]) for result in scores(work, "gamed.py", GAMING)]
    new = [float(result["score"]) for result in scores(work, "repaired.py", GAMING)]
    return f"traces earned {mean(old):.2f} on average before the repair, {mean(new):.2f} after it."


@CHECKS.register("sandbox")
def sandbox(work: Work) -> str:
    """A program that solves the task, one that a limit ends, and a bench of the scorer `code`."""
    from hone.rewards.sandbox import Limits, run

    def ended(file: str, stdin: str, seconds: float):
        program = work.path(file).read_text(encoding="utf-8", errors="replace")
        return asyncio.run(run(program, stdin=stdin, limits=Limits(seconds=seconds, memory_mb=256)))

    for digits, wanted in (("389", "490"), ("0", "1"), ("99999", "00000")):
        result = ended("digits.py", digits + "\n", 10)
        seen = f"{result.stdout.strip()[:40]!r}, ending {result.ending.value}"
        work.require(
            result.succeeded and result.stdout.strip() == wanted, "digits.py", f"{wanted!r} for {digits}", seen
        )
    source = work.path("greedy.py").read_text(encoding="utf-8", errors="replace")
    work.require("write" in source, "greedy.py", "a program that writes a large file", "none that writes")
    result = ended("greedy.py", "", 20)
    work.require(
        not result.succeeded, "greedy.py", "a program that the sandbox ends or fails", "it finished without an error"
    )
    lines = [json.loads(line) for line in work.path("code.jsonl").read_text(encoding="utf-8").splitlines()]
    golden = [line for line in lines if line["kind"] == "golden"]
    work.require(bool(golden), "code.jsonl", "answers of the kind golden", f"{len(lines)} lines without one")
    best: dict[str, float] = {}
    for line in golden:
        best[line["uid"]] = max(best.get(line["uid"], 0.0), line["score"] or 0.0)
    work.require(min(best.values()) == 1, "code.jsonl", "a right program for each row", shown(list(best.values())))
    work.answer_number(1, len(golden), look='Count the lines with "kind": "golden".')
    end = result.ending.value if result.exit_code is None else f"exit code {result.exit_code}"
    return f"the greedy program ended with {end}; {len(golden)} right programs for {len(best)} problems passed their tests."


@CHECKS.register("reward_model")
def reward_model(work: Work) -> str:
    """A reward model that orders held-out pairs, and a run whose reward it was, next to the rule."""
    judge = work.run("judge_run", 25)
    accuracy = next((judge.last(name) for name in judge.names() if name.endswith("accuracies") and "val" in name), None)
    if accuracy is None:
        raise work.refuse("judge_run", "expected a validation accuracy; the run has none: data.val_files")
    work.require(accuracy > 0.6, "accuracy", "more than 0.6 of the held-out pairs in order", f"{accuracy:.2f}")
    work.path("judge/config.json")
    run = work.run("judged", 4, {"reward.reward_model.enable": True})
    rule, model = work.metric(run, "reward/rule/mean"), work.metric(run, "reward/rm/mean")
    work.answer_number(1, accuracy, tolerance=0.011, look="hone runs show learn/judge_run")
    work.answer_number(2, rule, tolerance=0.011, look="hone runs show learn/judged --metric reward/rule/mean")
    return f"{accuracy:.2f} of the held-out pairs in order; in the last step the model says {model:.2f}, the rule {rule:.2f}."


@CHECKS.register("shaping")
def shaping(work: Work) -> str:
    """A shaped reward that keeps the three rules on all stored answers, and its comparison with the old one."""
    run = work.run("flow", 4)
    stored = [record for step in range(1, 5) for record in work.samples(run, step, ["text", "ground_truth"])]
    answers = [(record["text"], record["ground_truth"]) for record in stored]
    places = [_places(text, truth) for text, truth in answers]
    given = [float(result["score"]) for result in scores(work, "shaped.py", answers)]
    for (text, truth), reward in zip(answers, given, strict=True):
        right = _digits(text) == truth
        work.require(
            reward == 1 if right else 0 <= reward <= 0.5,
            "outcome",
            f"{'1' if right else 'at most 0.5'} for {text!r} where {truth} is right",
            reward,
        )
    wrong = [
        (place, len(_digits(text)) == 3, reward, text)
        for place, reward, (text, truth) in zip(places, given, answers, strict=True)
        if _digits(text) != truth
    ]
    for low, high in ((low, high) for low in wrong for high in wrong if low[:2] < high[:2]):
        fits = low[2] < high[2] if low[0] == high[0] else low[2] <= high[2]
        work.require(
            fits,
            "order",
            f"no less for {high[3]!r} ({high[0]} in place) than for {low[3]!r} ({low[0]})",
            f"{high[2]:g} and {low[2]:g}",
        )
    reordered = _reordered(work)
    report = json.loads(work.path("diff.json").read_text(encoding="utf-8"))
    work.require(
        abs(report["reordered_pairs"] - reordered) < 1e-9,
        "diff.json",
        f"{reordered:.4f} of the pairs reordered",
        report["reordered_pairs"],
    )
    work.answer_number(1, 100 * reordered, tolerance=0.06, look="reordered_pairs in learn/diff.json times 100.")
    return f"outcome first on {len(answers)} stored answers; {reordered:.1%} of the pairs changed their order."


def _digits(text: str) -> str:
    return "".join(filter(str.isdecimal, text))


def _places(text: str, truth: str) -> int:
    return sum(a == b for a, b in zip(_digits(text), truth, strict=False))


def _reordered(work: Work) -> float:
    """Return the share of pairs that the learner's reward orders in another way than the run's."""
    from hone.apps.lab.rewards.comparison import compare, rescore_run
    from hone.config.reward import CustomRewardConfig, RewardConfig

    path = str(work.path("shaped.py"))
    config = RewardConfig(custom_reward_function=CustomRewardConfig(path=path, name="compute_score"), num_workers=1)
    return compare(rescore_run(str(work.folder / "flow"), work.folder, None, config)).reordered_pairs
