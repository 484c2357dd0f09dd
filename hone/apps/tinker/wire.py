"""Protobuf messages of the training protocol: which fields there are, by number; and tensors to and from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from hone.apps.tinker.adapters import Datum, Passed
from hone.errors import RequestError
from hone.text import read_yaml

PROTOBUF = "application/x-protobuf"
_FIELD = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "hone_training"
_FLOAT32, _INT64 = 1, 2
_NUMPY = {_FLOAT32: np.float32, _INT64: np.int64}

_MESSAGES: dict[str, dict[str, tuple[int, str]]] = read_yaml(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
"""Fields of each message: name to number and type."""
_SCALARS = {
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
    "double": _FIELD.TYPE_DOUBLE,
    "bool": _FIELD.TYPE_BOOL,
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            repeated, kind = kind.startswith("*"), kind.removeprefix("*")
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            if kind in _SCALARS:
                message.field.add(name=field, number=number, label=label, type=_SCALARS[kind])
            else:
                type_name = f".{_PACKAGE}.{kind}"
                message.field.add(name=field, number=number, label=label, type=_FIELD.TYPE_MESSAGE, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _classes()


def parse_forward_backward(body: bytes) -> Any:
    """Return a ``ForwardBackwardRequest``; RequestError for another message."""
    try:
        return _CLASSES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is not a forward_backward request: {error}") from None


def data_of(request: Any) -> list[Datum]:
    """Return the data of a ``ForwardBackwardRequest``."""
    return [_datum(message, number) for number, message in enumerate(request.data)]


def settings_of(request: Any) -> dict[str, float]:
    settings = {entry.key: entry.value for entry in request.loss_fn_config}
    for entry in request.loss_fn_config_v2:
        if entry.value.text:
            raise RequestError(f"'{entry.key}' is a text; the losses take numbers", field="loss_fn_config")
        settings[entry.key] = entry.value.number
    return settings


def _datum(message: Any, number: int) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise RequestError(f"datum {number} has a chunk that is not text", fix="train on text", field="model_input")
        tokens += np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist()
    inputs = {entry.key: _values(entry.value, entry.key, number) for entry in message.loss_fn_inputs}
    if "target_tokens" not in inputs:
        raise RequestError(f"datum {number} has no 'target_tokens'", field="loss_fn_inputs")
    targets = inputs.pop("target_tokens").astype(np.int64).tolist()
    return Datum(tokens, targets, inputs)


def _values(tensor: Any, name: str, number: int) -> NDArray[Any]:
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1 or tensor.dtype not in _NUMPY:
        raise RequestError(
            f"'{name}' of datum {number} is not a dense vector of float32 or int64",
            why="each token has one target here",
            field="loss_fn_inputs",
        )
    return np.frombuffer(tensor.dense, _NUMPY[tensor.dtype]).copy()


def forward_backward_output(passed: Passed) -> bytes:
    """Return a ``ForwardBackwardOutput``: log-probs and weighted losses of each datum, and the metrics."""
    columns = {"logprobs": passed.log_probs, "elementwise_loss": passed.losses}
    message = _CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    records = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(passed.log_probs))
    for name, rows in columns.items():
        arrays = [row.detach().float().numpy() for row in rows]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
        field = records.fields.add(key=name)
        field.value.data, field.value.offsets = b"".join(array.tobytes() for array in arrays), offsets.tobytes()
        field.value.dtype = _FLOAT32
    for name, value in passed.metrics.items():
        message.metrics.add(key=name, value=value)
    return message.SerializeToString()


def sample_response(sequences: Sequence[Mapping[str, Any]], prompt_log_probs: Sequence[float | None] | None) -> bytes:
    """Return a ``SampleResponse`` of sequences with ``tokens``, ``log_probs``, ``stopped`` and ``likeliest`` (or None).

    ``prompt_log_probs`` are None for the first token; None if they were not asked for.
    """
    message = _CLASSES["SampleResponse"]()
    for sequence in sequences:
        part = message.sequences.add(stop_reason=0 if sequence["stopped"] else 1)
        part.tokens = np.asarray(sequence["tokens"], "<i4").tobytes()
        part.logprobs = np.asarray(sequence["log_probs"], "<f4").tobytes()
        likeliest = sequence["likeliest"]
        if likeliest:
            top = part.topk_sampled_logprobs
            top.token_ids = np.asarray([[token for token, _ in row] for row in likeliest], "<i4").tobytes()
            top.logprobs = np.asarray([[value for _, value in row] for row in likeliest], "<f4").tobytes()
            top.length, top.k = len(likeliest), len(likeliest[0])
    if prompt_log_probs is not None:
        values = [np.nan if value is None else value for value in prompt_log_probs]
        message.prompt_logprobs = np.asarray(values, "<f4").tobytes()
    return message.SerializeToString()
