"""Start of a training service (`hone serve --train`)."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hone.errors import ConfigError
from hone.trainers.served_model import ServerRequest
from hone.trainers.serving import call_on_loop, engine_loop, prepare_server

if TYPE_CHECKING:
    from hone.apps.tinker.service import ServiceLimits, TrainingService

log = logging.getLogger("hone.serve")


@dataclass(frozen=True)
class TrainRequest(ServerRequest):
    """Request of `hone serve --train`."""

    out: Path | None = None
    max_rank: int = 128
    max_adapters: int = 16


def serve_training(request: TrainRequest) -> None:
    """Load the model and serve training and sampling of its adapters in the foreground."""
    from hone.insight.run_lock import RunLock

    folder = request.out or Path(tempfile.mkdtemp(prefix="hone-training-"))
    with RunLock(folder):  # before what another service is writing is taken for interrupted
        _serve(request, folder)


def _serve(request: TrainRequest, folder: Path) -> None:
    max_model_len = prepare_server(request)
    from hone.agents.serving.server import HttpServer
    from hone.apps.tinker.app import TrainingEndpoint
    from hone.apps.tinker.service import ServiceLimits

    token = request.token or None
    limits = ServiceLimits(max_model_len, request.max_rank, request.max_adapters)
    with engine_loop() as loop:
        service = call_on_loop(loop, lambda: open_service(request, folder, limits))
        app = TrainingEndpoint(service, loop, token=token).app
        server = HttpServer(app, host=request.host, port=request.port)
        access = "token required" if token else "no token"
        log.info("training of '%s' at %s, weights in %s (%s)", service.name, server.url, folder, access)
        server.run()


def open_service(request: TrainRequest, folder: Path, limits: ServiceLimits) -> TrainingService:
    """Load the model and its tokenizer; return the service."""
    from hone.apps.tinker.adapters import AdapterSet
    from hone.apps.tinker.sampling import Sampler
    from hone.apps.tinker.service import TrainingService
    from hone.cluster.context import prepare_torch
    from hone.config.model import ModelConfig
    from hone.config.run import RunConfig
    from hone.data.tokenizer import load_tokenizer, stop_tokens
    from hone.generation.native.engine import NativeEngine
    from hone.models.devices import dtype_on
    from hone.models.loading import load_policy
    from hone.training.export import base_of_adapter, find_actor

    actor = find_actor(request.model)
    if base_of_adapter(actor) is not None:
        raise ConfigError(
            f"{actor} has only an adapter, but adapters are trained on a whole model",
            fix=f"hone export {request.model} --out DIR --merge, then hone serve DIR --train",
        )
    device = prepare_torch(RunConfig())
    dtype = dtype_on(device, request.dtype)
    model = load_policy(ModelConfig(path=str(actor)), device=device, seed=0, trainable=False)
    adapters = AdapterSet(model, device=device, dtype=dtype)
    tokenizer = load_tokenizer(str(actor))
    engine = NativeEngine(
        adapters.model,
        tokenizer,
        device=device,
        dtype=dtype,
        max_num_seqs=256,
        max_cache_tokens=None,
        max_model_len=limits.max_model_len,
    )
    return TrainingService(
        request.served_name,
        adapters,
        Sampler(engine, adapters),
        folder,
        stop_token_ids=stop_tokens(tokenizer, str(actor)),
        limits=limits,
        tokenizer=str(Path(actor).resolve()),
    )
