"""The process of an engine: it runs in the engine's environment and ends with Hone.

It reads its settings from standard input, whose end means that Hone has ended. It reports its port on standard output when
it is ready. All output of the engine goes to a log file. It leads a process group, so that no child process outlives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hone.errors import ConfigError, GenerationError, HoneError
from hone.generation.remote import messages
from hone.insight import activity

_PACKAGE = Path(__file__).resolve().parents[2]
_PROGRAM = "from hone.generation.server.serve import main; main()"
_TAIL_BYTES = 200_000
_SHOWN_LINES = 6


@dataclass(frozen=True)
class LaunchPlan:
    """Settings of an engine's process."""

    engine: str  # native, vllm, sglang or trtllm
    python: str  # interpreter of the engine's environment
    model: str  # Hugging Face directory of the initial weights
    tokenizer: str  # directory of the tokenizer, for stop strings
    dtype: str  # compute dtype: float32, bfloat16 or float16
    max_num_seqs: int  # maximum of sequences decoded at once
    max_model_len: int  # maximum of tokens in prompt and response
    max_cache_tokens: int | None = None  # capacity of the KV cache; None for the engine's default
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the engine, by its names
    cpus: tuple[int, ...] = ()  # CPU cores of the process; empty means all of Hone's
    # rank and scale (``r``, ``lora_alpha``) of the adapter, if weight syncs send only an adapter
    lora: dict[str, float] | None = None
    sleeps: bool = False  # whether the engine frees its memory between generations (``sleep``)
    devices: tuple[str, ...] = ()  # GPUs of the process, as in CUDA_VISIBLE_DEVICES; empty means all of Hone's
    host: str = "127.0.0.1"  # address to listen on
    port: int = 0  # to listen on; 0 for any free one
    log: Path = Path(os.devnull)  # file for the output
    start_seconds: float = 600.0  # time limit of the start

    def settings(self) -> dict[str, Any]:
        outside = ("python", "devices", "log", "start_seconds")
        return {name: value for name, value in asdict(self).items() if name not in outside}


class EngineProcess:
    """A running engine; ``token`` is what clients must send, None creates one.

    Raises:
        ConfigError: the interpreter does not exist, or the engine refuses its settings.
        GenerationError: it did not start; the message has the last lines of its log.
    """

    def __init__(self, plan: LaunchPlan, token: str | None = None) -> None:
        self.plan = plan
        self.token = secrets.token_urlsafe(24) if token is None else token  # that its clients must send
        self._modules = tempfile.TemporaryDirectory(prefix="hone-engine-")
        # the engine's environment gets the package `hone`, and nothing else of Hone's environment
        Path(self._modules.name, "hone").symlink_to(_PACKAGE, target_is_directory=True)
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._popen = self._spawn()
            ready = self._ready_message()
        except BaseException:
            self.kill()
            raise
        self.port: int = ready["port"]  # of its server
        self.description: dict[str, Any] = ready["description"]  # of the engine

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._popen.pid

    def alive(self) -> bool:
        return self._popen.poll() is None

    def exit_reason(self) -> str:
        """Return how the process ended, with the path of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5)
        code = self._popen.returncode
        how = (
            "closed its connection"
            if code is None
            else f"was killed by signal {-code}"
            if code < 0
            else f"ended with code {code}"
        )
        return f"engine {self.plan.engine} (process {self.pid}) {how}; its log is {self.plan.log}"

    def kill(self) -> None:
        """Kill the process and its children."""
        popen: subprocess.Popen[bytes] | None = getattr(self, "_popen", None)
        if popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
            for pipe in (popen.stdin, popen.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._modules.cleanup()

    # start -----------------------------------------------------------------------------------------------------------

    def _spawn(self) -> subprocess.Popen[bytes]:
        plan = self.plan
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        if plan.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(plan.devices)
        with plan.log.open("ab") as log:
            try:
                popen = subprocess.Popen(
                    [plan.python, "-c", _PROGRAM],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    env={**environment, "PYTHONPATH": self._modules.name, "PYTHONUNBUFFERED": "1"},
                )
            except OSError as error:
                raise ConfigError(
                    f"engine {plan.engine} cannot start: no interpreter {plan.python} ({error.strerror})",
                    why="engines run in separate environments",
                    fix=f"hone engines install {plan.engine}, or rollout.engine_env=DIR of its environment",
                    where="actor_rollout_ref.rollout.engine_env",
                ) from error
        assert popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already: its first message, or its log, says why
            popen.stdin.write(
                json.dumps({**plan.settings(), "token": self.token, "parent": os.getpid()}).encode() + b"\n"
            )
            popen.stdin.flush()
        return popen

    def _ready_message(self) -> dict[str, Any]:
        pipe, deadline = self._popen.stdout, time.monotonic() + self.plan.start_seconds
        assert pipe is not None
        with activity.waiting(f"engine {self.plan.engine} to start", limit=self.plan.start_seconds):
            output = bytearray()
            while not output.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._not_started(f"is not ready after {self.plan.start_seconds:.0f} s", late=True)
                if select.select([pipe], [], [], min(left, 1.0))[0]:
                    chunk = os.read(pipe.fileno(), 65536)
                    if not chunk:
                        raise self._not_started(self.exit_reason())
                    output += chunk
                    activity.tick()
        message = json.loads(bytes(output).splitlines()[0])
        if "error" in message:
            raise self._refused(message["error"])
        return message

    def _refused(self, error: dict[str, str]) -> HoneError:
        if error.get("code") == ConfigError.code:
            return messages.error_of(error)
        return self._not_started(error["what"])

    def _not_started(self, problem: str, *, late: bool = False) -> GenerationError:
        lines = log_errors(self.plan.log)
        fix = "rollout.engine_start_seconds=1200" if late else suggested_fix("\n".join([problem, *lines]))
        shown = "".join(f"\n    {line}" for line in lines)
        return GenerationError(
            f"engine {self.plan.engine} did not start: {problem}{shown}",
            why=f"the whole log is {self.plan.log}",
            fix=fix,
            where="actor_rollout_ref.rollout.name",
        )


def log_errors(log: Path) -> list[str]:
    """Return the last errors in an engine's log, or its last lines if there are no errors."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if any(mark in line for mark in ("Error:", "error:", "Error ", "Errno"))]
    return [line[-400:] for line in (list(dict.fromkeys(errors)) or lines)[-_SHOWN_LINES:]]


_FIXES = (
    (("out of memory", "No available memory", "KV cache", "kv cache", "gpu_memory_utilization", "Cannot allocate memory"),
     "lower actor_rollout_ref.rollout.max_cache_tokens, max_num_seqs or gpu_memory_utilization"),
    (("architectures", "not supported for now", "is not supported by vLLM", "Unsupported architecture"),
     "the engine does not support this model: actor_rollout_ref.rollout.name=native"),
    (("No module named",), "the engine's environment lacks a package: hone engines install NAME --force"),
    (("Address already in use",), "another --port, or 0 for any that is free"),
)  # fmt: skip


def suggested_fix(text: str) -> str:
    """Return the fix for an engine's error at the start."""
    for marks, fix in _FIXES:
        if any(mark in text for mark in marks):
            return fix
    return "see the log, or actor_rollout_ref.rollout.name=native"
