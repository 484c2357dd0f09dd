"""Rules about the processes of a run: enough devices, a Ray cluster that answers, rows for every rank."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from math import gcd
from pathlib import Path

from hone.cluster.torchrun.ranks import check_launched
from hone.config.derived import HALF_A_GPU, RunSpec
from hone.config.parallel_layout import Layout
from hone.config.pools import Pool, check_local
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.sft import SFTConfig
from hone.config.specs import spec_of
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig, OfflineConfig, parallel_block
from hone.errors import ConfigError
from hone.preflight.batches import mini_batches
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Finding, Stage, error, rule, warning

_CONNECT_SECONDS = 3.0
_IDLE_SHARE = 0.2  # of the ranks' time, lost because rows do not divide evenly


@rule("R02", *TREES.values())
def enough_processes(config: AnyConfig) -> Iterator[Finding]:
    """The runtime provides the configured processes and nodes."""
    if config.trainer.runtime == "local":
        try:
            check_local(config)
        except ConfigError as problem:
            yield Finding(problem, stops=True)
    elif config.trainer.runtime == "torchrun":
        try:
            check_launched(config)
        except ConfigError as problem:
            yield Finding(problem, stops=True)
    elif config.ray.address is None:
        for pool in spec_of(config).pools:
            key, nodes = pool.block, pool.nodes
            if nodes > 1:
                yield error(
                    f"{key}.nnodes={nodes}, but a cluster that the run starts (ray.address=null) has 1 node: this machine",
                    why=f"the workers of {nodes - 1} more nodes would wait for devices without end",
                    fix=f"ray.address=HOST:PORT of a cluster with {nodes} nodes, or {key}.nnodes=1",
                    where=f"{key}.nnodes",
                )


@rule("R02", *TREES.values(), stage=Stage.ENVIRONMENT)
def devices_present(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """A cluster started on this machine has a GPU for every worker, or without GPUs a core."""
    if config.trainer.runtime != "ray" or config.ray.address is not None:
        return
    pools = spec_of(config).pools
    workers = sum(pool.per_node for pool in pools)
    share = config.ray.device_fraction
    gpus = 0 if config.trainer.device == "cpu" else _visible_gpus()
    requested = " + ".join(f"{pool.block}.n_gpus_per_node={pool.per_node}" for pool in pools)
    if gpus and workers * share > gpus:
        most = max(1, int(gpus / share) - (workers - config.trainer.n_gpus_per_node))
        sharing = "" if _divided(config) else f"or ray.device_fraction={gpus / workers:.2g} to share them, "
        yield error(
            f"{requested} workers need {workers * share:g} GPUs, but this machine has {gpus}",
            why="the last workers would wait for a device without end",
            fix=f"trainer.n_gpus_per_node={most}, {sharing}or ray.address=HOST:PORT of a larger cluster",
            where="trainer.n_gpus_per_node",
        )
    elif not gpus and workers > evidence.machine.usable_cpus:
        yield warning(
            f"{requested} processes on {evidence.machine.usable_cpus} cores",
            why="processes that share cores are slower than fewer processes",
            fix=f"trainer.n_gpus_per_node={evidence.machine.usable_cpus}",
            where="trainer.n_gpus_per_node",
        )


@rule("R02", *TREES.values(), stage=Stage.ENVIRONMENT)
def ranks_have_their_own_gpu(config: AnyConfig) -> Iterator[Finding]:
    """Each process of a model that is sharded over GPUs has a GPU of its own."""
    share, pools = config.ray.device_fraction, _divided(config)
    if config.trainer.runtime == "ray" and _on_gpus(config) and pools and share <= HALF_A_GPU:
        yield error(
            f"ray.device_fraction={share:g} puts {int(1 / share)} workers on one GPU, but the {pools[0].world} workers of "
            f"pool '{pools[0].name}' share a model",
            why="NCCL refuses two ranks on one GPU, and they would compete for its memory",
            fix="ray.device_fraction=1",
            where="ray.device_fraction",
        )


@rule("R02", RLConfig, stage=Stage.ENVIRONMENT)
def broadcast_between_separate_gpus(config: RLConfig) -> Iterator[Finding]:
    """Workers between which weights are broadcast have a GPU each."""
    share, spec = config.ray.device_fraction, RunSpec(config)
    if spec.between_workers(on_cpu=False).value == "broadcast" and share <= HALF_A_GPU and _on_gpus(config):
        key = "actor_rollout_ref.rollout.checkpoint_engine.between_workers"
        yield error(
            f"between_workers=broadcast, but ray.device_fraction={share:g} lets {int(1 / share)} workers have the same GPU",
            why="NCCL refuses two ranks on one GPU",
            fix=f"{key}=auto, or ray.device_fraction=1",
            where=key,
        )


@rule("R12", RLConfig)
def rows_for_every_rank(config: RLConfig) -> Iterator[Finding]:
    """A mini-batch has a sequence for every data-parallel rank, and divides almost evenly over the ranks."""
    ranks = data_parallel_ranks(config)
    n = config.actor_rollout_ref.rollout.n
    for key, prompts in mini_batches(config).items():
        sequences = prompts * n
        if ranks is None or ranks == 1 or sequences % ranks == 0:
            continue
        name, batch = key.rpartition(".")[2], config.data.train_batch_size
        most = -(-sequences // ranks)
        idle = 1 - sequences / (most * ranks)
        if sequences < ranks:
            larger = [size for size in range(prompts, batch + 1) if batch % size == 0 and size * n >= ranks]
            needed = -(-ranks // n)
            yield error(
                f"{name}={prompts} prompts x {n} = {sequences} sequences for {ranks} data-parallel ranks",
                why=f"{ranks - sequences} ranks would compute duplicates of other ranks' rows",
                fix=f"{key}={larger[0]}"
                if larger
                else f"data.train_batch_size={needed} {key}={needed}, or fewer ranks",
                where=key,
            )
        elif idle > _IDLE_SHARE:
            step = ranks // gcd(ranks, n)
            yield warning(
                f"{name}={prompts} prompts x {n} = {sequences} sequences do not divide over {ranks} data-parallel ranks: "
                f"some get {most}, some {sequences // ranks}",
                why=f"ranks with fewer sequences are idle {idle:.0%} of the time when lengths are equal",
                fix=f"{key}={-(-prompts // step) * step}, and data.train_batch_size a multiple of it",
                where=key,
            )


@rule("R12", SFTConfig, PreferenceConfig, RewardModelConfig)
def offline_rows_for_every_rank(config: OfflineConfig) -> Iterator[Finding]:
    """A batch has a row for every data-parallel rank, and divides almost evenly over the ranks."""
    ranks, rows, key = data_parallel_ranks(config), config.data.train_batch_size, "data.train_batch_size"
    if ranks is None or rows % ranks == 0:
        return
    if rows < ranks:
        yield error(
            f"train_batch_size={rows} rows for {ranks} data-parallel ranks",
            why=f"{ranks - rows} ranks would have no row, and a pair is never split",
            fix=f"{key}={ranks}, or fewer ranks",
            where=key,
        )
        return
    most = -(-rows // ranks)
    idle = 1 - rows / (most * ranks)
    if idle > _IDLE_SHARE:
        yield warning(
            f"train_batch_size={rows} rows do not divide over {ranks} data-parallel ranks: some get {most}, "
            f"some {rows // ranks}",
            why=f"ranks with fewer rows are idle {idle:.0%} of the time when lengths are equal",
            fix=f"{key}={most * ranks}",
            where=key,
        )


@rule("R15", RLConfig)
def micro_batch_of_a_rank(config: RLConfig) -> Iterator[Finding]:
    """A limit on the sequences of a micro-batch is below one rank's share of a mini-batch."""
    actor, ranks = config.actor_rollout_ref.actor, data_parallel_ranks(config) or 1
    limit, sequences = (
        actor.ppo_micro_batch_size_per_gpu,
        actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
    )
    if limit is not None and sequences / ranks < limit <= sequences:
        yield warning(
            f"ppo_micro_batch_size_per_gpu={limit} sequences exceeds a rank's share: {sequences} per mini-batch / "
            f"{ranks} ranks = {sequences / ranks:g}",
            why="the limit has no effect",
            fix=f"at most {max(1, sequences // ranks)}, or null and ppo_max_token_len_per_gpu alone",
            where="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        )


@rule("R74", *TREES.values(), stage=Stage.ENVIRONMENT)
def ray_answers(config: AnyConfig) -> Iterator[Finding]:
    """Ray is installed, and the configured cluster accepts connections."""
    if config.trainer.runtime != "ray":
        return
    if importlib.util.find_spec("ray") is None:
        yield error(
            "trainer.runtime=ray, but Ray is not installed",
            fix="pip install 'hone-rl[ray]', or trainer.runtime=local",
            where="trainer.runtime",
        )
        return
    address = config.ray.address
    if address is None:
        return
    cluster_address = running_cluster() if address == "auto" else address.removeprefix("ray://")
    if cluster_address is None:
        yield error(
            "ray.address=auto, but no Ray cluster runs on this machine",
            why="auto uses the cluster in RAY_ADDRESS, or the one that this machine belongs to",
            fix="run `ray start --head` first, or ray.address=HOST:PORT, or ray.address=null to start one for this run",
            where="ray.address",
        )
        return
    host, _, port = cluster_address.rpartition(":")
    if not host or not port.isdigit():
        yield error(
            f"ray.address={address} is neither auto nor HOST:PORT",
            fix="ray.address=HOST:6379, the address that `ray start --head` printed",
            where="ray.address",
        )
    elif (problem := _connection_error(host, int(port))) is not None:
        yield error(
            f"no Ray cluster answers at {cluster_address}: {problem}",
            why="the run cannot start its workers",
            fix="start it with `ray start --head --port=PORT`, open the port between the machines, or ray.address=auto on a node "
            "of the cluster",
            where="ray.address",
        )


def data_parallel_ranks(config: AnyConfig) -> int | None:
    """Return the number of data-parallel ranks of the trained model; None when its parallel sizes do not divide (R70)."""
    try:
        return Layout.plan(actor_processes(config), parallel_block(config)).dp_size
    except ConfigError:
        return None


def actor_processes(config: AnyConfig) -> int:
    return 1 if config.trainer.runtime == "local" else config.trainer.nnodes * config.trainer.n_gpus_per_node


def running_cluster() -> str | None:
    """Return the address that Ray uses for ``auto``; None when there is none."""
    from_environment = os.environ.get("RAY_ADDRESS")
    if from_environment and from_environment != "auto":
        return from_environment.removeprefix("ray://")
    record = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        return record.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _connection_error(host: str, port: int) -> str | None:
    """Return why a connection fails; None when it succeeds."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return None
    except OSError as problem:
        return str(problem)


def _on_gpus(config: AnyConfig) -> bool:
    return config.trainer.device == "cuda" or (config.trainer.device == "auto" and _visible_gpus() > 0)


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _divided(config: AnyConfig) -> list[Pool]:
    """Return the pools with a model that is sharded over several processes of a node."""
    return [pool for pool in spec_of(config).pools if pool.divided and pool.per_node > 1]
