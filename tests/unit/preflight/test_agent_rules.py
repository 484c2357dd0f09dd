"""Rules about multi-turn episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.preflight import change, rows, write_rows

from hone.agents.tools.loading import BUILT_IN
from hone.config import RLConfig
from hone.data.chat_formats import CHAT_FORMATS
from hone.preflight import findings
from hone.preflight.agents import named_tools, schema_faults

MULTI = "actor_rollout_ref.rollout.multi_turn"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
TEMPLATE = "actor_rollout_ref.model.custom_chat_template"
ENABLED = {f"{MULTI}.enable": True, f"{MULTI}.max_assistant_turns": 4}
GAME = {"environment": {"name": "guess_the_number", "seed": 1, "options": {"max_number": 4}}}


def findings_with_columns(rl: RLConfig, data: Path, changes: dict[str, Any], columns: dict[str, Any]) -> list[Any]:
    """Return the findings when all rows have these further columns."""
    return findings_with_rows(rl, data, changes, [row | columns for row in rows()])


def findings_with_rows(rl: RLConfig, data: Path, changes: dict[str, Any], content: list[dict[str, Any]]) -> list[Any]:
    """Return the findings with these rows."""
    write_rows(data, content)
    (data.parent / "tools.yaml").write_text("tools: [{name: calculator}]\n")
    rl.preflight.reward_rows = 0
    placed = {key: str(data.parent / value) if key.endswith("_path") else value for key, value in changes.items()}
    return list(findings(change(rl, placed)))


@pytest.mark.parametrize(
    ("changes", "columns", "code", "words"),
    [
        ({f"{MULTI}.enable": True}, {"agent_name": "environment", "extra_info": GAME}, "R38", ["max_assistant_turns", "max_assistant_turns=8"]),
        (ENABLED, {}, "R33", ["10 training rows", "single_turn", "tool_config_path"]),
        (
            ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml", LOOP: "single_turn"},
            {},
            "R33",
            ["tool_config_path", "default_agent_loop=tool_agent"],
        ),
        ({f"{MULTI}.tool_config_path": "tools.yaml"}, {}, "R33", ["tool_config_path", "enable=true"]),
        (ENABLED, {"agent_name": "tool_agent"}, "R33", ["10 rows", "tool_config_path=FILE.yaml"]),
        (ENABLED | {f"{MULTI}.tool_config_path": "tols.yaml"}, {}, "R48", ["tols.yaml", "tools.yaml"]),
        (ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml"}, {"prompt": [5, 6]}, "R34", ["10 of 10 prompts", "agent_name=single_turn"]),
        (
            ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml"},
            {"extra_info": {"tools_kwargs": {"calcluator": {}}}},
            "R48",
            ["'calcluator'", "calculator"],
        ),
        (
            ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml"},
            {"extra_info": {"tools_kwargs": {"calculator": {"noise": {"failure_rate": 1.5}}}}},
            "R48",
            ["failure_rate=1.5", "tools_kwargs.calculator.noise"],
        ),
        (ENABLED, {"agent_name": "interaction"}, "R48", ["interaction_config_path"]),
        (ENABLED | {LOOP: "tool_agnt"}, {}, "R48", ["'tool_agnt'", "tool_agent"]),
        (
            ENABLED,
            {"agent_name": "environment", "extra_info": {"environment": {"name": "guess_the_nmber"}}},
            "R48",
            ["'guess_the_nmber'", "guess_the_number"],
        ),
    ],
)  # fmt: skip
def test_agent_rules(rl: RLConfig, data: Path, changes, columns, code: str, words: list[str]) -> None:
    with_code = [f for f in findings_with_columns(rl, data, changes, columns) if f.error.code == code]
    assert with_code and all(f.stops for f in with_code)
    text = "\n".join(f.error.render() for f in with_code)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        (ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml"}, {}),
        (ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml"}, {"agent_name": "tool_agent"}),
        (
            ENABLED,
            {"agent_name": "environment", "extra_info": GAME, "data_source": "environment/x", "reward_model": None},
        ),
    ],
)
def test_agent_rules_have_no_findings(rl: RLConfig, data: Path, changes, columns) -> None:
    codes = {"R33", "R34", "R38", "R43", "R44", "R48"}
    assert [f.error.render() for f in findings_with_columns(rl, data, changes, columns) if f.error.code in codes] == []


@pytest.mark.parametrize("loop, name", [("self_play", "kuhn_poker"), ("proposer_solver", "sums")])
def test_roles_need_an_estimator_that_knows_them(rl: RLConfig, data: Path, loop: str, name: str) -> None:
    row = {"agent_name": loop, "extra_info": {"environment": {"name": name, "seed": 1}}}
    (refused,) = [f for f in findings_with_columns(rl, data, ENABLED, row) if f.error.code in ("R62", "R48")]
    assert refused.error.code == "R62" and "10 rows" in refused.error.render()
    for estimator in ("rae", "hierarchical_grpo"):
        found = findings_with_columns(rl, data, ENABLED | {"algorithm.adv_estimator": estimator}, row)
        assert [f for f in found if f.error.code in ("R62", "R48")] == []


def tool_rows(results: list[str], calls: int) -> list[dict[str, Any]]:
    """Return rows whose prompt shows one turn of tool use."""
    named = [{"type": "function", "function": {"name": "calculator", "arguments": "{}"}}] * calls
    shown = [
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": "", "tool_calls": named},
        *({"role": "tool", "content": result} for result in results),
        {"role": "user", "content": "2 + 2 = ?"},
    ]
    return [row | {"prompt": shown} for row in rows()]


@pytest.mark.parametrize(
    ("results", "calls", "changes", "repair", "words"),
    [
        (
            ["2", "7" * 30],
            2,
            {f"{MULTI}.max_tool_response_length": 20},
            {f"{MULTI}.max_tool_response_length": 30},
            ["10 of 20 tool results", "(50%)", "=20 tokens (longest 30)", "max_tool_response_length=30"],
        ),
        (
            ["2", "2", "2"],
            3,
            {f"{MULTI}.max_parallel_calls": 1},
            {f"{MULTI}.max_parallel_calls": 3},
            ["10 of 10 turns", "3 calls", "max_parallel_calls=1", "max_parallel_calls=3"],
        ),
        (
            ["2"],
            1,
            {"data.max_response_length": 256},
            {"data.max_response_length": 1024},
            ["max_tool_response_length=256", "data.max_response_length=256", "=64"],
        ),
    ],
)
def test_limits_of_tools(rl: RLConfig, data: Path, results, calls, changes, repair, words: list[str]) -> None:
    changes = ENABLED | {f"{MULTI}.tool_config_path": "tools.yaml"} | changes
    with_code = [f for f in findings_with_rows(rl, data, changes, tool_rows(results, calls)) if f.error.code == "R37"]
    assert [f.stops for f in with_code] == [False]
    assert all(word in with_code[0].error.render() for word in words), with_code[0].error.render()
    assert [f for f in findings(change(rl, repair)) if f.error.code == "R37"] == []


FUNCTIONS = [
    {"name": "get_order", "description": "Return the order of a customer by its number."},
    {"name": "get_orders", "description": "Return the order of a customer by number."},
    {"name": "cancel", "description": "cancel", "parameters": {"properties": {"why": {"enum": ["late", "broken"]}}}},
    {
        "name": "pay",
        "description": "Pay an amount to somebody.",
        "parameters": {"properties": {"amount": {"type": "number"}, "whom": True}},
    },
    {"name": "wait", "description": "Wait until something happens.", "parameters": None},
]


def test_what_schemas_leave_unsaid_is_named() -> None:
    assert [fault.replace("'", "") for fault in schema_faults(FUNCTIONS)] == [
        "tool cancel says only cancel",
        "tool pay does not say what whom is",
        "tools get_order and get_orders have nearly the same description",
    ]
    assert not list(schema_faults(FUNCTIONS[4:]))
    built_in = [BUILT_IN.get(name)().schema["function"] for name in ("calculator", "python", "lookup")]
    assert not list(schema_faults(built_in))


@pytest.mark.parametrize(
    ("name", "says"),
    [("x", True), ("tool_2", True), ("fn", True), ("ls", False), ("toolbox_open", False), ("sum", False)],
)
def test_names_that_say_nothing_are_named(name: str, says: bool) -> None:
    faults = list(schema_faults([{"name": name, "description": "Open the box of the visitor."}]))
    assert bool(faults) == says and all(f"'{name}'" in fault for fault in faults)


@pytest.mark.parametrize(
    ("system", "limit", "words"),
    [
        ("Use the tool to calculate. Say `none` if you cannot.", 400, None),
        ('Use "calculator" for sums, then tool: `look_up`.', 400, "configured: look_up ("),
        ('{"name": "calculator", "parameters": {"type": "object"}}', 400, "shows as well"),
        ("Calculate.", 90, "tokens of a prompt and a response"),
    ],
)
def test_system_messages_agree_with_the_tools(
    rl: RLConfig, data: Path, system: str, limit: int, words: str | None
) -> None:
    content = [row | {"prompt": [{"role": "system", "content": system}, *row["prompt"]]} for row in rows()]
    changes = ENABLED | {
        f"{MULTI}.tool_config_path": "tools.yaml",
        LOOP: "tool_agent",
        "data.max_prompt_length": limit,
        "data.max_response_length": limit,
        TEMPLATE: CHAT_FORMATS["chatml_tools"].template,
    }
    found = [one.error.what for one in findings_with_rows(rl, data, changes, content) if one.error.code == "R96"]
    assert [one for one in found if words and words in one] == found and bool(found) == bool(words), found


@pytest.mark.parametrize(
    ("system", "names"),
    [
        (
            "You have access to the following tools: web_search, python_interpreter.",
            ["web_search", "python_interpreter"],
        ),
        ("Available tools:\n- browser: opens a page\n- terminal: runs a command\n\nBe brief.", ["browser", "terminal"]),
        ("Call web_search before answering. Run `git_status` first.", ["web_search", "git_status"]),
        ("Use mcp__github__create_issue to file bugs.", ["mcp__github__create_issue"]),
        ("<tools><tool>str_replace_editor</tool></tools>", ["str_replace_editor"]),
        ('{"name": "web_search", "arguments": {"query": "x"}}', ["web_search"]),
        ("请先调用 `发送邮件` 工具，或使用 send_email。", ["发送邮件", "send_email"]),
        ("Write Python: use `print()` to show results and `len()`. Never call `finish`. Do not use rm_rf.", []),
        ("Return `null` if unknown. Call the tool again, use it well, and put `final_answer` last.", []),
    ],
)
def test_names_of_tools_in_a_system_message(system: str, names: list[str]) -> None:
    assert named_tools(system) == names


def test_schemas_in_chinese_and_within_arguments() -> None:
    about = "查询指定城市当前的天气情况，返回温度和湿度"
    street = {"type": "object", "description": "where to deliver", "properties": {"zip": {"type": "string"}}}
    tools = [
        {
            "name": "查询天气",
            "description": about,
            "parameters": {"properties": {"城市": {"description": "城市的名称"}}},
        },
        {"name": "天气", "description": about.replace("，", "、")},
        {
            "name": "deliver",
            "description": "Send the order off.",
            "parameters": {"properties": {"address": street, "input": {"description": "the input"}}},
        },
    ]
    assert list(schema_faults(tools)) == [
        "tool 'deliver' does not say what address.zip, input is",
        "tools '查询天气' and '天气' have nearly the same description",
    ]
