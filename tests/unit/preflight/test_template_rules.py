"""Rules about tokenizer and chat template, with a real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.chat_templates import GEMMA, NUMBERED
from support.preflight import SMALL_MODEL, change, rows, write_rows

from hone.config import RLConfig, SFTConfig
from hone.preflight import findings

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking | default(true) %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture
def long_rows(data: Path) -> Path:
    """Ten rows, two with a prompt of more than 64 tokens, one of those after a system message."""
    content = rows()
    long = {"role": "user", "content": "9 + 8 + 7 + 6 " * 20}
    content[3]["prompt"] = [long]
    content[5]["prompt"] = [{"role": "system", "content": "Add."}, long]
    return write_rows(data, content)


def test_prompts_over_the_limit(rl: RLConfig, long_rows: Path) -> None:
    change(rl, {"data.max_prompt_length": 64})
    (finding,) = findings(rl)
    assert finding.error.code == "R45" and finding.stops
    assert (
        "2 of 10 prompts" in finding.error.what and "64 tokens" in finding.error.what and "row 5" in finding.error.where
    )
    longest = finding.error.fix.split("max_prompt_length=")[1].split(",")[0]
    change(rl, {"data.max_prompt_length": int(longest), "data.max_response_length": 64})
    assert list(findings(rl)) == [], "the given fix solves it"


def test_dropping_them(rl: RLConfig, long_rows: Path) -> None:
    change(rl, {"data.max_prompt_length": 64, "data.truncation": "drop"})
    (finding,) = findings(rl)
    assert finding.error.code == "R45" and not finding.stops and "20%" in finding.error.why
    change(rl, {"data.train_batch_size": 9, "actor_rollout_ref.actor.ppo_mini_batch_size": 9})
    dropped = [f for f in findings(rl) if f.error.code == "R46"]
    assert len(dropped) == 1 and dropped[0].stops and "10 rows, 8 left after 2 long prompts" in dropped[0].error.what


def test_truncating_a_system_message(rl: RLConfig, long_rows: Path) -> None:
    change(rl, {"data.max_prompt_length": 64, "data.truncation": "truncate"})
    (finding,) = findings(rl)
    assert finding.error.code == "R36" and finding.stops
    assert "1 of them" in finding.error.why and "data.truncation=drop" in finding.error.fix


def test_a_template_that_refuses_rows(rl: RLConfig, data: Path) -> None:
    change(rl, {"actor_rollout_ref.model.custom_chat_template": GEMMA, "actor_rollout_ref.rollout.stop": ["<|/turn|>"]})
    assert list(findings(rl)) == []
    content = rows()
    content[4]["prompt"] = [{"role": "system", "content": "Add."}, *content[4]["prompt"]]
    write_rows(data, content)
    (finding,) = findings(rl)
    assert finding.error.code == "R39" and finding.stops and "row 4" in finding.error.where
    assert "roles" in finding.error.what


def test_a_template_that_rewrites_earlier_turns(sft: SFTConfig, data: Path) -> None:
    sft.model.custom_chat_template = NUMBERED
    content = rows()
    content[2]["messages"] *= 2
    write_rows(data, content)
    finding = [f for f in findings(sft) if f.error.code == "R39"]
    assert len(finding) == 1 and not finding[0].stops and "character 0" in finding[0].error.what


def test_an_end_of_turn_that_does_not_end_generation(rl: RLConfig, model: Path) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|endoftext|>"}))
    (finding,) = findings(rl)
    assert finding.error.code == "R40" and finding.stops
    assert "'<|im_end|>' (3)" in finding.error.what and "[1]" in finding.error.what
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert list(findings(rl)) == [], "the given fix solves it"


def test_thinking_with_few_tokens(rl: RLConfig) -> None:
    change(rl, {"actor_rollout_ref.model.custom_chat_template": THINKING, "reward.scorer": "gsm8k"})
    finding = [f for f in findings(rl) if f.error.code == "R41"]
    assert len(finding) == 1 and not finding[0].stops
    assert "max_response_length=512" in finding[0].error.what and "gsm8k" in finding[0].error.what
    change(rl, {"data.apply_chat_template_kwargs": {"enable_thinking": False}})
    assert not [f for f in findings(rl) if f.error.code == "R41"]


def test_a_tokenizer_of_another_model(rl: RLConfig, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**SMALL_MODEL, "vocab_size": 100}))
    (finding,) = findings(rl)
    assert finding.error.code == "R08" and "vocab_size=100" in finding.error.what


def test_a_damaged_tokenizer(rl: RLConfig, model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    (finding,) = findings(rl)
    assert finding.error.code == "R08" and str(model) in finding.error.render()


def test_earlier_calls_are_text_where_the_renderer_writes_tools(rl: RLConfig, data: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools: [{name: calculator}]\n")
    several = "actor_rollout_ref.rollout.multi_turn"
    change(
        rl,
        {
            f"{several}.enable": True,
            f"{several}.tool_config_path": str(tmp_path / "tools.yaml"),
            f"{several}.max_assistant_turns": 3,
        },
    )
    call = {"type": "function", "id": "a", "function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
    before = [
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    content = rows()
    content[4]["prompt"] = [*before, *content[4]["prompt"]]
    write_rows(data, content)
    assert {finding.error.code for finding in findings(rl)} >= {"R35", "R39"}
    change(rl, {f"{several}.renderer": "text_tools"})
    assert not {finding.error.code for finding in findings(rl)} & {"R35", "R39"}
    change(rl, {"data.max_prompt_length": 60})  # the call and its result are among the tokens
    assert [finding.error.code for finding in findings(rl) if finding.stops] == ["R45"]
