"""`hone serve`: a model behind an OpenAI-compatible endpoint, until a signal ends it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.errors import ConfigError

log = logging.getLogger("hone.serve")


@dataclass(frozen=True)
class ServeRequest:
    """What `hone serve` is asked; the attributes are its options."""

    model: str
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    max_model_len: int | None = None
    renderer: str = "auto"
    parser: str = "auto"


def serve(request: ServeRequest) -> None:
    """Load the model, then serve it in the foreground.

    Raises:
        HoneError: the model cannot be loaded, or the address cannot be served.
    """
    try:
        from hone.agents.serving.server import HttpServer, check_access
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the endpoint needs the package '{error.name}', which is not installed",
            fix='pip install "hone-rl[serve]"',
        ) from error
    from hone.agents.client import EngineClient
    from hone.agents.serving.app import Endpoint
    from hone.agents.serving.asking import Service
    from hone.agents.serving.gateway import Gateway
    from hone.trainers.evaluation import open_model, weights_of
    from hone.trainers.inputs import stop_tokens

    token = request.token or None
    check_access(request.host, token)
    longest = request.max_model_len or context_length(weights_of(request.model))
    engine, tokenizer = open_model(request.model, longest)
    with engine_loop() as loop:
        service = Service(
            model=request.name or Path(request.model).resolve().name,
            tokenizer=tokenizer,
            gateway=Gateway(EngineClient(engine), loop),
            max_model_len=longest,
            stop_token_ids=stop_tokens(tokenizer, weights_of(request.model)),
            renderer=request.renderer,
            parser=request.parser,
        )
        server = HttpServer(Endpoint(service, token=token).app, host=request.host, port=request.port)
        log.info("serving '%s' at %s/v1 (%s)", service.model, server.url, "token asked for" if token else "no token")
        try:
            server.run()
        finally:
            engine.close()


def context_length(directory: str) -> int:
    """Most tokens that the model in a Hugging Face directory was made for; at most 32768, unless asked for more.

    Raises:
        ConfigError: its configuration does not say.
    """
    config: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    found = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    if not found:
        raise ConfigError(
            f"the configuration in {directory} has no max_position_embeddings", fix="--max-model-len 4096"
        )
    return min(int(found), 32768)


@contextmanager
def engine_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, on which an engine runs while HTTP has this thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="hone-engine", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
