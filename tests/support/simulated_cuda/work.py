"""Programs that print what parts of Hone ask of the simulated GPU, as JSON; see :func:`support.simulated_cuda.machine.Machine.start`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import families
from support.models import random_batch
from support.paged import paged_engine
from support.simulated_cuda import streams
from support.simulated_cuda.counters import COUNTERS
from support.simulated_cuda.tensors import SimulatedTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.config.model import OptimConfig
from hone.generation import ENGINES
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.models.attention import paged
from hone.models.heads import PolicyHead
from hone.models.offload import ActivationOffload
from hone.models.routing import use_hone_attention
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import imitation_objective

DEVICE = torch.device("cuda", 0)
SHORT, LONG = 3, 5
"""Sampled tokens of the two generations whose difference is counted."""
DECODING: dict[str, dict[str, Any]] = {
    "rows that share prompts": {"copies": 3},
    "rows with prompts of their own": {"copies": 1},
    "rows with stop strings": {"copies": 3, "stop": ("no such text",)},
    "rows with top-p": {"copies": 3, "top_p": 0.9},
    "rows with top-p and penalties": {"copies": 3, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.1},
}


def count(words: list[str]) -> None:
    """Print the counters of a decode step of each kind, of a log-prob pass and of an update, all in bfloat16.

    Args:
        words: directories of models that differ in their number of layers.
    """
    torch.set_num_threads(1)
    print(json.dumps([_count(directory) for directory in words]))  # noqa: T201 - the answer


def _count(directory: str) -> dict[str, dict[str, float]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(DEVICE)
    use_hone_attention(model)
    engine = ENGINES.get("native")(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(directory),
        device=DEVICE,
        dtype="bfloat16",
        max_num_seqs=8,
        max_cache_tokens=None,
        max_model_len=64,
    )
    work = {}
    for name, settings in DECODING.items():
        short, long = (_counted(functools.partial(_generate, engine, tokens, **settings)) for tokens in (SHORT, LONG))
        work[name] = {key: (value - short[key]) / (LONG - SHORT) for key, value in long.items()}
    backend = LocalBackend(model, PolicyHead(), TrainSettings(DEVICE, optim=OptimConfig(), dtype="bfloat16"))
    batch, objective = random_batch(8, seed=0), imitation_objective()
    work["log-prob pass"] = _counted(lambda: backend.infer_batch(batch))
    work["update"] = _counted(lambda: backend.train_batch(batch, objective, step=0))
    return work


def _counted(work: Callable[[], object]) -> dict[str, float]:
    """Return what ``work`` asks of the GPU when it is done for the second time: totals, and each wait by its place."""
    work()
    COUNTERS.clear()
    work()
    totals = {name: float(counter.total()) for name, counter in vars(COUNTERS).items()}
    return Counter(totals | {f"wait: {place}": float(number) for place, number in COUNTERS.waits.items()})


def _generate(engine: Any, tokens: int, *, copies: int, **sampling: Any) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)
    requests = [
        GenerationRequest(f"{prompt}-{copy}", [5 + prompt, 7, 9, 11 + prompt], params, seed=10 * prompt + copy)
        for prompt in range(2)
        for copy in range(copies)
    ]

    async def all_of_them() -> list[Completion]:
        return [completion async for completion in engine.generate(requests)]

    assert {len(completion.token_ids) for completion in asyncio.run(all_of_them())} == {tokens}


def check(words: list[str]) -> None:
    """Check the simulated GPU: its numbers are the CPU's, devices do not mix, and each counter counts what it says."""
    del words
    torch.manual_seed(0)
    layer, states = torch.nn.Linear(8, 8), torch.randn(2, 3, 4, 8)
    gradients = {}
    for device in (torch.device("cpu"), DEVICE):
        there, x = copy.deepcopy(layer).to(device), states.to(device).detach().requires_grad_()
        query = there(x)
        mixed = F.scaled_dot_product_attention(query, x, x, is_causal=True)
        mixed.square().sum().backward()
        gradients[device] = [gradient.cpu() for gradient in (x.grad, there.weight.grad) if gradient is not None]
    torch.testing.assert_close(gradients[DEVICE], gradients[torch.device("cpu")])
    assert isinstance(layer.to(DEVICE).weight, torch.nn.Parameter) and layer.weight.is_cuda
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(states.to(DEVICE)).dtype == torch.bfloat16
    numbers = torch.arange(6, device=DEVICE)
    try:
        numbers + torch.ones(6)
    except RuntimeError as error:
        assert "cuda:0 and cpu" in str(error)
    else:
        raise AssertionError("a tensor on the host was added to one on the GPU")
    for reads, kind, function in [
        (1, "waits", lambda: numbers.sum().item()),
        (1, "waits", numbers.tolist),
        (1, "waits", lambda: numbers[numbers > 2]),
        (1, "waits", lambda: torch.cuda.synchronize()),
        (0, "waits", lambda: numbers.view(2, 3)[0] + 1),
        (1, "launches", lambda: numbers.view(2, 3)[0] + 1),
        (1, "to_host", numbers.cpu),
        (1, "to_device", lambda: torch.tensor([1, 2], device=DEVICE)),
        (1, "to_device", lambda: numbers[torch.tensor([0, 2])]),
    ]:
        COUNTERS.clear()
        function()
        assert getattr(COUNTERS, kind).total() == reads, (kind, COUNTERS)
    _check_graphs()
    base = torch.zeros(4, device=DEVICE)
    base[1:3] += 2
    assert base.tolist() == [0, 2, 2, 0], "views share memory"


def _check_graphs() -> None:
    """Check that a graph computes nothing when it is captured, reads fixed addresses, and refuses what CUDA refuses."""
    state, factor = torch.ones(3, device=DEVICE), torch.full((3,), 2.0, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state += 1
        doubled = state * factor
        doubled.add_(1)
    assert state.tolist() == [1, 1, 1] and doubled.isnan().all().item(), "nothing is computed before a replay"
    COUNTERS.clear()
    for expected in (5, 7):
        graph.replay()
        assert doubled.tolist() == [expected] * 3
    assert COUNTERS.launches.total() == 2
    factor.copy_(torch.tensor([0.0, 1.0, 2.0], device=DEVICE))
    factor = torch.zeros(3, device=DEVICE)  # another tensor than the captured one
    graph.replay()
    assert doubled.tolist() == [1, 5, 9]
    for refused in (state.tolist, lambda: state[state > 1], lambda: torch.tensor([1.0], device=DEVICE)):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                refused()
        except RuntimeError as error:
            assert "capturing" in str(error)
        else:
            raise AssertionError(f"{refused} was captured")
    arriving, event = torch.zeros(3, pin_memory=True), torch.cuda.Event()
    arriving.copy_(state, non_blocking=True)
    event.record()
    assert arriving.tolist() != state.tolist(), "it has not arrived before the host waits"
    state += 1
    event.synchronize()
    assert arriving.tolist() == [4, 4, 4]


def offload(words: list[str]) -> None:
    """Check activations in host memory: the same gradients, less device memory, copies on a stream of their own, and no wait."""
    del words
    _check_streams()
    torch.manual_seed(0)
    width, depth = 256, 12
    layers = [torch.nn.Linear(width, width).to(DEVICE) for _ in range(depth)]
    x = torch.randn(256, width).to(DEVICE)
    size = x.numel() * 4

    def gradients(saving: Any, checkpointed: bool) -> tuple[list[list[float]], int]:
        for layer in layers:
            layer.zero_grad()
        y = x
        with _device_memory() as peak, saving:
            for layer in layers:
                step = lambda y, layer=layer: F.gelu(layer(y)) + y  # noqa: E731
                y = checkpoint(step, y, use_reentrant=False) if checkpointed else step(y)
        y.square().mean().backward()
        return [layer.weight.grad.tolist() for layer in layers if layer.weight.grad is not None], peak[0]

    for checkpointed, saved in ((False, 2), (True, 1)):  # tensors for each layer: its input, and what gelu gets
        on_host = ActivationOffload(DEVICE, in_flight=3 * size)
        expected, plain = gradients(contextlib.nullcontext(), checkpointed)
        for repetition in range(2):
            COUNTERS.clear()
            before = on_host._stream.clock[on_host._stream.number]
            results, peak = gradients(on_host.saving(), checkpointed)
            assert results == expected and len(results) == depth
            assert peak <= plain - (saved * depth - 5) * size, (peak, plain, size)
            copies = COUNTERS.to_host.total() - depth, COUNTERS.to_device.total()  # the gradients are read too
            assert copies[0] - saved * depth in (-1, 0) and copies[0] - copies[1] in (2, 3), copies
            assert on_host._stream.clock[on_host._stream.number] - before >= sum(copies), (
                "one of them on another stream"
            )
            assert COUNTERS.waits.total() == depth, COUNTERS.waits
            buffers = sum(map(len, on_host.buffers._free.values()))
            assert buffers == copies[0], (repetition, buffers)
    gc.collect()
    assert not streams.HAZARDS, streams.HAZARDS


@contextlib.contextmanager
def _device_memory() -> Iterator[list[int]]:
    """Yield the most bytes that the tensors made in the block have held at once."""
    peak, alive, make = [0], dict[int, int](), SimulatedTensor.__init__

    def made(tensor: SimulatedTensor, memory: torch.Tensor, requires_grad: bool = False) -> None:
        make(tensor, memory, requires_grad)
        storage = memory.untyped_storage()
        if id(storage) not in alive:
            alive[id(storage)] = storage.nbytes()
            weakref.finalize(storage, alive.pop, id(storage))
            peak[0] = max(peak[0], sum(alive.values()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedTensor, "__init__", made)
        yield peak


def _check_streams() -> None:
    """Check that memory which another stream may be using is neither read, written nor freed."""
    side, values, host = torch.cuda.Stream(), torch.ones(4, device=DEVICE), torch.zeros(4, pin_memory=True)

    def send() -> torch.cuda.Event:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(values, non_blocking=True)
        return side.record_event()

    def fetch(waits: bool) -> torch.Tensor:
        target = torch.empty(4, device=DEVICE)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(host, non_blocking=True)
        return target

    send()
    try:
        values.add_(1)
    except RuntimeError as error:
        assert "may still be using" in str(error)
    else:
        raise AssertionError("memory was changed during a copy out of it")
    torch.cuda.current_stream().wait_event(send())
    values.add_(1)
    fetched = fetch(waits=True)
    try:
        fetched + 1
    except RuntimeError as error:
        assert "may still be using" in str(error)
    else:
        raise AssertionError("memory was read during a copy into it")
    torch.cuda.current_stream().wait_stream(side)
    assert (fetched + 1).tolist() == [2, 2, 2, 2]
    fetched = fetch(waits=True)
    assert not streams.HAZARDS
    del fetched
    assert len(streams.HAZARDS) == 1, "memory was freed during a copy into it"
    streams.HAZARDS.clear()
    torch.cuda.synchronize()


def decode(words: list[str]) -> None:
    """Check that paged rows on the GPU, with graphs, give the tokens and log-probs of contiguous rows on the CPU.

    Args:
        words: directory of a model.
    """
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(words[0], dtype=torch.float32)
    requests = [
        GenerationRequest(
            f"{prompt}.{copy}", [*range(3, 6 + 3 * prompt)], SamplingParams(**settings), 7 * prompt + copy
        )
        for prompt in range(4)
        for copy, settings in enumerate(_WAYS_TO_SAMPLE)
    ]
    expected = families.serve(families.make_engine(model, max_num_seqs=6), requests)
    there = copy.deepcopy(model).to(DEVICE)
    assert paged.obstacle(DEVICE, 16) is None
    for limits in ({}, {"max_cache_tokens": 56, "max_model_len": 44}):  # the second gives 14 pages to rows of up to 11
        with pytest.MonkeyPatch.context() as patch:
            engine = paged_engine(patch, there, device=DEVICE, max_num_seqs=6, **limits)
        COUNTERS.clear()
        answers = families.serve(engine, requests)
        rows, stats = engine._runner.rows, engine.describe().stats
        for name, answer in expected.items():
            assert (answers[name].token_ids, answers[name].stop_reason) == (answer.token_ids, answer.stop_reason), name
            torch.testing.assert_close(answers[name].log_probs, answer.log_probs, atol=1e-4, rtol=0)
        assert bool(limits) == (stats["preemptions"] > 0), stats
        assert COUNTERS.waits.total() <= rows.steps, COUNTERS.waits
        replays = sum(number for place, number in COUNTERS.launches.items() if place.startswith("graph in"))
        assert replays == rows.steps and stats["decode_tokens"] == sum(len(a.token_ids) for a in answers.values())
        assert rows._memory.pages.in_use == 0


_WAYS_TO_SAMPLE: list[dict[str, Any]] = [
    {"max_tokens": 30},
    {"max_tokens": 9, "temperature": 0.7},
    {"max_tokens": 22, "stop_token_ids": tuple(range(10, 20))},
    {"max_tokens": 17, "temperature": 0.0},
    {"max_tokens": 13, "top_p": 0.9, "top_k": 12},
]
"""All of them without work of the host in a step."""
