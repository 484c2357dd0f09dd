"""Checks of the part First run."""

from __future__ import annotations

import json

from hone import __version__
from hone.learn.check import CHECKS
from hone.learn.work import Work


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
        (len(train), len(val)) == (80, 20), "rows", "80 problems and 20 held-out ones", f"{len(train)} and {len(val)}"
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
    return f"80 + 20 problems, {parameters:,} parameters, SFT loss {first:.2f} -> {last:.2f}."


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
