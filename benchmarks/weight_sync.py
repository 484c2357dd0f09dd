"""Compare a weight sync to an engine in another process with a plain copy of the same bytes: `python benchmarks/weight_sync.py`.

The model is a Qwen3 of about 100 million random parameters in float32. Each engine (the native one in a separate process; vLLM where it is
installed) takes all weights by every transport, with a pause before and a resume after, as a training run does after each update. Copies
and weight syncs alternate, so that other load on the machine affects both. The ratio is that of the medians. The copy is torch's, from one
buffer to another that was written before.

With `--changed SHARE` the model is served in bfloat16, and this share of its entries changes between two versions. The script then
compares sending it whole with sending what changed (`checkpoint_engine.delta`), in processor time of both sides and bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from hone.errors import ConfigError
from hone.generation.environments import interpreter_of
from hone.generation.remote import LaunchPlan, ServedEngine
from hone.generation.remote.delta import Differences
from hone.generation.remote.transports import share_parameters

VOCABULARY = 8192


def make_model(layers: int) -> PreTrainedModel:
    """Return a model of 7 million parameters a layer, and 8 million of vocabulary."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).requires_grad_(False)


def write(model: PreTrainedModel, folder: str) -> None:
    """Save the model, with a tokenizer that has names for its tokens."""
    model.save_pretrained(folder)
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")))
    tokenizer.save_pretrained(folder)


class PlainCopy:
    """Copy of the number of bytes of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        size = sum(parameter.nbytes for parameter in model.parameters())
        self._source, self._target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def __call__(self) -> float:
        """Copy, and return the seconds."""
        begun = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - begun


async def publish(engine: ServedEngine, model: PreTrainedModel, version: int) -> list[float]:
    """Sync the weights once; return the seconds of pause, weights and resume."""
    marks = [time.perf_counter()]
    await engine.pause()
    marks.append(time.perf_counter())
    await engine.load_weights(model.named_parameters(), version)
    marks.append(time.perf_counter())
    await engine.resume()
    marks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(marks)]


def processor_seconds(engine: ServedEngine) -> float:
    """Return the processor seconds of this process and the engine's, since they began."""
    processes = [psutil.Process()]
    if engine.process is not None:
        server = psutil.Process(engine.process.pid)
        processes += [server, *server.children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def measure(engine: ServedEngine, model: PreTrainedModel, repeats: int) -> str:
    """Return a line of the table."""
    copy, copies, parts = PlainCopy(model), [], []
    first = sum(asyncio.run(publish(engine, model, 1)))
    copy()
    spent = -processor_seconds(engine)
    for repeat in range(repeats):
        copies.append(copy())
        parts.append(asyncio.run(publish(engine, model, repeat + 2)))
    spent += processor_seconds(engine)
    plain, whole = statistics.median(copies), statistics.median(map(sum, parts))
    pause, weights, resume = (1000 * statistics.median(column) for column in zip(*parts, strict=True))
    return (
        f"{whole * 1000:6.0f} ms ({pause:.1f} pause, {weights:.1f} weights, {resume:.1f} resume)  {whole / plain:5.1f} x a plain "
        f"copy of {plain * 1000:.1f} ms  (the first: {first * 1000:.0f} ms; both: {1000 * spent / repeats:.0f} ms of processor time)"
    )


def change(model: PreTrainedModel, share: float, version: int) -> None:
    """Change a share of the entries of every parameter, spread evenly, other ones in each version."""
    stride = max(1, round(1 / share))
    for parameter in model.parameters():
        parameter.data.view(-1)[version % stride :: stride].neg_()


def measure_delta(engine: ServedEngine, model: PreTrainedModel, share: float, repeats: int, *, delta: bool) -> str:
    """Return a line of the table with `--changed`."""
    former: dict[str, torch.Tensor] = {}
    seconds, sent = [], []
    for version in range(1, repeats + 2):
        change(model, share, version)
        spent, before = processor_seconds(engine), engine.describe().stats["weights_sent_bytes"]
        since = Differences(former.get) if delta and former else None
        asyncio.run(engine.load_weights(model.named_parameters(), version, since=since))
        seconds.append(processor_seconds(engine) - spent)
        sent.append(engine.describe().stats["weights_sent_bytes"] - before)
        former = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert engine.describe().stats["weights_refused"] == 0
    median = statistics.median(seconds[1:])
    return f"{'delta' if delta else 'whole'} {sent[-1] / 1e6:7.1f} MB  {median:6.2f} s of processor time  (the first: {sent[0] / 1e6:.1f} MB, {seconds[0]:.2f} s)"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"])
    parser.add_argument("--backends", nargs="+", default=["shared_memory", "file"])
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--changed", type=float, help="share of the entries that change between two versions")
    arguments = parser.parse_args()
    model = make_model(arguments.layers)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.0f}M parameters, {4 * count / 1e6:.0f} MB, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        write(model, folder)
        for name in arguments.engines:
            try:
                python = str(interpreter_of(name))
            except ConfigError as missing:
                print(f"{name:8} {missing.what}")
                continue
            dtype, deltas = ("float32", (False,)) if arguments.changed is None else ("bfloat16", (False, True))
            for backend, delta in itertools.product(arguments.backends, deltas):
                model = make_model(arguments.layers)
                if backend == "shared_memory":
                    share_parameters(model)  # as a training run does
                plan = LaunchPlan(
                    name,
                    python,
                    *(folder, folder, dtype, 8, 256, 8 * 256),
                    cpus=tuple(range(torch.get_num_threads())),
                    log=Path(folder, f"{name}.log"),
                )
                engine = ServedEngine.start(plan, backend=backend, delta=delta)
                try:
                    if arguments.changed is None:
                        line = measure(engine, model, arguments.repeats)
                    else:
                        line = measure_delta(engine, model, arguments.changed, arguments.repeats, delta=delta)
                    print(f"{name:8} {backend:14} {line}", flush=True)
                finally:
                    engine.close()


if __name__ == "__main__":
    main()
