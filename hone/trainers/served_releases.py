"""Releases of a shelf for a running `hone serve`: loading of another one, and the end of the one before."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from hone.agents.episode import EngineClient
from hone.agents.serving.errors import ApiError
from hone.agents.serving.gateway import Gateway
from hone.agents.serving.service import Service
from hone.agents.serving.swapping import Opened
from hone.cluster.rollout import scorer_of
from hone.data.tokenizer import load_tokenizer
from hone.errors import HoneError
from hone.trainers.evaluation import stops_of, weights_of
from hone.trainers.served_model import ServeRequest, context_length, open_engine, vocabulary_size
from hone.training.releases import Release, Shelf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("hone.serve")


class Releases:
    """Releases that a server may swap to: those of the shelf from which its model comes.

    Args:
        request: options of the server.
        loop: event loop of the engine.

    Attributes:
        served: number of the release at the start; None for a model that belongs to no shelf.
        open: loads the release of a number; None for a model that belongs to no shelf.
    """

    def __init__(self, request: ServeRequest, loop: asyncio.AbstractEventLoop) -> None:
        self._request, self._loop = request, loop
        shelf = Shelf.containing(request.model)
        self.served = shelf.at(request.model).number if shelf is not None else None
        self._shelf = shelf
        self.open = None if shelf is None else self._open

    def closing(self, service: Service) -> Callable[[], Awaitable[None]]:
        """Return the function that frees the engine of a service."""

        async def close() -> None:
            async def end() -> None:
                service.gateway.client.engine.close()

            await service.gateway.on_engine(end())
            service.prompt_log_probs = None  # the last reference to the weights besides the engine
            await asyncio.to_thread(gc.collect)

        return close

    async def _open(self, number: int, before: Service) -> Opened:
        """Load a release next to the one that is served.

        Raises:
            ApiError: it does not exist, is damaged, or cannot replace the served one.
        """
        try:
            service = await asyncio.to_thread(self._load, number, before)
        except HoneError as error:
            raise ApiError(409, f"{error.what}; {error.fix}", code="release_refused", param="release") from error
        log.info("release %d of %s is loaded; new requests reach it", number, self._shelf and self._shelf.path)
        return Opened(service, self.closing(service))

    def _load(self, number: int, before: Service) -> Service:
        assert self._shelf is not None
        release = self._shelf.release(number)
        path = str(release.path)
        release.check()
        context_length(weights_of(path), before.max_model_len, may_exceed=self._request.allow_long_max_model_len)
        check_same_tokens(load_tokenizer(path), before.tokenizer, release, self._request.chat_template is None)
        request = dataclasses.replace(self._request, model=path)
        engine, _ = open_engine(request, before.max_model_len, computing=True)
        return dataclasses.replace(
            before,
            gateway=Gateway(EngineClient(engine), self._loop, metrics=before.gateway.metrics),
            vocabulary=vocabulary_size(weights_of(path)),
            stop_token_ids=stops_of(before.tokenizer, path),
            prompt_log_probs=scorer_of(engine),
            release=number,
        )


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, served: PreTrainedTokenizerBase, release: Release, with_template: bool
) -> None:
    """Check that recorded conversations mean the same to a release as to the served model.

    Raises:
        HoneError: vocabulary or chat template differ.
    """
    changed = [
        name
        for name, same in (
            ("vocabulary", tokenizer.get_vocab() == served.get_vocab()),
            ("chat template", not with_template or tokenizer.chat_template == served.chat_template),
        )
        if not same
    ]
    if changed:
        raise HoneError(
            f"release {release.number} has another {' and another '.join(changed)} than the served model",
            why="sessions are recorded as tokens, and go to the new model unchanged",
            fix="start a new server for it, and let clients move there",
        )
