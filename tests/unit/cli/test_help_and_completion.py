"""Help texts at 80 columns, completion, and tables: nothing that one has to type is cut."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hone.cli.config import completion_script
from hone.cli.main import COMMANDS, app, command_words, load
from hone.cli.output import new_console, new_table


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_no_help_cuts_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for words in command_words():
        name, *rest = words.split()
        load(COMMANDS[name].place).main(args=[*rest, "--help"], prog_name="hone", standalone_mode=False)
    shown = capsys.readouterr().out
    assert "--max-prompt-length" in shown and "--allow-long-max-model-len" in shown
    assert [line for line in shown.splitlines() if "…" in line] == []


def test_the_first_column_of_a_table_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    table = new_table("name", "about", "number>")
    table.add_row("a-name-of-forty-characters-that-one-types", "words " * 20, "1234567")
    new_console().print(table)
    assert "a-name-of-forty-characters-that-one-types " in capsys.readouterr().out


def complete(*words: str) -> list[str]:
    """Return what the bash script completes; nothing is a file, by `-o default`."""
    script = completion_script("bash", command_words())
    calls = f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _hone 2>/dev/null"
    shown = subprocess.run(
        ["bash", "-c", f'{script}\n{calls}\nprintf "%s\\n" "${{COMPREPLY[@]}}"; complete -p hone'],
        capture_output=True,
        text=True,
        check=True,
    )
    *found, registered = shown.stdout.splitlines()
    assert "-o default" in registered
    return [word for word in found if word]


def test_completion_knows_commands_options_keys_and_leaves_files_to_the_shell() -> None:
    assert complete("hone", "runs", "sh") == ["show", "sheet"]
    assert "--metric" in complete("hone", "runs", "show", "--")
    assert complete("hone", "train", "--preset", "grpo_") == ["grpo_lora"]
    assert complete("hone", "train", "--pre") == ["--preset"]
    assert "trainer.resume_mode=" in complete("hone", "config", "show", "trainer.resume_")
    assert complete("hone", "train", "trainer.resume_mode", "=", "a") == ["auto"]
    for words in (["view", "runs/"], ["train", "data.train_files", "=", "tr"], ["runs", "show", ""]):
        assert complete("hone", *words) == []


@pytest.mark.slow
@pytest.mark.application("hone/cli", "hone/models", "hone/training/export.py", "constraints.txt")
def test_messages_of_other_packages_that_concern_nobody_are_not_shown() -> None:
    program = """if True:
        import logging, warnings
        from hone.cli.main import log_to_stderr
        log_to_stderr()
        import hone.training.export
        warnings.warn("`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.warn("another one", FutureWarning)
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).warning("Failed to load x.so; K is an Enum subclass")
            logging.getLogger(name).warning("a real one of %s", name)
    """
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert not any(noise in shown for noise in ("`is_gradient", "Failed to load", "Enum subclass")), shown
    assert "another one" in shown and "a real one of torchao" in shown and "a real one of torch.utils" in shown


def test_a_model_goes_to_a_folder_of_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import hone.hub.get

    def bring(name: str, out: Path, source: str) -> object:
        out.mkdir()
        return hone.hub.get.Brought("nowhere", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hone.hub.get, "get_model", bring)
    for name, folder in (("smollm2-135m", "smollm2-135m"), ("org/Näme-1b@main", "Näme-1b")):
        assert CliRunner().invoke(app, ["models", "get", name]).exit_code == 0
        assert (tmp_path / folder).is_dir()
