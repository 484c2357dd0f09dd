"""`hone doctor` on simulated machines and on this one."""

import json
import os
import socket
import sys
from dataclasses import replace

import pytest
from support.messages import raises
from typer.testing import CliRunner

from hone.cli.main import app
from hone.preflight import doctor, machine
from hone.preflight.doctor import Check, diagnose, import_error
from hone.preflight.machine import GIB, GpuUser, Machine
from hone.preflight.rules import BEGIN, ELSEWHERE, END, RULES, index, index_page

SOUND = Machine(cpus=8, affinity=8, quota=None, memory=64 * GIB, shared_memory=8 * GIB, open_files=1 << 20)


def run(*words):
    return CliRunner().invoke(app, ["doctor", *map(str, words)], catch_exceptions=False)


@pytest.fixture
def checks(monkeypatch, tmp_path):
    """Return a function that diagnoses a simulated machine without importing packages."""
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
        ({"memory": GIB}, "memory", "warning", ["1.0 GiB", "hone plan"]),
        ({"shared_memory": GIB // 16}, "shared memory", "warning", ["0.062 GiB", "--shm-size=8g"]),
        ({"shared_memory": None}, "shared memory", "warning", ["/dev/shm"]),
        ({"open_files": 1024}, "open files", "warning", ["1024", "ulimit -n 65535"]),
        ({"gpu_users": (GpuUser(0, 4711, "VLLM::EngineCore", 41.0),)}, "gpu process", "warning", ["PID 4711", "kill 4711"]),
        ({"gpus": (machine.Gpu(0, "H100", 80, 0),)}, "device", "error", ["1 GPUs", "trainer.device=cpu"]),
        ({"broken": {"torch": "undefined symbol: x"}}, "torch", "error", ["undefined symbol: x", "force-reinstall 'torch"]),
        ({"broken": {"ray": "No module named 'y'"}}, "ray", "warning", ["No module named 'y'", "uninstall ray"]),
    ],
)  # fmt: skip
def test_problems_have_a_status_and_a_fix(checks, monkeypatch, facts, name, status, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    valid, check = checks().get(name), checks(**facts)[name]
    assert valid is None or valid.status == "ok", valid
    assert check.status == status and check.fix
    for word in words:
        assert word in f"{check.result} {check.fix}"


def test_threads_disk_ports_and_accounts(checks, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert checks()["OMP_NUM_THREADS"].fix.startswith("OMP_NUM_THREADS=8")
    monkeypatch.setattr(machine, "free_disk", lambda path: (tmp_path, GIB))
    assert checks()["disk"].status == "warning" and "1.0 GiB free" in checks()["disk"].result
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(doctor, "PORTS", {server.getsockname()[1]: "a test"})
        check = checks()[f"port {server.getsockname()[1]}"]
        assert check.status == "warning" and check.result == "a test: in use"
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        assert any(c.status == "error" for c in doctor._disk(tmp_path / "locked"))


def test_unsupported_versions(checks, monkeypatch):
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "4.9.9" if name == "transformers" else real(name))
    check = checks()["transformers"]
    assert check.status == "error" and "4.9.9" in check.result and "pip install 'transformers" in check.fix


def test_a_package_is_really_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_engine.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    (tmp_path / "crashing_engine.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_error("json") == ""
    assert import_error("broken_engine") == "ImportError: undefined symbol: _ZN3c10"
    assert "exit code -6" in import_error("crashing_engine")


def test_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "diagnose", lambda: [Check("python", "3.12"), Check("x", "y", "do z")])
    shown = run()
    assert shown.exit_code == 0 and "Fix: do z" in shown.output and "0 errors, 1 warnings" in shown.output
    as_json = json.loads(run("--json").output)
    assert as_json["status"] == "warning" and as_json["checks"][1] == {
        "name": "x",
        "status": "warning",
        "found": "y",
        "fix": "do z",
    }
    with_config = run("--json", "--preset", "grpo", "actor_rollout_ref.rollout.n=1", "data.train_files=nowhere.jsonl")
    assert with_config.exit_code == 2
    assert {"R19", "R42", "R08"} <= {finding["code"] for finding in json.loads(with_config.stdout)["findings"]}
    monkeypatch.setattr(doctor, "diagnose", lambda: [Check("torch", "no", "pip install torch", "error")])
    assert run().exit_code == 2


def test_every_code_is_in_the_index():
    entries = index()
    codes = {entry.code for entry in entries}
    assert {f"R{number:02}" for number in range(1, 64)} <= codes
    rule_codes = {entry.code for entry in RULES}
    assert not rule_codes & set(ELSEWHERE) - {"R37", "R58"} and all(entry.question.endswith(".") for entry in entries)
    listed = run("--rules").output
    assert all(code in listed for code in codes)
    assert json.loads(run("--rules", "--json").output)[0]["code"] == "R01"


def test_a_page_has_one_index():
    page = index_page(f"before\n{BEGIN}\nwritten before\n{END}\nafter\n")
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "written before" not in page
    assert index_page(page) == page
    with raises(ValueError, 2):
        index_page(page + page)


def test_the_command_is_cheap_to_import():
    import subprocess

    heavy = ["torch", "transformers", "pyarrow", "psutil", "packaging"]
    code = f"import hone.cli.doctor, hone.cli.reward, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
