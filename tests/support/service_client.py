"""A small client of a training service over HTTP, for runs in which the service is killed: it learns of that at once."""

from __future__ import annotations

import http.client
import json
import struct
from typing import Any

from support.patience import LONG
from tinker.proto.response_conv import deserialize_forward_backward_output

from hone.apps.tinker import wire


class ServiceLost(Exception):
    """The service is gone, or could not do what it was asked."""


class TrainingClient:
    """One adapter in training.

    Args:
        address: of the service.
        session: name of the session.
        base: name of the model.
    """

    def __init__(self, address: str, session: str, base: str) -> None:
        self._line = http.client.HTTPConnection(address.strip().removeprefix("http://"), timeout=LONG)
        self._session, self._base, self._number = session, base, 0
        self.model = f"{session}:train:0"

    def begin(self, saved: str | None) -> None:
        """Create the adapter, from saved weights with their optimizer."""
        start = {"session_id": self._session, "model_seq_id": 0, "base_model": self._base}
        if saved is None:
            shape = {"rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": False, "seed": 1}
            self._result("create_model", {**start, "lora_config": shape})
        else:
            self._result("load_weights", {**start, "path": saved, "optimizer": True})

    def update(self, step: int) -> float:
        """Update by one sequence; return its loss before."""
        tokens = [3 + (7 * step + 5 * place) % 200 for place in range(12)]
        message = wire.parse_forward_backward(b"")
        self._number += 1
        message.model_id, message.seq_id, message.loss_fn = self.model, self._number, "cross_entropy"
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = struct.pack("<11i", *tokens[:-1])
        entry = datum.loss_fn_inputs.add(key="target_tokens")
        entry.value.dense, entry.value.dtype = struct.pack("<11q", *tokens[1:]), 2
        passed = self._result("forward_backward", message.SerializeToString())
        self._operation("optim_step", adam_params={"learning_rate": 1e-2})
        return deserialize_forward_backward_output(passed).metrics["loss:sum"]

    def save(self, step: int) -> str:
        """Save weights and optimizer; return their path."""
        return json.loads(self._operation("save_weights", path=f"step-{step}", overwrite=True))["path"]

    def _operation(self, route: str, **fields: Any) -> bytes:
        self._number += 1
        return self._result(route, {"model_id": self.model, "seq_id": self._number, **fields})

    def _result(self, route: str, body: Any) -> bytes:
        name = json.loads(self._post(route, body))["request_id"]
        while True:
            answer = self._post("retrieve_future", {"request_id": name})
            if b'"category":' in answer:
                raise ServiceLost(answer)
            if b'"try_again"' not in answer:
                return answer

    def _post(self, route: str, body: Any) -> bytes:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-API-Key": "none"}
        try:
            self._line.request("POST", f"/api/v1/{route}", content, headers)
            answer = self._line.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServiceLost from error
        if answer.status != 200:
            raise ServiceLost(said)
        return said
