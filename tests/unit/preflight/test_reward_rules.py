"""Rules about the reward: real functions in real workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.preflight import change

from hone.config import RLConfig
from hone.preflight import Stage, findings

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


@pytest.fixture
def reward(rl: RLConfig, tmp_path: Path) -> RLConfig:
    """A run with a function of the user's own, few rows tried."""
    change(rl, {"reward.custom_reward_function.path": str(tmp_path / "own.py"), "preflight.reward_rows": 3})
    rl.reward.num_workers = 1
    return rl


@pytest.mark.parametrize(
    ("body", "code", "stops", "words"),
    [
        ("    return 0.0", "R49", True, ["the reward is 0 for all", "on 3 rows", "8 forms"]),
        (
            "    return 0.0 if ground_truth in solution_str else 1.0",
            *("R49", True, ["no better than garbage in 3 of 3 rows", "ground truth '1' scores 0 at best, garbage or nothing 1"]),
        ),
        ("    return len(solution_str) / 100", "R49", False, ["does not depend on the ground truth", "preflight.allow=[R49]"]),
        ("    return None", "R51", True, ["gave no finite number", "returned None"]),
        ("    return float('inf')", "R51", True, ["returned inf"]),
        ("    return [1.0] * 8", "R51", True, ["a list of length 8"]),
        (
            "    right = ground_truth in solution_str\n"
            "    return {'score': float(right), **({'acc': 1.0} if right else {})}",
            *("R51", False, ["terms beside the score differ", "[] and [acc]"]),
        ),
        ("    return float(int(solution_str))", "R52", True, ["calls in a worker process failed", "ValueError"]),
        (
            "    import signal, threading\n"
            "    def read(): signal.signal(signal.SIGALRM, lambda *a: None)\n"
            "    import concurrent.futures as f\n"
            "    return f.ThreadPoolExecutor().submit(read).result() or 0.0",
            *("R52", True, ["signal only works in main thread"]),
        ),
        ("    return 100.0 * (ground_truth in solution_str)", "R54", False, ["rewards reach 100"]),
    ],
)  # fmt: skip
def test_rule_speaks(reward: RLConfig, tmp_path: Path, body: str, code: str, stops: bool, words: list[str]) -> None:
    (tmp_path / "own.py").write_text(f"{HEAD}{body}\n")
    found = [f for f in findings(reward, [Stage.REWARD]) if f.error.code == code]
    assert [f.stops for f in found] == [stops], [f.error.render() for f in findings(reward, [Stage.REWARD])]
    assert found[0].error.fix
    for word in words:
        assert word in found[0].error.render()


def test_a_call_that_hangs_is_ended(reward: RLConfig, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"{HEAD}    while True: pass\n")
    reward.reward.timeout = 0.5
    (found,) = findings(reward, [Stage.REWARD])
    assert found.error.code == "R52" and found.stops and "no answer within 0.5 s" in found.error.what


def test_a_slow_function(reward: RLConfig, tmp_path: Path) -> None:
    body = "    import time; time.sleep(0.02)\n    return float(ground_truth in solution_str)"
    (tmp_path / "own.py").write_text(f"{HEAD}{body}\n")
    change(reward, {"data.train_batch_size": 2048, "preflight.reward_rows": 1})
    (found,) = findings(reward, [Stage.REWARD])
    assert found.error.code == "R53" and not found.stops
    assert "8192 sequences / 1 workers" in found.error.what and "num_workers=2" in found.error.fix


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def compute_score(solution_str): return 0.0\n", ["cannot be called with data_source"]),
        ("def score(**kwargs): return 0.0\n", ["has no function 'compute_score'"]),
        ("import nowhere_at_all\n", ["importing", "line 1", "nowhere_at_all"]),
    ],
)
def test_a_function_that_cannot_be_called(reward: RLConfig, tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "own.py").write_text(text)
    (found,) = findings(reward, [Stage.REWARD])
    assert found.error.code == "R50" and found.stops
    for word in words:
        assert word in found.error.render()


def test_a_sound_function_passes(reward: RLConfig, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"{HEAD}    return float(ground_truth in solution_str)\n")
    assert [f.error.render() for f in findings(reward, [Stage.REWARD])] == []
    (tmp_path / "own.py").write_text("raise SystemExit\n")
    reward.preflight.reward_rows = 0
    assert list(findings(reward, [Stage.REWARD])) == [], "not tried"
