"""A served model: its options, and the engine that answers for it."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hone.data.model_settings import read_settings
from hone.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hone.generation.pool import EnginePool
    from hone.generation.protocol import Engine

log = logging.getLogger("hone.serve")

MAX_DEFAULT_LENGTH = 32768
"""Maximum of the context length where the user sets none."""


@dataclass(frozen=True)
class ServerRequest:
    """Request of any `hone serve`; the attributes are its options."""

    model: str
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    max_model_len: int | None = None
    allow_long_max_model_len: bool = False
    dtype: str = "auto"

    @property
    def served_name(self) -> str:
        """Name of the model for clients."""
        return self.name or Path(self.model).resolve().name


@dataclass(frozen=True)
class ServeRequest(ServerRequest):
    """Request of `hone serve` without `--train`."""

    chat_template: str | None = None
    renderer: str = "auto"
    parser: str = "auto"
    engine: str = "native"
    replicas: int | None = None
    audit: Path | None = None


def open_engine(
    request: ServeRequest, max_model_len: int, *, computing: bool = False
) -> tuple[Engine, PreTrainedTokenizerBase]:
    """Open the native engine in this process; for another engine or with replicas, start separate processes.

    With ``computing`` the process serves another model already, and any thread may call this.

    Raises:
        HoneError: the model cannot be loaded, or the engine does not start.
    """
    from hone.models.devices import run_device
    from hone.trainers.evaluation import load_engine, open_model

    if request.replicas is None and request.engine == "native":
        if computing:
            return load_engine(request.model, max_model_len, run_device("auto"), request.dtype)
        return open_model(request.model, max_model_len, request.dtype)
    count, dtype = request.replicas or 1, request.dtype
    return open_replicas(request.model, max_model_len, engine=request.engine, count=count, dtype=dtype)


def open_replicas(
    path: str, max_model_len: int, *, engine: str, count: int, dtype: str
) -> tuple[EnginePool, PreTrainedTokenizerBase]:
    """Start replicas of an engine as processes with disjoint cores; also return the tokenizer.

    For the arguments see :class:`ServeRequest`.

    Raises:
        HoneError: the directory has only an adapter, or the engine is not installed or does not start.
    """
    from hone.data.tokenizer import load_tokenizer
    from hone.generation import SERVED
    from hone.generation.build import cores_of, threads_of
    from hone.generation.environments import interpreter_of
    from hone.generation.pool import EnginePool
    from hone.generation.remote import LaunchPlan, ServedEngine
    from hone.models.devices import dtype_on, run_device
    from hone.training.export import base_of_adapter, find_actor

    actor = find_actor(path)
    if engine not in ("native", *SERVED):
        raise ConfigError(f"engine '{engine}' cannot be served", fix=did_you_mean(engine, ("native", *SERVED)))
    if base_of_adapter(actor) is not None:
        raise ConfigError(
            f"{actor} has only an adapter, but replicas load complete weights",
            fix=f"hone export --model {path} --out DIR --merge, then --model DIR; or omit --replicas",
        )
    logs = Path(tempfile.mkdtemp(prefix="hone-serve-"))
    threads = threads_of(count)
    dtype = dtype_on(run_device("auto"), dtype)

    def start(index: int) -> ServedEngine:
        return ServedEngine.start(
            LaunchPlan(
                engine=engine,
                python=str(interpreter_of(engine)),
                model=str(Path(actor).absolute()),
                tokenizer=str(Path(actor).absolute()),
                dtype=dtype,
                max_num_seqs=256,
                max_model_len=max_model_len,
                cpus=cores_of(index, threads),
                log=logs / f"{engine}-{index}.log",
            )
        )

    log.info("%d replicas of %s, logs in %s", count, engine, logs)
    return EnginePool(start, count, concurrency=256), load_tokenizer(str(actor))


def context_length(directory: str, wanted: int | None = None, *, may_exceed: bool = False) -> int:
    """Return the context length to serve.

    Args:
        directory: Hugging Face directory of the model.
        wanted: context length that the user wants; None takes the model's, at most 32768.
        may_exceed: True to serve more positions than the model's configuration has.

    Raises:
        ConfigError: the configuration has no number of positions, or fewer than are wanted.
    """
    positions = _text_config(directory, "max_position_embeddings")
    if wanted is None and not positions:
        raise ConfigError(
            f"the configuration in {directory} has no max_position_embeddings", fix="set --max-model-len 4096"
        )
    if wanted is not None and positions and wanted > positions and not may_exceed:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the {positions} positions of the model (max_position_embeddings)",
            why="the model was not trained on later positions, and what it writes there may be useless",
            fix=f"--max-model-len {positions}, or --allow-long-max-model-len to serve more anyway",
            where=directory,
        )
    return wanted or min(int(positions or 0), MAX_DEFAULT_LENGTH)


def vocabulary_size(directory: str) -> int | None:
    """Return the number of tokens of the model in a Hugging Face directory; None if its configuration has no such number."""
    return _text_config(directory, "vocab_size")


def _text_config(directory: str, key: str) -> int | None:
    config = read_settings(directory)
    return config.get(key) or (config.get("text_config") or {}).get(key)
