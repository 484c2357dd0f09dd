"""Roofline of Hone on GPUs that are not there: `python benchmarks/roofline.py --models 0.6B 8B --device H100 --top 10`.

Hone's own update, log-prob pass and decode step run on tensors without storage. Every kernel that they would launch costs the
larger of its bytes at the GPU's bandwidth and its operations at its rate. Simulated: no figure has been compared with a GPU.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gpu_simulation.kernels import Kernel, host_launches_of, launches_of, waits_of
from gpu_simulation.passes import (
    Group,
    batch_of,
    decode_kernels,
    log_prob_kernels,
    model_without_storage,
    needed_operations,
    optimizer_kernels,
    update_kernels,
)
from gpu_simulation.timing import SHARE_OF_MATMULS, SHORTEST, WAIT, Recording, most_expensive, timeline
from transformers import Qwen3Config

from hone.preflight.plan.devices import MATMUL_SHARE, Device, device_named

SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
CHECKPOINTED = ("4B", "8B")
"""Models whose activations do not fit on one GPU without gradient checkpointing."""
PROMPT, SAMPLES, MICRO_BATCH = 512, 8, 16384
DECODED = (1, 8, 64, 256)
"""Rows of the decode steps."""


def qwen3(size: str, layers: int | None = None) -> Qwen3Config:
    """Return the configuration of a Qwen3 model, or of its first layers."""
    shared = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": size != "8B"}
    sizes = SIZES[size] | ({} if layers is None else {"num_hidden_layers": layers})
    return Qwen3Config(**sizes, **shared)


def long_tailed(prompts: int, mean: float = 1200, spread: float = 0.8, longest: int = 8192) -> list[Group]:
    """Return groups of 8 responses with lognormal lengths."""
    draw = random.Random(0)
    middle = math.log(mean) - spread**2 / 2

    def length() -> int:
        return max(32, min(longest, int(draw.lognormvariate(middle, spread))))

    return [Group(PROMPT, [length() for _ in range(SAMPLES)]) for _ in range(prompts)]


def decoding(rows: int) -> list[Group]:
    """Return rows in the middle of their responses, 8 a prompt, from 100 to 1,100 tokens."""
    sampled = [100 + 1000 * row // rows for row in range(rows)]
    return [Group(PROMPT, sampled[start : start + SAMPLES]) for start in range(0, rows, SAMPLES)]


def record(size: str, kernels_of: Callable[[Any], Sequence[Kernel]], keeps: str = "nothing") -> Recording:
    """Record a pass of a model's first layer, and of its first two; ``keeps`` is what gradient checkpointing keeps."""
    configs: list[Any] = [qwen3(size, layers) for layers in (1, 2)]
    settings: dict[str, Any] = {"checkpointing": size in CHECKPOINTED, "keeps": keeps}
    one, two = (kernels_of(model_without_storage(config, **settings)) for config in configs)
    return Recording(one, two)


def report(size: str, devices: Sequence[Device], prompts: int, top: int, keeps: str) -> list[str]:
    """Return the table's lines of a model, and print what costs most on the first device."""
    config, groups = qwen3(size), long_tailed(prompts)
    layers, batch, micro = config.num_hidden_layers, batch_of(groups), {"bf16": True, "max_tokens": MICRO_BATCH}
    update = record(size, lambda model: update_kernels(model, batch, **micro), keeps)
    scoring = record(size, lambda model: log_prob_kernels(model, batch, **micro))
    decode = {rows: record(size, partial(decode_kernels, groups=decoding(rows), bf16=True)) for rows in DECODED}
    optimizer = optimizer_kernels(model_without_storage(config))
    needed, lines = needed_operations(config, groups), []
    tokens = sum(group.prompt + sum(group.responses) for group in groups)
    for device in devices:
        seconds = update.seconds(device, layers) + timeline(optimizer, device).total
        scored, peak = scoring.seconds(device, layers), device.narrow_rate / MATMUL_SHARE
        rates = {rows: rows / recording.seconds(device, layers) for rows, recording in decode.items()}
        lines.append(
            f"| {size} | {device.name} | {f'keeps {keeps}' if size in CHECKPOINTED else 'no'} | {seconds:.2f} | "
            f"{tokens / seconds:,.0f} | {3 * needed / seconds / peak:.1%} | {scored:.2f} | "
            f"{needed / scored / peak:.1%} | {' | '.join(f'{rates[rows]:,.0f}' for rows in DECODED)} |"
        )
    kernels = {"update": [*update.kernels(layers), *optimizer]}
    kernels |= {f"decode step, {rows} rows": recording.kernels(layers) for rows, recording in decode.items()}
    steps = sum(kernel.name == "embedding_dense_backward" for kernel in update.one)
    a_layer = [
        (launches_of(r.two) - launches_of(r.one)) / count
        for r, count in ((update, steps), (scoring, steps), (decode[64], 1))
    ]
    print(f"\n{size}: {len(batch)} rows, {tokens:,} tokens, {steps} micro-batches; kernels a layer: ", end="")
    print(f"{a_layer[0]:.0f} in an update's micro-batch, {a_layer[1]:.0f} for log-probs, ", end="")
    print(
        f"{a_layer[2]:.0f} in a decode step, which the host launches {host_launches_of(decode[64].one)} times; ", end=""
    )
    print(f"the host waits {waits_of(kernels['update'])} times an update, {waits_of(decode[64].one)} a decode step")
    for words, part in kernels.items():
        _print_most_expensive(f"{size} {words}", part, devices[0], top)
    return lines


def _print_most_expensive(words: str, kernels: Sequence[Kernel], device: Device, top: int) -> None:
    whole = timeline(kernels, device)
    print(f"\n{words}: {device.name} busy {whole.busy * 1e3:.1f} ms, launches {whole.host * 1e3:.1f} ms of the host")
    for share in most_expensive(kernels, device)[:top]:
        print(
            f"  {share.seconds / whole.busy:5.1%} {share.seconds * 1e3:9.2f} ms {share.calls:6d} x {share.name:24} "
            f"{share.moved / 1e9:9.1f} GB {share.operations / 1e12:8.1f} TFLOP  {share.where}"
        )


def main() -> None:
    """Print the figures of every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--device", nargs="+", default=["H100-80GB", "H200-141GB"])
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a mini-batch, 8 responses each")
    parser.add_argument("--top", type=int, default=10, help="kernels to list")
    parser.add_argument(
        "--keeps", default="nothing", choices=["nothing", "attention"], help="of gradient checkpointing"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    devices = [device_named(name) for name in options.device]
    print(f"simulated, never run on a GPU. torch {torch.__version__}; bfloat16 autocast over float32 weights, AdamW")
    for device in devices:
        print(
            f"{device.name}: matmuls {device.narrow_rate / 1e12:.0f} TFLOP/s, {device.bandwidth / 1e9:.0f} GB/s, a launch "
            f"{device.launch * 1e6:.1f} us of the host, a kernel at least {SHORTEST * 1e6:.0f} us, a wait {WAIT * 1e6:.0f} us"
        )
    shares = ", ".join(f"{work} {share:.0%}" for work, share in SHARE_OF_MATMULS.items())
    print(f"speed against matmuls: {shares}")
    print(f"micro-batches of {MICRO_BATCH:,} tokens, prompts of {PROMPT}, n={SAMPLES}, lognormal lengths of mean 1,200")
    lines = [
        line for size in options.models for line in report(size, devices, options.prompts, options.top, options.keeps)
    ]
    print(
        "\n| Qwen3 | device | checkpointing | update s | tokens/s | MFU | log-probs s | MFU | decode tokens/s, 1 row | 8 | 64 | 256 |"
    )
    print("|---" * 12 + "|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
