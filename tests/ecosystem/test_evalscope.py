"""The load test of evalscope, by ModelScope, against `hone serve`: no request fails."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.environments import foreign_python
from support.patience import LONG

pytestmark = pytest.mark.long("hone/agents/serving")
PACKAGES = ("evalscope[perf]==1.14.1",)
REQUESTS, TOKENS = 6, 12


@pytest.mark.parametrize("options", [("--stream",), ("--no-stream",), ("--api", "openai_responses")])
def test_no_request_of_a_load_test_fails(url: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    python = foreign_python("evalscope", *PACKAGES)
    path = "responses" if "openai_responses" in options else "chat/completions"
    (tmp_path / "prompts.txt").write_text("".join(f"Count from {number} on.\n" for number in range(REQUESTS)))
    command = [str(Path(python).parent / "evalscope"), "perf", "--url", f"{url}/v1/{path}", "--model", "smollm2"]
    command += ["--dataset", "line_by_line", "--dataset-path", str(tmp_path / "prompts.txt"), "--no-timestamp"]
    command += ["--number", str(REQUESTS), "--parallel", "2", "--max-tokens", str(TOKENS), "--seed", "1"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    ran = subprocess.run(
        [*command, "--outputs-dir", str(tmp_path / "out"), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    (path_of_summary,) = (tmp_path / "out").rglob("benchmark_summary.json")
    summary = json.loads(path_of_summary.read_text())
    assert (summary["Total Requests"], summary["Success Requests"], summary["Failed Requests"]) == (
        REQUESTS,
        REQUESTS,
        0,
    )
