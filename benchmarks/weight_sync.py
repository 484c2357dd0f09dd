"""How long new weights take into an engine's own process, against a plain copy of the same bytes: `python benchmarks/weight_sync.py`.

A Qwen3 of about 100 million random parameters in float32. Each engine (the native one in a process of its own; vLLM where it is
installed) takes all weights by every transport, with a pause before and a resume after, as a training run does after each update.
The ratio is that of the medians; the copy is torch's, from one buffer to another that was written before.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

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


def plain_copy(model: PreTrainedModel, repeats: int) -> float:
    """Median seconds of copying as many bytes."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


async def publish(engine: ServedEngine, model: PreTrainedModel, version: int) -> float:
    """Seconds of one publication, pause and resume included."""
    begun = time.perf_counter()
    await engine.pause()
    await engine.load_weights(model.named_parameters(), version)
    await engine.resume()
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"])
    parser.add_argument("--backends", nargs="+", default=["shared_memory", "file"])
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    model = make_model(arguments.layers)
    count = sum(parameter.numel() for parameter in model.parameters())
    copy = plain_copy(model, arguments.repeats)
    print(f"{count / 1e6:.0f}M parameters, {4 * count / 1e6:.0f} MB; a plain copy: {copy * 1000:.0f} ms")
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
                    name, python, folder, folder, "float32", 8, 256, 8 * 256, log=Path(folder, f"{name}.log")
                )
                engine = ServedEngine.start(plan, backend=backend)
                try:
                    seconds = [asyncio.run(publish(engine, model, n + 1)) for n in range(arguments.repeats)]
                finally:
                    engine.close()
                median = statistics.median(seconds[1:])
                print(
                    f"{name:8} {backend:14} {median * 1000:6.0f} ms  {median / copy:5.1f} x a plain copy (first: {seconds[0] * 1000:.0f} ms)"
                )


if __name__ == "__main__":
    main()
