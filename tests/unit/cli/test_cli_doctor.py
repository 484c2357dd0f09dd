"""`hone doctor`: what it finds on machines that lack something, and what it says of this one."""

import json
import os
import socket
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from hone.cli.doctor import app
from hone.preflight import doctor, machine
from hone.preflight.codes import BEGIN, ELSEWHERE, END, index, index_page
from hone.preflight.doctor import Check, diagnose, import_error
from hone.preflight.machine import GIB, GpuUser, Machine
from hone.preflight.rules import RULES

SOUND = Machine(cpus=8, affinity=8, quota=None, memory=64 * GIB, shared_memory=8 * GIB, open_files=1 << 20)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def checks(monkeypatch, tmp_path):
    """Diagnose a machine that lacks nothing but what is said; packages are not imported."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def look(broken=None, **facts):
        monkeypatch.setattr(machine, "look", lambda: replace(SOUND, **facts))
        monkeypatch.setattr(doctor, "import_error", lambda name: (broken or {}).get(name, ""))
        return {check.name: check for check in diagnose(tmp_path)}

    return look


@pytest.mark.parametrize(
    ("facts", "name", "status", "words"),
    [
        ({"quota": 1.5}, "cpu", "warning", ["quota 1.5", "trainer.num_threads=2"]),
        ({"memory": GIB}, "memory", "warning", ["1.0 GiB", "hone config check"]),
        ({"shared_memory": GIB // 16}, "shared memory", "warning", ["0.062 GiB", "--shm-size=8g"]),
        ({"shared_memory": None}, "shared memory", "warning", ["there is no /dev/shm"]),
        ({"open_files": 1024}, "open files", "warning", ["1024", "ulimit -n 65535"]),
        ({"gpu_users": (GpuUser(0, 4711, "VLLM::EngineCore", 41.0),)}, "gpu process", "warning", ["PID 4711", "kill 4711"]),
        ({"gpus": (machine.Gpu(0, "H100", 80, 0),)}, "device", "error", ["1 GPUs", "sees none", "CUDA build"]),
        ({"broken": {"torch": "undefined symbol: x"}}, "torch", "error", ["undefined symbol: x", "force-reinstall 'torch"]),
        ({"broken": {"ray": "No module named 'y'"}}, "ray", "warning", ["No module named 'y'", "pip uninstall ray"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_with_its_fix(checks, monkeypatch, facts, name, status, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sound, found = checks().get(name), checks(**facts)[name]
    assert sound is None or sound.status == "ok", sound
    assert found.status == status and found.fix
    for word in words:
        assert word in f"{found.found} {found.fix}"


def test_threads_disk_ports_and_accounts(checks, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert checks()["OMP_NUM_THREADS"].fix.startswith("OMP_NUM_THREADS=8")
    monkeypatch.setattr(machine, "free_disk", lambda path: (tmp_path, GIB))
    assert checks()["disk"].status == "warning" and "1.0 GiB free" in checks()["disk"].found
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(doctor, "PORTS", {server.getsockname()[1]: "a test"})
        found = checks()[f"port {server.getsockname()[1]}"]
        assert found.status == "warning" and found.found == "a test: in use"
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        assert any(c.status == "error" for c in doctor._disk(tmp_path / "locked"))


def test_versions_that_do_not_fit(checks, monkeypatch):
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "4.9.9" if name == "transformers" else real(name))
    found = checks()["transformers"]
    assert (
        found.status == "error" and "4.9.9, and Hone needs" in found.found and "pip install 'transformers" in found.fix
    )


def test_a_package_is_really_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_engine.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    (tmp_path / "crashing_engine.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_error("json") == ""
    assert import_error("broken_engine") == "ImportError: undefined symbol: _ZN3c10"
    assert "exit code -6" in import_error("crashing_engine")


def test_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "diagnose", lambda: [Check("python", "ok", "3.12"), Check("x", "warning", "y", "do z")])
    shown = run()
    assert shown.exit_code == 0 and "Fix: do z" in shown.output and "0 errors, 1 warnings" in shown.output
    as_json = json.loads(run("--json").output)
    assert as_json["status"] == "warning" and as_json["checks"][1]["fix"] == "do z"
    with_config = run("--json", "--preset", "grpo", "actor_rollout_ref.rollout.n=1", "data.train_files=nowhere.jsonl")
    assert with_config.exit_code == 2
    assert {"R19", "R42", "R08"} <= {finding["code"] for finding in json.loads(with_config.output)["findings"]}
    monkeypatch.setattr(doctor, "diagnose", lambda: [Check("torch", "error", "no", "pip install torch")])
    assert run().exit_code == 2


def test_every_code_has_its_place():
    entries = index()
    codes = {entry.code for entry in entries}
    assert {f"R{number:02}" for number in range(1, 64)} <= codes
    borne = {entry.code for entry in RULES}
    assert not borne & set(ELSEWHERE) - {"R37", "R58"} and all(entry.question.endswith(".") for entry in entries)
    listed = run("--rules").output
    assert all(code in listed for code in codes)
    assert json.loads(run("--rules", "--json").output)[0]["code"] == "R01"


def test_a_page_has_one_index():
    page = index_page(f"before\n{BEGIN}\nwritten before\n{END}\nbehind\n")
    assert page.startswith("before\n") and page.endswith("\nbehind\n") and "written before" not in page
    assert index_page(page) == page
    with pytest.raises(ValueError, match="2 beginnings"):
        index_page(page + page)


def test_the_command_is_cheap_to_import():
    import subprocess

    heavy = ["torch", "transformers", "pyarrow", "psutil", "packaging"]
    code = f"import hone.cli.doctor, hone.cli.reward, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
