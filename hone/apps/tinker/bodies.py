"""Fields of the requests in JSON: their types and bounds, checked before anything begins. Other fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from hone.errors import RequestError
from hone.generation.limits import MAX_SEED, MAX_STOPS, MAX_TEMPERATURE, MAX_TOP_K, MAX_TOP_LOG_PROBS, MIN_SEED

MAX_SAMPLES = 1024
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
_CREATION = {"session_id": _Name, "model_seq_id": int}
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
