"""Measure the cost of the mathematics: `python benchmarks/algorithms.py`.

    estimators   seconds of every registered advantage estimator on 8,192 sequences of up to 2,048 tokens, in groups of 8:
                 once in one piece, once with tool output (a fifth of the tokens has mask 0). The bound is 0.5 s.
    losses       forward and backward of every registered policy loss on 1,024 x 1,024 tokens, against `vanilla`. The
                 contestants take turns. The bound is 2x.
    memory       peak memory of log-probs and entropies from hidden states, forward and backward, in chunks and from the
                 whole table of logits, at a vocabulary of 32,768. The bound is 4x less.

A run waits for wall time. Processor time, of all threads, depends less on other load of the machine. Estimators show the
fastest of their calls, losses a median.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor

from hone.algorithms import (
    advantage_estimators,
    chunked_log_probs,
    entropy_from_logits,
    policy_losses,
    token_log_probs,
)

PARTS = ("estimators", "losses", "memory")
ESTIMATOR_BOUND, LOSS_BOUND, MEMORY_BOUND = 0.5, 2.0, 4.0
GROUP, TURN = 8, 256
MIB = 2**20


def names(registry: Any) -> list[str]:
    """Return the registered entries by their first name."""
    return [name for name in registry if registry.get(name).name == name]


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return wall and processor seconds of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the medians of wall and processor seconds."""
    walls, processors = zip(*times, strict=True)
    return statistics.median(walls), statistics.median(processors)


# --------------------------------------------------------------------------------------------------------- estimators


def estimator_inputs(rows: int, tokens: int, *, gaps: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return rewards, mask and all inputs of estimators; the last token has a score of 0 or 1."""
    lengths = torch.randint(1, tokens + 1, (rows,))
    mask = torch.arange(tokens) < lengths[:, None]
    if gaps:
        mask &= torch.rand(rows, tokens) < 0.8
    rewards = torch.zeros(rows, tokens)
    last = (mask * torch.arange(tokens)).argmax(dim=-1)
    rewards[torch.arange(rows), last] = torch.randint(0, 2, (rows,)).float()
    old = -torch.rand(rows, tokens)
    inputs = {
        "group_ids": [row // GROUP for row in range(rows)],
        "values": torch.randn(rows, tokens),
        "reward_baselines": torch.randint(0, 2, (rows,)).float(),
        "old_log_probs": old,
        "sum_pi_squared": (2 * old).exp(),
        "rollout_is_weights": torch.ones(rows, tokens),
        "reward_components": {name: torch.randint(0, 2, (rows,)).float() for name in ("right", "form")},
        "turn_ids": (torch.arange(tokens) // TURN).expand(rows, tokens).contiguous(),
        "turn_group_ids": torch.randint(0, 4, (rows, -(-tokens // TURN))),
    }
    return rewards, mask.long(), inputs


def fastest(name: str, rewards: Tensor, mask: Tensor, inputs: dict[str, Any], *, repeats: int) -> tuple[float, float]:
    """Return the least wall and processor seconds of an estimator, after one call to warm up."""
    estimator = advantage_estimators.get(name)
    times = [timed(lambda: estimator(rewards, mask, **inputs)) for _ in range(repeats + 1)][1:]
    walls, processors = zip(*times, strict=True)
    return min(walls), min(processors)


def estimators(arguments: argparse.Namespace) -> None:
    """Print the seconds of every estimator."""
    rows, tokens = arguments.rows, arguments.tokens
    print(f"\nadvantage estimators, {rows} x {tokens} tokens       wall s (processor s), bound {ESTIMATOR_BOUND} s")
    print(f"{'':32}{'in one piece':>18}{'with tool output':>18}")
    cells: dict[str, list[tuple[float, float]]] = {name: [] for name in names(advantage_estimators)}
    for gaps in (False, True):
        torch.manual_seed(0)
        call = estimator_inputs(rows, tokens, gaps=gaps)
        for name, times in cells.items():
            times.append(fastest(name, *call, repeats=arguments.repeats))
    for name, times in cells.items():
        text = "".join(f"{f'{wall:.3f} ({processor:.3f})':>18}" for wall, processor in times)
        print(f"{name:32}{text}{verdict(max(wall for wall, _ in times) <= ESTIMATOR_BOUND)}")


# ------------------------------------------------------------------------------------------------------------- losses


def losses(arguments: argparse.Namespace) -> None:
    """Print forward and backward of every loss against the vanilla one."""
    torch.manual_seed(0)
    size = (1024, 1024)
    old = -torch.rand(size)
    new = old + 0.1 * torch.randn(size)
    advantages, mask = torch.randn(size), torch.rand(size) < 0.8

    def step(name: str) -> None:
        log_probs = new.clone().requires_grad_()
        policy_losses.get(name)(old, log_probs, advantages, mask)[0].backward()

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names(policy_losses)}
    for turn in range(arguments.repeats + 1):
        for name, taken in times.items():
            taken += [timed(lambda n=name: step(n))][: 1 if turn else 0]
    wall_of_vanilla, processor_of_vanilla = medians(times["vanilla"])
    print(f"\npolicy losses, 1024 x 1024 tokens, forward and backward, bound {LOSS_BOUND}x of vanilla")
    print(f"{'':32}{'wall s':>10}{'ratio':>8}{'processor s':>14}{'ratio':>8}")
    for name, taken in times.items():
        wall, processor = medians(taken)
        ratios = wall / wall_of_vanilla, processor / processor_of_vanilla
        text = f"{name:32}{wall:10.3f}{ratios[0]:7.2f}x{processor:14.3f}{ratios[1]:7.2f}x"
        print(text + verdict(min(ratios) <= LOSS_BOUND))


# ------------------------------------------------------------------------------------------------------------- memory


def peak_of(how: str, tokens: int, vocabulary: int, device: str) -> int:
    """Return the peak bytes of one forward and backward pass, above those before it. Run it in a separate process."""
    width = 64
    hidden = torch.randn(tokens, width, device=device, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=device, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    warm = torch.randn(8, width, device=device) @ weight.detach().t()
    del warm
    before = memory(device)
    if how == "naive":
        logits = hidden @ weight.t()
        log_probs, entropy = token_log_probs(logits, targets), entropy_from_logits(logits)
        del logits
    else:
        log_probs, entropy = chunked_log_probs(hidden, weight, targets, with_entropy=True)
        assert entropy is not None
    (log_probs.sum() + entropy.sum()).backward()
    return memory(device, peak=True) - before


def memory(device: str, *, peak: bool = False) -> int:
    """Return the bytes in use by this process, or their peak."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if peak:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return psutil.Process().memory_info().rss


def memories(arguments: argparse.Namespace) -> None:
    """Print the peaks of both ways, each measured in a separate process."""
    command = [sys.executable, __file__, "--device", arguments.device, "--threads", str(arguments.threads)]
    command += ["--memory-tokens", str(arguments.memory_tokens), "--vocabulary", str(arguments.vocabulary)]
    peaks = {}
    for how in ("naive", "chunked"):
        result = subprocess.run([*command, "--peak-of", how], capture_output=True, text=True, check=True)
        peaks[how] = json.loads(result.stdout)
    ratio = peaks["naive"] / peaks["chunked"]
    print(
        f"\nlog-probs and entropies, {arguments.memory_tokens} tokens, vocabulary {arguments.vocabulary}, forward and "
        f"backward, {arguments.device}\npeak of naive {peaks['naive'] / MIB:.0f} MiB, in chunks "
        f"{peaks['chunked'] / MIB:.0f} MiB: {ratio:.1f}x less, bound {MEMORY_BOUND:.0f}x{verdict(ratio >= MEMORY_BOUND)}"
    )


# --------------------------------------------------------------------------------------------------------------- main


def verdict(good: bool) -> str:
    """Return an empty string, or a note that the bound is missed."""
    return "" if good else "   OUT OF BOUND"


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", type=int, default=8192, help="sequences, for the estimators")
    parser.add_argument("--tokens", type=int, default=2048, help="longest sequence, for the estimators")
    parser.add_argument("--memory-tokens", type=int, default=8192, help="tokens, for the memory")
    parser.add_argument("--vocabulary", type=int, default=32768, help="for the memory")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="for the memory")
    parser.add_argument("--peak-of", choices=["naive", "chunked"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak_of:
        print(peak_of(arguments.peak_of, arguments.memory_tokens, arguments.vocabulary, arguments.device))
        return
    from grpo_step import machine

    print(machine(arguments.threads))
    run = {"estimators": estimators, "losses": losses, "memory": memories}
    for part in arguments.parts:
        run[part](arguments)


if __name__ == "__main__":
    main()
