"""Rules about where a run's processes live: enough devices, a cluster that answers, rows for every rank."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from math import gcd
from pathlib import Path

from hone.cluster.pool_keys import check_local, pool_keys
from hone.config.tree import RLConfig
from hone.errors import ConfigError
from hone.preflight.batches import mini_batches
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Finding, Stage, error, rule, warning

_CONNECT_SECONDS = 3.0
_IDLE_SHARE = 0.2  # of the ranks' time, lost to rows that do not divide


@rule("R02", RLConfig)
def enough_processes(config: RLConfig) -> Iterator[Finding]:
    """One process is not asked to be several, nor one machine several nodes."""
    if config.trainer.runtime == "local":
        try:
            check_local(config)
        except ConfigError as found:
            yield Finding(found, stops=True)
    elif config.ray.address is None:
        for key, nodes, _ in pools(config):
            if nodes > 1:
                yield error(
                    f"{key}.nnodes={nodes}, but a cluster started by the run (ray.address=null) has one node: this machine",
                    why=f"workers of {nodes - 1} more nodes would wait for devices that never come",
                    fix=f"ray.address=HOST:PORT of a cluster with {nodes} nodes, or {key}.nnodes=1",
                    where=f"{key}.nnodes",
                )


@rule("R02", RLConfig, stage=Stage.ENVIRONMENT)
def devices_present(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """A cluster started here finds a GPU for every worker; without GPUs, workers have a core each."""
    if config.trainer.runtime != "ray" or config.ray.address is not None:
        return
    workers = sum(per_node for _, _, per_node in pools(config))
    share = config.ray.device_fraction
    gpus = 0 if config.trainer.device == "cpu" else _visible_gpus()
    asked = " + ".join(f"{key}.n_gpus_per_node={per_node}" for key, _, per_node in pools(config))
    if gpus and workers * share > gpus:
        most = max(1, int(gpus / share) - (workers - config.trainer.n_gpus_per_node))
        yield error(
            f"{asked} workers take {workers * share:g} GPUs, this machine has {gpus}",
            why="the last workers would wait for a device for ever",
            fix=f"trainer.n_gpus_per_node={most}, or ray.device_fraction={gpus / workers:.2g} to share them, "
            "or ray.address=HOST:PORT of a larger cluster",
            where="trainer.n_gpus_per_node",
        )
    elif not gpus and workers > evidence.machine.usable_cpus:
        yield warning(
            f"{asked} processes on {evidence.machine.usable_cpus} cores",
            why="they take turns, and the run is slower than with fewer",
            fix=f"trainer.n_gpus_per_node={evidence.machine.usable_cpus}",
            where="trainer.n_gpus_per_node",
        )


@rule("R12", RLConfig)
def rows_for_every_rank(config: RLConfig) -> Iterator[Finding]:
    """A mini-batch has a sequence for every data-parallel rank, and few ranks wait for the others."""
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
                why=f"{ranks - sequences} ranks would only repeat what others do",
                fix=f"{key}={larger[0]}"
                if larger
                else f"data.train_batch_size={needed} {key}={needed}, or fewer ranks",
                where=key,
            )
        elif idle > _IDLE_SHARE:
            step = ranks // gcd(ranks, n)
            yield warning(
                f"{name}={prompts} prompts x {n} = {sequences} sequences do not divide over {ranks} data-parallel ranks: "
                f"some have {most}, some {sequences // ranks}",
                why=f"ranks with fewer wait: {idle:.0%} of their time, unless lengths make up for it",
                fix=f"{key}={-(-prompts // step) * step}, and data.train_batch_size a multiple of it",
                where=key,
            )


@rule("R15", RLConfig)
def micro_batch_of_a_rank(config: RLConfig) -> Iterator[Finding]:
    """A limit on sequences a micro-batch is below what one rank has of a mini-batch."""
    actor, ranks = config.actor_rollout_ref.actor, data_parallel_ranks(config) or 1
    limit, sequences = (
        actor.ppo_micro_batch_size_per_gpu,
        actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
    )
    if limit is not None and sequences / ranks < limit <= sequences:
        yield warning(
            f"ppo_micro_batch_size_per_gpu={limit} sequences is more than a rank has: {sequences} of a mini-batch over "
            f"{ranks} ranks = {sequences / ranks:g}",
            why="the limit has no effect",
            fix=f"at most {max(1, sequences // ranks)}, or null and ppo_max_token_len_per_gpu alone",
            where="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        )


@rule("R74", RLConfig, stage=Stage.ENVIRONMENT)
def ray_answers(config: RLConfig) -> Iterator[Finding]:
    """Ray is installed, and the cluster that is named accepts connections."""
    if config.trainer.runtime != "ray":
        return
    if importlib.util.find_spec("ray") is None:
        yield error(
            "trainer.runtime=ray, and Ray is not installed",
            fix="pip install 'hone-rl[ray]', or trainer.runtime=local",
            where="trainer.runtime",
        )
        return
    address = config.ray.address
    if address is None:
        return
    found = running_cluster() if address == "auto" else address.removeprefix("ray://")
    if found is None:
        yield error(
            "ray.address=auto, and no Ray cluster runs on this machine",
            why="auto means the cluster of this machine's own node, or the one that RAY_ADDRESS names",
            fix="`ray start --head` first, or ray.address=HOST:PORT, or ray.address=null to start one for this run",
            where="ray.address",
        )
        return
    host, _, port = found.rpartition(":")
    if not host or not port.isdigit():
        yield error(
            f"ray.address={address} is neither auto nor HOST:PORT",
            fix="ray.address=HOST:6379, the address that `ray start --head` printed",
            where="ray.address",
        )
    elif (problem := _refusal(host, int(port))) is not None:
        yield error(
            f"no Ray cluster answers at {found}: {problem}",
            why="nothing can be started there",
            fix="start it with `ray start --head --port=PORT`, open the port between the machines, or ray.address=auto on a node "
            "of the cluster",
            where="ray.address",
        )


def pools(config: RLConfig) -> list[tuple[str, int, int]]:
    """Return of every pool of devices the block of its keys, its nodes and its workers a node; the main one first."""
    main = ("trainer", config.trainer.nnodes, config.trainer.n_gpus_per_node)
    if not any(keys.enable_resource_pool for keys in pool_keys(config).values()):
        return [main]
    from hone.cluster.plan import model_roles, pools_of

    try:
        roles = model_roles(config)
    except ConfigError:  # an estimator or a loss that does not exist; R11 says so
        return [main]
    block = {
        "main": "trainer",
        "rollout": "actor_rollout_ref.rollout",
        "reference": "actor_rollout_ref.ref",
        "critic": "critic",
        "reward_model": "reward.reward_model",
    }
    return [(block[pool.name], pool.nodes, pool.per_node) for pool in pools_of(config, roles)]


def data_parallel_ranks(config: RLConfig) -> int | None:
    """Return over how many ranks the actor's rows are divided; None when its sizes do not fit (R70 says so)."""
    from hone.training.layout import Layout

    try:
        return Layout.plan(actor_processes(config), config.actor_rollout_ref.actor).dp_size
    except ConfigError:
        return None


def actor_processes(config: RLConfig) -> int:
    """Return how many processes hold the actor."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node if config.trainer.runtime == "ray" else 1


def running_cluster() -> str | None:
    """Return the address that Ray itself would take for ``auto``, None when there is none."""
    named = os.environ.get("RAY_ADDRESS")
    if named and named != "auto":
        return named.removeprefix("ray://")
    noted = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        return noted.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _refusal(host: str, port: int) -> str | None:
    """Why no connection can be made, or None when it can."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return None
    except OSError as problem:
        return str(problem)


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
