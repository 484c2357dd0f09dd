"""Rules about the reward: real functions in real workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.preflight import change

from hone.config import RLConfig
from hone.preflight import Stage, findings
from hone.preflight.evidence import try_reward
from hone.preflight.methods import FORM, PENALTIES
from hone.rewards.scorers import SCORERS

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


@pytest.fixture
def reward(rl: RLConfig, tmp_path: Path) -> RLConfig:
    """A run with a custom reward function, tried on few rows."""
    change(rl, {"reward.custom_reward_function.path": str(tmp_path / "custom.py"), "preflight.reward_rows": 3})
    rl.reward.num_workers = 1
    return rl


@pytest.mark.parametrize(
    ("body", "code", "stops", "words"),
    [
        ("    return 0.0", "R49", True, ["3 rows", "8 forms"]),
        (
            "    return 0.0 if ground_truth in solution_str else 1.0",
            *("R49", True, ["3 of 3 rows", "'1'"]),
        ),
        ("    return len(solution_str) / 100", "R49", False, ["ground truth", "preflight.allow=[R49]"]),
        ("    return None", "R51", True, ["None"]),
        ("    return float('inf')", "R51", True, ["inf"]),
        ("    return [1.0] * 8", "R51", True, ["list", "8"]),
        (
            "    right = ground_truth in solution_str\n"
            "    return {'score': float(right), **({'acc': 1.0} if right else {})}",
            *("R51", False, ["[] and [acc]"]),
        ),
        ("    return float(int(solution_str))", "R52", True, ["ValueError"]),
        (
            "    import signal, threading\n"
            "    def read(): signal.signal(signal.SIGALRM, lambda *a: None)\n"
            "    import concurrent.futures as f\n"
            "    return f.ThreadPoolExecutor().submit(read).result() or 0.0",
            *("R52", True, ["ValueError"]),
        ),
        (
            "    return None if len(solution_str) < 2 else float(ground_truth in solution_str)",
            *("R51", False, ["None", "calls", "cannot be judged"]),
        ),
        ("    right = {'1': 1.0}\n    return right[extra_info['unit']]", "R52", True, ["custom.py, line 3", "'unit'", "the rows have"]),
        ("    return 100.0 * (ground_truth in solution_str)", "R54", False, ["100"]),
    ],
)  # fmt: skip
def test_reward_rules(reward: RLConfig, tmp_path: Path, body: str, code: str, stops: bool, words: list[str]) -> None:
    (tmp_path / "custom.py").write_text(f"{HEAD}{body}\n")
    finding = [f for f in findings(reward, [Stage.REWARD]) if f.error.code == code]
    assert [f.stops for f in finding] == [stops], [f.error.render() for f in findings(reward, [Stage.REWARD])]
    assert finding[0].error.fix
    for word in words:
        assert word in finding[0].error.render()


def test_a_hanging_call_is_ended(reward: RLConfig, tmp_path: Path) -> None:
    (tmp_path / "custom.py").write_text(f"{HEAD}    while True: pass\n")
    reward.reward.timeout = 0.5
    (finding,) = findings(reward, [Stage.REWARD])
    assert finding.error.code == "R52" and finding.stops and "0.5 s" in finding.error.what


def test_a_slow_function(reward: RLConfig, tmp_path: Path) -> None:
    body = "    import time; time.sleep(0.02)\n    return float(ground_truth in solution_str)"
    (tmp_path / "custom.py").write_text(f"{HEAD}{body}\n")
    change(reward, {"data.train_batch_size": 2048, "preflight.reward_rows": 1})
    (finding,) = findings(reward, [Stage.REWARD])
    assert finding.error.code == "R53" and not finding.stops
    assert "8192 sequences / 1 workers" in finding.error.what and "num_workers=2" in finding.error.fix


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def compute_score(solution_str): return 0.0\n", ["data_source"]),
        ("def score(**kwargs): return 0.0\n", ["'compute_score'"]),
        ("import nowhere_at_all\n", ["line 1", "nowhere_at_all"]),
    ],
)
def test_a_function_that_cannot_be_called(reward: RLConfig, tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "custom.py").write_text(text)
    (finding,) = findings(reward, [Stage.REWARD])
    assert finding.error.code == "R50" and finding.stops
    for word in words:
        assert word in finding.error.render()


def test_a_valid_function_has_no_findings(reward: RLConfig, tmp_path: Path) -> None:
    (tmp_path / "custom.py").write_text(f"{HEAD}    return float(ground_truth in solution_str)\n")
    assert [f.error.render() for f in findings(reward, [Stage.REWARD])] == []
    (tmp_path / "custom.py").write_text("raise SystemExit\n")
    reward.preflight.reward_rows = 0
    assert list(findings(reward, [Stage.REWARD])) == [], "not tried"


@pytest.mark.parametrize("template", ["", "{{ '<think>' }}"])
def test_right_answers_after_thoughts_must_pass_where_the_policy_thinks(
    reward: RLConfig, tmp_path: Path, template: str
) -> None:
    (tmp_path / "custom.py").write_text(f"{HEAD}    return float(solution_str.strip() == ground_truth)\n")
    tried = try_reward(reward, thinks=bool(template))
    assert [f.stops for f in tried if "after a thought" in f.error.what] == [True] * bool(template)
    reward.actor_rollout_ref.rollout.multi_turn.enable = True
    reward.actor_rollout_ref.rollout.agent.default_agent_loop = "tool_agent"
    assert [f.stops for f in try_reward(reward) if "after a tool call" in f.error.what] == [True]


@pytest.mark.parametrize(
    ("signature", "body", "code", "words"),
    [
        ("completions, price, **kw", "[1.0]", "R52", ["'price'", "the rows have", "completion_ids"]),
        (
            "completions, **kw",
            "[float(u) for u in kw['einheit']]",
            "R52",
            ["'einheit'", "custom.py, line 2", "the rows have"],
        ),
        ("completions, **kw", "[1 / 0]", "R52", ["ZeroDivisionError", "custom.py, line 2, in compute_score"]),
        ("completions, **kw", "[1.0, 2.0]", "R51", ["length 2", "1 score"]),
        ("completions, **kw", "__import__('numpy').zeros((1, 1))[0][0]", "R51", ["not a list of 1 score"]),
    ],
)
def test_functions_of_trl_that_cannot_be_used_say_why(
    reward: RLConfig, tmp_path: Path, signature: str, body: str, code: str, words: list[str]
) -> None:
    (tmp_path / "custom.py").write_text(f"def compute_score({signature}):\n    return {body}\n")
    (finding,) = [f for f in findings(reward, [Stage.REWARD]) if f.error.code == code]
    assert finding.stops and [word for word in words if word not in finding.error.render()] == []


@pytest.mark.parametrize(
    "body",
    ["np.array(right)", "torch.tensor(right)", "[np.float32(r) for r in right]", "list(map(torch.tensor, right))"],
)
def test_functions_of_trl_may_return_arrays(reward: RLConfig, tmp_path: Path, body: str) -> None:
    lines = ["import numpy as np, torch", "def compute_score(completions, ground_truth, **kw):"]
    lines += ["    texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]"]
    lines += ["    right = [float(t in text) for t, text in zip(ground_truth, texts)]", f"    return {body}"]
    (tmp_path / "custom.py").write_text("\n".join(lines))
    assert [f.error.render() for f in findings(reward, [Stage.REWARD]) if f.error.code in ("R51", "R52")] == []


def test_the_scorers_of_form_are_those_of_text_and_tools() -> None:
    modules = {name: SCORERS.get(name).compute.__module__.rpartition(".")[2] for name in SCORERS}
    assert {*FORM, *PENALTIES} == {name for name, module in modules.items() if module in ("text_shape", "tool_use")}
