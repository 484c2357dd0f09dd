"""The environment doctor: every planted defect is named with its tasks, and healthy runs are silent."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hone.config.reward import CustomRewardConfig, DoctorConfig, RewardConfig
from hone.data.episode_log import CallRecord, CallStatus, EpisodeEnd, EpisodeLog
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import DataError
from hone.rewards.doctor import FILE, QUARANTINE, EnvironmentDoctor, Finding, History, Prober
from hone.rewards.score import Cause, Score
from hone.rewards.worker import to_score
from hone.trainers.inputs import read_quarantine

TASKS, N, STEPS = 12, 4, 6
BROKEN = ("train:3", "train:7")
"""Rows whose verifier is planted with a defect."""
HEAD = "import random\nBROKEN = {'3', '7'}\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    row = extra_info['row']\n    right = float(solution_str.strip() == ground_truth)\n"
HEALTHY = HEAD + "    return right\n"
SHARE = HEAD + "    return sum(a == b for a, b in zip(solution_str, ground_truth)) / len(ground_truth)\n"
PLANTED = {
    "passes_empty": HEAD + "    return 1.0 if row in BROKEN and not solution_str else right\n",
    "passes_traceback": HEAD + "    return 1.0 if row in BROKEN and 'Traceback' in solution_str else right\n",
    "ignores_answer": HEAD
    + "    return float(bool(solution_str) and 'Trace' not in solution_str) if row in BROKEN else right\n",
    "does_not_repeat": HEAD + "    return right + random.random() / 9 if row in BROKEN else right\n",
}


def trajectory(task: int, index: int, text: str, episode: EpisodeLog | None = None) -> Trajectory:
    sample = Sample(f"train:{task}", [1], None, "mine", str(100 + task), {"row": str(task)})
    return Trajectory(sample.uid, index, [1], [2], [1], [0.0], [0.0], text, StopReason.STOP, sample, episode=episode)


def answers(draw: random.Random, skill: float = 0.5) -> list[Trajectory]:
    """A step: every task, this share of the answers right."""
    texts = [(task, n, str(100 + task) if draw.random() < skill else str(draw.randrange(99))) for task in range(TASKS) for n in range(N)]  # fmt: skip
    return [trajectory(*text) for text in texts]


def run(tmp_path: Path, code: str, seed: int = 1, steps: int = STEPS, skill: float = 0.5) -> dict[str, set[str]]:
    """Run the doctor over steps with this verifier; return the tasks of every kind of finding."""
    (tmp_path / "verifier.py").write_text(code)
    function = CustomRewardConfig(str(tmp_path / "verifier.py"))
    config = RewardConfig(custom_reward_function=function, doctor=DoctorConfig(probes_per_step=6, cooldown=1))
    space: dict = {}
    exec(code, space)  # noqa: S102 - the verifier of the test
    doctor, draw = EnvironmentDoctor(config, tmp_path / "run", probes=True), random.Random(seed)
    try:
        for step in range(1, steps + 1):
            played = answers(draw, skill)
            draw.shuffle(played)
            scores = [to_score(space["compute_score"]("mine", t.text, t.sample.ground_truth, t.sample.extra_info)) for t in played]  # fmt: skip
            doctor.observe(step, played, scores)
            doctor.finish(step)
    finally:
        doctor.close()
    kinds: dict[str, set[str]] = {}
    if (tmp_path / "run" / FILE).exists():
        for line in (tmp_path / "run" / FILE).read_text().splitlines():
            finding = json.loads(line)
            kinds.setdefault(finding["kind"], set()).update(finding["tasks"])
            assert 1 <= len(finding["episodes"]) <= 3 and finding["fix"]
    return kinds


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_defect_is_named_with_its_tasks(tmp_path: Path, kind: str) -> None:
    found = run(tmp_path, PLANTED[kind], steps=12)
    assert set(found) == {kind} and found[kind] <= set(BROKEN), found
    proposed = read_quarantine(tmp_path / "run" / QUARANTINE)
    assert proposed == found[kind]


def test_ten_healthy_runs_are_silent(tmp_path: Path) -> None:
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert run(folder, *((HEALTHY, seed) if seed % 2 else (SHARE, seed, STEPS, 0.1))) == {}


def test_a_defect_is_named_again_after_the_cool_down_and_for_other_tasks_alone(tmp_path: Path) -> None:
    doctor = EnvironmentDoctor(RewardConfig(doctor=DoctorConfig(cooldown=3)), tmp_path, probes=False)
    try:
        reported = [doctor._is_due(step, Finding("kind", "", "", "", tasks)) for step, tasks in
                    [(5, ["a"]), (6, ["b"]), (8, ["a"]), (8, ["b"]), (9, ["c"]), (12, ["c"])]]  # fmt: skip
    finally:
        doctor.close()
    assert reported == [True, False, False, True, False, True]


def observe(
    tmp_path: Path, make: Callable[[int, int], tuple[Trajectory, Score]], steps: int = 4
) -> dict[str, list[str]]:
    doctor = EnvironmentDoctor(RewardConfig(), tmp_path, probes=False)
    found: dict[str, list[str]] = {}
    for step in range(1, steps + 1):
        pairs = [make(task, n) for task in range(TASKS) for n in range(N)]
        for finding in doctor.observe(step, [t for t, _ in pairs], [s for _, s in pairs]):
            found.setdefault(finding.kind, []).extend(finding.tasks)
    doctor.close()
    return found


def test_failures_concentrated_in_few_tasks(tmp_path: Path) -> None:
    lost = Score(0.0, error="the sandbox died", cause=Cause.SANDBOX)
    found = observe(
        tmp_path, lambda task, n: (trajectory(task, n, "1"), lost if task in (3, 7) else Score(float(n % 2)))
    )
    assert found == {"failing_tasks": list(BROKEN)}


def test_tasks_that_lost_nothing_do_not_count_as_failures(tmp_path: Path) -> None:
    """One of 13 tasks lost its eight answers: all that are missing, though fewer than there are tasks."""
    lost = Score(0.0, error="the sandbox died", cause=Cause.SANDBOX)
    doctor = EnvironmentDoctor(RewardConfig(), tmp_path, probes=False)
    pairs = [
        (trajectory(task, n, "1"), lost if task == 3 else Score(float(n % 2))) for task in range(13) for n in range(8)
    ]
    found = [f for f in doctor.observe(1, [t for t, _ in pairs], [s for _, s in pairs]) if f.kind == "failing_tasks"]
    doctor.close()
    assert [finding.tasks for finding in found] == [[trajectory(3, 0, "1").sample.uid]] and "8 of the 8" in found[
        0
    ].what


def test_failures_at_random_are_not_of_tasks(tmp_path: Path) -> None:
    draw, lost = random.Random(3), Score(0.0, error="the sandbox died", cause=Cause.SANDBOX)
    found = observe(
        tmp_path, lambda task, n: (trajectory(task, n, "1"), lost if draw.random() < 0.3 else Score(1.0)), 8
    )
    assert found == {}


@pytest.mark.parametrize("key", ["skipped", "tests"])
def test_a_skip_that_passes(tmp_path: Path, key: str) -> None:
    def make(task: int, n: int) -> tuple[Trajectory, Score]:
        broken = task in (3, 7)
        value = broken if key == "skipped" else (0.0 if broken else 5.0)
        return trajectory(task, n, "1"), Score(1.0, {key: float(value)})

    assert observe(tmp_path, make) == {"skip_passes": list(BROKEN)}


@pytest.mark.parametrize("kind", ["tool", "scoring", "episode"])
def test_time_limits_that_pin(tmp_path: Path, kind: str) -> None:
    draw = random.Random(5)

    def make(task: int, n: int) -> tuple[Trajectory, Score]:
        late = draw.random() < 0.5
        call = CallRecord("search", {}, CallStatus.TIMEOUT if late and kind == "tool" else CallStatus.OK)
        end = EpisodeEnd.TIME if late and kind == "episode" else EpisodeEnd.ANSWER
        score = Score(0.0, error="timeout", cause=Cause.TIMEOUT) if late and kind == "scoring" else Score(1.0)
        return trajectory(task, n, "1", EpisodeLog(end=end, calls=[call])), score

    assert set(observe(tmp_path, make)) == {"time_limit"}


def test_every_time_limit_is_reported(tmp_path: Path) -> None:
    doctor = EnvironmentDoctor(RewardConfig(), tmp_path, probes=False)
    calls = [CallRecord(name, {}, CallStatus.TIMEOUT) for name in ("search", "python")]
    pairs = [(trajectory(task, n, "1", EpisodeLog(calls=calls)), Score(1.0)) for task in range(TASKS) for n in range(N)]
    found = doctor.observe(1, *zip(*pairs, strict=True))
    assert [finding.about for finding in found] == ["calls of the tool python", "calls of the tool search"]
    assert doctor.observe(2, *zip(*pairs, strict=True)) == [], "within the cool-down"


def test_a_finding_is_repeated_for_new_tasks_after_the_cool_down(tmp_path: Path) -> None:
    config = RewardConfig(doctor=DoctorConfig(cooldown=3))
    doctor = EnvironmentDoctor(config, tmp_path, probes=False)
    reported = []
    for step in range(1, 9):
        broken = {3} if step < 4 else {3, 5}
        pairs = [(trajectory(task, n, "1"), Score(1.0, {"skipped": float(task in broken)})) for task in range(TASKS) for n in range(N)]  # fmt: skip
        reported += [(step, finding.tasks) for finding in doctor.observe(step, *zip(*pairs, strict=True))]
    assert reported == [(1, ["train:3"]), (4, ["train:3", "train:5"])]


def test_a_quarantine_file_needs_a_uid_in_every_line(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"uid": "train:1"}\n{"uid": "train:2", "reason": "x"}\n')
    assert read_quarantine(file) == {"train:1", "train:2"}
    file.write_text('{"row": 1}\n')
    with pytest.raises(DataError):
        read_quarantine(file)


def test_probes_that_cannot_be_scored_are_named_once_and_counted(monkeypatch, caplog) -> None:
    def refuse(_: object, __: object) -> list[Score]:
        raise DataError("no scorer is registered for it")

    monkeypatch.setattr(Prober, "_score", refuse)
    prober, history = Prober(RewardConfig()), History()
    for _ in range(5):
        prober.submit([SimpleNamespace(trajectory=None)])  # type: ignore[list-item]
        prober.collect(history, wait=True)
    prober.close()
    assert prober.failed == 5 and [record.args[0] for record in caplog.records] == ["no scorer is registered for it", 5]
