"""Datasets with broken lines and contents of other shapes, and chat templates without end: one message, in bounded time and memory."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from support.launch import hone
from support.messages import raises
from support.small_sft import PLAIN, make_small_sft

from hone.agents.rendering.template import Template
from hone.apps.lab.data.check import DatasetOptions, check_dataset
from hone.data import template_limits
from hone.data.chat import render_prompt, render_texts
from hone.data.files import BadLines, read_all
from hone.data.statistics import statistics
from hone.data.template_limits import check_template
from hone.data.tokenizer import load_tokenizer
from hone.errors import DataError

pytestmark = pytest.mark.application("hone/data", "hone/preflight")

MESSAGES = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
TEMPLATES = {
    "a range": "{% for i in range(10**12) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxx{% endfor %}{% endfor %}",
    "a constant": "{{ 'a' * 10**9 }}",
    "a constant never shown": "{% if false %}{{ 'a' * 10**10 }}{% endif %}",
    "a repeated content": "{{ messages[0]['content'] * 10**9 }}",
    "a list": "{{ ([0] * 10**9)|length }}",
    "a constant power": "{{ 10**(10**10) }}",
    "a power": "{{ (messages|length)**(10**9) }}",
    "doubling by +": "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "doubling by ~": "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling a list": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling a block": "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
    "a filter's width": "{{ 'a'|center(10**9) }}",
    "a method's width": "{{ 'a'.ljust(10**9) }}",
    "a format": "{{ '{:>1000000000}'.format(1) }}",
    "a format's width": "{{ '{:>{}}'.format(1, 10**9) }}",
    "a percent format": "{{ '%1000000000d' % 1 }}",
    "a percent format's width": "{{ '%*d' % (10**9, 1) }}",
    "a replacement": "{% set a = 'a' * 100000 %}{{ a.replace('a', a) }}",
    "a join": "{% set a = 'a' * 100000 %}{{ range(99999)|join(a) }}",
    "many texts": "{{ range(99999)|map('center', 99999)|join }}",
    "indentation": "{{ ('a\n' * 10000)|indent(99999) }}",
    "JSON": "{{ {'a': [1, 2]}|tojson(indent=10**9) }}",
    "a recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a branching macro": "{% macro f(n) %}{% if n > 1 %}{{ f(n - 1) }}{{ f(n - 2) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for x in [[1], [2]] recursive %}{{ loop([[1], [2]]) }}{% endfor %}",
    "operations alone": "{% set a = [0] * 200000 %}" + "{% set b = '%s' % a %}" * 200,
    "filler": "{{ lipsum(n=10**8) }}",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_sft(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_without_end_is_one_message(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.5)
    tokenizer = load_tokenizer(root / "model", custom_chat_template=TEMPLATES[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with raises(DataError, root / "model", code="E-template", where=str(root / "model")):
        render_prompt(tokenizer, MESSAGES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
    monkeypatch.delattr(template_limits, "_traced")  # a template that exceeded a limit is not rendered again
    with raises(DataError, code="E-template"):
        Template(tokenizer).text(MESSAGES)


@pytest.mark.slow
def test_the_command_ends_with_the_template_named(root: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": MESSAGES[:1], "data_source": "gsm8k", "reward_model": {"ground_truth": "1"}}
    rows.write_text((json.dumps(row) + "\n") * 50)
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATES["nested loops"])
    ended = hone("data", "inspect", rows, "--tokenizer", root / "model", "--template", template, log=tmp_path / "log")
    assert ended.code == 2 and "Traceback" not in ended.output, ended.output
    assert "E-template" in ended.message and str(root / "model") in ended.message


def test_ordinary_templates_are_within_the_limits(root: Path) -> None:
    templates = sorted(Path(__file__).parents[2].glob("support/templates/*.jinja"))
    assert templates
    long = [{"role": "user", "content": "word " * 400_000}, *MESSAGES[1:]] * 3
    for path in templates:
        check_template(path.read_text(), [MESSAGES, long], {"bos_token": "<s>", "eos_token": "</s>"}, path.name)
    tokenizer = load_tokenizer(root / "model")
    assert tokenizer.chat_template == PLAIN
    assert render_texts(tokenizer, [MESSAGES], False, None) == ["w1 w2 w3 w1"]


CONTENTS: list[Any] = [
    *([["a", "b"], ["c"]], [[]], [[1, 2], [3]], [["a"], {"type": "text", "text": "x"}], [None], [1.5], [[[["x"]]]]),
]  # fmt: skip
PARTS: list[Any] = [[{"type": ["text"]}], [{"type": {"a": 1}, "text": ["x"]}], [{"type": "text", "text": [["x"]]}]]


@pytest.mark.parametrize("content", [*CONTENTS, *PARTS], ids=json.dumps)
@pytest.mark.parametrize("column", ["prompt", "messages", "chosen"])
def test_contents_of_other_shapes_are_findings(root: Path, tmp_path: Path, column: str, content: Any) -> None:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    row = {column: messages, "data_source": "gsm8k", "reward_model": {"ground_truth": "1"}}
    if column == "chosen":
        row |= {"rejected": messages, "prompt": messages[:1]}
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps(row) + "\n") * 3)
    report = check_dataset([str(file)], [str(file)], DatasetOptions(tokenizer=str(root / "model"), max_prompt_length=1))
    if content in CONTENTS and column != "chosen":
        assert any(f.stops and f.error.code == "R42" and "content[0]" in f.error.what for f in report.findings)
    numbers = statistics(read_all(str(file)), prompt_key="prompt", messages_key="messages", reward_fn_key="data_source")
    assert numbers["rows"] == 3


def test_lines_that_are_not_json_are_listed_and_the_others_checked(tmp_path: Path) -> None:
    good = json.dumps({"prompt": "w1", "data_source": "gsm8k", "reward_model": {"ground_truth": "1"}})
    unknown = json.dumps({"prompt": "w2", "data_source": "nothing known", "reward_model": {"ground_truth": "1"}})
    bad = {7 * n: text for n, text in enumerate(["{", "nonsense", '{"prompt": }', "[1,", '"', "[" * 100_000, "{'a': 1}", *["}"] * 6], 1)}  # fmt: skip
    lines = [bad.get(number, good) for number in range(1, 10_012)]
    lines[10_000] = unknown
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    with raises(DataError, "line 7"):
        read_all(str(file))
    bad_lines = BadLines()
    assert len(read_all(str(file), bad_lines)) == 10_011 - len(bad)
    assert bad_lines.count == len(bad) and [number for _, number, _ in bad_lines.first] == sorted(bad)[:10]
    report = check_dataset([str(file)], [], DatasetOptions())
    (lines_finding,) = [f for f in report.findings if "line 7" in f.error.where]
    assert lines_finding.stops and report.numbers["rows"] == 10_011 - len(bad)
    for number in sorted(bad)[:10]:
        assert f"line {number}:" in lines_finding.error.what
    assert f"{len(bad)} lines" in lines_finding.error.what and f"{len(bad) - 10} more" in lines_finding.error.what
    assert f"line {sorted(bad)[10]}:" not in lines_finding.error.what
    assert any(f.error.code == "R43" for f in report.findings), "the row after the bad lines is checked"


@pytest.mark.parametrize(
    "template",
    [
        "{% macro show(n) %}{{ n }}{% endmacro %}{{ show(-480000) }}",
        "{{ none|default(480000) }}",
        "{{ '%d' % 480000 }}",
        "{{ '{}'.format(480000) }}",
        "{{ '480000'|int(999999) }}",
    ],
)
def test_large_numbers_are_ordinary_data(template: str) -> None:
    check_template(template, [MESSAGES], {}, "tokenizer")
