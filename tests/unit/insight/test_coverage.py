"""The coverage ledger: fates add up whatever happens, resume is exact, and damage is recognised."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.coverage_runs import changed, invented, write_run
from support.examples import examples

from hone.apps.lab.coverage import coverage_report, fates_by_epoch, never_trained
from hone.errors import HoneError
from hone.insight.coverage import CoverageLedger, Fate, Stage, coverage_metrics, read_coverage
from hone.insight.metrics import MetricStore
from hone.insight.run_directory import RunDirectory

ENDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "trained": (("finished",), {"lag": 2, "reward": 0.5, "tokens": 12.5}),
    "filtered": (("in_flight", "finished"), {"reason": "all equal", "reward": 1.0}),
    "failed": (("in_flight", "finished"), {"reason": "a tool broke"}),
    "too_old": (("in_flight", "finished"), {"lag": 5, "tokens": 900.0}),
}
MOVES: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "admit": (("waiting",), "in_flight", {"source": "sums", "prompt_tokens": 7}),
    "finish": (("in_flight",), "finished", {}),
    "returned": (("in_flight", "finished"), "waiting", {}),
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def ended_draw(ledger: CoverageLedger, fate: str = "trained", **facts: Any) -> int:
    draw = ledger.draw(3, 0)
    ledger.admit(draw, "train:3", "sums")
    ledger.finish(draw)
    getattr(ledger, fate)(draw, **(ENDS[fate][1] | facts))
    return draw


class Trial:
    """A ledger with its run directory, and a plain dictionary that must agree with it."""

    def __init__(self, path: Path) -> None:
        self.path, self.step = path, 0
        self.run = RunDirectory(path)
        self.ledger = CoverageLedger(self.run.coverage)
        self.at: dict[int, str] = {}  # every draw: its stage or fate
        self.written: dict[int, tuple[str, int]] = {}  # fate and step in the file
        self.checkpoint = self.snapshot()

    def snapshot(self) -> tuple[Any, ...]:
        state = json.dumps(self.ledger.state_dict())
        return state, self.step, copy.copy(self.at), copy.copy(self.written)

    def kill(self, half: bytes) -> None:
        """End without closing, perhaps amid a line, and resume from the last checkpoint."""
        self.run.close()
        if half:
            with (self.path / "coverage.jsonl").open("ab") as file:
                file.write(half)
        state, self.step, at, written = self.checkpoint
        self.at, self.written = copy.copy(at), copy.copy(written)
        self.run = RunDirectory(self.path)
        self.ledger = CoverageLedger(self.run.coverage)
        self.ledger.load_state_dict(json.loads(state))
        self.run.rewind(self.step)

    def write(self) -> None:
        self.step += 1
        self.ledger.write(self.step)
        ended = {draw: fate for draw, fate in self.at.items() if fate in ENDS and draw not in self.written}
        self.written |= {draw: (fate, self.step) for draw, fate in ended.items()}
        coverage = read_coverage(self.path)
        assert coverage.problem is None
        assert {e.draw: (e.fate, e.step) for e in coverage.draws} == self.written
        assert coverage.counts == self.ledger.counts()
        assert sum(row["drawn"] for row in fates_by_epoch(coverage).values()) == len(self.at)

    def draw(self, row: int) -> int:
        draw = self.ledger.draw(row=row, epoch=row)
        self.at[draw] = "waiting"
        return draw

    def event(self, name: str, draw: int) -> None:
        stages, facts = ENDS[name] if name in ENDS else (MOVES[name][0], MOVES[name][2])
        if name == "admit":
            facts = facts | {"uid": f"train:{draw}"}
        before = self.ledger.state_dict()
        if self.at.get(draw) in stages:
            getattr(self.ledger, name)(draw, **facts)
            self.at[draw] = name if name in ENDS else MOVES[name][1]
        else:
            with pytest.raises(ValueError, match=f"draw {draw}"):
                getattr(self.ledger, name)(draw, **facts)
            assert self.ledger.state_dict() == before

    def check(self) -> None:
        counts = self.ledger.counts()
        assert counts.pop("drawn") == len(self.at) == sum(counts.values())
        admitted = {draw for draw, at in self.at.items() if at in ("in_flight", "finished")}
        assert {entry.uid: entry.draw for entry in self.ledger.open_draws() if entry.draw in admitted} == {
            f"train:{draw}": self.ledger.admitted(f"train:{draw}") for draw in admitted
        }
        assert counts == {name: list(self.at.values()).count(name) for name in (*Stage, *Fate)}


HALF_LINES = [b"", b'{"step": 9, "dr', b"\x00\x00\n", b'{"step": 99, "draw": 1}\n']
EVENTS = st.one_of(
    st.tuples(st.just("draw"), st.integers(0, 2)),
    st.tuples(st.sampled_from([*ENDS, *MOVES]), st.integers(0, 6)),  # often at the wrong stage
    st.tuples(st.sampled_from([f"play until {fate}" for fate in ENDS]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["write", "save"]), st.just(0)),
    st.tuples(st.just("kill"), st.sampled_from(HALF_LINES)),
)


@given(st.lists(EVENTS, min_size=5, max_size=60))
@examples(200)
def test_fates_are_conserved_through_kills_and_resumes(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, Any]]
) -> None:
    trial = Trial(tmp_path_factory.mktemp("run"))
    for name, argument in events:
        if name == "draw":
            trial.draw(argument)
        elif name.startswith("play until"):
            draw = trial.draw(argument)
            for event in ("admit", "finish", name.removeprefix("play until ")):
                trial.event(event, draw)
        elif name == "write":
            trial.write()
        elif name == "save":
            trial.checkpoint = trial.snapshot()
        elif name == "kill":
            trial.kill(argument)
        else:
            trial.event(name, argument)
        trial.check()
    trial.write()
    trial.run.close()


@pytest.mark.parametrize("first", list(ENDS))
@pytest.mark.parametrize("second", list(ENDS))
def test_a_second_fate_is_refused(run: RunDirectory, first: str, second: str) -> None:
    ledger = CoverageLedger(run.coverage)
    draw = ended_draw(ledger, first)
    with pytest.raises(ValueError, match="already"):
        getattr(ledger, second)(draw, **ENDS[second][1])
    assert ledger.counts()[first] == 1 and sum(ledger.counts()[fate] for fate in Fate) == 1


def test_unknown_draws_and_wrong_stages_are_refused(run: RunDirectory) -> None:
    ledger = CoverageLedger(run.coverage)
    for number in (0, -1, 5):
        with pytest.raises(ValueError, match=f"draw {number}"):
            ledger.failed(number, "lost")
    draw = ledger.draw(0, 0)
    for name in ENDS:
        with pytest.raises(ValueError, match="waiting"):
            getattr(ledger, name)(draw, **ENDS[name][1])
    assert ledger.counts()["waiting"] == 1


def test_a_uid_belongs_to_one_admitted_draw(run: RunDirectory) -> None:
    ledger = CoverageLedger(run.coverage)
    first, second = ledger.draw(1, 0), ledger.draw(1, 1)
    ledger.admit(first, "train:1", "sums")
    with pytest.raises(ValueError, match="train:1"):
        ledger.admit(second, "train:1", "sums")
    ledger.returned(first)
    with pytest.raises(ValueError, match="train:1"):
        ledger.admitted("train:1")
    ledger.admit(second, "train:1", "sums")
    ledger.failed(ledger.admitted("train:1"), "lost")
    ledger.admit(first, "train:1", "sums")
    assert ledger.admitted("train:1") == first


def test_the_file_survives_kill_minus_nine(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom hone.insight.coverage import CoverageLedger\nfrom hone.insight.run_directory import RunDirectory\n"
        f"ledger = CoverageLedger(RunDirectory({str(tmp_path)!r}).coverage)\n"
        "for step in range(10**9):\n"
        "    for row in range(100):\n"
        "        draw = ledger.draw(row, step)\n"
        "        ledger.admit(draw, f'train:{row}', 'sums')\n"
        "        ledger.finish(draw)\n"
        "        ledger.trained(draw, 0)\n"
        "    ledger.write(step)\n"
        "    if step == 20: sys.stdout.write('go'); sys.stdout.flush()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.read(2) == b"go"
    finally:
        process.kill()
        process.communicate()
    before = read_coverage(tmp_path)
    assert before.problem is None and max(before.steps) >= 20
    RunDirectory(tmp_path).rewind(7)
    after = read_coverage(tmp_path)
    assert after.problem is None and after.counts["trained"] == 800 and max(after.steps) == 7


def test_lines_have_the_facts_and_steps_end_with_the_counts(run: RunDirectory) -> None:
    ledger = CoverageLedger(run.coverage)
    draw = ledger.draw(row=17, epoch=2)
    ledger.admit(draw, uid="train:17~2", source="sums", prompt_tokens=30)
    ledger.finish(draw)
    ledger.trained(draw, lag=1, reward=0.25, tokens=float("nan"))  # unknown values have no entry
    ledger.draw(row=4, epoch=3)
    ledger.write(6)
    line, counts = [json.loads(text) for text in (run.path / "coverage.jsonl").read_text().splitlines()]
    assert line == {
        "step": 6,
        "draw": 0,
        "row": 17,
        "epoch": 2,
        "uid": "train:17~2",
        "source": "sums",
        "prompt_tokens": 30,
        "fate": "trained",
        "lag": 1,
        "reward": 0.25,
    }
    assert counts["step"] == 6 and counts["counts"] == ledger.counts() and counts["open"] == {"3": {"waiting": 1}}
    with pytest.raises(ValueError, match="step 6"):
        ledger.write(6)


def test_the_file_is_cut_when_a_run_resumes(run: RunDirectory) -> None:
    ledger = CoverageLedger(run.coverage)
    for step in range(1, 6):
        ended_draw(ledger)
        run.log_metrics(step, {})
        ledger.write(step)
    before = (run.path / "coverage.jsonl").read_bytes().splitlines()
    run.rewind(3)
    assert (run.path / "coverage.jsonl").read_bytes().splitlines() == before[:6]
    assert max(read_coverage(run.path).steps) == 3
    run.rewind(-1)
    with pytest.raises(HoneError) as caught:
        read_coverage(run.path)
    assert caught.value.code == "E-runs"


def test_an_interrupted_step_is_left_out(run: RunDirectory) -> None:
    ledger = CoverageLedger(run.coverage)
    for step in (1, 2):
        ended_draw(ledger)
        ledger.write(step)
    file = run.path / "coverage.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:20])
    coverage = read_coverage(run.path)
    assert coverage.problem is None and list(coverage.steps) == [1] and len(coverage.draws) == 1


DAMAGE = {
    "a draw twice": lambda lines: [*lines[:3], json.loads(json.dumps(lines[0])) | {"step": 2}, *lines[3:]],
    "a lost draw": lambda lines: lines[1:],
    "another fate": lambda lines: [lines[0] | {"fate": "failed"}, *lines[1:]],
    "an unknown fate": lambda lines: [lines[0] | {"fate": "eaten"}, *lines[1:]],
    "a draw that was never drawn": lambda lines: [lines[0] | {"draw": 77}, *lines[1:]],
    "no counts": lambda lines: [lines[0], *lines[2:]],
    "a sum": lambda lines: [*lines[:-1], lines[-1] | {"counts": lines[-1]["counts"] | {"drawn": 9}}],
    "open by epoch": lambda lines: [*lines[:-1], lines[-1] | {"open": {"0": {"waiting": 3}}}],
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_contradiction_is_a_problem(run: RunDirectory, damage: str) -> None:
    ledger = CoverageLedger(run.coverage)
    ledger.draw(1, 0)
    for step in (1, 2):
        ended_draw(ledger)
        ledger.write(step)
    file = run.path / "coverage.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert read_coverage(run.path).problem is None
    file.write_text("".join(json.dumps(line) + "\n" for line in DAMAGE[damage](lines)))
    assert read_coverage(run.path).problem is not None


@pytest.mark.parametrize("line", ['{"step": 1, "counts": 3}', '{"step": 1, "draw": 1}', '{"step": 1, "counts": {}}'])
def test_a_foreign_line_is_an_error(run: RunDirectory, line: str) -> None:
    (run.path / "coverage.jsonl").write_text(line + "\n")
    with pytest.raises(HoneError) as caught:
        read_coverage(run.path)
    assert caught.value.code == "E-runs" and caught.value.where.endswith("coverage.jsonl")


def test_metrics_are_declared_and_add_up(run: RunDirectory) -> None:
    ledger = CoverageLedger(run.coverage)
    for fate in ENDS:
        ended_draw(ledger, fate)
    ledger.draw(1, 0)
    store = MetricStore()
    store.update(coverage_metrics(ledger))
    metrics = store.reduce()
    shares = {name: metrics.pop(name) for name in list(metrics) if name.endswith("_token_share")}
    assert metrics.pop("coverage/drawn") == 5 == sum(metrics.values())
    assert metrics == {f"coverage/{name}": 1.0 for name in ("failed", "filtered", "open", "too_old", "trained")}
    tokens = {fate: ENDS[fate][1].get("tokens", 0.0) for fate in ENDS}
    assert shares == {f"coverage/{fate}_token_share": tokens[fate] / sum(tokens.values()) for fate in ENDS}
    resumed = CoverageLedger(run.coverage)
    resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert resumed.token_shares() == ledger.token_shares()


def test_report_of_epochs_lags_and_prompts_never_trained(tmp_path: Path) -> None:
    draws = invented(
        0, lambda random, draw: "too_old" if draw.row in (4, 7) and draw.epoch < 2 else None, rows=8, epochs=3
    )
    run = write_run(tmp_path, draws)
    coverage = read_coverage(run.path)
    assert coverage.draws == draws
    report = coverage_report(coverage)
    assert report["problem"] is None and report["lags"] == {"0": 20} and report["reasons"] == []
    assert [row["too_old"] for row in report["by_epoch"].values()] == [2, 2, 0]
    missed = [(entry["epoch"], entry["prompts"], entry["uids"]) for entry in report["never_trained"]]
    assert missed == [(0, 8, ["train:4", "train:7"]), (1, 8, ["train:4", "train:7"])]  # epoch 2 may not be over
    json.dumps(report)


def test_an_epoch_with_open_draws_is_not_complete(run: RunDirectory) -> None:
    ledger = CoverageLedger(run.coverage)
    ledger.draw(1, 0)
    ended_draw(ledger, "failed")
    ledger.draw(1, 1)
    ledger.write(1)
    assert never_trained(read_coverage(run.path)) == []


def test_a_row_that_is_trained_on_a_second_draw_of_its_epoch_is_not_missed(tmp_path: Path) -> None:
    trained = invented(0, lambda random, draw: None, rows=1)[0]
    draws = [changed(trained, "failed"), trained, invented(0, lambda random, draw: None, rows=1, epochs=2)[1]]
    entries = never_trained(read_coverage(write_run(tmp_path, draws).path))
    assert [entry["never_trained"] for entry in entries] == [0]
