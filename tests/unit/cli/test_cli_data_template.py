"""`hone data template` as typed, and the page that shows its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.chat_templates import CHATML_SYSTEM, NUMBERED
from support.messages import mentioned, raises
from support.templates import SHAPES, Shape, tokenizer, tokenizer_with
from support.templates.page import models_page, report
from typer.testing import CliRunner

from hone.apps.lab.data.inspection import train_tokenizer
from hone.apps.lab.data.verdict import Outcome
from hone.cli.data import app
from hone.errors import ConfigError, DataError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
CHATML = Shape(("<|endoftext|>", "<|im_end|>", "<|im_start|>"), ("<tool_call>", "</tool_call>"))


def run(*words: object):
    return CliRunner().invoke(app, ["template", *map(str, words)], catch_exceptions=False)


@pytest.fixture
def chatml(tmp_path: Path) -> Path:
    """A template without tools, whose tokenizer ends sequences with another token than turns."""
    tokenizer_with(CHATML_SYSTEM, CHATML).save_pretrained(tmp_path / "chatml")
    return tmp_path / "chatml"


def test_a_template_that_appends(tmp_path: Path) -> None:
    tokenizer("qwen2_5").save_pretrained(tmp_path)
    shown = run(tmp_path)
    assert shown.exit_code == 0 and "renderer qwen, tool-call format hermes" in shown.output
    assert shown.output.count("token for token") == 2 and shown.output.endswith("verdict: append-only\n")


def test_a_template_that_ignores_tools(chatml: Path) -> None:
    shown = run(chatml, "--json")
    found = json.loads(shown.stdout)
    assert shown.exit_code == 2 and not found["usable"] and found["verdict"].endswith(": tools")
    (bad,) = [check for check in found["checks"] if check["outcome"] == "fails"]
    assert bad["name"] == "tools" and mentioned("get_weather", bad["said"])
    assert run(chatml, "--no-tools").exit_code == 0
    as_text = run(chatml, "--renderer", "text_tools")
    assert (
        as_text.exit_code == 0 and "renderer text_tools" in as_text.output and "read back by hermes" in as_text.output
    )
    wrong = run(chatml, "--renderer", "text_tools", "--format", "kimi")
    assert wrong.exit_code == 2 and mentioned("kimi", wrong.output) and mentioned("multi_turn.format", wrong.output)


def test_the_end_of_turns(chatml: Path) -> None:
    """A token that ends turns is compared with those at which generations end by themselves."""
    number = tokenizer_with(CHATML_SYSTEM, CHATML).convert_tokens_to_ids("<|im_end|>")
    note = f"note   end of turn: <|im_end|> ({number})"
    assert note in run(chatml, "--no-tools").output
    (chatml / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, number]}))
    assert f"ok     end of turn: <|im_end|> ({number})\n" in run(chatml, "--no-tools").output


def test_templates_that_rewrite(chatml: Path, tmp_path: Path) -> None:
    """Changing an earlier turn when more follows splits samples; changing the text before a turn is refused."""
    marked = CHATML_SYSTEM.replace(
        "{{ m.content }}", "{% if not loop.last and m.role == 'assistant' %}(old) {% endif %}{{ m.content }}"
    )
    for name, template in (("marked", marked), ("numbered", NUMBERED)):
        (tmp_path / f"{name}.jinja").write_text(template)
    shown = run(chatml, "--template", tmp_path / "marked.jinja", "--no-tools")
    assert (
        shown.exit_code == 0
        and "splits append-only at a user's message" in shown.output
        and "becomes '\\n(old) It" in shown.output
    )
    shown = run(chatml, "--template", tmp_path / "numbered.jinja", "--no-tools")
    assert shown.exit_code == 2 and "fails  append-only at a user's message" in shown.output


def test_thoughts(tmp_path: Path) -> None:
    tokenizer("qwen3").save_pretrained(tmp_path)
    assert "splits append-only with thoughts" in run(tmp_path).output
    closed = run(tmp_path, "--kwargs", '{"enable_thinking": false}', "--json")
    assert "</think>" in json.loads(closed.stdout)["checks"][0]["said"]


def test_mistakes(tmp_path: Path, chatml: Path) -> None:
    with raises(ConfigError, "--kwargs", "JSON"):
        run(chatml, "--kwargs", "{enable_thinking}")
    with raises(ConfigError, "[1]", "JSON"):
        run(chatml, "--kwargs", "[1]")
    bare = tokenizer_with(CHATML_SYSTEM, CHATML)
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    with raises(DataError, "bare"):
        run(tmp_path / "bare")


def test_the_template_for_small_models(tmp_path: Path) -> None:
    """`chatml_tools` shows tools, calls and results, with a token for each mark of a call that decoded text keeps."""
    (tmp_path / "text.jsonl").write_text(json.dumps({"prompt": "What is 1 + 1?"}) + "\n")
    made = train_tokenizer([tmp_path / "text.jsonl"], tmp_path / "t", vocab_size=300, template="chatml_tools")
    assert len(made) <= 300 and len(made.encode("<tool_call></tool_call>")) == 2
    assert (
        made.decode(made.encode("<tool_call>1</tool_call><|im_end|>"), skip_special_tokens=True)
        == "<tool_call>1</tool_call>"
    )
    shown = run(tmp_path / "t")
    assert shown.exit_code == 0 and shown.output.endswith("verdict: append-only\n")
    with raises(DataError, 256, 6, 262):
        train_tokenizer([tmp_path / "text.jsonl"], tmp_path / "u", vocab_size=261, template="chatml_tools")


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_shape_is_usable(name: str) -> None:
    found = report(name)
    assert found.usable, [check for check in found.checks if check.outcome is Outcome.BAD]


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == models_page(text), "run scripts/make_docs"
