"""`hone plan` and what `hone runs show` makes of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hone.cli import runs
from hone.cli.main import app, main
from hone.insight.run_directory import RunDirectory
from hone.preflight.plan import devices as local
from hone.preflight.plan.devices import GIB, Device

SETTINGS = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return ["plan", "--preset", "grpo", f"actor_rollout_ref.model.path={tmp_path}"]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_plan_from_the_config_alone(words: list[str]) -> None:
    done = call(*words, "--device", "h200", "--json")
    plan = json.loads(done.stdout)
    assert done.exit_code == 0 and not plan["fits"] and plan["fits_with_knobs"]
    assert plan["model"]["parameters"] == 8030261248, "of Llama 3.1 8B"
    assert plan["knobs"][0]["setting"].startswith("actor_rollout_ref.")
    (pool,) = plan["pools"]
    for phase in pool["phases"].values():
        assert phase["total"] == pytest.approx(sum(size for name, size in phase.items() if name != "total"))
    text = call(*words, "--device", "h200").output
    assert "8.03 billion parameters" in text and plan["knobs"][0]["setting"] in text


def test_a_placement(words: list[str]) -> None:
    done = call(*words, "--cluster", "8xH100", "actor_rollout_ref.actor.dtype=bfloat16")
    assert done.exit_code == 0 and "trainer.n_gpus_per_node=8" in done.output
    assert "gpu_memory_utilization=0.6" in done.output, "half of a GPU does not hold the engine's weights twice"


def test_exit_code_when_nothing_fits(words: list[str]) -> None:
    assert call(*words, "--device", "T4").exit_code == 2


@pytest.mark.parametrize(
    ("more", "mention"),
    [
        (["--cluster", "many"], "'many'"),
        (["--device", "H1000"], "'H1000'"),
        (["--cluster", "8xH100", "--of", "sft"], "`hone sft`"),
    ],
)
def test_mistakes(words: list[str], more: list[str], mention: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "sft" in more:
        words = ["plan"]
    with pytest.raises(SystemExit) as ended:
        main([*words, *more])
    assert ended.value.code == 2 and mention in capsys.readouterr().err


def test_this_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[str] = []

    def measure(name: str, on_cpu: bool, machine: Any) -> Device:
        measured.append(name)
        return Device(name, on_cpu, 0.0, 1e11, 1e11, 1e10, 1e-6, 5e9, 1e9, 0.0, 0.4 * GIB)

    monkeypatch.setattr(local, "_measured", measure)
    here = [*words, "trainer.device=cpu", "--json"]
    first = json.loads(call(*here).output)
    assert first["device"]["wide_rate"] == 1e11 and first["device"]["memory"] > GIB
    assert json.loads(call(*here).output) == first and len(measured) == 1
    _ = call(*here, "--measure")
    assert len(measured) == 2
    (tmp_path / "hone" / "devices.json").write_text('{"x": {"name": "of another version"}}')
    _ = call(*here)
    assert len(measured) == 3


@pytest.mark.long("hone/preflight/plan", "hone/cli")
def test_a_measured_device_is_plausible() -> None:
    from hone.preflight.machine import look

    found = local._measured("here", True, look())
    assert 1e9 < found.wide_rate < 1e14 and 1e8 < found.bandwidth < 1e12 and 1e-8 < found.launch < 1e-2
    assert 0.1 * GIB < found.overhead < 4 * GIB


def test_prediction_and_measurement_are_shown(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    plan = [{"pool": "main", "peak_gib": 1.1, "peak_phase": "update", "phases": {}, "roles": ["actor"]}]
    directory.expect(plan)
    directory.start(seed=1, config_yaml="a: 1\n")
    memory = {"main[0]": {"bare": 0.4, "peak": 1.4}}
    directory.update_status("finished", memory=memory)
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["plan"] == plan and record["memory"] == memory
    (text,) = runs._memory(record).values()
    assert all(part in text for part in ("1.00 GiB", "0.40 GiB", "1.10 GiB", "(update)", "1.1 times"))
    assert "main[0]" in call("runs", "show", str(tmp_path / "run")).output
    directory.start(seed=1, config_yaml="a: 1\n")
    assert json.loads((tmp_path / "run/run.json").read_text())["memory"] == {}, "of this run, not of the one before"


def test_a_resumed_run_keeps_its_highest_peak(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    small, large = {"bare": 0.5, "peak": 0.6}, {"bare": 0.4, "peak": 1.4}
    directory.start(seed=1, config_yaml="a: 1\n")
    for used, kept in ((large, large), (small, large), ({"bare": 0.1, "peak": 2.0}, {"bare": 0.1, "peak": 2.0})):
        directory.update_status("finished", memory={"main[0]": used}, last_step=2)
        directory.start(seed=1, config_yaml="a: 1\n", last_step=2)
        assert json.loads((tmp_path / "run/run.json").read_text())["memory"] == {"main[0]": kept}
