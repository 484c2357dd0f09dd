"""Compare the native engine with vLLM on one machine in one run: `python benchmarks/engines.py` (needs `hone engines install vllm`).

A Qwen3 of 5 or 30 million random parameters (vocabulary 512) answers 64 prompts of 64 tokens with 128 tokens each, sampled at
temperature 1; every token comes with its log-probs. Both have the same number of threads. Runs alternate, so that other load on the
machine affects both; the ratio is that of the medians.

Then it compares whole GRPO steps, weight sync included (`--only steps`; `--only tokens` leaves them out): 8 prompts of 64 tokens with 8
answers of 128 tokens each, with the run's own trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch
from grpo_step import WORKLOADS, Hone, make_files, measure
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from hone.generation import ENGINES
from hone.generation.environments import interpreter_of
from hone.generation.protocol import Engine, GenerationRequest, SamplingParams
from hone.generation.remote import LaunchPlan, ServedEngine
from hone.models.routing import use_hone_attention

PROMPTS, PROMPT_LENGTH, TOKENS, VOCABULARY = 64, 64, 128, 512
LONGEST = PROMPT_LENGTH + TOKENS
SHAPES = {"5M": (256, 6), "30M": (512, 10)}
"""Hidden size and layers."""


def make_model(size: str) -> PreTrainedModel:
    """Return a model with random weights."""
    torch.manual_seed(0)
    hidden, layers = SHAPES[size]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def open_engines(model: PreTrainedModel, dtype: str, folder: str) -> dict[str, Engine]:
    """Return the native engine in this process, and vLLM in a separate one."""
    model.save_pretrained(folder)
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")))
    tokenizer.save_pretrained(folder)
    cpus = tuple(range(torch.get_num_threads()))
    plan = LaunchPlan(
        "vllm",
        str(interpreter_of("vllm")),
        *(folder, folder, dtype, PROMPTS, LONGEST, PROMPTS * LONGEST),
        cpus=cpus,
        log=Path(folder, "vllm.log"),
    )
    vllm = ServedEngine.start(plan)
    use_hone_attention(model)
    native = ENGINES.get("native")(
        model=model,
        tokenizer=tokenizer,
        device=torch.device("cpu"),
        dtype=dtype,
        max_num_seqs=PROMPTS,
        max_cache_tokens=None,
        max_model_len=LONGEST,
    )
    return {"native": native, "vllm": vllm}


def serve(engine: Engine, seed: int) -> float:
    """Return tokens per second of one round; prompts are new in every round, so that no prefix is cached."""
    prompts = torch.randint(0, VOCABULARY, (PROMPTS, PROMPT_LENGTH), generator=torch.Generator().manual_seed(seed))
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    requests = [GenerationRequest(str(i), ids, sampling, seed=i) for i, ids in enumerate(prompts.tolist())]

    async def answer() -> int:
        return sum([len(done.token_ids) async for done in engine.generate(requests)])

    begun = time.perf_counter()
    return asyncio.run(answer()) / (time.perf_counter() - begun)


def compare_tokens(size: str, dtype: str, repeats: int) -> None:
    """Print tokens per second of both."""
    with tempfile.TemporaryDirectory() as folder:
        engines = open_engines(make_model(size), dtype, folder)
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for repeat in range(repeats + 1):
            for name, engine in engines.items():
                speed = serve(engine, repeat)
                if repeat:
                    speeds[name].append(speed)
        for engine in engines.values():
            engine.close()
    median = {name: statistics.median(taken) for name, taken in speeds.items()}
    shown = "  ".join(f"{name} {value:7.0f} tokens/s" for name, value in median.items())
    print(f"{size:4} {dtype:9} {shown}   native is {median['native'] / median['vllm']:.2f}x", flush=True)


async def compare_steps(size: str, dtype: str, repeats: int) -> None:
    """Print seconds of a whole step with both, and of its phases."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        make_files(files, *SHAPES[size])
        key, threads = "actor_rollout_ref.rollout.name", torch.get_num_threads()
        runs = [Hone(name, files, WORKLOADS[0], dtype, threads, f"{key}={name}") for name in ("native", "vllm")]
        try:
            seconds = await measure(list(runs), WORKLOADS[0], 1, repeats)
        finally:
            for run in runs:
                run.close()
    median = {name: statistics.median(step.wall for step in steps) for name, steps in seconds.items()}
    shown = "  ".join(f"{name} {value:7.3f} s a step" for name, value in median.items())
    print(f"{size:4} {dtype:9} {shown}   native is {median['vllm'] / median['native']:.2f}x", flush=True)
    for run in runs:
        phases = {name: statistics.median(taken[1:]) for name, taken in run.phases.items()}
        print(f"     {run.name:6} " + ", ".join(f"{k} {v:.3f}" for k, v in phases.items() if v > 0.0005), flush=True)


def main() -> None:
    """Measure and print a line for each size and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["5M", "30M"], choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["tokens", "steps"])
    arguments = parser.parse_args()
    disable_progress_bar()
    for size in arguments.sizes:
        for dtype in arguments.dtypes:
            if arguments.only != "steps":
                compare_tokens(size, dtype, arguments.repeats)
            if arguments.only != "tokens":
                asyncio.run(compare_steps(size, dtype, arguments.repeats))


if __name__ == "__main__":
    main()
