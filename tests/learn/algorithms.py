"""How the boxes of the part Algorithms are played."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import pyarrow.parquet as pq
from playing import Play, Wrong, changed


def metrics(learn: Path, run: str) -> list[dict]:
    return [json.loads(line) for line in (learn / run / "metrics.jsonl").read_text().splitlines()]


def last(learn: Path, run: str, name: str) -> float:
    return [row[name] for row in metrics(learn, run) if name in row][-1]


def answers(learn: Path, run: str, step: int) -> list[dict]:
    return pq.read_table(learn / run / f"rollouts/step_{step}.parquet").to_pylist()


def by_group(learn: Path, run: str, step: int) -> dict[str, list[float]]:
    grouped = defaultdict(list)
    for answer in answers(learn, run, step):
        grouped[answer["uid"]].append(answer["score"])
    return grouped


def equal_groups(learn: Path) -> list[str]:
    equal = [uid for uid, scores in by_group(learn, "groups", 3).items() if max(scores) == min(scores)]
    return [str(len(equal)), equal[-1] if equal else "none"]


def another_group(learn: Path) -> list[str]:
    other = next(uid for uid, scores in by_group(learn, "groups", 3).items() if max(scores) > min(scores))
    return [equal_groups(learn)[0], other]


def largest(learn: Path) -> list[str]:
    return [f"{max((max(s) - mean(s)) / (stdev(s) + 1e-6) for s in by_group(learn, 'groups', 1).values()):.2f}"]


ADVANTAGE = """cat > learn/advantage.py <<'END'
from statistics import mean, stdev
def advantages(rewards):
    print("noise on standard output")
    return [(reward - mean(rewards)) / (DIVISOR) for reward in rewards]
END"""
GAE = """{text}
cat > learn/gae.py <<'END'
def returns(rewards, values, gamma, lam):
    targets, value, advantage = [], 0.0, 0.0
    for reward, mine in zip(reversed(rewards), reversed(values)):
        advantage = reward + gamma * value - mine + gamma * LAM * advantage
        value = mine
        targets.append(advantage + mine)
    return targets[::-1]
END"""


def clipped(learn: Path) -> list[str]:
    return [f"{100 * last(learn, 'clip', 'actor/pg_clipfrac'):.1f}"]


def clip(mini: int, epochs: int) -> str:
    """The run of the text with another mini-batch and more epochs."""
    keys = f"ppo_mini_batch_size={mini} actor_rollout_ref.actor.ppo_epochs={epochs}"
    return "rm -rf learn/clip\n" + changed("clip", ("ppo_mini_batch_size=16", keys))


def verdict(learn: Path) -> list[str]:
    from hone.apps.lab.compare import read_whole_run
    from hone.apps.lab.confidence import compare_arms, scores_in_common
    from hone.cli.runs import confidence_lines

    runs = [read_whole_run(learn / name) for name in ("grpo", "rloo")]
    scores = scores_in_common(runs)
    assert scores is not None
    said = confidence_lines(compare_arms(runs, scores)[0])
    line = next((line for line in said if "interval" in line), "noise")
    word = "better" if "second better" in line else "worse" if "first better" in line else "noise"
    report = json.loads((learn / "what_if.json").read_text())
    return [word, f"{100 * report['compared'][-1]['turned']:.1f}"]


def switched(learn: Path) -> list[str]:
    return [f"{max(max(s) - mean(s) for s in by_group(learn, 'switched', 1).values()):.2f}"]


def swept(learn: Path, sweep: str, metric: str) -> list[float]:
    return [sum(row.get(metric, 0) for row in metrics(learn, f"{sweep}/{n:03}")) for n in range(3)]


def micro(learn: Path) -> list[str]:
    times = swept(learn, "sweep_micro", "timing_s/update_actor")
    rewards = {metrics(learn, f"sweep_micro/{n:03}")[0]["critic/rewards/mean"] for n in range(3)}
    return [("64", "256", "4096")[times.index(max(times))], "no" if len(rewards) == 1 else "yes"]


def kl(learn: Path) -> list[str]:
    distances = [last(learn, f"sweep_kl/{n:03}", "actor/kl_loss") for n in range(3)]
    return [("0.001", "0.1", "5")[distances.index(min(distances))], f"{min(distances):.3f}"]


def rollout(learn: Path) -> list[str]:
    times = swept(learn, "sweep_rollout", "timing_s/gen")
    return [("2", "16", "128")[times.index(min(times))], f"{max(times) / min(times):.1f}"]


def preferences(learn: Path) -> list[str]:
    chosen = [row["logps/chosen"] for row in metrics(learn, "dpo") if "logps/chosen" in row]
    return [f"{last(learn, 'dpo', 'val/rewards/accuracies'):.2f}", "rise" if chosen[-1] > chosen[0] else "fall"]


PLAYS = {
    "groups": Play(
        "groups",
        answers=equal_groups,
        after=[Wrong("answer 1", answers=["17", "none"]), Wrong("answer 2", answers=another_group)],
    ),
    "advantages": Play(
        "advantage.py",
        ADVANTAGE.replace("DIVISOR", "stdev(rewards) + 1e-6"),
        answers=largest,
        wrong=[
            Wrong("advantages", "{text}"),
            Wrong("advantages", ADVANTAGE.replace("DIVISOR", "len(rewards)")),
            Wrong("advantage.py", "echo 'def advantages(rewards): return 1 / 0' > learn/advantage.py"),
        ],
        after=[Wrong("answer 1", answers=["0.1"])],
    ),
    "ppo": Play(
        "ppo",
        GAE.replace("LAM", "lam").replace("{text}", ""),
        answers=lambda learn: [f"{last(learn, 'ppo', 'critic/values/mean'):.2f}"],
        wrong=[Wrong("returns", "{text}"), Wrong("returns", GAE.replace("LAM", "1").replace("{text}", ""))],
        after=[Wrong("answer 1", answers=["99"])],
    ),
    "clip": Play(
        "clip",
        clip(4, 2),
        answers=clipped,
        wrong=[Wrong("clip actor_rollout_ref.actor.ppo_epochs", "{text}"), Wrong("updates", clip(8, 2))],
        after=[Wrong("answer 1", answers=["99"])],
    ),
    "two_estimators": Play(
        "grpo",
        answers=verdict,
        wrong=[
            Wrong(
                "what_if.json",
                "{text}\nhone what-if learn/grpo --step 1 algorithm.adv_estimator=reinforce_plus_plus --json > learn/what_if.json",
            )
        ],
        do="hone what-if learn/grpo --step 1 algorithm.adv_estimator=rloo --json > learn/what_if.json",
        after=[
            Wrong("answer 1", answers=lambda learn: ["better" if verdict(learn)[0] != "better" else "worse", "0"]),
            Wrong("answer 2", answers=lambda learn: [verdict(learn)[0], "50"]),
        ],
    ),
    "switch": Play(
        "choice.json",
        "rm -r learn/switched\n" + changed("switch", ("hone train --preset grpo", "hone train --preset dr_grpo")),
        answers=switched,
        wrong=[Wrong("switched actor_rollout_ref.actor.loss_agg_mode", "{text}")],
        after=[Wrong("answer 1", answers=["1.5"])],
    ),
    "sweep_micro_batch": Play(
        "sweep_micro",
        answers=micro,
        after=[
            Wrong("answer 1", answers=lambda learn: ["64" if micro(learn)[0] != "64" else "4096", "no"]),
            Wrong("answer 2", answers=lambda learn: [micro(learn)[0], "yes" if micro(learn)[1] == "no" else "no"]),
        ],
    ),
    "sweep_kl": Play(
        "sweep_kl",
        answers=kl,
        after=[Wrong("answer 1", answers=["0.2", "0"]), Wrong("answer 2", answers=lambda learn: [kl(learn)[0], "9"])],
    ),
    "sweep_rollout": Play(
        "sweep_rollout",
        answers=rollout,
        after=[Wrong("answer 1", answers=["3"]), Wrong("answer 2", answers=lambda learn: [rollout(learn)[0], "0.5"])],
    ),
    "preferences": Play(
        "pairs/train.parquet",
        answers=preferences,
        wrong=[Wrong("accuracy", changed("preferences", ("optim.lr=5e-4", "optim.lr=0")))],
        do="rm -r learn/dpo\n{text}",
        after=[Wrong("answer 1", answers=["0.01", "rise"])],
    ),
}
