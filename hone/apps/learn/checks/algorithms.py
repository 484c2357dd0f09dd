"""Checks of the part Algorithms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from hone.apps.lab.compare import Run, config_differences
from hone.apps.lab.confidence import compare_pair, scores_in_common
from hone.apps.lab.sweeps import TrialResult, read_sweep
from hone.apps.learn.work import CHECKS, Work

_ACTOR = "actor_rollout_ref.actor"


def groups(work: Work, run: Run, step: int) -> dict[str, list[float]]:
    """Return the rewards of each group of a step, by the row of its prompt, such as ``train:17``."""
    rewards: dict[str, list[float]] = {}
    for record in work.samples(run, step, ["uid", "score"]):
        rewards.setdefault(record["uid"], []).append(record["score"])
    return rewards


def close(left: Sequence[float], right: Sequence[float], tolerance: float = 1e-4) -> bool:
    """Return whether two lists of numbers are equal up to a tolerance."""
    return len(left) == len(right) and all(abs(a - b) <= tolerance for a, b in zip(left, right, strict=True))


def shown(values: Sequence[float]) -> str:
    """Return numbers for a message."""
    return "[" + ", ".join(f"{value:.3g}" for value in values) + "]"


@CHECKS.register("groups")
def taught_nothing(work: Work) -> str:
    """The groups of step 3 whose rewards are all equal."""
    run = work.run("groups", 4, {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4})
    rewards = groups(work, run, 3)
    equal = [uid for uid, scores in rewards.items() if len(set(scores)) == 1]
    metric = {int(row["step"]): row for row in run.metrics}[3]["reward/zero_std_group_ratio"]
    work.require(
        abs(metric * len(rewards) - len(equal)) < 0.5,
        "groups",
        f"{metric:.3f} of the groups with equal rewards, as the metric of step 3 says",
        f"{len(equal)} of {len(rewards)} in the stored answers",
    )
    look = "Group the answers of step 3 by uid, and count the groups whose scores are all equal."
    work.answer_number(1, len(equal), look=look)

    def explain(given: str) -> str:
        scores = rewards.get(given)
        return f"step 3 has no group {given}" if scores is None else f"its rewards are {shown(scores)}"

    work.answer_among(2, equal or ["none"], explain)
    return f"{len(equal)} of {len(rewards)} groups of step 3 taught nothing."


@CHECKS.register("advantages")
def advantages(work: Work) -> str:
    """The learner's function gives the advantages that the run used."""
    run = work.run("groups", 4)
    work.require(
        run.config.get("algorithm.norm_adv_by_std_in_grpo") is True,
        "groups",
        "a run that divides by the deviation",
        "none",
    )
    stored: dict[str, list[tuple[float, float]]] = {}
    for record in work.samples(run, 1, ["uid", "score", "advantages", "response_mask"]):
        sampled = [a for a, mask in zip(record["advantages"], record["response_mask"], strict=True) if mask]
        stored.setdefault(record["uid"], []).append((record["score"], sampled[0]))
    rewards = [[score for score, _ in group] for group in stored.values()]
    computed = work.call("advantage.py", "advantages", [[group] for group in rewards])
    for scores, given, group in zip(rewards, computed, stored.values(), strict=True):
        used = [advantage for _, advantage in group]
        work.require(
            close(given, used, 1e-3), "advantages", f"{shown(used)} for the rewards {shown(scores)}", shown(given)
        )
    largest = max(advantage for group in stored.values() for _, advantage in group)
    work.answer_number(
        1, largest, tolerance=0.011, look="Take the largest value of `advantages` in the answers of step 1."
    )
    return f"{len(stored)} groups computed as the run did; the largest advantage is {largest:.3f}."


@CHECKS.register("ppo")
def ppo(work: Work) -> str:
    """The learner's GAE gives the critic's targets that the run used."""
    run = work.run("ppo", 4, {"algorithm.adv_estimator": "gae", "algorithm.lam": 0.95})
    gamma, lam = float(run.config["algorithm.gamma"]), float(run.config["algorithm.lam"])
    records = work.samples(run, 2, ["token_rewards", "values", "returns"])[:64]
    calls = [[record["token_rewards"], record["values"], gamma, lam] for record in records]
    computed = work.call("gae.py", "returns", calls)
    for record, given in zip(records, computed, strict=True):
        expected = f"{shown(record['returns'])} for the rewards {shown(record['token_rewards'])} and the values {shown(record['values'])}"
        work.require(close(given, record["returns"], 1e-3), "returns", expected, shown(given))
    value = work.metric(run, "critic/values/mean")
    work.answer_number(1, value, tolerance=0.011, look="hone runs show learn/ppo --metric critic/values/mean")
    return f"{len(records)} answers computed as the run did; mean prediction {value:.3f} in step {run.steps}."


@CHECKS.register("clip")
def clip(work: Work) -> str:
    """Eight updates a step with each answer used twice, and tokens that were clipped."""
    run = work.run("clip", 3, {f"{_ACTOR}.ppo_epochs": 2, "data.train_batch_size": 16})
    updates = 16 // int(run.config[f"{_ACTOR}.ppo_mini_batch_size"]) * 2
    work.require(updates == 8, "updates", "8 updates a step", updates)
    share = {int(row["step"]): row for row in run.metrics}[3]["actor/pg_clipfrac"]
    work.require(share > 0, "clipped", "clipped tokens in step 3", f"actor/pg_clipfrac {share}")
    work.answer_number(1, 100 * share, tolerance=0.06, look="hone runs show learn/clip --metric actor/pg_clipfrac")
    return f"8 updates a step; {share:.1%} of the tokens of step 3 were clipped."


@CHECKS.register("two_estimators")
def two_estimators(work: Work) -> str:
    """Two runs that differ in the estimator alone, and the stored step computed with both."""
    first = work.run("grpo", 8, {"algorithm.adv_estimator": "grpo"})
    second = work.run("rloo", 8, {"algorithm.adv_estimator": "rloo"})
    changed = set(config_differences([first, second])) - {"trainer.default_local_dir", "algorithm.adv_estimator"}
    work.require(not changed, "configuration", "one key that differs", ", ".join(sorted(changed)))
    report = json.loads(work.path("what_if.json").read_text(encoding="utf-8"))
    lines = {line["name"]: line for line in report["compared"]}
    work.require("changed" in lines, "what_if.json", "the run and a change", ", ".join(lines))
    turned, size = _left_out(work, first)
    seen = lines["changed"]
    work.require(
        abs(seen["turned"] - turned) < 1e-6 and abs(seen["advantage"] - size) < 1e-3,
        "what_if.json",
        f"RLOO on step 1 of learn/grpo: {turned:.1%} turned, mean absolute advantage {size:.4f}",
        f"{seen['turned']:.1%} and {seen['advantage']:.4f}",
    )
    scores = scores_in_common([first, second])
    verdict = "noise" if scores is None else _in_one_word(compare_pair(first, second, scores).result.verdict)
    work.answer_among(
        1, {verdict}, lambda given: "read the line of the interval of `hone runs compare learn/grpo learn/rloo`"
    )
    work.answer_number(2, 100 * turned, tolerance=0.06, look="`turned` is a share; times 100 it is in percent.")
    return f"rloo against grpo: {verdict}; {turned:.1%} of the answers pushed the other way."


def _in_one_word(verdict: str) -> str:
    return "better" if "second" in verdict else "worse" if "first" in verdict else "noise"


def _left_out(work: Work, run: Run) -> tuple[float, float]:
    """Return what leave-one-out makes of step 1: the share of answers with another sign, and the mean absolute advantage of a token."""
    rewards = groups(work, run, 1)
    turned, answers, size, tokens = 0, 0, 0.0, 0
    for record in work.samples(run, 1, ["uid", "score", "response_mask"]):
        group, reward = rewards[record["uid"]], record["score"]
        advantage = reward - (sum(group) - reward) / (len(group) - 1)
        turned += (reward - mean(group)) * advantage < -1e-12
        answers += 1
        size += abs(advantage) * sum(record["response_mask"])
        tokens += sum(record["response_mask"])
    return turned / answers, size / tokens


@CHECKS.register("switch")
def switch(work: Work) -> str:
    """A recommendation with reasons, and a run by Dr. GRPO whose advantages are not divided."""
    choice = json.loads(work.path("choice.json").read_text(encoding="utf-8"))
    work.require(
        "grpo" in json.dumps(choice), "choice.json", "the recommendation for a verifiable reward", str(choice)[:80]
    )
    wanted = {f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", "algorithm.norm_adv_by_std_in_grpo": False}
    run = work.run("switched", 2, wanted)
    values = [max(record["advantages"]) for record in work.samples(run, 1, ["advantages"])]
    for rewards in groups(work, run, 1).values():
        work.require(len(rewards) > 1, "groups", "several answers to a prompt", len(rewards))
    work.answer_number(
        1, max(values), tolerance=0.011, look="Take the largest of `advantages` in the answers of step 1."
    )
    return f"Dr. GRPO; the largest advantage is {max(values):.3f}."


def trials(work: Work, folder: str, key: str, least: int = 3) -> list[tuple[str, Run]]:
    """Return the finished trials of a sweep over one key: each value with its run, in the order of the trials."""
    path = work.path(folder)
    listed: list[TrialResult] = sorted(read_sweep(path).trials, key=lambda trial: trial.directory.name)
    found_values = [(_swept(trial.values, key), trial.directory) for trial in listed]
    work.require(len(found_values) >= least, folder, f"{least} values of {key}", len(found_values))
    return [(value, work.run(f"{folder}/{Path(directory).name}")) for value, directory in found_values if value]


def _swept(values: Mapping[str, Any], key: str) -> str:
    return next((str(value) for name, value in values.items() if name.endswith(key)), "")


def _explain(numbers: Mapping[str, float], what: str):
    def explain(given: str) -> str:
        value = numbers.get(given)
        return f"the sweep has no value {given}" if value is None else f"its {what} is {value:.4g}"

    return explain


def _total(run: Run, metric: str) -> float:
    return sum(row.get(metric, 0.0) for row in run.metrics)


def _first_reward(run: Run) -> float:
    return next(row["critic/rewards/mean"] for row in run.metrics if "critic/rewards/mean" in row)


@CHECKS.register("sweep_micro_batch")
def sweep_micro_batch(work: Work) -> str:
    """Three sizes of micro-batches that change the time and nothing else."""
    runs = trials(work, "sweep_micro", "ppo_max_token_len_per_gpu")
    norms = [run.metrics[0].get("actor/grad_norm", float("nan")) for _, run in runs]
    work.require(
        close(norms, [norms[0]] * len(norms), 1e-3), "gradient", "the same gradient norm in step 1", shown(norms)
    )
    seconds = {value: _total(run, "timing_s/update_actor") for value, run in runs}
    slowest = max(seconds, key=lambda value: seconds[value])
    work.answer_among(1, {slowest}, _explain(seconds, "time of updates in seconds"))
    rewards = [_first_reward(run) for _, run in runs]
    differ = "no" if close(rewards, [rewards[0]] * len(rewards), 1e-6) else "yes"
    work.answer_among(2, {differ}, lambda given: f"the rewards of step 1 are {shown(rewards)}")
    return f"gradient norm {norms[0]:.4f} for all; updates took {min(seconds.values()):.2f} to {max(seconds.values()):.2f} s."


@CHECKS.register("sweep_kl")
def sweep_kl(work: Work) -> str:
    """Three KL coefficients, and the distance from the reference that each allows."""
    runs = trials(work, "sweep_kl", "kl_loss_coef")
    for value, run in runs:
        work.require(run.steps >= 8, f"trial {value} steps", "8 steps", run.steps)
    distances = {value: work.metric(run, "actor/kl_loss") for value, run in runs}
    values = sorted(distances, key=float)
    work.require(
        float(values[-1]) >= 10 * float(values[0]),
        "values",
        "coefficients that differ by a factor of 10 or more",
        ", ".join(values),
    )
    nearest = min(distances, key=lambda value: distances[value])
    work.answer_among(1, {nearest}, _explain(distances, "last actor/kl_loss"))
    work.answer_number(
        2, distances[nearest], tolerance=0.0011, look="It is the last value of actor/kl_loss of that trial."
    )
    return "distances from the reference: " + ", ".join(f"{value}: {distances[value]:.3f}" for value in values) + "."


@CHECKS.register("sweep_rollout")
def sweep_rollout(work: Work) -> str:
    """Three budgets of the rollout that change the time and not the answers."""
    runs = trials(work, "sweep_rollout", "max_num_seqs")
    rewards = [_first_reward(run) for _, run in runs]
    work.require(
        close(rewards, [rewards[0]] * len(rewards), 0.02), "rewards", "the same rewards in step 1", shown(rewards)
    )
    seconds = {value: _total(run, "timing_s/gen") for value, run in runs}
    fastest, slowest = min(seconds.values()), max(seconds.values())
    work.answer_among(
        1,
        {value for value, time in seconds.items() if time == fastest},
        _explain(seconds, "time of the rollouts in seconds"),
    )
    work.answer_number(
        2, slowest / fastest, tolerance=0.06, look="Divide the largest sum of timing_s/gen by the smallest."
    )
    return f"rollouts took {fastest:.2f} to {slowest:.2f} s, a factor of {slowest / fastest:.1f}."


@CHECKS.register("preferences")
def preferences(work: Work) -> str:
    """Pairs of the learner's own run, and a DPO run that orders held-out pairs."""
    pairs = {name: work.rows(f"pairs/{name}.parquet", "prompt", "chosen", "rejected") for name in ("train", "val")}
    run = work.run("dpo", 20)
    accuracy = work.metric(run, "val/rewards/accuracies")
    work.require(
        accuracy > 0.55, "accuracy", "more than 0.55 of the held-out pairs in the right order", f"{accuracy:.2f}"
    )
    likelihood = [row["logps/chosen"] for row in run.metrics if "logps/chosen" in row]
    work.answer_number(1, accuracy, tolerance=0.011, look="hone runs show learn/dpo --metric val/rewards/accuracies")
    way = "rise" if likelihood[-1] > likelihood[0] else "fall"
    work.answer_among(2, {way}, lambda given: f"it is {likelihood[0]:.2f} first and {likelihood[-1]:.2f} last")
    return f"{len(pairs['train'])} + {len(pairs['val'])} pairs, {accuracy:.2f} of the held-out ones in order."
