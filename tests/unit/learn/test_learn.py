"""The course's texts, entries and progress, without playing boxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.messages import raises

from hone.apps.learn import texts
from hone.apps.learn.progress import ENTRIES, NEEDS, Progress, read_progress, write_progress
from hone.apps.learn.texts import COURSE
from hone.apps.learn.work import CHECKS, Refused, Work
from hone.cli.main import main
from hone.errors import HoneError

ALL = texts.boxes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HONE_LANGUAGE", raising=False)
    return tmp_path


def hone(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_every_text_has_a_check_and_every_check_a_text() -> None:
    import importlib

    for part in texts.PARTS:
        importlib.import_module(f"hone.apps.learn.checks.{part}")
    assert sorted(CHECKS.names()) == sorted(ALL)


@pytest.mark.parametrize("name", ALL)
def test_a_text_takes_two_minutes(name: str) -> None:
    text = ALL[name].text()
    words = len(text.body("Read").split())
    assert 40 <= words <= 250, f"{words} words"
    assert "```" in text.body("Do") and text.body("Look") and text.body("Hint")
    assert ("Quiz" in text.sections) == bool(text.questions)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.name)
def test_an_entry_is_a_way_over_30_days(entry) -> None:
    assert len(set(entry.boxes)) == len(entry.boxes) and set(entry.boxes) <= set(ALL)
    days = [stop.day for stop in entry.stops]
    for name, needed in NEEDS.items():
        assert name not in entry.boxes or needed in entry.boxes[: entry.boxes.index(name)]
    assert entry.boxes[:2] == ["install", "data_and_model"]
    assert days == sorted(days) and days[0] >= 1 and days[-1] <= 30


def test_the_notes_and_the_path_are_covered() -> None:
    assert {part: len(listed) for part, listed in COURSE["check_boxes"].items()} == {
        "first_run": 5,
        "data": 4,
        "algorithms": 4,
        "reward": 5,
        "agents": 4,
    }
    for part, listed in COURSE["check_boxes"].items():
        for _, _, names in listed:
            assert all(ALL[name].part == part for name in names.split())
    new = {stop.box: stop for stop in ENTRIES["new"].stops}
    assert set(new) == set(ALL), "the first entry has every box"
    for week, _, names in COURSE["weeks"]:
        assert all(new[name].week == int(week) for name in names.split())


def test_a_translation_is_shown_and_english_where_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "01_x.md"
    file.write_text(
        "# A\n\n## Read\n\nread\n\n## Do\n\ndo\n\n## Look\n\nlook\n\n## Quiz\n\n1. How\n   many?\n\n## Hint\n\nhint\n"
    )
    translated = "# 甲\n\n## 读\n\n读它\n\n## 做\n\n做它\n\n## 看\n\n看它\n\n## 问题\n\n1. 多少?\n\n## 提示\n\n提示\n"
    file.with_suffix(".zh.md").write_text(translated)
    box = texts.Box("x", "data", file)
    assert box.text("zh").title == "甲" and box.text("zh").body("Do") == "做它"
    assert box.text("zh").sections["Quiz"][0] == "问题" and box.text("zh").questions == ["多少?"]
    assert box.text("vi").language == "en" and box.text("vi").questions == ["How many?"]
    file.with_suffix(".vi.md").write_text("# A\n\n## Đọc\n\nđọc\n")
    with raises(HoneError, "Đọc, not Read", code="E-learn"):
        box.text("vi")


def test_next_shows_the_language_or_says_that_there_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    english = ALL["install"].file.read_text()
    (folder / "01_install.md").write_text(english)
    (folder / "01_install.zh.md").write_text(
        english.replace("Is this machine ready?", "准备好了吗").replace("## Do", "## 做")
    )
    assert hone("learn", "start", "new") == 0
    monkeypatch.setattr(
        texts, "boxes", lambda: ALL | {"install": texts.Box("install", "first_run", folder / "01_install.md")}
    )
    monkeypatch.setenv("HONE_LANGUAGE", "zh")
    capsys.readouterr()
    assert hone("learn", "next") == 0
    shown = capsys.readouterr()
    assert "准备好了吗" in shown.out and "\n做\n" in shown.out and not shown.err
    assert hone("learn", "next", "--language", "vi") == 0
    shown = capsys.readouterr()
    assert "Is this machine ready?" in shown.out and "no text in vi" in shown.err


def test_progress_is_kept_and_a_damaged_file_named(folder: Path) -> None:
    with raises(HoneError, "hone learn start", code="E-learn"):
        read_progress()
    progress = Progress("sft")
    assert progress.current == ENTRIES["sft"].boxes[0]
    progress.add(ENTRIES["sft"].boxes[0], "42 checks")
    write_progress(progress)
    assert read_progress() == progress and read_progress().current == ENTRIES["sft"].boxes[1]
    assert not list(Path("learn").glob(".*")), "written under another name and renamed"
    assert hone("learn", "start", "agents") == 0
    assert read_progress().entry == "agents" and read_progress().passed == progress.passed
    for damage in ('{"entry": "sft"', "[]", '{"entry": "sft", "passed": {"install": 3}}'):
        Path("learn/progress.json").write_text(damage)
        with raises(HoneError, "damaged", code="E-learn"):
            read_progress()
        assert hone("learn", "check") == 2


def test_an_unknown_entry_or_box_names_the_near_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hone("learn", "start", "agent") == 2
    assert "Did you mean agents" in capsys.readouterr().err
    assert hone("learn", "start", "new") == 0
    assert hone("learn", "check", "instal") == 2
    assert "Did you mean install" in capsys.readouterr().err


def test_a_check_reads_the_answers_of_the_quiz() -> None:
    work = Work("x", "look again", ["How many?", "Which?"], ["0.50", "Train:1"])
    assert work.answer_number(1, 0.5, look="") == 0.5
    assert work.answer_among(2, {"train:1"}, str) == "Train:1"
    for right, tolerance in ((0.6, 0.05), (float("nan"), 1.0)):
        with pytest.raises(Refused) as refused:
            work.answer_number(1, right, tolerance=tolerance, look="see the table.")
        assert refused.value.field == "answer 1" and "look again" in str(refused.value)
    with pytest.raises(Refused, match="its rewards differ"):
        work.answer_among(2, {"train:2"}, lambda given: "its rewards differ")
    for answers, ask, field in (([], None, "answer 1"), ([""], None, "answer 1"), ([], lambda _: "two", "answer 1")):
        with pytest.raises(Refused) as refused:
            Work("x", "", ["How many?"], answers, ask).answer_number(1, 2, look="")
        assert refused.value.field == field
    questions: list[str] = []
    Work("x", "", ["How many?"], [], lambda question: questions.append(question) or "2").answer_number(1, 2, look="")
    assert questions == ["1. How many?"]


def test_what_is_missing_is_refused_with_its_name(folder: Path) -> None:
    work = Work("x", "the hint")
    for look in (lambda: work.path("a"), lambda: work.rows("b.jsonl"), lambda: work.run("c")):
        with pytest.raises(Refused, match="E-learn x, "):
            look()
    Path("learn/run").mkdir(parents=True)
    Path("learn/run/run.json").write_text(json.dumps({"status": "interrupted"}))
    with pytest.raises(Refused, match="expected a finished run; seen status interrupted"):
        work.run("run")
    Path("learn/run/run.json").write_text(json.dumps({"status": "finished"}))
    Path("learn/run/metrics.jsonl").write_text('{"step": 3, "x": 1.0}\n')
    Path("learn/run/config.yaml").write_text(
        "{algorithm: {adv_estimator: grpo}, trainer: {default_local_dir: learn/run}}\n"
    )
    Path("learn/copy").symlink_to("run")
    with pytest.raises(Refused, match="a copy of run"):
        work.run("copy")
    with pytest.raises(Refused, match="expected 4 steps or more; seen 3"):
        work.run("run", steps=4)
    with pytest.raises(Refused, match="expected algorithm.adv_estimator=gae; seen grpo"):
        work.run("run", keys={"algorithm.adv_estimator": "gae"})
    run = work.run("run", steps=3, keys={"algorithm.adv_estimator": "grpo"})
    assert work.metric(run, "x") == 1.0
    with pytest.raises(Refused, match="the metric y"):
        work.metric(run, "y")
    with pytest.raises(Refused, match="expected all samples of step 3"):
        work.samples(run, 3, ["score"])


def test_a_function_of_the_learner_runs_in_a_process_of_its_own(folder: Path) -> None:
    Path("learn").mkdir()
    work = Work("x", "the hint")
    Path("learn/f.py").write_text("def f(a, b=1):\n    print('noise')\n    return [a, b]\n")
    assert work.call("f.py", "f", [[1], [2, 3]]) == [[1, 1], [2, 3]]
    for source, said in (
        ("def f(): return 1 / 0", "ZeroDivisionError"),
        ("def g(): pass", "no attribute 'f'"),
        ("f(", "SyntaxError"),
    ):
        Path("learn/f.py").write_text(source)
        with pytest.raises(Refused, match=said):
            work.call("f.py", "f", [[]])


def test_files_of_another_form_are_refused_and_no_crash(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hone("learn", "start", "new") == 0
    for part in ("nines.parquet", "talk.parquet", "sound.jsonl", "episodes.jsonl"):
        Path("learn", part).write_text("[1, 2\n")
    for box in ALL:
        assert hone("learn", "check", box, "--answer", "1") == 2, box
    shown = capsys.readouterr().err
    assert shown.count("E-learn ") + shown.count("E-data") == len(ALL) and shown.count("E-data") <= 4


def test_progress_and_list_show_what_is_passed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hone("learn", "start", "agents") == 0
    progress = read_progress()
    progress.add("install", "41 of 42 checks are ok.")
    write_progress(progress)
    capsys.readouterr()
    assert hone("learn", "progress") == 0
    shown = capsys.readouterr().out
    assert "[x] day  1  install" in shown and "41 of 42 checks" in shown and "[ ] day  1  data_and_model" in shown
    assert f"1 of {len(ENTRIES['agents'].stops)} boxes. Next: data_and_model" in shown and "Week 4" in shown
    assert hone("learn", "next", "gate") == 0
    assert "uses the results of the box first_agent" in capsys.readouterr().out
    assert hone("learn", "list", "--language", "zh") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*ALL, *ENTRIES))
