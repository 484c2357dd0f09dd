"""Measure updates on rows that begin alike, with and without shared prefixes: `python benchmarks/prefix_tree.py`.

The rows are the leaves of a tree: an agent's episode of eight turns (a sampled half, then a tool's answer), forked after the second,
fourth, sixth and eighth turn, each time into five last turns. A Qwen3 of random weights gets a policy update on all of them, with
an advantage for each row, by three contestants in processes of their own, which take turns:

    shared       every token of the tree is computed once
    prompts      rows share their prompt and nothing deeper
    unshared     every row is packed whole

Printed are seconds of an update, the ratio to `unshared`, tokens that go through the model, the memory that the updates add to the
process at their peak, and the norm of the gradient, which is the same for all. The bounds are 3x, and memory no higher.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

CONTESTANTS = ("shared", "prompts", "unshared")
SPEED_BOUND = 3.0
PROMPT, TURN, LEAF = 64, 224, 96
FORKS, LEAVES_OF_A_FORK = (2, 4, 6, 8), 5
VOCABULARY = 512
MIB = 2**20


class Plan(NamedTuple):
    """Model directory, compute dtype and threads."""

    model: str
    dtype: str
    threads: int


class Measured(NamedTuple):
    """Wall and processor seconds of an update, its gradient norm, and the most memory that updates have added, in bytes."""

    wall: float
    processor: float
    norm: float
    added: int


def serve(pipe: Any, plan: Plan, name: str) -> None:
    """Build a contestant, send the tokens of its micro-batches, then update it on each request."""
    import torch

    from hone.config.actor import ActorConfig
    from hone.config.algorithm import RolloutCorrectionConfig
    from hone.config.derived import correction_settings
    from hone.config.model import ModelConfig, OptimConfig
    from hone.config.parallel import ParallelConfig
    from hone.data.prefixes import PrefixOrder
    from hone.models.heads import PolicyHead
    from hone.training.backends.registry import build_train_backend
    from hone.training.engine import TrainSettings
    from hone.training.objectives import PolicyObjective

    torch.set_num_threads(plan.threads)
    batch = tree()
    if name != "shared":
        shared = batch.ragged("prompt_ids").lengths * (name == "prompts")

        def prefixes(*columns: Any) -> PrefixOrder:
            """Return the order of rows that share nothing but their prompt, if that."""
            return PrefixOrder.from_groups([0] * len(columns[0]), shared[: len(columns[0])])

        PrefixOrder.from_tokens = prefixes  # type: ignore[method-assign]
    objective = PolicyObjective(ActorConfig(), correction_settings(RolloutCorrectionConfig()), max_response_length=4096)
    settings = TrainSettings(torch.device("cpu"), optim=OptimConfig(lr=1e-5), dtype=plan.dtype)
    engine = build_train_backend(
        "policy", ModelConfig(path=plan.model), PolicyHead(), settings, parallel=ParallelConfig(), meshes=None, seed=0
    )
    pipe.send(tokens_of(batch))
    before, step = memory("VmRSS"), 0
    while True:
        pipe.recv()
        began, worked = time.perf_counter(), time.process_time()
        result = engine.train_batch(batch, objective, step=step)
        seconds = time.perf_counter() - began, time.process_time() - worked
        step += 1
        pipe.send(Measured(*seconds, result.grad_norm, memory("VmHWM") - before))


def tokens_of(batch: Any) -> tuple[int, int]:
    """Return the tokens of all micro-batches, and the number of micro-batches."""
    import torch

    from hone.config.limits import CPU_MICRO_BATCH_TOKENS
    from hone.training.packing import pack, plan_micro_batches

    plan = plan_micro_batches(batch.ragged("prompt_ids"), batch.ragged("response_ids"), CPU_MICRO_BATCH_TOKENS)
    packed = [pack(batch.reorder(rows), torch.device("cpu")) for rows in plan]
    return sum(one.input_ids.numel() for one in packed), len(plan)


def tree() -> Any:
    """Return the rows: leaves of one episode, in random order, with an advantage for every row."""
    import torch

    from hone.data.batch import Batch
    from hone.data.ragged import Ragged

    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (count,), generator=generator)

    prompt, trunk = tokens(PROMPT), tokens(TURN * max(FORKS))
    rows = [torch.cat([trunk[: TURN * turn], tokens(LEAF)]) for turn in FORKS for _ in range(LEAVES_OF_A_FORK)]
    order = torch.randperm(len(rows), generator=generator).tolist()
    responses = Ragged.from_rows([rows[row] for row in order])
    sampled = Ragged.from_rows([torch.arange(len(rows[row])) % TURN < TURN // 2 for row in order], torch.int64)
    advantages = torch.randn(len(rows), generator=generator).repeat_interleave(responses.lengths)
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([prompt] * len(rows)),
            "response_ids": responses,
            "response_mask": sampled,
            "advantages": responses.with_values(advantages),
        }
    )


def memory(name: str) -> int:
    """Return an entry of this process's status, in bytes: VmRSS, memory now, or VmHWM, its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def save_model(directory: str, hidden: int, layers: int) -> int:
    """Save a Qwen3 of random weights; returns its number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    """Measure and print; returns 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        parameters = save_model(directory, arguments.hidden, arguments.layers)
        plan = Plan(directory, arguments.dtype, arguments.threads)
        pipes: dict[str, Any] = {}
        processes: list[Any] = []
        for name in CONTESTANTS:
            pipes[name], theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(theirs, plan, name), daemon=True))
            processes[-1].start()
            theirs.close()  # so that a contestant that fails ends the benchmark
        sizes = {name: pipe.recv() for name, pipe in pipes.items()}
        measured: dict[str, list[Measured]] = {name: [] for name in CONTESTANTS}
        for _ in range(arguments.updates + 1):
            for name, pipe in pipes.items():
                pipe.send("update")
                measured[name].append(pipe.recv())
        for process in processes:
            process.kill()
            process.join()
    from grpo_step import machine

    print(machine(arguments.threads))
    print(
        f"{len(FORKS) * LEAVES_OF_A_FORK} rows of a tree, {parameters / 1e6:.1f}M parameters, {arguments.dtype}, "
        f"{arguments.updates} updates after one"
    )
    return report(measured, sizes)


def report(measured: dict[str, list[Measured]], sizes: dict[str, tuple[int, int]]) -> int:
    """Print a table; returns 1 when a bound is missed."""
    print(
        f"{'':9} {'s an update':>12} {'x wall':>8} {'x processor':>12} {'tokens':>8} {'micro-batches':>14} "
        f"{'peak MiB':>9} {'norm':>10}"
    )
    slow, ratios, peaks = measured["unshared"][1:], {}, {}
    for name, all_updates in measured.items():
        updates = all_updates[1:]  # the first warms up
        wall = statistics.median(one.wall for one in updates)
        ratios[name] = statistics.median(a.wall / b.wall for a, b in zip(slow, updates, strict=True))
        work = statistics.median(a.processor / b.processor for a, b in zip(slow, updates, strict=True))
        peaks[name] = max(one.added for one in updates)
        tokens, count = sizes[name]
        print(
            f"{name:9} {wall:12.2f} {ratios[name]:8.2f} {work:12.2f} {tokens:8} {count:14} {peaks[name] / MIB:9.0f} "
            f"{all_updates[0].norm:10.6f}"
        )
    met = ratios["shared"] >= SPEED_BOUND and peaks["shared"] <= peaks["unshared"]
    print(
        f"shared is {ratios['shared']:.1f}x as fast as unshared (bound {SPEED_BOUND:.0f}x), with "
        f"{peaks['shared'] / peaks['unshared']:.2f} of its memory (bound 1){'' if met else '   OUT OF BOUND'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
