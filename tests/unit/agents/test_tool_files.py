"""Tools from files: what can be written, and what is said of what cannot."""

import asyncio
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises
from support.templates import tokenizer

from hone.agents.tools.base import Noisy, ToolError, truncate
from hone.agents.tools.calculator import calculate
from hone.agents.tools.loading import load_toolbox, tools_of_yaml
from hone.config.agents import MultiTurnConfig
from hone.errors import ConfigError, HoneError


def loaded(folder: Path, text: str):
    path = folder / "tools.yaml"
    path.write_text(text)
    return {tool.name: tool for tool in tools_of_yaml(path)}


def test_every_kind_of_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_tools_kinds.py").write_text(
        "from hone.agents.tools import Tool, tool\n"
        "class Weather(Tool):\n"
        "    def __init__(self, config, tool_schema):\n"
        "        super().__init__(tool_schema); self.unit = config['unit']\n"
        "    async def execute(self, state, arguments, **kwargs):\n"
        "        return '20 ' + self.unit\n"
        "def halve(number: float) -> float:\n"
        '    """Halve.\n\n    Args:\n        number: what.\n    """\n'
        "    return number / 2\n"
        "@tool(name='greet')\n"
        "def hello(name: str) -> str:\n"
        '    """Greet.\n\n    Args:\n        name: whom.\n    """\n'
        "    return 'hi ' + name\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tools = loaded(
        tmp_path,
        "tools:\n"
        "  - {name: calculator, timeout: 2, retries: 0, concurrency: 5}\n"
        "  - class_name: my_tools_kinds.Weather\n"
        "    config: {type: native, unit: C}\n"
        "    tool_schema: {type: function, function: {name: weather, parameters: {type: object, properties: {}}}}\n"
        "  - function: my_tools_kinds:halve\n"
        "  - function: my_tools_kinds:hello\n",
    )
    assert set(tools) == {"calculator", "weather", "halve", "greet"}
    assert (tools["calculator"].timeout, tools["calculator"].retries, tools["calculator"].concurrency) == (2, 0, 5)
    assert asyncio.run(tools["weather"].execute(None, {})) == "20 C"
    assert asyncio.run(tools["halve"].execute(None, {"number": 3})) == 1.5
    several = MultiTurnConfig(True, str(tmp_path / "tools.yaml"), str(tmp_path / "my_tools_kinds.py"))
    with raises(ConfigError, "greet", where="actor_rollout_ref.rollout.multi_turn"):
        load_toolbox(several)
    assert set(load_toolbox(MultiTurnConfig(True, None, str(tmp_path / "my_tools_kinds.py")))) == {"greet"}


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ("tools:\n  - name: calculator\n   bad", ["tools.yaml", "line 3"]),
        ("tools: []", ["tools.yaml", "name: calculator"]),
        ("tools: [7]", ["tool 1", 7]),
        ("tools:\n  - nam: calculator", ["tool 1", "nam", "name"]),
        ("tools:\n  - mcp: {command: x, only: [a]}\n    only: [b]", ["tool 1", "'only'", "write only once"]),
        ("tools:\n  - config: {}", ["tool 1", "name, class_name, function, mcp"]),
        ("tools:\n  - name: calculater", ["calculater", "calculator"]),
        ("tools:\n  - {name: calculator, config: {digits: 3}}", ["tool 1", "digits"]),
        ("tools:\n  - {name: calculator, timeout: 0}", ["timeout=0"]),
        ("tools:\n  - {name: calculator, noise: {failure_rate: 2}}", ["failure_rate=2", "0..1"]),
        ("tools:\n  - class_name: json.JSONDecoder", ["json.JSONDecoder", "hone.agents.tools.Tool"]),
        ("tools:\n  - {class_name: no_such_module.X}", ["no_such_module"]),
        ("tools:\n  - {function: 'json:loads', tool_schema: {name: x}}", ["tool 1", "tool_schema"]),
        ("tools:\n  - {function: 'json:loads'}", ["loads", "@tool"]),
        ("tools:\n  - {name: search, config: {files: nothing.jsonl}}", ["nothing.jsonl"]),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, mentions: list[object]):
    with raises(HoneError, *mentions) as raised:
        loaded(tmp_path, text)
    assert raised.value.exit_code == 2  # type: ignore[attr-defined]


def test_missing_files(tmp_path: Path):
    (tmp_path / "tools.yaml").write_text("tools: [{name: calculator}]")
    with raises(ConfigError, "tols.yaml", "tools.yaml", code="R33"):
        load_toolbox(MultiTurnConfig(True, str(tmp_path / "tols.yaml")))
    with raises(ConfigError, "mine.py", code="R33"):
        load_toolbox(MultiTurnConfig(True, None, str(tmp_path / "mine.py")))
    (tmp_path / "empty.py").write_text("x = 1")
    with raises(ConfigError, "empty.py", "@tool"):
        load_toolbox(MultiTurnConfig(True, None, str(tmp_path / "empty.py")))


def test_search_finds_the_document(tmp_path: Path):
    pytest.importorskip("bm25s")
    texts = ["The Danube flows through Vienna.", "Mount Etna is a volcano in Sicily.", "Oslo lies on a fjord."]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"title": t.split()[1], "text": t}) + "\n" for t in texts))
    tools = loaded(tmp_path, f"tools:\n  - {{name: search, config: {{files: {tmp_path}/docs.jsonl, k: 2}}}}")
    found = asyncio.run(tools["search"].execute(None, {"query": "volcano of Sicily"}))
    assert found.startswith("[1] Etna: Mount Etna") and "Danube" not in found
    assert asyncio.run(tools["search"].execute(None, {"query": "zebra"})) == "nothing found"
    assert asyncio.run(tools["search"].execute(None, {"query": ""})) == "nothing found"


def test_noise_fails_the_same_calls_every_time(tmp_path: Path):
    tools = loaded(tmp_path, "tools:\n  - {name: calculator, noise: {failure_rate: 0.5, seed: 3}}")
    noisy = tools["calculator"]
    assert isinstance(noisy, Noisy)

    async def day() -> list[str]:
        state, seen = await noisy.create(), []
        for number in range(40):
            try:
                seen.append(await noisy.execute(state, {"expression": f"{number % 7}+1"}))
            except ToolError as error:
                seen.append(str(error))
        return seen

    first = asyncio.run(day())
    assert first == asyncio.run(day())
    failed = sum("try again" in text for text in first)
    assert 8 < failed < 32


NUMBERS = st.integers(-999, 999)


@given(st.recursive(NUMBERS.map(str), lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"), max_leaves=6))  # fmt: skip
def test_the_calculator_agrees_with_python(expression: str):
    assert calculate(expression) == str(eval(expression))  # noqa: S307 - digits and operators only


@pytest.mark.parametrize(
    "expression",
    ["", "1+", "9**9**9", "2**99999", "a", "().__class__", "'a'*9", "1 # 2", "[1]", "lambda: 1", "(" * 399, "0" * 401, "1e999", "(-8)**0.5", "abs()", "sqrt(-1)", "𝟙𝟚('x')"],
)  # fmt: skip
def test_the_calculator_refuses_what_is_no_arithmetic(expression: str):
    with pytest.raises(ToolError):
        calculate(expression)


@pytest.mark.parametrize(
    "expression",
    ["sqrt(16)", "floor(-2.5)", "ceil(2.1)", "log(e)", "log2(8)", "log10(1000)", "exp(0)", "sin(0) + cos(pi) + tan(0)", "abs(-3)", "round(2.567, 2)", "min(3, 1, 2)", "max(1, 2.5)", "gcd(12, 18)"],
)  # fmt: skip
def test_the_calculator_has_functions(expression: str):
    assert float(calculate(expression)) == pytest.approx(eval(expression, {**vars(math), "abs": abs}))


@given(st.lists(st.sampled_from(["red", "green", "blue", "17", "cats.", "Oslo\n"]), min_size=60), st.integers(1, 40))
def test_truncation_to_the_middle_keeps_half_of_the_tokens_at_each_end(parts: list[str], limit: int):
    words, text = tokenizer("qwen2_5"), " ".join(parts)
    ids = words.encode(text, add_special_tokens=False)
    kept = truncate(text, limit, "middle", words)
    first = words.decode(ids[: limit - limit // 2])
    assert kept == (f"{first}...(truncated)...{words.decode(ids[len(ids) - limit // 2 :])}", True)


@given(st.text(max_size=400), st.integers(1, 40), st.sampled_from(["left", "middle", "right"]))
def test_truncation_keeps_the_sides(text: str, limit: int, side: str):
    words = tokenizer("qwen2_5")
    kept, cut = truncate(text, limit, side, words)
    assert cut == (len(words.encode(text, add_special_tokens=False)) > limit)
    if not cut:
        assert kept == text
    else:
        assert "truncated" in kept and len(kept) <= len(text) + 40
