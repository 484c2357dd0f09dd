"""Measure how long a step waits for its checkpoint: `python benchmarks/checkpoints.py`.

A Qwen3 of random parameters is trained with AdamW, and saved after every third update into a directory: once in the background,
once while training waits. A save is 12 bytes a parameter: float32 weights and AdamW's two averages. The script prints the seconds
of an ordinary update, those that the run waited at a save (staging, and the save before), and those until the checkpoint was
complete. It also prints the share of these seconds that the run did not wait.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from grpo_step import machine
from transformers import Qwen3Config, Qwen3ForCausalLM

from hone.config.model import OptimConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import PolicyHead
from hone.models.routing import use_hone_attention
from hone.training.backends.local import LocalBackend
from hone.training.checkpoints.store import CheckpointStore
from hone.training.engine import TrainSettings
from hone.training.objectives import imitation_objective

ROWS, TOKENS, WORDS = 8, 128, 8192


def make_engine(layers: int) -> LocalBackend:
    """Return an engine over a model of about ``10 + 4.2 * layers`` million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    use_hone_attention(model)
    settings = TrainSettings(torch.device("cpu"), optim=OptimConfig(lr=1e-4))
    return LocalBackend(model, PolicyHead(1.0), settings)


def make_batch() -> Batch:
    """Return random prompts and responses."""
    lengths = torch.full((ROWS,), TOKENS)
    ids = torch.randint(0, WORDS, (ROWS * TOKENS,), generator=torch.Generator().manual_seed(1))
    responses = Ragged.from_lengths(ids, lengths)
    prompts = Ragged.from_lengths(ids[: ROWS * 4], torch.full((ROWS,), 4))
    columns = {"prompt_ids": prompts, "response_ids": responses, "response_mask": responses.with_values(ids * 0 + 1)}
    return Batch({**columns, "uid": [str(row) for row in range(ROWS)]})


def measure(engine: LocalBackend, batch: Batch, root: Path, *, background: bool, saves: int) -> dict[str, float]:
    """Return median seconds of an update, of the wait at a save, and until a checkpoint was complete."""
    store = CheckpointStore(root, keep=1, background=background)
    updates, during, waits, whole = [], [], [], []
    for step in range(1, 3 * saves + 1):
        started = time.perf_counter()
        engine.train_batch(batch, imitation_objective(), step=0)
        (during if step % 3 == 1 and step > 1 else updates).append(time.perf_counter() - started)
        if step % 3 == 0:
            started, ended = time.perf_counter(), [0.0]
            write = engine.stage(str(store.begin(step)), "actor")

            def timed(write=write, ended=ended) -> None:
                write()
                ended[0] = time.perf_counter()

            store.publish(step, {}, {}, timed)
            waits.append(time.perf_counter() - started)
            whole.append((started, ended))
    store.wait()
    return {
        "update": statistics.median(updates),
        "update during a save": statistics.median(during),
        "wait": statistics.median(waits),
        "save": statistics.median(ended[0] - started for started, ended in whole),
    }


def main() -> None:
    """Parse options, measure both ways, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=None, help="disk to write on; default is the temporary folder")
    arguments = parser.parse_args()
    print(machine(arguments.threads), flush=True)
    torch.set_num_threads(arguments.threads)
    engine, batch = make_engine(arguments.layers), make_batch()
    count = sum(parameter.numel() for parameter in engine.model.parameters())
    print(f"{count / 1e6:.1f}M parameters, {count * 12 / 1e6:.0f} MB a checkpoint")
    engine.train_batch(batch, imitation_objective(), step=0)
    results = {}
    for name, background in (("waiting", False), ("background", True)):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
            results[name] = measure(engine, batch, Path(root), background=background, saves=arguments.saves)
        print(name + ": " + ", ".join(f"{key} {seconds:.3f} s" for key, seconds in results[name].items()))
    background, waiting = results["background"], results["waiting"]
    print(f"the run waits {background['wait'] / waiting['wait']:.1%} of what it would wait without the background")


if __name__ == "__main__":
    main()
