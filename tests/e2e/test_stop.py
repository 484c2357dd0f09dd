"""`hone stop` on real runs: after the step, and at once with tools that do not end by themselves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.launch import Command, hone
from support.tiny_runs import offline_words, rl_words

from hone.insight.activity import birth
from hone.insight.audit import read_audit
from hone.insight.run_files import read_metrics, read_run
from hone.insight.stop_requests import STOP

pytestmark = [
    pytest.mark.slow,
    pytest.mark.application("hone/insight", "hone/apps/lab", "hone/trainers", "hone/agents", "hone/rewards"),
]
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TOOLS = '''
import asyncio, pathlib, subprocess, sys, time

def started():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path("child").write_text(str(child.pid))

async def waits(expression: str) -> str:
    """Waits for long.

    Args:
        expression: ignored
    """
    started()
    await asyncio.sleep(1000)

async def blocks(expression: str) -> str:
    """Ignores everybody.

    Args:
        expression: ignored
    """
    started()
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
'''


def record(run: Path) -> dict[str, Any]:
    return read_run(run) if (run / "run.json").is_file() else {}


def long_run(program: str, tiny: Path, run: Path) -> list[str]:
    longer = ("trainer.total_training_steps=1000", "trainer.save_freq=1000")
    return rl_words(tiny, run, *longer) if program == "train" else offline_words(program, tiny, run, *longer)


@pytest.mark.parametrize("program", ["train", "sft"])
def test_a_run_ends_after_its_step_and_resumes(program: str, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = long_run(program, tiny, run)
    training = Command(words, tmp_path / "log")
    assert training.wait_until(lambda: len(read_metrics(run)) >= 2), training.log.read_text()
    stopped = hone("stop", run, "--reason", "enough", "--wait", "120", log=tmp_path / "stop.log")
    assert stopped.code == 0 and "enough" in stopped.output, stopped.output
    assert training.wait().code == 4
    ended = record(run)
    last = ended["last_step"]
    assert ended["status"] == "interrupted" and "enough" in ended["exit_reason"]
    assert (run / "checkpoints" / f"step_{last}").is_dir() and not (run / STOP).exists()
    refused = hone("stop", run, log=tmp_path / "again.log")
    assert refused.code == 2 and "not running" in refused.output

    rest = [word for word in words if "total_training_steps" not in word]
    resumed = hone(*rest, f"trainer.total_training_steps={last + 1}", log=tmp_path / "resumed.log")
    assert resumed.code == 0, resumed.output
    assert [row["step"] for row in read_metrics(run)] == list(range(1, last + 2))


@pytest.mark.parametrize(
    ("tool", "runtime"),
    [
        ("waits", "local"),
        ("blocks", "local"),
        pytest.param(
            "blocks", "ray", marks=pytest.mark.long("hone/insight/stop_requests.py", "hone/trainers/session.py")
        ),
    ],
)
def test_a_stop_at_once_ends_tools_and_what_they_started(tool: str, runtime: str, tiny: Path, tmp_path: Path) -> None:
    run, child = tmp_path / "run", tmp_path / "child"
    (tmp_path / "slow_tools.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text(f"tools: [{{function: 'slow_tools:{tool}', timeout: 900}}]\n")
    (tmp_path / "tiny_loop.py").write_text((tiny / "tiny_loop.py").read_text().replace('"calculator"', f'"{tool}"'))
    words = rl_words(
        tiny,
        run,
        *("data.max_prompt_length=400", "data.max_response_length=80", f"{MULTI_TURN}.audit_dir={tmp_path}/audit"),
        *(
            f"{MULTI_TURN}.enable=true",
            f"{MULTI_TURN}.max_assistant_turns=3",
            f"{MULTI_TURN}.tool_config_path={tmp_path}/tools.yaml",
        ),
        f"trainer.runtime={runtime}",
        rows="calls",
    )
    training = Command(words, tmp_path / "log", tmp_path)
    assert training.wait_until(child.exists), training.log.read_text()
    stopped = hone("stop", "--all", "--now", "--reason", "it deletes files", "--root", tmp_path, "--wait", "120",
                   log=tmp_path / "stop.log")  # fmt: skip
    assert stopped.code == 0 and "it deletes files" in stopped.output, stopped.output
    assert training.wait().code == 130
    ended = record(run)
    assert ended["status"] == "interrupted" and "it deletes files" in ended["exit_reason"]
    if runtime == "local":  # a worker of Ray is killed with its tools while the driver ends
        assert ("were killed" in ended["exit_reason"]) == (tool == "blocks")
    assert birth(int(child.read_text())) is None, "what a tool started has ended too"

    lines = list(read_audit(tmp_path / "audit"))
    assert {line.record["event"] for line in lines} == {"call"}, "calls that were killed are in the log"
    assert {line.record["tool"] for line in lines} == {tool} and not any(line.problem for line in lines)

    (tmp_path / "tools.yaml").write_text("tools: [{name: calculator}]\n")
    (tmp_path / "tiny_loop.py").write_text((tiny / "tiny_loop.py").read_text())
    refused = hone(*words, log=tmp_path / "refused.log", cwd=tmp_path)
    assert refused.code == 2 and "E-stopped" in refused.output, refused.output
    cleared = hone("stop", run, "--clear", log=tmp_path / "clear.log")
    assert cleared.code == 0, cleared.output
    resumed = hone(*words, log=tmp_path / "resumed.log", cwd=tmp_path)
    assert resumed.code == 0, resumed.output
    assert record(run)["status"] == "finished"
    later = [line.record for line in read_audit(tmp_path / "audit") if line.file != lines[0].file]
    assert {line["status"] for line in later if line["event"] == "end"} == {"ok"}
    assert Counter(line["call"] for line in later) == dict.fromkeys(range(1, len(later) // 2 + 1), 2)


def test_a_file_made_by_hand_stops_a_run(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Command(long_run("train", tiny, run), tmp_path / "log")
    assert training.wait_until(lambda: len(read_metrics(run)) >= 1), training.log.read_text()
    (run / STOP).touch()
    assert training.wait().code == 4
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
