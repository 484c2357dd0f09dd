"""A package in the place of TensorRT-LLM, which starts on NVIDIA GPUs alone.

It takes what ``trtllm_interface.json`` records of the published interface and nothing else, and behaves as the source of that
version says: it is no TensorRT-LLM, and what passes here has not been run there.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pydantic
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

INTERFACE: dict[str, Any] = json.loads(Path(__file__).with_name("trtllm_interface.json").read_text())
_TYPES: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict}


class LogprobMode(StrEnum):
    """Which log-probs are reported."""

    RAW = "raw"
    PROCESSED = "processed"


assert [mode.value for mode in LogprobMode] == INTERFACE["LogprobMode"]


def _model(name: str, **known: Any) -> Any:
    fields: dict[str, Any] = {}
    for key, (kind, default) in INTERFACE[name].items():
        annotation = known.get(kind) or _TYPES[kind]
        if default == "factory":
            fields[key] = (annotation, pydantic.Field(default_factory=annotation))
        else:
            fields[key] = (annotation, ...) if default == "required" else (annotation | None, default)
    return pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid", strict=True), **fields)


KvCacheConfig = _model("KvCacheConfig")
TorchLlmArgs = _model("TorchLlmArgs", KvCacheConfig=KvCacheConfig)
SamplingParams: Any = make_dataclass(
    "SamplingParams",
    [
        (name, Any, field(default=LogprobMode(default) if kind == "LogprobMode" else default))
        for name, (kind, default) in INTERFACE["SamplingParams"].items()
    ],
    kw_only=True,
)


class RequestError(RuntimeError):
    """A request that cannot be served."""


class WorkerExtension:
    """Takes weights as the source says: a device's pairs of a function and its arguments, or nothing at the end."""

    device_id: Any
    engine: Any

    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        assert not self.engine.active, "the control action waits until nothing is computed, and would wait for ever"
        if ipc_handles is None:
            self.engine.calls.append("finalize")
            return
        self.engine.calls.append("weights")
        parameters = dict(self.engine.model.named_parameters())
        for name, (function, arguments) in ipc_handles[f"GPU-{self.device_id}"]:
            given = list(arguments)
            given[6] = self.device_id
            with torch.no_grad():
                parameters[name].copy_(function(*given))

    def abort_update_weights(self, reason: str = "trainer-initiated abort") -> None:
        self.engine.calls.append("abort")

    def reset_prefix_cache(self) -> None:
        self.engine.calls.append("reset")


class Answer:
    """A request under way: a token a turn of the loop."""

    def __init__(self, engine: AsyncLLM, prompt: list[int], sampling: Any) -> None:
        self._engine, self._prompt, self._sampling = engine, prompt, sampling
        self._cancelled = False
        self.outputs = [SimpleNamespace(token_ids=[], logprobs=[], finish_reason=None)]
        self._task = asyncio.ensure_future(self._make())

    def abort(self) -> None:
        self._cancelled = True

    async def aresult(self) -> Answer:
        await self._task
        return self

    async def _make(self) -> None:
        output, asked = self.outputs[0], self._sampling
        self._engine.active.add(self)
        stops = [[token] for token in asked.stop_token_ids or []]
        if self._engine.finds_strings:
            stops += [self._engine.tokenizer.encode(text) for text in asked.stop or []]
        try:
            while output.finish_reason is None:
                await asyncio.sleep(0)
                token, log_prob = self._draw(len(output.token_ids))
                if self._cancelled:  # the source: log-probs of a cancelled answer may be one more than its tokens
                    output.logprobs.append(log_prob)
                    output.finish_reason = "cancelled"
                    return
                output.token_ids.append(token)
                output.logprobs.append(log_prob)
                if any(output.token_ids[-len(stop) :] == stop for stop in stops):
                    output.finish_reason = "stop"
                elif len(output.token_ids) == asked.max_tokens:
                    output.finish_reason = "length"
        finally:
            self._engine.active.discard(self)

    def _draw(self, step: int) -> tuple[int, float]:
        asked = self._sampling
        ids = torch.tensor([self._prompt + self.outputs[0].token_ids])
        with torch.no_grad():
            logits = self._engine.model(input_ids=ids).logits[0, -1].float()
        self._engine.steps += 1
        drawn = logits if asked.temperature == 0 else logits / asked.temperature
        if asked.temperature == 0:
            token = int(drawn.argmax())
        else:
            generator = torch.Generator().manual_seed((asked.seed * 1009 + step) % 2**63)
            token = int(torch.multinomial(drawn.softmax(-1), 1, generator=generator))
        reported = drawn if asked.logprobs_mode == LogprobMode.PROCESSED else logits
        assert asked.logprobs == 0 and asked.logprobs_simple_format and asked.ignore_eos
        return token, float(reported.log_softmax(-1)[token])


class AsyncLLM:
    """The engine; ``args`` are what it was started with."""

    finds_strings = True

    def __init__(self, **arguments: Any) -> None:
        own = {name: arguments.pop(name, None) for name in INTERFACE["AsyncLLM"]["arguments"]}
        assert not any(own.values())
        self.args = TorchLlmArgs(**arguments)
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.args.model, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.args.tokenizer)
        self.active: set[Answer] = set()
        self.calls: list[str] = []
        self.steps = 0
        self._worker: Any = None

    async def setup_async(self) -> AsyncLLM:
        module, name = self.args.ray_worker_extension_cls.rsplit(".", 1)
        extension = getattr(importlib.import_module(module), name)
        self._worker = type("Worker", (extension,), {"engine": self, "device_id": "cpu"})()
        return self

    def generate_async(self, inputs: dict[str, Any], sampling_params: Any = None) -> Answer:
        if len(inputs["prompt_token_ids"]) + sampling_params.max_tokens > self.args.max_seq_len:
            raise RequestError("too long")
        return Answer(self, list(inputs["prompt_token_ids"]), sampling_params)

    async def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
        unique_reply_rank: Any = None,
        target_ranks: Any = None,
    ) -> list[Any]:
        await asyncio.sleep(0)
        return [getattr(self._worker, method)(*args, **(kwargs or {}))]

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def modules() -> dict[str, ModuleType]:
    """Its modules, by the names that the package has them under."""
    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {"AsyncLLM": AsyncLLM, "SamplingParams": SamplingParams, "__version__": INTERFACE["version"]},
        "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.utils": {"get_device_uuid": lambda device: f"GPU-{device}"},
        "tensorrt_llm.executor": {},
        "tensorrt_llm.executor.utils": {"RequestError": RequestError},
        "tensorrt_llm.llmapi": {"KvCacheConfig": KvCacheConfig, "TorchLlmArgs": TorchLlmArgs},
        "tensorrt_llm.llmapi.rlhf_utils": {"WorkerExtension": WorkerExtension},
    }
    made = {}
    for name, content in contents.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(content)
    return made


@contextmanager
def in_place() -> Iterator[None]:
    """As long as the block lasts the stand-in is what ``import tensorrt_llm`` finds, and there seems to be a GPU."""
    worker = "hone.generation.server.trtllm_worker"
    with (
        mock.patch.dict(sys.modules, modules()),
        mock.patch.dict("os.environ"),
        mock.patch("torch.cuda.is_available", return_value=True),
    ):
        sys.modules.pop(worker, None)
        try:
            yield
        finally:
            sys.modules.pop(worker, None)
