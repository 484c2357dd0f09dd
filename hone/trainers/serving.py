"""Serving of a model through an OpenAI-compatible endpoint, until a signal (`hone serve`)."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hone.errors import ConfigError, HoneError
from hone.extras import install_command
from hone.insight.audit import AuditLog
from hone.trainers.served_model import ServeRequest, ServerRequest, context_length, open_engine, vocabulary_size

if TYPE_CHECKING:
    from hone.agents.serving.server import HttpServer
    from hone.agents.suites import Suite, TaskScore

SWITCH_SECONDS = 0.0002
"""Longest wait of the engine's thread for the interpreter while another thread computes.

An operation of torch releases the interpreter and then waits for it. With Python's default of 5 ms, a decode step of a hundred
operations would wait half a second while the endpoint reads a large request.
"""

log = logging.getLogger("hone.serve")
T = TypeVar("T")


def prepare_server(request: ServerRequest) -> int:
    """Check the packages, the address and the context length of a server; return the context length.

    Raises:
        ConfigError: a package is missing, the address needs a token, or the model has no such context.
    """
    try:
        from hone.agents.serving.server import check_access
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the endpoint needs the package '{error.name}', which is not installed",
            fix=install_command("serve"),
        ) from error
    from hone.trainers.evaluation import weights_of

    check_access(request.host, request.token or None)
    sys.setswitchinterval(SWITCH_SECONDS)
    return context_length(weights_of(request.model), request.max_model_len, may_exceed=request.allow_long_max_model_len)


def serve(request: ServeRequest) -> None:
    """Load the model and serve it in the foreground.

    Raises:
        HoneError: the model cannot be loaded, or the address is not available.
    """
    with served(request) as server:
        server.run()


@contextmanager
def served(request: ServeRequest) -> Iterator[HttpServer]:
    """Load the model, and yield a server of it that does not run yet.

    Raises:
        HoneError: the model cannot be loaded, or the address is not available.
    """
    max_model_len = prepare_server(request)
    from hone.agents.episode import EngineClient
    from hone.agents.serving.app import Endpoint
    from hone.agents.serving.gateway import Gateway
    from hone.agents.serving.server import HttpServer
    from hone.agents.serving.service import TOOLS_AS_TEXT, Service
    from hone.cluster.rollout import scorer_of
    from hone.data.tokenizer import set_template
    from hone.trainers.evaluation import stops_of, weights_of
    from hone.trainers.served_releases import Releases

    token = request.token or None
    check_names(request)
    audit = AuditLog(request.audit) if request.audit is not None else None
    with engine_loop() as loop:
        engine, tokenizer = call_on_loop(loop, lambda: open_engine(request, max_model_len))
        if request.chat_template is not None:
            set_template(tokenizer, request.chat_template)
        service = Service(
            model=request.served_name,
            tokenizer=tokenizer,
            gateway=Gateway(EngineClient(engine), loop),
            max_model_len=max_model_len,
            vocabulary=vocabulary_size(weights_of(request.model)),
            stop_token_ids=stops_of(tokenizer, request.model),
            renderer=request.renderer,
            parser=request.parser,
            prompt_log_probs=scorer_of(engine),
            audit=audit,
        )
        releases = Releases(request, loop)
        service.release = releases.served
        if service.tools_as_text:
            log.warning("%s", TOOLS_AS_TEXT)
        endpoint = Endpoint(service, token=token, open_release=releases.open, close=releases.closing(service))
        server = HttpServer(endpoint.app, host=request.host, port=request.port)
        log.info("serving '%s' at %s/v1 (%s)", service.model, server.url, "token required" if token else "no token")
        try:
            yield server
        finally:
            endpoint.services.current.gateway.client.engine.close()


def run_suites(request: ServeRequest, suites: Sequence[Suite], folder: Path, limit: int) -> list[TaskScore]:
    """Serve a model for suites of other packages, and return what they measured; see :func:`hone.agents.suites.measure`.

    Raises:
        HoneError: the model cannot be loaded, or a suite failed.
    """
    from hone.agents.suites import measure, write_scores
    from hone.trainers.evaluation import weights_of

    scores = []
    with served(request) as server:
        server.start()
        try:
            length = context_length(weights_of(request.model))
            for suite in suites:
                scores += asyncio.run(measure(suite, server.url, length, folder, limit=limit, shown=True))
        finally:
            server.stop()
    write_scores(folder, scores)
    return scores


def check_names(request: ServeRequest) -> None:
    """Check that renderer and parser exist and fit the model's tokenizer, before anything is loaded.

    Raises:
        HoneError: a name is unknown, the tokenizer lacks the tokens of the renderer, or the template is not a file.
    """
    from hone.agents.rendering import renderer_for
    from hone.agents.serving.errors import named_by_options
    from hone.data.tokenizer import load_tokenizer
    from hone.training.export import find_actor

    try:
        tokenizer = load_tokenizer(find_actor(request.model), custom_chat_template=request.chat_template)
        if not tokenizer.chat_template and (request.renderer, request.parser) == ("auto", "auto"):
            return  # completions need no template
        renderer_for(tokenizer, request.renderer, parser=request.parser)
    except HoneError as error:
        raise named_by_options(error) from error


def call_on_loop(loop: asyncio.AbstractEventLoop, make: Callable[[], T]) -> T:
    """Call ``make`` on the loop's thread; return its result or raise its error."""

    async def call() -> T:
        return make()

    return asyncio.run_coroutine_threadsafe(call(), loop).result()


@contextmanager
def engine_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop for the engine in a separate thread, while HTTP uses this one.

    The engine's thread is the one that computes (:mod:`hone.threads`).
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="hone-engine", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
