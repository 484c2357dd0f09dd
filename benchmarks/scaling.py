"""Compare the training throughput of several processes with that of one, one thread each: `python benchmarks/scaling.py`.

A Qwen3 of random weights is updated on the same mini-batch of ragged sequences: whole in one process, and divided over several by
each requested layout (gloo, on this machine). Data-parallel ranks share the rows, balanced by their work; ranks of a
ring, sequence- and tensor-parallel ranks share every row. The contestants take turns update by update, so that other load on the machine affects all of
them. Throughput is tokens a second of wall time, from the medians. The ratio of processor time (one process's against the busiest
rank's) is printed too, because it hardly depends on other load.

    --world 2 --updates 5 --tokens 16384 --hidden 256 --layers 6 --layouts fsdp,fsdp-kept,sequence,tensor

A small model reads and writes much memory for each multiplication, and two cores share their memory. `--hidden 512 --layers 10`
(30 million parameters) shows how much of the loss that is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp-kept": {"fsdp_config": {"reshard_after_forward": False}},
    "copies": {"fsdp_config": {"fsdp_size": 1}},
    "sequence": {"ulysses_sequence_parallel_size": 2},
    "ring": {"context_parallel_size": 2},
    "tensor": {"tensor_model_parallel_size": 2},
    "separate": {},
}
"""Settings of each layout; in ``separate`` every process trains alone on its share of the rows, which is the machine's limit."""


class Plan(NamedTuple):
    """Model, mini-batch size and dtype of the training."""

    model: str
    tokens: int
    dtype: str


class Measured(NamedTuple):
    """Seconds of one update, of the slowest and of the busiest rank, and the gradient's norm."""

    wall: float
    processor: float
    norm: float


class Contestant:
    """Processes that train on request."""

    def __init__(self, plan: Plan, world: int, layout: str) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = str(Path(tempfile.mkdtemp()) / "meeting")
        self.pipes: list[Any] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, plan, rank, world, meeting, layout), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def update(self) -> Measured:
        """Make one optimizer update."""
        for pipe in self.pipes:
            pipe.send("update")
        measured: list[Measured] = [pipe.recv() for pipe in self.pipes]
        return Measured(max(m.wall for m in measured), max(m.processor for m in measured), measured[0].norm)

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def serve(pipe: Any, plan: Plan, rank: int, world: int, meeting: str, name: str) -> None:
    """Run a rank: build its part of the model, then update it on each request."""
    import torch
    import torch.distributed as dist

    from hone.config.model import ModelConfig, OptimConfig
    from hone.config.parallel import FsdpConfig, Layout, ParallelConfig
    from hone.models.heads import PolicyHead
    from hone.training.backends.registry import build_train_backend
    from hone.training.engine import TrainSettings
    from hone.training.layout import build_meshes
    from hone.training.objectives import imitation_objective

    torch.set_num_threads(1)
    parallel, together = LAYOUTS[name], 1 if name == "separate" else world
    sizes: dict[str, Any] = parallel | {"fsdp_config": FsdpConfig(**parallel.get("fsdp_config", {}))}
    config = ParallelConfig(**sizes)
    layout, meshes = Layout.plan(together, config), None
    if together > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        meshes = build_meshes(layout, "cpu")
    engine = build_train_backend(
        "policy",
        ModelConfig(path=plan.model),
        PolicyHead(),
        TrainSettings(torch.device("cpu"), optim=OptimConfig(lr=1e-4), dtype=plan.dtype),
        parallel=config,
        meshes=meshes,
        seed=0,
    )
    shares, place = (world, rank) if name == "separate" else (layout.dp_size, layout.dp_rank(rank))
    batch = share(plan.tokens, shares, place)
    pipe.send("ready")
    step = 0
    while True:
        pipe.recv()
        began, worked = time.perf_counter(), time.process_time()
        result = engine.train_batch(batch, imitation_objective(), step=step)
        step += 1
        pipe.send(Measured(time.perf_counter() - began, time.process_time() - worked, result.grad_norm))


def share(tokens: int, shares: int, place: int) -> Any:
    """Return share ``place`` of a mini-batch of about ``tokens`` tokens: responses of 32 to 480 to prompts of 32, balanced by work."""
    import torch

    from hone.data.balance import Lengths, balance
    from hone.data.batch import Batch
    from hone.data.ragged import Ragged

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(32, 481, (round(tokens / 288),), generator=generator)
    prompts = torch.full_like(lengths, 32)
    responses = Ragged.from_lengths(torch.randint(0, 512, (int(lengths.sum()),), generator=generator), lengths)
    batch = Batch(
        {
            "prompt_ids": Ragged.from_lengths(
                torch.randint(0, 512, (int(prompts.sum()),), generator=generator), prompts
            ),
            "response_ids": responses,
            "response_mask": responses.with_values(torch.ones_like(responses.values)),
        }
    )
    rows = balance(Lengths.from_uids(prompts, lengths, [str(row) for row in range(len(lengths))]), shares)
    assert rows is not None
    return batch.reorder(rows[place])


def save_model(directory: str, hidden: int, layers: int) -> int:
    """Save a Qwen3 of random weights and return its number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layouts", default="fsdp,fsdp-kept,copies,sequence,tensor,separate")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        parameters = save_model(directory, arguments.hidden, arguments.layers)
        plan = Plan(directory, arguments.tokens, arguments.dtype)
        names = arguments.layouts.split(",")
        contestants = {"one process": Contestant(plan, 1, "fsdp")}
        contestants |= {name: Contestant(plan, arguments.world, name) for name in names}
        times: dict[str, list[Measured]] = {name: [] for name in contestants}
        for update in range(arguments.updates + 1):
            for name, contestant in contestants.items():
                measured = contestant.update()
                if update:  # the first warms up
                    times[name].append(measured)
        for contestant in contestants.values():
            contestant.stop()
    report(times, parameters, arguments)


def report(times: dict[str, list[Measured]], parameters: int, arguments: argparse.Namespace) -> None:
    """Print a table."""
    print(
        f"{parameters / 1e6:.1f}M parameters, mini-batches of {arguments.tokens} tokens, {arguments.dtype}, "
        f"{arguments.updates} updates; {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    one = times["one process"]
    norms = {name: updates[-1].norm for name, updates in times.items()}
    print(f"{'':14} {'s an update':>12} {'tokens/s':>10} {'x wall':>8} {'x processor':>12} {'norm of gradient':>18}")
    for name, updates in times.items():
        wall = statistics.median(m.wall for m in updates)
        speed = statistics.median(a.wall / b.wall for a, b in zip(one, updates, strict=True))
        work = statistics.median(a.processor / b.processor for a, b in zip(one, updates, strict=True))
        print(f"{name:14} {wall:12.2f} {arguments.tokens / wall:10.0f} {speed:8.2f} {work:12.2f} {norms[name]:18.6f}")


if __name__ == "__main__":
    main()
