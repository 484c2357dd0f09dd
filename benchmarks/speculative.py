"""Speculative decoding against one token a step, in one run: `python benchmarks/speculative.py`.

The policy is a Qwen3 of 5 million parameters (vocabulary 512, 6 layers), the draft model one of 0.4 million (1 layer). Both are
fitted, before anything is measured, to sequences of a random Markov chain in which each token has four successors of probability
0.7, 0.2, 0.05 and 0.05.

    repetitive   temperature 0.3: the chain runs in cycles, as answers do that repeat themselves
    diverse      temperature 1: nothing repeats itself exactly

1, 8 and 64 prompts of 32 tokens get answers of 256 tokens. All contestants sample the same tokens, which is checked. A pass is one
forward pass of the policy over all rows; its ratio says how many passes drafts save, whatever else the machine does. The contestants
alternate; tokens per second are of the medians, and their ratios those to decoding without drafts in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from numbered_tokenizer import numbered_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from hone.generation.native.engine import NativeEngine
from hone.generation.native.speculative import Drafter, Speculation
from hone.generation.native.speculative.build import DraftTrainer, Example, ModelDrafter, NgramDrafter
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.models.routing import use_hone_attention

VOCABULARY, PROMPT, ANSWER, NUM_TOKENS = 512, 32, 256, 4
PROBABILITIES = (0.7, 0.2, 0.05, 0.05)
CPU = torch.device("cpu")


def make_model(hidden: int, layers: int) -> nn.Module:
    """Return a random model."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    use_hone_attention(model)
    return model


def sequences(count: int, length: int, seed: int) -> list[list[int]]:
    """Return sequences of the Markov chain."""
    chain = torch.randint(0, VOCABULARY, (VOCABULARY, len(PROBABILITIES)), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    tokens: list[Tensor] = [torch.randint(0, VOCABULARY, (count,), generator=generator)]
    for _ in range(length - 1):
        choice = torch.multinomial(torch.tensor(PROBABILITIES), count, replacement=True, generator=generator)
        tokens.append(chain[tokens[-1], choice])
    return torch.stack(tokens, 1).tolist()


def fit(model: nn.Module, updates: int) -> float:
    """Fit a model to the chain; return the mean cross-entropy of the last updates. Each has 4096 tokens."""
    trainer = DraftTrainer(model, learning_rate=3e-3, device=CPU, dtype="float32")
    loss = None
    for part in range(0, updates, 10):
        for ids in sequences(160, 256, seed=1 + part):
            trainer.add(Example(ids, 1, 1.0))
        loss = trainer.train()
    assert loss is not None
    return loss


def serve(engine: NativeEngine, count: int, temperature: float) -> tuple[dict[str, list[int]], float]:
    """Return the tokens of each answer, and the seconds of all."""
    sampling = SamplingParams(max_tokens=ANSWER, temperature=temperature, ignore_eos=True)
    prompts = sequences(count, PROMPT, seed=99)
    requests = [GenerationRequest(str(i), ids, sampling, seed=i) for i, ids in enumerate(prompts)]

    async def collect() -> dict[str, list[int]]:
        return {completion.request_id: completion.token_ids async for completion in engine.generate(requests)}

    began = time.perf_counter()
    tokens = asyncio.run(collect())
    return tokens, time.perf_counter() - began


def measure(policy: nn.Module, small: nn.Module, count: int, temperature: float, repeats: int) -> None:
    """Print a line for each contestant."""
    drafters: dict[str, Drafter | None] = {
        "without": None,
        "ngram": NgramDrafter(2, 4),
        "draft_model": ModelDrafter(small, device=CPU, dtype=torch.float32),
    }
    engines = {
        name: NativeEngine(
            policy,
            numbered_tokenizer(VOCABULARY),
            device=CPU,
            dtype="float32",
            max_num_seqs=64,
            max_cache_tokens=None,
            max_model_len=PROMPT + ANSWER,
            speculation=None if drafter is None else Speculation(drafter, num_tokens=NUM_TOKENS),
        )
        for name, drafter in drafters.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    expected: dict[str, list[int]] = {}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            tokens, taken = serve(engine, count, temperature)
            expected = expected or tokens
            if tokens != expected:
                raise RuntimeError(f"{name} sampled other tokens")
            if repeat:
                seconds[name].append(taken)
    stats = {name: engine.describe().stats for name, engine in engines.items()}
    workload = "repetitive" if temperature < 1 else "diverse"
    for name in engines:
        speed, base = (count * ANSWER / statistics.median(seconds[one]) for one in (name, "without"))
        line = f"{workload:10} {count:3} rows  {name:12} {speed:7.0f} tokens/s"
        if name != "without":
            passes = stats["without"]["steps"] / stats[name]["steps"]
            acceptance = stats[name]["accepted_tokens"] / max(1, stats[name]["drafted_tokens"])
            line += f"  {speed / base:5.2f}x   {passes:5.2f}x fewer passes   acceptance {acceptance:.2f}"
        print(line, flush=True)


def machine() -> str:
    """Return the machine in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions of each")
    parser.add_argument("--updates", type=int, default=100, help="updates that fit each model to the chain")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="prompts at once")
    arguments = parser.parse_args()
    print(machine())
    policy, small = make_model(256, 6), make_model(128, 1)
    for name, model in (("policy", policy), ("draft model", small)):
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(
            f"{name}: {size:.1f} million parameters, cross-entropy {fit(model, arguments.updates):.2f} nats", flush=True
        )
    for temperature in (0.3, 1.0):
        for count in arguments.rows:
            measure(policy, small, count, temperature, arguments.repeats)


if __name__ == "__main__":
    main()
