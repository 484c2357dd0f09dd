"""Compare the native engine with transformers `generate`, on one machine in one run: `python benchmarks/generation.py`.

A Qwen3 of 5 million random parameters (vocabulary 512) answers 64 prompts of 64 tokens. Both sample at temperature 1, without an
end-of-sequence token, so that the amount of work is fixed. The native engine also returns two log-probs a token.

    uniform      every response has 128 tokens
    groups       8 prompts of 512 tokens, 8 responses of 64 tokens to each, as in GRPO with a long prompt
    long-tailed  lengths are log-normal, median 32, longest 256; each request ends at its own length. transformers runs
                 one batch to the longest; only wanted tokens count. The row "sorted" gives it all lengths in advance, which
                 no rollout knows, for four batches of 16 requests of similar length.

Repetitions of both alternate, so that other load on the machine affects both; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from numbered_tokenizer import numbered_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from hone.generation import ENGINES
from hone.generation.protocol import Engine, GenerationRequest, SamplingParams
from hone.models.routing import use_hone_attention

SEQUENCES, PROMPT_LENGTH, UNIFORM, MEDIAN, LONGEST = 64, 64, 128, 32, 256
GROUP, GROUP_PROMPT, GROUP_RESPONSE = 8, 512, 64
VOCABULARY = 512


def make_model(dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Return a model with the same random weights in each call."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().to(dtype)


def long_tailed(count: int) -> list[int]:
    """Return log-normal lengths: median MEDIAN, the longest LONGEST."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(count, generator=generator)
    spread = spread - spread.median()
    lengths = MEDIAN * torch.exp(spread * (torch.log(torch.tensor(LONGEST / MEDIAN)) / spread.max()))
    return lengths.round().clamp(1, LONGEST).int().tolist()


def random_prompts(count: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))


def native_run(engine: Engine, prompts: torch.Tensor, lengths: list[int]) -> Callable[[], int]:
    requests = [
        GenerationRequest(str(i), ids, SamplingParams(max_tokens=n, ignore_eos=True), seed=i)
        for i, (ids, n) in enumerate(zip(prompts.tolist(), lengths, strict=True))
    ]

    async def serve() -> int:
        return sum([len(completion.token_ids) async for completion in engine.generate(requests)])

    return lambda: asyncio.run(serve())


def transformers_run(
    model: PreTrainedModel, prompts: torch.Tensor, lengths: list[int], batch: int
) -> Callable[[], int]:
    order = sorted(range(len(lengths)), key=lengths.__getitem__) if batch < len(lengths) else [*range(len(lengths))]

    def serve() -> int:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            ids, most = prompts[rows], max(lengths[row] for row in rows)
            out = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=most,
                min_new_tokens=None,
            )
            if out.shape[1] != ids.shape[1] + most:
                raise RuntimeError(f"transformers stopped after {out.shape[1] - ids.shape[1]} of {most} tokens")
        return sum(lengths)

    return serve


def interleaved(runs: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Return the median tokens per second of each, after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    tokens: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            tokens[name] = run()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return {name: tokens[name] / statistics.median(taken) for name, taken in seconds.items()}


def machine() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return (
        f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def measure(dtype: str, repeats: int) -> None:
    torch_dtype = getattr(torch, dtype)
    ours, theirs = make_model(torch.float32, "sdpa"), make_model(torch_dtype, "sdpa")
    use_hone_attention(ours)
    engine = ENGINES.get("native")(
        model=ours,
        tokenizer=numbered_tokenizer(VOCABULARY),
        device=torch.device("cpu"),
        dtype=dtype,
        max_num_seqs=SEQUENCES,
        max_cache_tokens=None,
        max_model_len=GROUP_PROMPT + LONGEST,
    )
    prompts, long_prompts = random_prompts(SEQUENCES, PROMPT_LENGTH), random_prompts(SEQUENCES // GROUP, GROUP_PROMPT)
    for workload, ids, lengths in (
        ("uniform", prompts, [UNIFORM] * SEQUENCES),
        ("long-tailed", prompts, long_tailed(SEQUENCES)),
        ("groups", long_prompts.repeat_interleave(GROUP, 0), [GROUP_RESPONSE] * SEQUENCES),
    ):
        runs = {
            "native": native_run(engine, ids, lengths),
            "transformers": transformers_run(theirs, ids, lengths, SEQUENCES),
        }
        if workload == "long-tailed":
            runs["transformers, sorted"] = transformers_run(theirs, ids, lengths, SEQUENCES // 4)
        speed = interleaved(runs, repeats)
        for name, tokens_per_second in speed.items():
            ratio = "" if name == "native" else f"   native is {speed['native'] / tokens_per_second:.2f}x"
            print(f"{dtype:9} {workload:12} {name:22} {tokens_per_second:9.0f} tokens/s{ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions of each")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves torch's choice")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append", help="default: both")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(machine())
    for dtype in arguments.dtype or ("float32", "bfloat16"):
        measure(dtype, arguments.repeats)


if __name__ == "__main__":
    main()
