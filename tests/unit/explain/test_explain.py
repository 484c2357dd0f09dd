"""`hone explain`: every source answers, pointers of the glossary lead somewhere, and codes are those of the source."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import hone
from hone.apps.explain import explain
from hone.apps.explain.key_search import exact
from hone.apps.explain.lookup import codes_page, error_codes, glossary, glossary_page
from hone.cli.main import main
from hone.config import TREES, documentation
from hone.errors import ConfigError
from hone.insight.metrics import METRICS

PACKAGE = Path(hone.__file__).parent
DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("words", "kind", "name"),
    [
        ("staleness", "term", "staleness"),
        ("Weight-Sync", "term", "weight sync"),
        ("micro-batch", "term", "mini-batch, micro-batch"),
        ("rollout.n", "key, hone train", "actor_rollout_ref.rollout.n"),
        ("algorithm.kl_ctrl", "key, hone train", "algorithm.kl_ctrl.type"),
        ("actor/pg_clipfrac", "metric", "actor/pg_clipfrac"),
        ("timing_s/generate", "metric", "timing_s/<stage>"),
        ("zero_gradient", "detector", "zero_gradient"),
        ("r49", "rule", "R49"),
        ("D-mask", "error code", "D-mask"),
        ("e-runs", "error code", "E-runs"),
        ("rloo", "method, advantage estimator", "rloo"),
        ("dapo", "preset, hone train", "dapo"),
        ("entropy_bonus", "method, building block", "entropy_bonus"),
    ],
)
def test_every_source_answers(words: str, kind: str, name: str) -> None:
    (first, *_) = explain(words)
    assert (first.kind, first.name) == (kind, name)
    assert len(first.text) > 20 and str(first).startswith(f"{name}  ({kind})\n    ")


def test_a_name_of_two_sources_gets_both() -> None:
    assert [answer.kind for answer in explain("gae")] == ["term", "method, advantage estimator"]
    assert [answer.kind for answer in explain("grpo")] == ["term", "method, advantage estimator", "preset, hone train"]
    assert [answer.kind for answer in explain("cispo")] == ["method, policy loss", "preset, hone train"]


def test_a_rule_lists_all_its_checks_and_when() -> None:
    (rule,) = explain("R08")
    assert len(rule.facts["checks"]) > 3 and "(files)" in rule.text and "preflight.allow=[R08]" in rule.text
    (tested,) = explain("R10")
    assert "preflight.allow" not in tested.text


def test_keys_are_those_of_config_explain_and_long_lists_are_cut() -> None:
    answers = [answer for answer in explain("optim.lr_warmup_steps") if answer.kind.startswith("key")]
    keys = exact("optim.lr_warmup_steps", [*TREES])
    assert [answer.facts for answer in answers] == [key.as_json() for key in keys[:6]]
    block = [answer for answer in explain("data") if answer.kind.startswith("key")]
    assert len(block) == 6 and block[-1].text.endswith("more keys: hone config explain data")


def test_words_without_an_exact_name_give_what_contains_them() -> None:
    names = [answer.name for answer in explain("mini batch size")]
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in names


def test_an_unknown_term_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "stailness"])
    assert ended.value.code == 2
    assert "Did you mean staleness" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="R999"):
        explain("R999")
    with pytest.raises(ConfigError):
        explain("zzqx")


def test_json_has_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "importance", "weight", "--json"])
    assert not ended.value.code
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["kind"] == "term" and entry["page"] == "docs/algorithms/rollout_correction.md" and entry["keys"]


def test_pointers_of_the_glossary_lead_somewhere() -> None:
    keys = {key.path for tree in TREES.values() for key in documentation(tree)}
    metrics = {spec.name for spec in METRICS}
    for term in glossary():
        assert not set(term.keys) - keys, term.name
        assert not set(term.metrics) - metrics, term.name
        assert not term.page or (DOCS / term.page).is_file(), term.name
        assert term.meaning.endswith(".") and len(re.findall(r"[.!?](?:\s|$)", term.meaning)) <= 3, term.name
    names = Counter(
        re.sub(r"[-_ ]+", " ", name).lower() for term in glossary() for name in {*term.names, *term.name.split(", ")}
    )
    assert not [name for name, times in names.items() if times > 1]


def test_the_pages_are_those_of_the_package() -> None:
    assert (DOCS / "glossary.md").read_text(encoding="utf-8") == glossary_page(), "run scripts/make_docs"
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert text == codes_page(text), "run scripts/make_docs"
    assert all(f"| {term.name} " in glossary_page() for term in glossary())


def test_every_code_of_the_source_is_explained_and_no_other() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    raised = set(re.findall(r'\bcode(?:: str)? = "([ED]-[\w-]+)"|\bcode="([ED]-[\w-]+)"', source))
    codes = {first or second for first, second in raised}
    assert "E-runs" in codes and codes == set(error_codes())


def test_terms_keys_and_metrics_need_no_torch() -> None:
    program = (
        "import sys; from hone.apps.explain import explain\n"
        "explain('staleness'), explain('rollout.n'), explain('actor/entropy'), explain('flat_reward'), explain('dapo')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
