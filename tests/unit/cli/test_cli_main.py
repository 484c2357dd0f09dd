"""The frame of the command line: help without imports, exit codes, and errors shown once."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer
from support.patience import SOON

from hone.cli import main as cli
from hone.cli.main import Entry, load
from hone.errors import ConfigError

HEAVY = ("torch", "transformers", "hydra", "omegaconf", "numpy", "pyarrow", "ray", "matplotlib")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a function as the command `hone probe`."""

    def install(function: Any) -> None:
        module = types.ModuleType("hone.cli.probe")
        module.probe = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "hone.cli.probe", module)
        monkeypatch.setitem(cli.COMMANDS, "probe", Entry("probe:probe", "Probe."))

    return install


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys\n"
        "from hone.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
        "loaded = [n for n in sys.modules if n.startswith('hone.') and n not in"
        " ('hone.cli', 'hone.cli.main', 'hone.errors', 'hone.startup', 'hone.threads')]\n"
        "assert not loaded, loaded\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON, check=False)
    assert result.returncode == 0, result.stderr
    for name, entry in cli.COMMANDS.items():
        assert name in result.stdout and entry.help[:30] in result.stdout


def test_a_background_job_goes_on_ignoring_interrupts() -> None:
    code = (
        "import signal\n"
        "from hone.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "try: main(['--version'])\n"
        "except SystemExit: assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=SOON, check=True)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, name, "--help")
    assert code == 0 and f"hone {name}" in out


def test_importing_a_command_loads_nothing_heavy() -> None:
    modules = sorted({entry.place.partition(":")[0] for entry in cli.COMMANDS.values()})
    code = (
        "import importlib, os, sys, typer\n"
        f"for module in {modules}:\n"
        "    if not os.fork():\n"  # of a process that has imported none of the others
        "        importlib.import_module(f'hone.cli.{module}')\n"
        f"        print(module, *[name for name in {HEAVY} if name in sys.modules], flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON, check=True)
    assert result.stdout.splitlines() == modules, result.stderr


def test_a_function_is_a_command_with_options_anywhere(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def probe(words: list[str], loud: bool = False) -> None:
        typer.echo(f"{words} {loud}")

    command(probe)
    assert run(capsys, "probe", "a", "--loud", "b")[:2] == (0, "['a', 'b'] True\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from hone import __version__

    assert run(capsys, "--version")[:2] == (0, f"hone {__version__}\n")


def test_unknown_command_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "trian")
    assert code == 2 and "train" in err


def test_user_error_is_one_message_and_exit_2(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    error = ConfigError("x=[bold]1[/bold] " + "long " * 60, why="[red]", fix="y=[a,b]", where="k[0]", code="R99")

    def probe() -> None:
        raise error

    command(probe)
    code, out, err = run(capsys, "probe")
    assert (code, out) == (2, "")
    assert err == error.render() + "\n"


@pytest.mark.parametrize("arguments", [("--debug", "probe"), ("probe", "--debug"), ("probe", "a=1", "--debug")])
def test_debug_shows_the_traceback(
    command: Any, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    def probe(words: list[str] | None = typer.Argument(None)) -> None:  # noqa: B008
        raise ConfigError("broken", code="R99")

    command(probe)
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "Traceback" in err and "in probe" in err and "R99: broken" in err


def test_debug_after_two_dashes_belongs_to_the_command(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def probe(words: list[str]) -> None:
        typer.echo(words)

    command(probe)
    assert run(capsys, "probe", "--", "--debug")[1] == "['--debug']\n"


def test_interrupt_exits_130(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def probe() -> None:
        raise KeyboardInterrupt

    command(probe)
    assert run(capsys, "probe")[0] == 130


def test_a_bug_keeps_its_traceback(command: Any) -> None:
    def probe() -> None:
        raise ZeroDivisionError

    command(probe)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_exit_code_of_a_command(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def probe() -> None:
        raise typer.Exit(143)

    command(probe)
    assert run(capsys, "probe")[0] == 143


@pytest.mark.parametrize(("name", "module"), [("train", "hone.trainers.rl"), ("sft", "hone.trainers.sft")])
def test_train_checks_then_trains(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("hone.preflight.check", lambda config: calls.append(f"check {config.trainer.seed}"))

    def train(config: Any) -> int:
        calls.append(f"train {config.trainer.seed}")
        return 143

    monkeypatch.setattr(f"{module}.train", train)
    monkeypatch.setattr("hone.preflight.training_rows", lambda config, read_rows=None: 640)
    code, out, _ = run(capsys, name, "trainer.seed=7")
    assert code == 143
    assert ("plan: 32 " if name == "train" else "plan: 64 ") in out
    assert calls == ["check 7", "train 7"]


def test_dry_run_prints_the_plan_and_does_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hone.preflight.check", lambda config: None)
    monkeypatch.setattr("hone.trainers.rl.train", lambda config: pytest.fail("it trained"))
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n' * 65)
    code, out, _ = run(capsys, "train", "--preset", "grpo", "--dry-run", f"data.train_files={tmp_path}/d.jsonl")
    assert code == 0 and "plan: 32 prompts x 8 = 256 sequences" in out and "2 steps an epoch" in out
    assert not (tmp_path / "runs").exists()


def test_wrong_key_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "train", "algorithm.group_size=8")
    assert code == 2 and "R09" in err and "actor_rollout_ref.rollout.n" in err and "Traceback" not in err


def test_config_show_and_changed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "config", "show", "--preset", "grpo", "trainer.seed=5")
    assert code == 0 and "  seed: 5\n" in out and "adv_estimator: grpo" in out and "${" not in out
    out = run(capsys, "config", "show", "--of", "sft", "trainer.seed=5", "--changed")[1]
    assert out == "trainer.seed=5  # command line\n"
    shown = json.loads(run(capsys, "config", "show", "--json")[1])
    assert shown["trainer"]["seed"] == 1 and set(shown) >= {"data", "actor_rollout_ref", "critic", "reward"}


def test_config_explain(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "config", "explain", "rollout.temperature")[1]
    assert "actor_rollout_ref.rollout.temperature  (hone train)" in out and "Default: 1" in out and ">= 0" in out
    assert "algorithm.kl_ctrl.horizon" in run(capsys, "config", "explain", "algorithm.kl_ctrl")[1]
    rows = json.loads(run(capsys, "config", "explain", "trainer.seed", "--json")[1])
    assert [(row["command"], row["key"], row["default"]) for row in rows] == [
        (command, "trainer.seed", 1) for command in ("train", "sft", "prefer", "reward-model")
    ]
    code, _, err = run(capsys, "config", "explain", "grup_size")
    assert code == 2 and "actor_rollout_ref.rollout.n" in err


def test_config_presets(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "config", "presets")[1]
    assert "hone train --preset grpo:" in out and "hone sft --preset lora:" in out


def test_table_points_at_commands() -> None:
    for entry in cli.COMMANDS.values():
        assert load(entry.place) is not None
