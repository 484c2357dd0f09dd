"""How long new weights take into an engine's own process, against a plain copy of the same bytes: `python benchmarks/weight_sync.py`.

A Qwen3 of about 100 million random parameters in float32. Each engine (the native one in a process of its own; vLLM where it is
installed) takes all weights by every transport, with a pause before and a resume after, as a training run does after each update. Copies and
publications alternate, so that whatever else the machine does hits both. The ratio is that of the medians; the copy is torch's, from one
buffer to another that was written before.
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

VOCABULARY = 8192


def make_model(layers: int) -> PreTrainedModel:
    """A model of 7 million parameters a layer, and 8 million of vocabulary."""
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
    """Copies as many bytes as a model has."""

    def __init__(self, model: PreTrainedModel) -> None:
        size = sum(parameter.nbytes for parameter in model.parameters())
        self._source, self._target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def __call__(self) -> float:
        """Seconds of a copy."""
        begun = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - begun


async def publish(engine: ServedEngine, model: PreTrainedModel, version: int) -> list[float]:
    """Seconds of the parts of one publication: pause, weights, resume."""
    marks = [time.perf_counter()]
    await engine.pause()
    marks.append(time.perf_counter())
    await engine.load_weights(model.named_parameters(), version)
    marks.append(time.perf_counter())
    await engine.resume()
    marks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(marks)]


def processor_seconds(engine: ServedEngine) -> float:
    """Of this process and those of the engine, since they began."""
    processes = [psutil.Process()]
    if engine.process is not None:
        server = psutil.Process(engine.process.pid)
        processes += [server, *server.children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def measure(engine: ServedEngine, model: PreTrainedModel, repeats: int) -> str:
    """A line of the table."""
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


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"])
    parser.add_argument("--backends", nargs="+", default=["shared_memory", "file"])
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--repeats", type=int, default=15)
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
            for backend in arguments.backends:
                plan = LaunchPlan(
                    name,
                    python,
                    *(folder, folder, "float32", 8, 256, 8 * 256),
                    cpus=tuple(range(torch.get_num_threads())),
                    log=Path(folder, f"{name}.log"),
                )
                engine = ServedEngine.start(plan, backend=backend)
                try:
                    print(f"{name:8} {backend:14} {measure(engine, model, arguments.repeats)}", flush=True)
                finally:
                    engine.close()


if __name__ == "__main__":
    main()
