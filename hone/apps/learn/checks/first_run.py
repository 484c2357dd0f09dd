"""Checks of the part First run."""

from __future__ import annotations

import json
from statistics import mean

from hone import __version__
from hone.apps.lab.compare import Run, config_differences
from hone.apps.lab.run_sheet import read_notes
from hone.apps.learn.work import CHECKS, Work


@CHECKS.register("install")
def install(work: Work) -> str:
    """A report of `hone doctor` of this version, without an error."""
    file = work.path("doctor.json")
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        checks = [(entry["name"], entry["status"], entry["found"]) for entry in report["checks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise work.refuse("doctor.json", f"expected the report of `hone doctor --json`; seen {error!r}") from None
    seen = next((text for name, _, text in checks if name == "python"), "no Python")
    work.require(f"hone {__version__}," in seen, "version", f"a report of hone {__version__}", seen)
    errors = [name for name, status, _ in checks if status == "error"]
    work.require(not errors, "errors", "no check with the status error", ", ".join(errors))
    good = sum(status == "ok" for _, status, _ in checks)
    work.answer_number(1, good, look=f"{len(checks)} checks are in {file}; count those whose status is ok.")
    return f"{good} of {len(checks)} checks are ok ({seen})."


@CHECKS.register("data_and_model")
def data_and_model(work: Work) -> str:
    """The rows of the task, an SFT run, and its exported model."""
    train, val = work.rows("data/train.parquet"), work.rows("data/val.parquet")
    work.require(
        (len(train), len(val)) == (400, 50), "rows", "400 problems and 50 held-out ones", f"{len(train)} and {len(val)}"
    )
    prompts = {row["prompt"][-1]["content"] for row in train} & {row["prompt"][-1]["content"] for row in val}
    work.require(not prompts, "overlap", "no problem in both files", f"{len(prompts)} in both")
    run = work.run("sft", steps=50)
    first, last = run.metrics[0]["train/loss"], work.metric(run, "train/loss")
    work.require(last < first / 2, "loss", f"a loss below half of its first value, {first:.3f}", f"{last:.3f}")
    parameters = weight_count(work)
    work.answer_number(
        1, parameters, look="`hone init` prints the number, and so does adding up the shapes of the weights."
    )
    return f"400 + 50 problems, {parameters:,} parameters, SFT loss {first:.2f} -> {last:.2f}."


def weight_count(work: Work, model: str = "start") -> int:
    """Return the number of parameters in the safetensors files of a model of the learner."""
    from math import prod

    from safetensors import safe_open

    total = 0
    for file in sorted(work.path(model).glob("*.safetensors")):
        with safe_open(file, "numpy") as weights:
            total += sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    work.require(total > 0, model, f"weights in {work.folder / model}", "none")
    return total


REWARD = "critic/rewards/mean"
"""Metric with the mean reward of a step."""


def curve(run: Run, metric: str) -> list[tuple[int, float]]:
    """Return the steps of a run that have a metric, with its values."""
    return [(int(row["step"]), row[metric]) for row in run.metrics if metric in row]


@CHECKS.register("first_training")
def first_training(work: Work) -> str:
    """A GRPO run whose reward rose, with all its answers."""
    run = work.run("first", 20, {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8})
    rewards = [value for _, value in curve(run, REWARD)]
    early, late = mean(rewards[:5]), mean(rewards[-5:])
    work.require(
        late > early + 0.05,
        "reward",
        f"a mean reward of the last five steps at least 0.05 above that of the first five, {early:.3f}",
        f"{late:.3f}",
    )
    answers = sum(len(work.samples(run, step, ["uid"])) for step in range(1, run.steps + 1))
    work.answer_number(1, answers, look="The plan of the batches names the sequences of one step.")
    look = "Take the column `best` of hone runs show learn/first --metric critic/rewards/mean."
    work.answer_number(2, max(rewards), tolerance=0.011, look=look)
    return f"{answers} answers, mean reward {early:.3f} -> {late:.3f} (five steps each)."


@CHECKS.register("curves")
def curves(work: Work) -> str:
    """The exported page of the run, and two readings of its curves."""
    run = work.run("first", 20)
    page = work.path("first.html").read_text(encoding="utf-8", errors="replace")
    work.require(
        "<html" in page and "learn/first" in page and REWARD in page,
        "first.html",
        "the page that `hone view learn/first --export` writes",
        f"{len(page)} characters without the curves of learn/first",
    )
    rewards, entropy = dict(curve(run, REWARD)), [value for _, value in curve(run, "actor/entropy")]
    best = max(rewards.values())
    steps = {str(step) for step, value in rewards.items() if value == best}

    def explain(given: str) -> str:
        value = rewards.get(int(given)) if given.isdecimal() else None
        return (
            f"there is no step {given}"
            if value is None
            else f"its mean reward is {value:.3f}, and the highest {best:.3f}"
        )

    work.answer_among(1, steps, explain)
    way = "rise" if entropy[-1] > entropy[0] else "fall"
    work.answer_among(2, {way}, lambda given: f"the entropy is {entropy[0]:.3f} first and {entropy[-1]:.3f} at the end")
    return f"reward {best:.3f} in step {' and '.join(sorted(steps))}, entropy {entropy[0]:.2f} -> {entropy[-1]:.2f}."


@CHECKS.register("evaluate")
def evaluate(work: Work) -> str:
    """Sampled answers of both models to all held-out prompts."""
    prompts = [row["prompt"][-1]["content"] for row in work.rows("data/val.parquet")]
    right = {name: _right(work, name, prompts) for name in ("before", "after")}
    before, after = (sum(map(sum, right[name].values())) for name in ("before", "after"))
    work.require(after > before, "after.jsonl", f"more right answers after training than before, {before}", after)
    look = "acc/mean@4 of `hone eval` times 200 is the number of right answers."
    work.answer_number(1, before, look=look)
    work.answer_number(2, after, look=look)
    solved = sum(not any(right["before"][uid]) and any(right["after"][uid]) for uid in right["before"])
    work.answer_number(3, solved, look="Group the lines by uid, and look at acc in terms.")
    return f"{before} of 200 answers right before, {after} after; {solved} prompts solved that were not."


def _right(work: Work, name: str, prompts: list[str]) -> dict[str, list[bool]]:
    """Return for each prompt whether its answers are right, checked against the digits themselves."""
    try:
        lines = [json.loads(line) for line in work.path(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        answers = [
            (line["uid"], line["prompt"], line["terms"]["acc"], line["text"], line["ground_truth"]) for line in lines
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise work.refuse(f"{name}.jsonl", f"expected lines of `hone eval --output`; seen {error!r}") from None
    work.require(len(answers) == 200, f"{name}.jsonl", "200 answers, 4 to each of 50 prompts", len(answers))
    seen = {prompt for _, prompt, *_ in answers}
    work.require(
        seen == set(prompts), f"{name}.jsonl", "the 50 held-out prompts", f"{len(seen & set(prompts))} of them"
    )
    wrong = [uid for uid, _, acc, text, truth in answers if acc != ("".join(filter(str.isdecimal, text)) == truth)]
    work.require(
        not wrong, f"{name}.jsonl", "acc 1 exactly for right answers", f"another acc for {', '.join(wrong[:3])}"
    )
    by_prompt: dict[str, list[bool]] = {}
    for uid, _, acc, *_ in answers:
        by_prompt.setdefault(uid, []).append(bool(acc))
    return by_prompt


@CHECKS.register("baseline")
def baseline(work: Work) -> str:
    """A run that repeats, the difference that another seed makes, and a run sheet with a note."""
    first, again = work.run("first", 20), work.run("again", 20, {"trainer.seed": 1})
    other = work.run("seed2", 20, {"trainer.seed": 2})
    for run in (again, other):
        changed = set(config_differences([first, run])) - {"trainer.default_local_dir", "trainer.seed"}
        work.require(
            not changed, f"{run.name} configuration", "that of learn/first", f"other {', '.join(sorted(changed))}"
        )
    gaps = [abs(a[1] - b[1]) for a, b in zip(curve(first, REWARD), curve(again, REWARD), strict=True)]
    work.require(max(gaps) < 1e-6, "again reward", "the rewards of learn/first", f"a difference of {max(gaps):.4f}")
    sheet = work.path("baseline.md").read_text(encoding="utf-8", errors="replace")
    notes = read_notes(first.path)
    work.require(bool(notes), "note", "a note on learn/first (hone runs note)", "none")
    written = "learn/first" in sheet and all(note["text"] in sheet for note in notes)
    work.require(
        written, "baseline.md", "the sheet of learn/first with its note", f"{len(sheet)} characters without them"
    )
    luck = abs(work.metric(first, REWARD) - work.metric(other, REWARD))
    look = "Subtract the last values of critic/rewards/mean of the two runs."
    work.answer_number(1, luck, tolerance=0.011, look=look)
    return f"20 steps repeat exactly; another seed changes the last reward by {luck:.3f}."
