"""HTTP routes of a training service; they run in the server's thread and call the service on the engine's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hone.apps.tinker import wire
from hone.apps.tinker.adapters import AdapterShape, adam_settings
from hone.apps.tinker.service import SCHEME, Failure, TrainingService
from hone.errors import HoneError, RequestError
from hone.generation.limits import MAX_SEED, MAX_STOPS, MAX_TEMPERATURE, MAX_TOP_K, MAX_TOP_LOG_PROBS, MIN_SEED

MAX_SAMPLES = 1024
# the fields of requests in JSON, with types and bounds, checked before anything begins; other fields are ignored
_CONFIG = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())


def _object(**fields: Any) -> type[BaseModel]:
    """Return the type of an object; fields that may be null may be absent."""
    defaults = {name: (kind, None if type(None) in get_args(kind) else ...) for name, kind in fields.items()}
    return create_model("Body", __config__=_CONFIG, **defaults)  # type: ignore[call-overload, no-any-return]


def _bounded(kind: Any, **bounds: Any) -> Any:
    return Annotated[kind, Field(**bounds)]


_Name = _bounded(str, max_length=512)
_Number = _bounded(int, ge=0, lt=2**31)
_Seed = _bounded(int, ge=MIN_SEED, le=MAX_SEED)
_OPERATION = {"model_id": _Name, "seq_id": _Number}
_ABOUT = _bounded(dict[_Name, Any], max_length=64)
_CREATION = {"session_id": _Name, "model_seq_id": int, "user_metadata": _ABOUT | None}
_WEIGHTS = {"base_model": _Name | None, "model_path": _Name | None}
_SHAPE = _object(rank=int, train_attn=bool, train_mlp=bool, train_unembed=bool, seed=_Seed | None)
_PROMPT = _object(chunks=list[_object(tokens=list[_Number] | None)])  # type: ignore[misc]
_PARAMS = _object(
    max_tokens=_bounded(int, ge=1, lt=2**31) | None,
    seed=_Seed | None,
    stop=str | _bounded(list[str | _Number], max_length=MAX_STOPS) | None,
    temperature=_bounded(float, ge=0, le=MAX_TEMPERATURE) | None,
    top_k=_bounded(int, ge=-1, le=MAX_TOP_K) | None,
    top_p=_bounded(float, gt=0, le=1) | None,
)
_BODIES: dict[str, type[BaseModel]] = {
    "session_heartbeat": _object(session_id=_Name),
    "create_model": _object(
        **_CREATION, base_model=_Name, lora_config=_SHAPE | None, optimizer_config=_object(type=_Name | None) | None
    ),
    "get_info": _object(model_id=_Name),
    "unload_model": _object(model_id=_Name),
    "optim_step": _object(**_OPERATION, adam_params=dict[_Name, float] | None),
    "save_weights": _object(**_OPERATION, path=_Name | None, overwrite=bool | None),
    "save_weights_for_sampler": _object(**_OPERATION, path=_Name | None),
    "load_weights": _object(
        **{name: kind | None for name, kind in (_OPERATION | _CREATION).items()},
        path=_Name,
        optimizer=bool | None,
        base_model=_Name | None,
    ),
    "create_sampling_session": _object(**_WEIGHTS),
    "weights_info": _object(tinker_path=_Name),
    "asample": _object(
        **_WEIGHTS,
        sampling_session_id=_Name | None,
        seq_id=_Number | None,
        prompt=_PROMPT,
        sampling_params=_PARAMS,
        num_samples=_bounded(int, ge=1, le=MAX_SAMPLES) | None,
        prompt_logprobs=bool | None,
        topk_sample_logprobs=_bounded(int, ge=0, le=MAX_TOP_LOG_PROBS) | None,
    ),
    "cancel_future": _object(request_id=_Name),
    "retrieve_future": _object(request_id=_Name),
}
_ANY = _object()


def check_body(route: str, body: Any) -> dict[str, Any]:
    """Return the body of a request to a route, without what is null; RequestError where a field is missing or wrong."""
    try:
        checked = _BODIES.get(route, _ANY).model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))[:80]
        raise RequestError(f"{field or 'the body'}: {problem['msg']}", field=field) from None
    return {**body, **checked.model_dump(exclude_none=True)}


MAX_BODY, MAX_JSON = 256 * 2**20, 16 * 2**20
"""Most bytes of a request with sequences, and of another."""
MAX_HELD = 2 * MAX_BODY
"""Most bytes of all requests that are being received."""
POLL_SECONDS = 20.0
"""How long a client waits for a result before it asks again."""
T = TypeVar("T")
Json = dict[str, Any]


class TrainingEndpoint:
    """Training protocol as an ASGI application (:attr:`app`).

    Callers must send ``token`` as ``X-API-Key`` or bearer; None allows every caller.
    """

    def __init__(self, service: TrainingService, loop: asyncio.AbstractEventLoop, *, token: str | None) -> None:
        self._service, self._loop, self._token = service, loop, token
        self._held = 0
        posts: dict[str, Callable[[Json], Any]] = {
            "client/config": lambda body: self._config(),
            "client/dynamic_config": lambda body: {},
            "telemetry": lambda body: {"status": "accepted"},
            "create_session": lambda body: {"type": "create_session", "session_id": service.create_session()},
            "session_heartbeat": lambda body: service.heard_of(body["session_id"]) or {"type": "session_heartbeat"},
            "create_model": self._create_model,
            "get_info": lambda body: service.info(body["model_id"]),
            "unload_model": lambda body: _future(service.unload(body["model_id"])),
            "optim_step": lambda body: _future(
                service.optim_step(body["model_id"], body["seq_id"], adam_settings(body.get("adam_params") or {}))
            ),
            "save_weights": lambda body: _future(
                service.save(
                    body["model_id"],
                    body["seq_id"],
                    body.get("path") or f"step-{body['seq_id']}",
                    "weights",
                    overwrite=bool(body.get("overwrite")),
                )
            ),
            "save_weights_for_sampler": lambda body: _future(
                service.save(body["model_id"], body["seq_id"], body.get("path"), "sampler_weights")
            ),
            "load_weights": self._load,
            "create_sampling_session": lambda body: {
                "type": "create_sampling_session",
                "sampling_session_id": service.create_sampling_session(body.get("base_model"), body.get("model_path")),
            },
            "weights_info": lambda body: service.weights_info(body["tinker_path"]),
            "sessions/{session}/finish": lambda body: {},
            "asample": self._sample,
            "cancel_future": self._cancel,
        }
        self.app = Starlette(
            routes=[
                *(
                    Route(f"/api/v1/{name}", self._route(name, answer), methods=["GET"])
                    for name, answer in {
                        "healthz": lambda request, body: {"status": "ok"},
                        "get_server_capabilities": lambda request, body: self._capabilities(),
                        "samplers/{name}": self._sampler,
                        "training_runs/{model}": lambda request, body: service.training_run(
                            request.path_params["model"]
                        ),
                    }.items()
                ),
                Route(
                    "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}",
                    self._route(
                        "checkpoints", lambda request, body: service.delete(_PATH.format(**request.path_params))
                    ),
                    methods=["DELETE"],
                ),
                Route("/api/v1/forward_backward", self.forward_backward, methods=["POST"]),
                Route("/api/v1/retrieve_future", self.retrieve, methods=["POST"]),
                *(
                    Route(
                        f"/api/v1/{name}",
                        self._route(name, lambda request, body, answer=answer: answer(body)),
                        methods=["POST"],
                    )
                    for name, answer in posts.items()
                ),
            ],
        )

    # routes with other bodies than JSON ------------------------------------------------------------------------------

    async def forward_backward(self, request: Request) -> Response:
        """Begin a forward and backward pass; the body is protobuf."""
        sent: Json = {}
        try:
            self._check(request)
            async with self._body(request, MAX_BODY) as body:
                message = wire.parse_forward_backward(body)
            sent = {"model_id": message.model_id, "seq_id": message.seq_id}
            data = wire.data_of(message)

            def begin() -> str:
                return self._service.forward_backward(
                    message.model_id,
                    message.seq_id,
                    data,
                    message.loss_fn,
                    wire.settings_of(message),
                    backward=not message.forward_only,
                )

            return JSONResponse(_future(await self._on_loop(begin), message.model_id))
        except HoneError as error:
            await self._refused(sent)
            return _refusal(error)
        except (ValueError, TypeError) as error:  # bytes that are no whole numbers
            await self._refused(sent)
            return _refusal(RequestError(f"the request is not complete: {error}"))

    async def retrieve(self, request: Request) -> Response:
        """Return the result of a request, or say that it is not there yet."""
        try:
            self._check(request)
            async with self._body(request) as body:
                name = check_body("retrieve_future", json.loads(body))["request_id"]
        except (ValueError, RecursionError):
            return _refusal(RequestError("the body names no request_id"))
        except HoneError as error:
            return _refusal(error)
        waiting = self._service.futures.wait(name, POLL_SECONDS)
        try:
            outcome = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(waiting, self._loop))
        except KeyError:
            return JSONResponse({"detail": f"there is no request '{name}'"}, status_code=410)
        if outcome is None:
            return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"})
        if isinstance(outcome, Failure):
            return JSONResponse({"error": outcome.message, "category": "user" if outcome.user else "server"})
        if outcome.protobuf is not None:
            return Response(outcome.protobuf, media_type=wire.PROTOBUF)
        return JSONResponse(outcome.json)

    # routes with JSON ------------------------------------------------------------------------------------------------

    def _route(self, name: str, answer: Callable[[Request, Json], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            sent: Any = None
            try:
                self._check(request)
                async with self._body(request) as content:
                    sent = json.loads(content or b"{}")
                    body = check_body(name, sent) if request.method == "POST" else {}
                return JSONResponse(await self._on_loop(lambda: answer(request, body)))
            except HoneError as error:
                await self._refused(sent)
                return _refusal(error)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
                await self._refused(sent)
                return _refusal(RequestError(f"the request is not complete: {type(error).__name__}: {error}"))

        return route

    async def _refused(self, sent: Any) -> None:
        """Note the number of a refused operation, which the client may have used up."""
        model, number = (sent.get("model_id"), sent.get("seq_id")) if isinstance(sent, dict) else (None, None)
        if isinstance(model, str) and type(number) is int:
            await self._on_loop(lambda: self._service.refuse(model, number))

    def _config(self) -> Json:
        return {"pjwt_auth_enabled": False, "credential_default_source": "api_key", "use_pyqwest_transport": False}

    def _capabilities(self) -> Json:
        service = self._service
        model = {"model_name": service.name, "max_context_length": service.limits.max_model_len}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    def _sampler(self, request: Request, body: Json) -> Json:
        return self._service.sampler(request.path_params["name"])

    def _create_model(self, body: Json) -> Json:
        optimizer = (body.get("optimizer_config") or {}).get("type", "adamw")
        if optimizer != "adamw":
            raise RequestError(f"this server has no optimizer '{optimizer}'", fix="adamw", field="optimizer_config")
        config = body.get("lora_config")
        if not config:
            raise RequestError("this server trains adapters", fix="create_lora_training_client", field="lora_config")
        shape = AdapterShape(config["rank"], config["train_attn"], config["train_mlp"], config["train_unembed"])
        seed = config.get("seed")
        name = self._service.create_model(
            body["session_id"], body["model_seq_id"], body["base_model"], shape, seed, body.get("user_metadata")
        )
        return _future(name, name)

    def _load(self, body: Json) -> Json:
        optimizer = bool(body.get("optimizer"))
        if body.get("session_id") is not None:
            name = self._service.create_from(
                body["session_id"],
                body["model_seq_id"],
                body["path"],
                body.get("base_model"),
                optimizer=optimizer,
                about=body.get("user_metadata"),
            )
            return _future(name, name)
        return _future(self._service.load(body["model_id"], body["seq_id"], body["path"], optimizer=optimizer))

    def _sample(self, body: Json) -> Json:
        name, sequences = self._service.sample(body)
        return {**_future(name), "sample_sequence_ids": sequences}

    def _cancel(self, body: Json) -> Json:
        self._service.cancel(body["request_id"])
        return {}

    # access ----------------------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        if self._token is None:
            return
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-api-key") or bearer
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise RequestError("the API key is not the token of this server", code=_UNAUTHORIZED)

    @contextlib.asynccontextmanager
    async def _body(self, request: Request, most: int = MAX_JSON) -> AsyncIterator[bytes]:
        """Receive the body of a request; it counts among the bytes held until the block ends."""
        parts, length = [], 0
        try:
            async for part in request.stream():
                length += len(part)
                self._held += len(part)
                if length > most:
                    raise RequestError(f"a request has at most {most} bytes", fix="fewer sequences a request")
                if self._held > MAX_HELD:
                    raise RequestError("too many large requests at once", fix="send it again", code=_BUSY)
                parts.append(part)
            yield b"".join(parts)
        finally:
            self._held -= length

    async def _on_loop(self, call: Callable[[], T]) -> T:
        async def run() -> T:
            return call()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))


_PATH = SCHEME + "{model}/{kind}/{name}"
_UNAUTHORIZED, _BUSY = "E-unauthorized", "E-busy"


def _future(name: str, model: str | None = None) -> Json:
    return {"request_id": name, "model_id": model}


def _refusal(error: HoneError) -> Response:
    status = {_UNAUTHORIZED: 401, _BUSY: 429}.get(error.code, 422)
    body: Mapping[str, Any] = {"detail": str(error), "code": error.code}
    return JSONResponse(body, status_code=status)
