"""Every rule reports its case (code, numbers, fix), and has no finding once the fix is applied."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.preflight import safetensors_head, write_rows
from support.preflight_cases import CASES, Case, World
from support.preflight_cases.files import PAIR, TEMPLATE_FILES, mark_is_special
from typer.testing import CliRunner

from hone.cli.main import app
from hone.preflight.rules import RULES, Rule

LABELLED = {"prompt": "1 + 1 = ?", "completion": "2", "label": True}
SOUND = {
    "train": "data.train_files=TMP/train.jsonl data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 "
    "actor_rollout_ref.model.path=TMP/model actor_rollout_ref.rollout.n=4 preflight.reward_rows=0",
    "sft": "data.train_files=TMP/train.jsonl data.train_batch_size=2 model.path=TMP/model",
    "prefer": "data.train_files=TMP/pairs.jsonl data.train_batch_size=2 model.path=TMP/model",
    "reward-model": "data.train_files=TMP/pairs.jsonl data.train_batch_size=2 model.path=TMP/model",
}
BOTH = "trainer.default_local_dir=TMP/run trainer.device=cpu"


def name_of(entry: Rule) -> str:
    return f"{entry.code} {entry.check.__module__.rpartition('.')[2]}.{entry.check.__name__}"


def test_every_rule_has_a_case() -> None:
    cases = Counter(dict.fromkeys((case.name for case in CASES), 1))  # a rule may have several
    assert cases == Counter(name_of(entry) for entry in RULES)


@pytest.fixture
def world(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The directory of a run without problems."""
    here = World(tmp_path, monkeypatch)
    monkeypatch.setenv("HONE_ENGINES", str(tmp_path / "no engines"))
    shutil.copytree(tokenizer, here.model)
    here.settings()
    (here.model / "model.safetensors").write_bytes(safetensors_head({"w": [10, 10]}))
    here.rows()
    shutil.copy(here.model / "chat_template.jinja", tmp_path / "original.jinja")
    write_rows(tmp_path / "pairs.jsonl", [PAIR] * 6)
    write_rows(tmp_path / "labels.jsonl", [LABELLED] * 6)
    here.write("tools.yaml", "tools: [{name: calculator}]\n")
    for name, text in TEMPLATE_FILES.items():
        here.write(name, text)
    return here


@dataclass
class Outcome:
    """Output of `hone config check`."""

    exit_code: int
    findings: list[dict[str, Any]]
    fired: set[str]
    """Names of the rules with findings."""

    def with_code(self, code: str) -> list[dict[str, Any]]:
        """Return the findings with a code."""
        return [finding for finding in self.findings if finding["code"] == code]


def check(world: World, case: Case, *overrides: str) -> Outcome:
    """Run the command on the configuration of a case."""
    fired: set[str] = set()
    run = Rule.run

    def recorded(self: Rule, *arguments: Any):
        for finding in run(self, *arguments):
            fired.add(name_of(self))
            yield finding

    (world.folder / "base.yaml").write_text("{}")  # with a file, no method sets keys of its own
    file = f"--config-path {world.folder} --config-name base"
    words = world.place(" ".join([file, SOUND[case.tree], BOTH, case.given, *overrides])).split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rule, "run", recorded)
        result = CliRunner().invoke(app, ["config", "check", "--of", case.tree, "--json", *words])
    assert result.output.startswith("{"), result.output
    return Outcome(result.exit_code, json.loads(result.stdout)["findings"], fired)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_rule_reports_its_case_and_nothing_after_the_fix(world: World, case: Case) -> None:
    if case.breaks:
        case.breaks(world)
    outcome = check(world, case, case.keys)
    assert case.name in outcome.fired
    assert {finding["code"] for finding in outcome.findings} == {case.code, *case.also}
    finding = outcome.with_code(case.code)[0]
    text = " ".join(str(finding[part]) for part in ("what", "why", "where"))
    assert all(world.place(words) in text for words in case.says), text
    assert finding["severity"] == ("warning" if case.warns else "error")
    assert outcome.exit_code == (2 if any(each["severity"] == "error" for each in outcome.findings) else 0)
    assert finding["fix"] and (case.fix or case.advice) in finding["fix"], finding["fix"]
    if case.repairs:
        case.repairs(world)
    repaired = check(world, case, *case.repaired_keys)
    assert (repaired.exit_code, repaired.findings) == (0, [])


@pytest.mark.parametrize("tree", SOUND)
def test_a_valid_configuration_has_no_findings(world: World, tree: str) -> None:
    outcome = check(world, Case("R00 none", tree=tree))
    assert (outcome.exit_code, outcome.findings, outcome.fired) == (0, [], set())


@pytest.mark.parametrize(
    ("given", "mark"), [("reward.scorer=exact", "<answer>"), ("reward.terms=[{scorer:math}]", "####")]
)
def test_the_marks_of_every_scorer_and_term_are_looked_for(world: World, given: str, mark: str) -> None:
    (case,) = [case for case in CASES if case.code == "R93"]
    mark_is_special(world, mark)
    outcome = check(world, replace(case, given=given))
    assert [finding["code"] for finding in outcome.findings] == ["R93"] and mark in outcome.findings[0]["what"]
