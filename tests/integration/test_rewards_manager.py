"""The reward manager with real worker processes: functions that fail in every way cost one counted error each."""

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.messages import mentioned, raises
from support.patience import LONG, SOON

from hone.config.reward import CustomRewardConfig, RewardConfig
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import ConfigError, RewardError
from hone.rewards.manager import RewardManager
from hone.rewards.score import Score
from hone.rewards.worker import no_verdict_metrics

FUNCTIONS = """
import asyncio, os, signal, sys, threading, time

together = 0

def behave(word):
    if word == "raise": raise ValueError("boom")
    if word == "exit": sys.exit(3)
    if word == "sleep": time.sleep(1000)
    if word == "spin":
        for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
        while True: pass
    if word == "child":
        os.fork() or time.sleep(1000)
        time.sleep(1000)
    if word == "die": os._exit(7)
    if word == "segv": os.kill(os.getpid(), signal.SIGSEGV)
    if word == "nan": return float("nan")
    if word == "none": return None
    if word == "text": return "1.0"
    if word == "list": return [1.0, 2.0]
    if word == "dict": return {"reward": 1.0}
    return {"score": float(word), "double": 2 * float(word), "pred": word, "thing": threading}

def sync(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return behave(solution_str)

async def concurrent(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "await": await asyncio.sleep(1000)
    if solution_str == "stubborn":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    global together
    together += 1
    await asyncio.sleep(0.2)
    found = behave(solution_str)
    if isinstance(found, dict): found["together"] = str(together)
    together -= 1
    return found

def returns_awaitable(data_source, solution_str, ground_truth, extra_info):
    return concurrent(data_source, solution_str, ground_truth, extra_info)

def everything(data_source, solution_str, ground_truth, extra_info, scale):
    print("reward functions may print")
    return {"score": scale * len(solution_str), "source": data_source, "truth": ground_truth, "info": extra_info}

class Callable:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return float(solution_str)

instance = Callable()
number = 3

def too_few(solution_str, ground_truth): return 1.0
"""
TIMEOUT = 4.0


def trajectory(text: str, truth: Any = "1", source: str = "mine", row: int = 0, **info: Any) -> Trajectory:
    sample = Sample(f"val:{row}", [1], None, source, truth, info)
    return Trajectory(sample.uid, 0, [1], [2], [1], [0.0], [0.0], text, StopReason.STOP, sample)


def config(tmp_path: Path, name: str, code: str = FUNCTIONS, **changes: Any) -> RewardConfig:
    path = tmp_path / "my_reward.py"
    path.write_text(code)
    kwargs = changes.pop("reward_kwargs", {})
    settings = {"timeout": TIMEOUT, "max_no_verdict_rate": 1.0, "max_retries": 0} | changes
    return RewardConfig(custom_reward_function=CustomRewardConfig(str(path), name, kwargs), **settings)


@contextlib.contextmanager
def manager(settings: RewardConfig) -> Iterator[RewardManager]:
    rewards = RewardManager(settings)
    try:
        yield rewards
    finally:
        rewards.close()


def score(settings: RewardConfig, words: list[str]) -> list[Score]:
    with manager(settings) as rewards:
        return asyncio.run(rewards.score([trajectory(word, row=row) for row, word in enumerate(words)]))


FAILURES = {
    "raise": "ValueError: boom",
    "exit": "SystemExit: 3",
    "sleep": "timeout",
    "spin": "timeout",
    "child": "timeout",
    "die": "exit code 7",
    "segv": "exit code -11",
    "nan": "returned nan",
    "none": "returned None",
    "text": "returned a str",
    "list": "a list of length 2",
    "dict": "without 'score'",
}


def test_each_failure_costs_one_counted_error_and_the_rest_is_right(tmp_path: Path, caplog) -> None:
    good = [str(number) for number in range(40)]
    words = good[:20] + list(FAILURES) + good[20:]
    with caplog.at_level(logging.WARNING, logger="hone.rewards"):
        scores = score(config(tmp_path, "sync"), words)
    assert len(scores) == len(words)
    for word, result in zip(words, scores, strict=True):
        if word in FAILURES:
            assert result.total == 0.0 and result.error is not None and FAILURES[word] in result.error, word
        else:
            number = float(word)
            assert (result.total, result.terms, result.error) == (number, {"double": 2 * number}, None)
            assert result.extra["pred"] == word and result.extra["thing"].startswith("<module 'threading'")
    assert no_verdict_metrics(scores) == {
        "reward/no_verdict_rate": 12 / 52,
        "reward/no_verdict/declined": 1,
        "reward/no_verdict/raised": 2,
        "reward/no_verdict/invalid": 4,
        "reward/no_verdict/timeout": 3,
        "reward/no_verdict/crash": 2,
    }
    assert mentioned("12 of 52", caplog.text) and mentioned("3 timeout", caplog.text)
    assert caplog.text.count("Traceback") == 1 and "boom" in caplog.text


def test_asynchronous_functions_run_concurrently_and_are_cancelled(tmp_path: Path) -> None:
    with manager(config(tmp_path, "concurrent", num_workers=1, timeout=5.0)) as rewards:
        scores = asyncio.run(rewards.score([trajectory(str(n)) for n in range(64)]))
        assert [result.total for result in scores] == [float(n) for n in range(64)]
        assert max(int(result.extra["together"]) for result in scores) > 1
    words = ["1", "await", "raise", "die", "sleep", "stubborn", "2"]
    expected = {**FAILURES, "await": "timeout", "stubborn": "timeout"}
    for word, result in zip(words, score(config(tmp_path, "concurrent", timeout=2.0), words), strict=True):
        if word in expected:
            assert result.error is not None and expected[word] in result.error, word
        else:
            assert result.error is None and result.total == float(word)


@pytest.mark.parametrize("name", ["returns_awaitable", "instance"])
def test_other_ways_to_be_asynchronous(tmp_path: Path, name: str) -> None:
    assert [result.total for result in score(config(tmp_path, name), ["1", "2", "3"])] == [1.0, 2.0, 3.0]


def test_arguments_and_reward_kwargs_arrive(tmp_path: Path, capfd) -> None:
    settings = config(tmp_path, "everything", reward_kwargs={"scale": 10})
    with manager(settings) as rewards:
        [result] = asyncio.run(rewards.score([trajectory("abc", {"a": [1]}, "src", level=2)]))
        [lost] = asyncio.run(rewards.score([trajectory("abc", lambda: 1)]))
    assert result.total == 30.0
    assert result.extra == {"source": "src", "truth": {"a": [1]}, "info": {"level": 2, "last_answer": "abc"}}
    assert lost.error is not None and "cannot be sent" in lost.error
    captured = capfd.readouterr()
    assert captured.out == "" and "may print" in captured.err


def test_a_manager_serves_many_event_loops_and_empty_batches(tmp_path: Path) -> None:
    async def together(rewards: RewardManager) -> list[list[Score]]:
        batches = [[trajectory(str(10 * b + n)) for n in range(10)] for b in range(5)]
        return await asyncio.gather(*(rewards.score(batch) for batch in batches))

    with manager(config(tmp_path, "sync")) as rewards:
        for _ in range(2):
            results = asyncio.run(together(rewards))
            assert [[s.total for s in row] for row in results] == [[10.0 * b + n for n in range(10)] for b in range(5)]
        assert asyncio.run(rewards.score([])) == []


def test_a_rate_of_zero_ends_the_run_at_the_first_error(tmp_path: Path) -> None:
    words = ["1", "raise", *["sleep"] * 50]
    with raises(RewardError, "ValueError: boom") as caught:  # and waits for none of the others
        score(config(tmp_path, "sync", max_no_verdict_rate=0.0, timeout=10 * LONG, num_workers=2), words)
    assert "row val:1" in str(caught.value) and "reward.max_no_verdict_rate=" in caught.value.fix


OUTAGE = """
import pathlib
from hone import NoVerdict
def f(data_source, solution_str, ground_truth, extra_info, folder):
    mark = pathlib.Path(folder) / solution_str
    if not mark.exists():
        mark.touch()
        raise NoVerdict("the grader restarts")
    return float(solution_str)
"""


def test_an_outage_that_passes_costs_no_response(tmp_path: Path) -> None:
    """The first tries fail until the rest is skipped; the further tries give all of them their scores, in order."""
    words = [str(number) for number in range(40)]
    settings = {"reward_kwargs": {"folder": str(tmp_path)}, "max_no_verdict_rate": 0.25, "num_workers": 2}
    lasting = config(tmp_path, "f", OUTAGE, **settings)
    with raises(RewardError, "infrastructure"):
        score(lasting, words)
    for mark in tmp_path.glob("[0-9]*"):
        mark.unlink()
    patient = config(tmp_path, "f", OUTAGE, **settings, max_retries=4)
    scores = score(patient, words)
    assert [s.total for s in scores] == [float(word) for word in words] and not any(s.error for s in scores)


def test_too_many_errors_end_the_run(tmp_path: Path) -> None:
    words = ["1"] * 10 + ["nan"] * 10
    assert sum(s.error is not None for s in score(config(tmp_path, "sync", max_no_verdict_rate=0.5), words)) == 10
    with raises(RewardError, "11 of 21"):
        score(config(tmp_path, "sync", max_no_verdict_rate=0.5), [*words, "nan"])


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("synk", FUNCTIONS, "Did you mean sync"),
        ("number", FUNCTIONS, "is a int, not a function"),
        ("too_few", FUNCTIONS, "cannot be called with data_source, solution_str, ground_truth, extra_info"),
        ("sync", "import nowhere_to_be_found", "line 1: ModuleNotFoundError"),
        ("sync", "def sync(:", "SyntaxError"),
        ("sync", "import sys\nsys.exit(0)", "line 2: SystemExit"),
        ("sync", "import os\nos._exit(5)", "exit code 5"),
    ],
)
def test_what_cannot_be_loaded_is_said_at_construction(tmp_path: Path, name: str, code: str, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        RewardManager(config(tmp_path, name, code))
    assert message in str(caught.value) and caught.value.fix


def test_wrong_reward_kwargs_missing_file_and_contradictions(tmp_path: Path) -> None:
    with raises(RewardError, "scale"):
        RewardManager(config(tmp_path, "everything", reward_kwargs={"scales": 1}))
    settings = config(tmp_path, "sync")
    settings.scorer = "gsm8k"
    with raises(RewardError, "reward.scorer=null"):
        RewardManager(settings)
    settings.scorer, settings.custom_reward_function.path = None, str(tmp_path / "my_rewards.py")
    with raises(RewardError, "my_reward.py"):
        RewardManager(settings)


def test_siblings_of_the_file_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "helper_of_reward.py").write_text("def grade(x): return 42.0")
    code = "from helper_of_reward import grade\ndef f(data_source, solution_str, ground_truth, extra_info): return grade(1)"
    assert score(config(tmp_path, "f", code), ["x"])[0].total == 42.0


# ------------------------------------------------------------------------------------------------------------ built-in


def test_built_in_scorers_side_by_side() -> None:
    entry = json.dumps({"question": "1 + 1?", "answer": "2", "metadata": {}})
    batch = [
        trajectory("#### 18", "18", "arithmetic"),
        trajectory(r"\boxed{\frac{2}{4}}", "0.5", "math"),
        trajectory("<answer>2</answer>", entry, "reasoning_gym/chain_sum"),
        trajectory("3814", "3815", "digit_sequence"),
        trajectory("<answer>1</answer>", "not json", "countdown"),
    ]
    with manager(RewardConfig()) as rewards:
        rewards.check({t.sample.data_source: 1 for t in batch})
        scores = asyncio.run(rewards.score(batch))
    assert [s.total for s in scores] == [1.0, 1.0, 1.0, 0.75, 0.0]
    assert scores[1].extra["verifier"] == "math-verify"
    assert scores[4].error is not None and "JSONDecodeError" in scores[4].error


def test_a_verifier_that_hangs_is_one_error() -> None:
    batch = [trajectory(r"\boxed{" + answer + "}", "1", "math") for answer in ["1", "9^{9^{9^{9^9}}}", "1"]]
    with manager(RewardConfig(timeout=2.0)) as rewards:
        scores = asyncio.run(rewards.score(batch))
    assert [s.total for s in scores] == [1.0, 0.0, 1.0]


def test_unknown_data_sources_options_and_scorers() -> None:
    with manager(RewardConfig()) as rewards:
        with pytest.raises(RewardError) as caught:
            rewards.check({"data/gsm8k-local": 7473, "gsm8k": 5})
        assert caught.value.code == "R43"
        assert "'data/gsm8k-local' (7473 rows)" in str(caught.value) and "reward.scorer=" in caught.value.fix
        with raises(RewardError, code="R43"):
            asyncio.run(rewards.score([trajectory("x", source="nope")]))
    with manager(RewardConfig(scorer="gsm8k", scorer_kwargs={"method": "flexible"})) as rewards:
        rewards.check({"data/gsm8k-local": 7473})
        assert asyncio.run(rewards.score([trajectory("so 18.", "18", "nope")]))[0].total == 1.0
    with raises(ConfigError, "gsm8k"):
        RewardManager(RewardConfig(scorer="gsm8"))
    with raises(RewardError, "method"):
        RewardManager(RewardConfig(scorer_kwargs={"metod": "flexible"}))
    with raises(RewardError, where="reward.scorer_kwargs"):
        RewardManager(RewardConfig(scorer_kwargs={"format_score": 0.1})).check({"digit_sequence": 1})


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """Even when the parent is killed outright and a call never returns."""
    code = f"""
import os
def f(data_source, solution_str, ground_truth, extra_info):
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    while True: pass
"""
    settings = config(tmp_path, "f", code)
    program = f"""
import asyncio
from hone.config.reward import CustomRewardConfig, RewardConfig
from hone.data.types import Sample, StopReason, Trajectory
from hone.rewards.manager import RewardManager

rewards = RewardManager(RewardConfig(CustomRewardConfig({settings.custom_reward_function.path!r}, "f"), timeout=1000.0))
sample = Sample("a", [1], None, "s", "1", {{}})
asyncio.run(rewards.score([Trajectory("a", 0, [1], [2], [1], [0.0], [0.0], "x", StopReason.STOP, sample)]))
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    finally:
        parent.kill()
        parent.wait()
    assert wait_for(lambda: not alive(pid))


def wait_for(condition: Any, seconds: float = SOON) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize("name", ["raises", "raises_later"])
def test_the_text_of_an_exception_has_no_secret(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients put the key, or the address with it, into what they raise."""
    key = "sk-" + "aB3dE5gH7jK9mN1pQ3s" * 2
    words = f"Incorrect API key provided: {key}, https://me:correct-horse@judge.example/v1?api_key=battery-staple"
    code = f"""
def raises(data_source, solution_str, ground_truth, extra_info): raise ValueError({words!r})
async def raises_later(data_source, solution_str, ground_truth, extra_info): raise ValueError({words!r})
"""
    (scored,) = score(config(tmp_path, name, code), ["1"])
    assert scored.error is not None and "ValueError" in scored.error and "ValueError" in caplog.text
    for secret in (key, "correct-horse", "battery-staple"):
        assert secret not in scored.error and secret not in caplog.text
