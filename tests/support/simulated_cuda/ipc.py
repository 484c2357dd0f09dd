"""Programs on the simulated GPU that send weights to engines in processes of their own; started by :mod:`.machine`."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support import forked_engines
from support.engine_cases import make_model, plan, requests, serve
from support.simulated_cuda.counters import COUNTERS
from support.simulated_cuda.sharing import MAPPED, REFUSE_VARIABLE

from hone.errors import GenerationError
from hone.generation.protocol import Completion, SamplingParams
from hone.generation.remote import ServedEngine, transports
from hone.generation.remote.transports import CHUNKS_IN_FLIGHT, CudaSender, Mappings, open_chunk, padded

DEVICE = torch.device("cuda", 0)
BUCKET_BYTES = 60_000
"""Less than the embedding has, more than the matrices of a layer."""
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95)


def deliver(words: list[str]) -> None:
    """Check that weights which stay on the GPU are those that a file brings, over three versions with every kind of chunk.

    Args:
        words: directory of a model.
    """
    forked_engines.install()
    transports.CudaSender = functools.partial(CudaSender, chunk_bytes=20_000)  # type: ignore[misc,assignment]
    versions = [make_model("tied", seed=seed) for seed in (5, 6, 7)]
    size = sum(parameter.nbytes for parameter in versions[0].parameters())
    with (
        _engine(words[0], "file") as golden,
        _engine(words[0], "auto") as automatic,
        _engine(words[0], "cuda_ipc") as chosen,
    ):
        assert golden.server_info["gpus"] == automatic.server_info["gpus"] == ["simulated"]
        for number, model in enumerate(versions, start=1):
            on_gpu = [(name, parameter.detach().to(DEVICE)) for name, parameter in model.named_parameters()]
            assert max(tensor.nbytes for _, tensor in on_gpu) > 20_000 > min(tensor.nbytes for _, tensor in on_gpu)
            expected = _load(golden, on_gpu, number)
            for engine in (automatic, chosen):
                _assert_same(_load(engine, on_gpu, number), expected)
        for engine in (automatic, chosen):
            stats = engine.describe().stats
            assert stats["weights_on_gpu_bytes"] == stats["weights_sent_bytes"] == len(versions) * size, stats
            assert (stats["transport"], stats["transport_fallbacks"]) == ("cuda_ipc", 0), stats
            assert "transport_obstacle" not in stats
        stats = golden.describe().stats
        assert (stats["transport"], stats["weights_on_gpu_bytes"]) == ("file", 0), stats
        # the copies for a replica that starts again are in memory of the host
        kept = list(versions[0].named_parameters())
        _assert_same(_load(automatic, kept, 4), _load(golden, kept, 4))
        stats = automatic.describe().stats
        assert (stats["transport"], stats["weights_on_gpu_bytes"]) == ("shared_memory", len(versions) * size), stats


def refused(words: list[str]) -> None:
    """Check that an engine which cannot map memory of the GPU gets all weights through the host, with one warning.

    Args:
        words: directory of a model.
    """
    os.environ[REFUSE_VARIABLE] = "1"
    forked_engines.install()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hone.generation.remote").addHandler(handler)
    models = [make_model("tied", seed=seed) for seed in (5, 6)]
    with _engine(words[0], "file") as golden, _engine(words[0], "auto") as engine:
        for number, model in enumerate(models, start=1):
            on_gpu = [(name, parameter.detach().to(DEVICE)) for name, parameter in model.named_parameters()]
            _assert_same(_load(engine, on_gpu, number), _load(golden, on_gpu, number))
            stats = engine.describe().stats
            assert (stats["transport"], stats["transport_fallbacks"]) == ("shared_memory", 1), stats
            assert stats["weights_on_gpu_bytes"] == 0 and stats["weights_sent_bytes"] > 0
            assert "invalid resource handle" in stats["transport_obstacle"], stats
    assert len(warnings) == 1 and "cuda_ipc" in warnings[0], warnings
    with _engine(words[0], "auto", delta=True) as engine:
        _load(engine, list(models[0].to(DEVICE).named_parameters()), 1)
        stats = engine.describe().stats
        assert (stats["transport"], stats["transport_fallbacks"]) == ("shared_memory", 0), stats
        assert "checkpoint_engine.delta" in stats["transport_obstacle"]


@contextmanager
def _engine(path: str, backend: str, **options: Any) -> Iterator[ServedEngine]:
    launch = plan("served", Path(path), Path(f"engine-{backend}.log"))
    engine = ServedEngine.start(launch, backend=backend, bucket_bytes=BUCKET_BYTES, **options)
    try:
        yield engine
    finally:
        engine.close()


def _load(engine: ServedEngine, weights: list[tuple[str, torch.Tensor]], version: int) -> dict[str, Completion]:
    """Send a version in two calls, and return what the engine samples from it."""
    middle = len(weights) // 2

    async def load() -> None:
        await engine.load_weights(weights[:middle], version, last=False)
        await engine.load_weights(weights[middle:], version)

    asyncio.run(load())
    answers: dict[str, Completion] = {}
    for kind, sampling in {"greedy": GREEDY, "sampled": SAMPLED}.items():
        answers |= {f"{kind} {name}": answer for name, answer in serve(engine, requests(sampling, 3)).items()}
    assert all(answer.weight_versions == (version, version) for answer in answers.values())
    return answers


def _assert_same(answers: dict[str, Completion], expected: dict[str, Completion]) -> None:
    """Tokens are the same, and log-probs but for the order of sums, which depends on who arrives first."""
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert answer.token_ids == expected[name].token_ids and len(answer.token_ids) > 1
        torch.testing.assert_close(answer.log_probs, expected[name].log_probs, atol=1e-5, rtol=0)


def chunks(words: list[str]) -> None:
    """Check chunks against another process that opens them: bytes, messages, buffers and their ends."""
    del words
    reader = _Reader()
    os.environ["PYTORCH_ALLOC_CONF"] = (
        "max_split_size_mb:512,expandable_segments:True"  # as torch has read it at its start
    )
    torch._C._accelerator_setAllocatorSettings(os.environ["PYTORCH_ALLOC_CONF"])
    sender = CudaSender(DEVICE, chunk_bytes=4096)
    generator = torch.Generator().manual_seed(0)
    cases = [[("empty", torch.zeros(0, 3))], [("scalar", torch.tensor(2.5))], []]
    cases += [[(f"{dtype} {shape}", torch.randint(0, 2, shape, generator=generator).to(dtype)) for shape in ((3,), (7, 5), (2, 0), ())]
              for dtype in DTYPES]  # fmt: skip
    cases += [[("transposed", torch.arange(12.0).view(3, 4).T), ("every other", torch.arange(20)[::2])]]
    large = [("large", torch.arange(3000.0)), ("small", torch.ones(3))]
    cases += [[large[1]], large, [large[1]], large, large, [large[1]]]
    in_flight: deque[tuple[str, list[tuple[str, torch.Tensor]]]] = deque()
    for number, case in enumerate(cases):
        if len(in_flight) == CHUNKS_IN_FLIGHT:
            reader.check(*in_flight.popleft())
        COUNTERS.clear()
        on_gpu = [(name, tensor.to(DEVICE)) for name, tensor in case]
        launches = COUNTERS.launches.total()
        message = json.dumps(sender.pack(on_gpu))
        assert COUNTERS.launches.total() - launches <= max(1, len(case)) and COUNTERS.waits.total() == 1, number
        assert json.loads(message)["kept"] is (sum(tensor.nbytes for _, tensor in case) < 4096)
        in_flight.append((message, case))
    for message, case in in_flight:
        reader.check(message, case)
    settings = torch._C._accelerator_getAllocatorSettings()
    assert settings == "max_split_size_mb:512,expandable_segments:True", "they are as before"
    oversized = sum(padded(tensor.nbytes) for _, tensor in large)
    assert sorted(reader.mapped()) == [4096] * CHUNKS_IN_FLIGHT + [oversized] * 3, "only those of a chunk stay mapped"
    sender.release_oversized()
    sender.close()
    sender.close()
    again = CudaSender(DEVICE, chunk_bytes=8192)
    small = [("small", torch.ones(3, device=DEVICE))]
    reader.check(json.dumps(again.pack(small)), large[1:])
    assert reader.mapped()[-1] == 8192
    unknown = {**again.pack(small)["buffer"], "memory": base64.b64encode(b"0 0").decode()}
    for wrong, problem in [({"buffer": unknown}, "cannot map"), ({"buffer": unknown, "gpu": "another"}, "another")]:
        assert problem in reader.ask({"chunk": json.dumps(again.pack(small) | wrong)})["error"]
    again.close()
    reader.close()


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
          torch.float8_e4m3fn)  # fmt: skip


class _Reader:
    """Another process with the same GPU, which opens chunks."""

    def __init__(self) -> None:
        self._mine, theirs = socket.socketpair()
        self._process = os.fork()
        if self._process == 0:
            self._mine.close()
            _answer(theirs)
        theirs.close()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self._mine.sendall(json.dumps(question).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self._mine.recv(1 << 20)
        return json.loads(answer)

    def check(self, message: str, expected: list[tuple[str, torch.Tensor]]) -> None:
        """The other process sees these tensors, and waits for the GPU before it answers."""
        answer = self.ask({"chunk": message})
        assert answer.get("waits") == 1, answer
        shown = [[name, str(t.dtype), list(t.shape), t.reshape(-1).view(torch.uint8).tolist() if t.numel() else []]
                 for name, t in ((name, tensor.contiguous()) for name, tensor in expected)]  # fmt: skip
        assert answer["tensors"] == shown

    def mapped(self) -> list[int]:
        """Sizes of the buffers that it has mapped."""
        return self.ask({})["mapped"]

    def close(self) -> None:
        self._mine.close()
        assert os.waitpid(self._process, 0)[1] == 0


def _answer(asked: socket.socket) -> None:
    mappings = Mappings()
    for line in asked.makefile():
        question = json.loads(line)
        answer: dict[str, Any] = {"mapped": MAPPED}
        if "chunk" in question:
            try:
                with open_chunk(json.loads(question["chunk"]), mappings) as tensors:
                    shown = [[name, str(t.dtype), list(t.shape), t.reshape(-1).view(torch.uint8).tolist() if t.numel() else []]
                             for name, t in tensors]  # fmt: skip
                    assert all(t.device == DEVICE for _, t in tensors)
                    COUNTERS.clear()
                answer = {"tensors": shown, "waits": COUNTERS.waits.total()}
            except GenerationError as error:
                answer = {"error": error.what}
        asked.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)
