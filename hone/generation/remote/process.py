"""The process of an engine: started in the engine's own environment, supervised, and gone when Hone is.

It learns what to be from its standard input, whose end tells it that Hone is gone; it says on its standard output when it is
ready and on which port; all that the engine prints goes to a log file. It leads a process group of its own, so that nothing
the engine starts outlives it.
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
_PROGRAM = "from hone.generation.server.program import main; main()"
_TAIL_BYTES = 200_000
_SHOWN_LINES = 6


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that an engine's process must know.

    Attributes:
        engine: its name: native, vllm, sglang or trtllm.
        python: interpreter of the environment that the engine is installed in.
        model: Hugging Face directory whose weights it begins with.
        tokenizer: directory of the tokenizer, for stop strings.
        dtype: compute dtype, float32 or bfloat16.
        max_num_seqs: most sequences decoded at once.
        max_model_len: longest prompt with response.
        max_cache_tokens: capacity of the key-value cache; None leaves it to the engine.
        options: further arguments of the engine, by its own names.
        cpus: cores that it may use; empty means all of Hone's.
        lora: rank and scale (``r``, ``lora_alpha``) of the adapter that it takes new weights of, instead of the model's.
        host: address it listens on.
        port: it listens on; 0 takes a free one.
        log: file for what it prints.
        start_seconds: seconds it may take to be ready.
    """

    engine: str
    python: str
    model: str
    tokenizer: str
    dtype: str
    max_num_seqs: int
    max_model_len: int
    max_cache_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    lora: dict[str, float] | None = None
    host: str = "127.0.0.1"
    port: int = 0
    log: Path = Path(os.devnull)
    start_seconds: float = 600.0

    def settings(self) -> dict[str, Any]:
        """What is sent to the process."""
        return {name: value for name, value in asdict(self).items() if name not in ("python", "log", "start_seconds")}


class EngineProcess:
    """A running engine.

    Attributes:
        port: it listens on.
        token: it wants to see.
        description: what it said of itself.

    Args:
        plan: what to start.
        token: it should want; None makes one.

    Raises:
        ConfigError: there is no such interpreter, or the engine refuses its settings.
        GenerationError: it did not start; the message has its own last words.
    """

    def __init__(self, plan: LaunchPlan, token: str | None = None) -> None:
        self.plan = plan
        self.token = secrets.token_urlsafe(24) if token is None else token
        self._modules = tempfile.TemporaryDirectory(prefix="hone-engine-")
        # the engine's environment sees Hone, and nothing else of the environment that Hone is installed in
        Path(self._modules.name, "hone").symlink_to(_PACKAGE, target_is_directory=True)
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._popen = self._spawn()
            said = self._first_words()
        except BaseException:
            self.kill()
            raise
        self.port: int = said["port"]
        self.description: dict[str, Any] = said["description"]

    @property
    def pid(self) -> int:
        """Its process id, which is that of its process group too."""
        return self._popen.pid

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._popen.poll() is None

    def obituary(self) -> str:
        """Why it is gone, with its last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5)
        code = self._popen.returncode
        how = "hung up" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"engine {self.plan.engine} (process {self.pid}) {how}; its log is {self.plan.log}"

    def kill(self) -> None:
        """End it and everything that it started."""
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

    # beginning -------------------------------------------------------------------------------------------------------

    def _spawn(self) -> subprocess.Popen[bytes]:
        plan = self.plan
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        with plan.log.open("ab") as log:
            try:
                popen = subprocess.Popen(
                    [plan.python, "-c", _PROGRAM],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    env={**kept, "PYTHONPATH": self._modules.name, "PYTHONUNBUFFERED": "1"},
                )
            except OSError as error:
                raise ConfigError(
                    f"engine {plan.engine} has no environment at {plan.python} ({error.strerror})",
                    why="engines live in environments of their own, apart from Hone's",
                    fix=f"hone engines install {plan.engine}, or rollout.engine_env=DIR of the environment that has it",
                    where="actor_rollout_ref.rollout.engine_env",
                ) from error
        assert popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already: its first words, or their absence, tell why
            popen.stdin.write(
                json.dumps({**plan.settings(), "token": self.token, "parent": os.getpid()}).encode() + b"\n"
            )
            popen.stdin.flush()
        return popen

    def _first_words(self) -> dict[str, Any]:
        """What it says when it is ready.

        Raises:
            HoneError: it cannot be.
        """
        pipe, deadline = self._popen.stdout, time.monotonic() + self.plan.start_seconds
        assert pipe is not None
        with activity.waiting(f"engine {self.plan.engine} to start", limit=self.plan.start_seconds):
            said = bytearray()
            while not said.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._not_started(f"is not ready after {self.plan.start_seconds:.0f} s", late=True)
                if select.select([pipe], [], [], min(left, 1.0))[0]:
                    part = os.read(pipe.fileno(), 65536)
                    if not part:
                        raise self._not_started(self.obituary())
                    said += part
                    activity.tick()
        words = json.loads(bytes(said).splitlines()[0])
        if "error" in words:
            raise self._refused(words["error"])
        return words

    def _refused(self, error: dict[str, str]) -> HoneError:
        if error.get("code") == ConfigError.code:
            return messages.error_of(error)
        return self._not_started(error["what"])

    def _not_started(self, problem: str, *, late: bool = False) -> GenerationError:
        words = last_words(self.plan.log)
        fix = "rollout.engine_start_seconds=1200" if late else remedy("\n".join([problem, *words]))
        shown = "".join(f"\n    {line}" for line in words)
        return GenerationError(
            f"engine {self.plan.engine} did not start: {problem}{shown}",
            why=f"the whole log is {self.plan.log}",
            fix=fix,
            where="actor_rollout_ref.rollout.name",
        )


def last_words(log: Path) -> list[str]:
    """The lines of an engine's log that say what went wrong: its last errors, or else its last lines."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if any(mark in line for mark in ("Error:", "error:", "Error ", "Errno"))]
    return [line[-400:] for line in (list(dict.fromkeys(errors)) or lines)[-_SHOWN_LINES:]]


_REMEDIES = (
    (("out of memory", "No available memory", "KV cache", "kv cache", "gpu_memory_utilization", "Cannot allocate memory"),
     "less memory: actor_rollout_ref.rollout.max_cache_tokens, max_num_seqs or gpu_memory_utilization lower"),
    (("architectures", "not supported for now", "is not supported by vLLM", "Unsupported architecture"),
     "the engine does not know this model: actor_rollout_ref.rollout.name=native"),
    (("No module named",), "the engine's environment lacks a package: hone engines install NAME --force"),
    (("Address already in use",), "another --port, or 0 for any that is free"),
)  # fmt: skip


def remedy(text: str) -> str:
    """What to change, by what an engine says when it fails to start."""
    for marks, fix in _REMEDIES:
        if any(mark in text for mark in marks):
            return fix
    return "look into the log, or actor_rollout_ref.rollout.name=native"
