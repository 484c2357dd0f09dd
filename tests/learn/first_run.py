"""How the boxes of the part First run are played."""

from __future__ import annotations

import json
from pathlib import Path

from playing import Play, Wrong


def ok_checks(learn: Path) -> list[str]:
    checks = json.loads((learn / "doctor.json").read_text())["checks"]
    return [str(len([check for check in checks if check["status"] == "ok"]))]


def parameters(learn: Path) -> list[str]:
    from transformers import AutoModelForCausalLM

    return [str(AutoModelForCausalLM.from_pretrained(learn / "start").num_parameters())]


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
                "hone data make digit_sequence kind=count length=2 --out learn/data --size 70 --val-size 20",
            )
        ],
        after=[Wrong("answer 1", answers=["200000"])],
    ),
}
