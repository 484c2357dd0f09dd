"""How the boxes of the part First run are played."""

from __future__ import annotations

import json
from pathlib import Path

from playing import Play, Wrong, commands


def ok_checks(learn: Path) -> list[str]:
    checks = json.loads((learn / "doctor.json").read_text())["checks"]
    return [str(len([check for check in checks if check["status"] == "ok"]))]


def reward(learn: Path, run: str = "first") -> list[float]:
    rows = map(json.loads, (learn / run / "metrics.jsonl").read_text().splitlines())
    return [row["critic/rewards/mean"] for row in rows if "critic/rewards/mean" in row]


def best_step(learn: Path) -> list[str]:
    rewards = reward(learn)
    return [str(1 + rewards.index(max(rewards))), "fall"]


def solved(learn: Path) -> list[str]:
    right: dict[str, dict[str, list[bool]]] = {"before": {}, "after": {}}
    for name, prompts in right.items():
        for line in map(json.loads, (learn / f"{name}.jsonl").read_text().splitlines()):
            prompts.setdefault(line["prompt"], []).append(line["text"].strip() == line["ground_truth"])
    before, after = right["before"], right["after"]
    gained = [prompt for prompt, answers in before.items() if sum(answers) == 0 and sum(after[prompt]) > 0]
    return [str(sum(map(sum, before.values()))), str(sum(map(sum, after.values()))), str(len(gained))]


def parameters(learn: Path) -> list[str]:
    from transformers import AutoModelForCausalLM

    return [str(AutoModelForCausalLM.from_pretrained(learn / "start").num_parameters())]


def short(run: str, *changes: str) -> str:
    """The training of the text `first_training`, changed."""
    words = [word for word in commands("first_training").split() if word != "\\"]
    keys = [change.partition("=")[0] for change in (*changes, "trainer.default_local_dir=")]
    kept = [word for word in words if word.partition("=")[0] not in keys]
    return f"rm -rf learn/{run}\n" + " ".join([*kept, *changes, f"trainer.default_local_dir=learn/{run}"])


PLAYS = {
    "install": Play(
        "doctor.json",
        answers=ok_checks,
        wrong=[
            Wrong("doctor.json", "echo ok > learn/doctor.json"),
            Wrong("version", """echo '{"checks": []}' > learn/doctor.json"""),
        ],
        after=[Wrong("answer 1"), Wrong("answer 1", answers=["0"]), Wrong("answer 1", answers=["many"])],
    ),
    "data_and_model": Play(
        "data/train.parquet",
        answers=parameters,
        wrong=[
            Wrong(
                "rows",
                "hone data make digit_sequence kind=count length=3 --out learn/data --size 70 --val-size 20",
            )
        ],
        after=[Wrong("answer 1", answers=["200000"])],
    ),
    "first_training": Play(
        "first",
        answers=lambda learn: ["2560", f"{max(reward(learn)):.2f}"],
        wrong=[
            Wrong("first steps", short("first", "trainer.total_training_steps=2")),
            Wrong("reward", short("first", "actor_rollout_ref.actor.optim.lr=0")),
        ],
        do="rm -r learn/first\n{text}",
        after=[
            Wrong("answer 1", answers=["128", "0.5"]),
            Wrong("answer 2", answers=["2560", "1.5"]),
        ],
    ),
    "curves": Play(
        "first.html",
        answers=best_step,
        wrong=[Wrong("first.html", "echo '<html></html>' > learn/first.html")],
        after=[
            Wrong("answer 1", answers=["1", "fall"]),
            Wrong("answer 2", answers=lambda learn: [best_step(learn)[0], "rise"]),
        ],
    ),
    "evaluate": Play(
        "before.jsonl",
        answers=solved,
        wrong=[Wrong("before.jsonl", "head -20 learn/data/train.parquet > learn/before.jsonl || true")],
        after=[
            Wrong("answer 1", answers=["0", "0", "0"]),
            Wrong("answer 3", answers=lambda learn: [*solved(learn)[:2], "50"]),
            Wrong("after.jsonl", "cp learn/after.jsonl kept && cp learn/before.jsonl learn/after.jsonl"),
            Wrong(
                "after.jsonl",
                "cat > cheat.py <<'END'\nfrom pathlib import Path\nfile = Path('learn/after.jsonl')\n"
                "file.write_text(file.read_text().replace('\"acc\": 0.0', '\"acc\": 1.0'))\nEND\npython cheat.py",
            ),
            Wrong("answer 1", "cp kept learn/after.jsonl"),
        ],
    ),
    "baseline": Play(
        "again",
        answers=lambda learn: [f"{abs(reward(learn)[-1] - reward(learn, 'seed2')[-1]):.2f}"],
        wrong=[Wrong("again", "cp -r learn/first learn/again")],
        do="rm -r learn/again\n{text}",
        after=[Wrong("answer 1", answers=["0.9"])],
    ),
}
