"""A hanging run is ended with a report of the culprit, and resumes from its last checkpoint."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from support import faults
from support.launch import Command, Ended
from support.patience import SOON
from support.services import serve
from support.transcripts import DOCS, missing, shown_in
from support.world import World, metrics, rl_command, run_record, steps_saved

pytestmark = pytest.mark.long("hone/cluster/watchdog.py", "hone/cluster/watcher.py")

SCORER, ENGINE = "reward.scorer=shaky", "actor_rollout_ref.rollout.name=shaky"
HANGS = {
    # how: (setting, fault, without it, exit code, the stage, the function to blame)
    "regex": (SCORER, faults.REGEX, faults.NO_SCORER_FAULT, -9, "step 3 > reward", "hold_the_interpreter"),
    "lock": (SCORER, faults.LOCK, faults.NO_SCORER_FAULT, 3, "step 3 > reward", "take_a_lock_twice"),
    "engine": (ENGINE, faults.ENGINE, faults.NO_ENGINE_FAULT, 3, "step 2 > update_weights", "wait_for_the_device"),
}

NOTICES: dict[str, dict[str, Any]] = {}
"""How to the notice that the run sent."""


def arguments(world: World, run: Path, setting: str, *words: str) -> list[str]:
    common = ("trainer.total_training_steps=4", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=null")
    return rl_command(world, run, "grpo", *common, setting, "trainer.watchdog_seconds=8", *words)


@pytest.fixture(scope="module")
def hung(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Ended]]:
    """One run of each kind, all at once: most of their time they stand still. A webhook gets what they send."""
    root = tmp_path_factory.mktemp("hangs")
    with serve(lambda path, body: (200, "ok")) as (url, seen):
        commands = {
            how: Command(
                arguments(world, root / how, setting, f"insight.webhook={url}/{how}"),
                root / f"{how}.log",
                prepare=fault,
            )
            for how, (setting, fault, *_) in HANGS.items()
        }
        ended = {how: (root / how, command.wait(180)) for how, command in commands.items()}
    NOTICES.update({path.removeprefix("/"): body for path, body, _ in seen})
    return ended


@pytest.mark.parametrize("how", HANGS)
def test_a_hang_is_reported_ended_and_resumed(world: World, hung, tmp_path, how):
    setting, _, no_fault, code, stage, function = HANGS[how]
    run, ended = hung[how]
    assert ended.code == code, ended.output
    assert f"Culprit: driver (pid {run_record(run)['pid']}" in ended.output and f"in '{stage}'" in ended.output
    assert f"in {function}" in ended.output and "Traceback" not in ended.output
    saved = steps_saved(run)[-1]
    assert f"step {saved}" in ended.message
    record = run_record(run)
    assert record["status"] == "failed" and record["exit_reason"].startswith("hang: driver")
    report = (run / "hangs" / "hang_1.txt").read_text()
    assert str(run / "hangs" / "hang_1.txt") in record["exit_reason"]
    assert "--- stacks of driver" in report and f"[{stage}]" in report and function in report

    if code == 3:  # a process that is killed sends nothing
        assert NOTICES[how]["event"] == "failed" and "hang: driver" in NOTICES[how]["text"]
        assert record["webhook"] == {"delivered": 1, "failed": 0}

    resumed = Command(arguments(world, run, setting), tmp_path / "resumed", prepare=no_fault).wait()
    assert resumed.code == 0, resumed.output
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4] and run_record(run)["status"] == "finished"
    if how == "lock":  # and nothing is lost: the curve is that of a run that never hung
        whole = Command(arguments(world, tmp_path / "whole", setting), tmp_path / "log", prepare=no_fault).wait()
        assert whole.code == 0, whole.output
        assert metrics(run) == metrics(tmp_path / "whole")


def test_a_killed_run_says_so(world: World, tmp_path: Path):
    """The watcher outlives the driver, and tells what nobody else can."""
    run = tmp_path / "run"
    command = Command(arguments(world, run, SCORER), tmp_path / "log", prepare=faults.NO_SCORER_FAULT)
    assert command.wait_until(lambda: steps_saved(run) == [1])
    command.process.kill()
    command.wait()
    assert command.process.exitcode == -9

    deadline = time.monotonic() + SOON
    while "/checkpoints/step_" not in (said := (tmp_path / "log").read_text()):  # printed after it is recorded
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    assert "was killed" in run_record(run)["exit_reason"]


def test_the_page_shows_a_real_report(world: World, tmp_path: Path):
    page = (DOCS / "failures.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python stuck_loss.py\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "stuck_loss.py").write_text(program)
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=stuck_loss:stuck"
    words = rl_command(world, tmp_path / "run", "grpo", loss, "trainer.watchdog_seconds=10")
    ended = Command(words, tmp_path / "log", cwd=tmp_path).wait()
    assert ended.code == 3, ended.output
    assert not missing(shown_in("failures.md", "watchdog: HANG"), ended.output)
