"""Measure what a step costs the driver of a cluster: `python benchmarks/dispatch.py`.

16,384 sequences of 4,096 tokens (2,048 prompts of 512 tokens, 8 answers each) go through the calls of a GRPO step: play, check,
score, log-probs, reference log-probs, advantages, update, publish, report. The driver divides the rows by their work, sends
every worker the metadata of its rows, and joins the answers.

--ranks: the number of simulated workers. Every call is pickled as for a worker, and every answer unpickled as from one, but no
process computes. The script prints the driver's CPU seconds of the fastest step (it has one thread), and the growth of its memory
over the steps.

--real N: N worker processes on a real Ray, which make and read columns of the real size (one int64 a token). The script prints the
driver's CPU time for a step of those calls, with Ray's own, and its memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from hone.cluster.context import RoleSpec, WorkerContext
from hone.cluster.dispatch import Split, dispatch
from hone.cluster.handles import RoleUpdate
from hone.cluster.plan import model_roles
from hone.cluster.ray.runtime import Failures, RayGroup, RayRuntime
from hone.cluster.remote_batch import RemoteBatch, RowInfo, Shard, Stored
from hone.config import RLConfig, load_config
from hone.config.parallel import Layout
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.types import Sample
from hone.generation.protocol import SamplingParams
from hone.trainers.algorithm import mini_batches
from hone.trainers.batch_ops import BatchOps

PROMPTS, N, PROMPT_LENGTH, TOKENS = 2048, 8, 512, 4096
SAMPLED = (
    ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs"),
    ("index", "data_source", "trajectory"),
    (),
)


# simulated ranks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """Pickled answer of a simulated worker, in place of Ray's reference."""

    data: bytes


class SimulatedFailures(Failures):
    """Failure watch that never waits."""

    def __init__(self) -> None:
        pass

    def answers(self, calls: Any, timeout: float | None = None) -> list[Any]:
        """Unpickle every answer."""
        return [pickle.loads(post.ref.data) for post in calls]


class SimulatedHost:
    """Simulated worker that pickles its arguments and answers with references to the same number of rows."""

    counter = 0
    elsewhere = 0.0
    """Seconds that real workers would have spent."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.call, self._lengths = self, lengths

    def remote(self, role: str, method: str, args: Any, kwargs: Any) -> Answered:
        """Answer one call."""
        pickle.dumps((role, method, args, kwargs), protocol=5)
        started = time.process_time()
        answer = Answered(pickle.dumps(self._answer(method, args), protocol=5))
        SimulatedHost.elsewhere += time.process_time() - started
        return answer

    def _answer(self, method: str, args: Any) -> Any:
        rows = len(args[0].uids) if args and isinstance(args[0], Shard) else 0
        if method == "play":
            uids = [sample.uid for sample in args[0] for _ in range(N)]
            responses = self._lengths[[int(uid) for uid in uids]]
            info = RowInfo(uids, np.full(len(uids), PROMPT_LENGTH), responses)
            return Stored(SAMPLED, (self._ref(), self._ref(), None), len(uids), info, {})
        columns = {
            "log_probs": ("log_probs", "entropy"),
            "score": ("score",),
            "place_rewards": ("token_level_rewards", "reward"),
            "advantages": ("advantages", "returns"),
        }
        if method in columns:
            return Stored((columns[method], (), ()), (self._ref(), None, None), rows, None, {})
        return RoleUpdate([], 0.0) if method == "update" else None

    def _ref(self) -> bytes:
        SimulatedHost.counter += 1
        return SimulatedHost.counter.to_bytes(28, "little")  # as long as an id of Ray


def groups_of(ranks: int, lengths: np.ndarray) -> dict[str, Any]:
    """Return the groups of a GRPO run with a reference, of simulated workers."""
    config = load_config(RLConfig, ["actor_rollout_ref.actor.use_kl_loss=true"])
    hosts, layout, failures = (
        [SimulatedHost(lengths) for _ in range(ranks)],
        Layout(ranks, dp_shard=ranks),
        SimulatedFailures(),
    )
    roles = [*model_roles(config), RoleSpec("work", BatchOps)]
    return {role.name: RayGroup(role, hosts, "main", layout, failures) for role in roles}


def step(groups: dict[str, Any], samples: list[Sample]) -> dict[str, float]:
    """Make the calls of a step one after the other; return the CPU seconds of each."""
    actor, work, rollout, seconds = groups["actor"], groups["work"], groups["rollout"], {}

    def timed(name: str, ask: Any) -> Any:
        SimulatedHost.elsewhere, started = 0.0, time.process_time()
        answer = ask().result()
        seconds[name] = time.process_time() - started - SimulatedHost.elsewhere
        return answer

    batch: RemoteBatch = timed("play", lambda: rollout.play(samples, SamplingParams(), n=N, seeding=(1, "rollout", 1)))
    timed("check", lambda: work.check_sampled(batch))
    batch = batch.updated(timed("score", lambda: work.score(batch, training=True)))
    batch = batch.updated(timed("rewards", lambda: work.place_rewards(batch)))
    log_probs = timed("log-probs", lambda: actor.log_probs(batch, with_entropy=True))
    batch = batch.updated(log_probs.rename({"log_probs": "old_log_probs"}))
    log_probs = timed("reference", lambda: groups["reference"].log_probs(batch))
    batch = batch.updated(log_probs.rename({"log_probs": "ref_log_probs"}))
    batch = batch.updated(timed("advantages", lambda: work.advantages(batch)))
    minis = mini_batches(batch.uids, PROMPTS, 1, None)
    timed("update", lambda: actor.update(batch, minis, 0))
    timed("publish", lambda: rollout.load_weights([], 1))
    timed("report", lambda: work.report(batch))
    return seconds


def simulate(ranks: int, repeats: int, detail: bool) -> None:
    """Print the driver's time and memory for ``ranks`` simulated workers."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(
        1024, 2 * TOKENS - 2 * PROMPT_LENGTH - 1024, PROMPTS
    )  # 4,096 tokens on average, prompt included
    groups = groups_of(ranks, lengths)
    samples = [Sample(str(number), [1] * PROMPT_LENGTH, None, "x") for number in range(PROMPTS)]
    gc.freeze()  # as the runtime does
    process, seen, memory = psutil.Process(), [], []
    for _ in range(repeats + 1):
        seen.append(step(groups, samples))
        memory.append(process.memory_info().rss / 2**20)
    seconds = min(sum(calls.values()) for calls in seen[1:])
    print(
        f"{ranks:6} ranks  {seconds:7.3f} s of CPU a step   memory {memory[1]:6.0f} -> {memory[-1]:6.0f} MiB",
        flush=True,
    )
    if detail:
        shown = ", ".join(f"{name} {value * 1e3:.0f}" for name, value in seen[-1].items())
        print(f"        ms: {shown}", flush=True)


# real ranks ----------------------------------------------------------------------------------------------------------


class Columns:
    """Role that only makes and reads token columns."""

    def __init__(self, context: WorkerContext) -> None:
        pass

    @dispatch(Split.ROWS)
    def make(self, uids: list[str]) -> Batch:
        """Return the rows of a rollout."""
        offsets = torch.arange(len(uids) + 1) * TOKENS
        ids = Ragged(torch.zeros(len(uids) * TOKENS, dtype=torch.int64), offsets)
        return Batch({"uid": list(uids), "prompt_ids": Ragged(torch.zeros(0, dtype=torch.int64), offsets * 0), "response_ids": ids})  # fmt: skip

    @dispatch(Split.ROWS)
    def log_probs(self, batch: Batch) -> Batch:
        """Return one column of tokens."""
        ids = batch.ragged("response_ids")
        return Batch({"log_probs": ids.with_values(torch.zeros(len(ids.values)))})

    @dispatch(Split.ZERO)
    def advantages(self, batch: Batch) -> Batch:
        """Return one column of tokens, from one worker that has all rows."""
        mask = batch.ragged("log_probs")
        return Batch({"advantages": mask.with_values(torch.zeros(len(mask.values)))})

    @dispatch(Split.ROWS, sum)
    def update(self, batch: Batch) -> int:
        """Count the tokens."""
        return len(batch.ragged("advantages").values)


def real(workers: int, sequences: int, repeats: int) -> None:
    """Print the driver's CPU time and memory with real workers."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [
            *("trainer.runtime=ray", "trainer.device=cpu", f"trainer.n_gpus_per_node={workers}"),
            *(f"ray.num_cpus={workers}", f"ray.object_store_memory_gb={5 * sequences * TOKENS * 8 / 2**30:.1f}"),
            f"trainer.default_local_dir={directory}/run",
        ]
        runtime = RayRuntime(load_config(RLConfig, overrides), [RoleSpec("columns", Columns, replicated=True)])
        group, process = runtime.group("columns"), psutil.Process()
        try:
            for repeat in range(repeats + 1):
                started, cpu = time.perf_counter(), time.process_time()
                batch = group.make([str(row // N) for row in range(sequences)]).result()
                batch = batch.updated(group.log_probs(batch).result())
                batch = batch.updated(group.advantages(batch).result())
                assert group.update(batch).result() == sequences * TOKENS
                runtime.begin_step(0)
                wall, cpu = time.perf_counter() - started, time.process_time() - cpu
                memory = process.memory_info().rss / 2**20
                if repeat:
                    print(
                        f"{workers} real workers, {sequences} x {TOKENS} tokens: driver {cpu:.3f} s of CPU in a step of "
                        f"{wall:.2f} s (4 calls); memory {memory:.0f} MiB",
                        flush=True,
                    )
                del batch
        finally:
            runtime.close()


def main() -> None:
    """Parse options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8, 64, 256, 1024])
    parser.add_argument("--real", type=int, default=2, help="worker processes on a real Ray; 0 leaves that out")
    parser.add_argument("--sequences", type=int, default=PROMPTS * N, help="of the real workers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--detail", action="store_true", help="milliseconds of every call")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; {PROMPTS * N} sequences of {TOKENS} tokens on average")
    for ranks in arguments.ranks:
        simulate(ranks, arguments.repeats, arguments.detail)
    if arguments.real:
        real(arguments.real, arguments.sequences, arguments.repeats)


if __name__ == "__main__":
    main()
