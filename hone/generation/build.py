"""Construction of the configured engine, in this process or in separate ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import device as Device

from hone.config.derived import RunSpec, longest_sequence
from hone.config.pools import divided_cores
from hone.config.tree import RLConfig
from hone.errors import ConfigError
from hone.generation import ENGINES, is_served
from hone.generation.environments import interpreter_of
from hone.generation.options import adapter_shape, engine_options, needs_untied_head
from hone.generation.pool import EnginePool
from hone.generation.protocol import Engine
from hone.generation.remote import LaunchPlan, ServedEngine
from hone.models.devices import dtype_on, run_device

LOGS = "engines"
"""Folder of engine logs in a run directory."""


def build_engine(
    config: RLConfig,
    *,
    model: Callable[[], Any],
    tokenizer: Any,
    device: Device,
    shares_weights: bool,
    number: int = 0,
    world: int = 1,
    devices: Sequence[str] | None = None,
) -> Engine:
    """Build the engine that ``rollout.name`` names.

    Args:
        model: returns the model that an engine in this process samples from; not called for other engines.
        shares_weights: whether the model is the module that is trained.
        number: index of this process among those that build an engine.
        world: number of those processes.
        devices: GPUs of a served engine, as in CUDA_VISIBLE_DEVICES; None: see :func:`engine_start`.
    """
    rollout = config.actor_rollout_ref.rollout
    if is_served(rollout):
        return served_pool(config, number=number, world=world, devices=devices)
    arguments: dict[str, Any] = {} if shares_weights else {"shares_weights": False}
    if rollout.name == "native":
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        arguments["report_experts"] = RunSpec(config).follows_engine_experts
        arguments["speculation"] = _speculation(config, device)
    if not shares_weights and rollout.name != "native":
        raise ConfigError(
            f"engine '{rollout.name}' can only read the trainer's weights, but here it needs a copy",
            why="rollout is remote from the actor, or the actor's model is sharded over several processes",
            fix="actor_rollout_ref.rollout.name=native",
            where="actor_rollout_ref.rollout.name",
        )
    return ENGINES.get(rollout.name)(
        model=model(),
        tokenizer=tokenizer,
        device=device,
        dtype=engine_dtype(config),
        max_num_seqs=rollout.max_num_seqs,
        max_cache_tokens=rollout.max_cache_tokens,
        max_model_len=longest_sequence(config),
        **arguments,
    )


def _speculation(config: RLConfig, device: Device) -> Any:
    """Return the speculation of a native engine in this process; None without one."""
    settings, model = config.actor_rollout_ref.rollout.speculative, config.actor_rollout_ref.model
    if settings.method is None:
        return None
    from hone.generation.native.speculative.build import speculation_from_config

    return speculation_from_config(
        settings, device=device, dtype=engine_dtype(config), trust_remote_code=model.trust_remote_code
    )


def served_pool(
    config: RLConfig, *, number: int = 0, world: int = 1, devices: Sequence[str] | None = None
) -> EnginePool:
    """Start the engine's replicas in separate processes, or attach to running servers, and put a pool over them.

    Args:
        number: index of this process among those that build a pool; selects the replicas' numbers, logs and cores.
        world: number of those processes; running servers are divided among them.
        devices: see :func:`engine_start`.
    """
    rollout = config.actor_rollout_ref.rollout
    start, count = engine_start(config, number=number, world=world, devices=devices)
    return EnginePool(
        start,
        count,
        limits=rollout.server_pool,
        concurrency=rollout.max_num_seqs,
        bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20,
        delta=rollout.checkpoint_engine.delta,
    )


def engine_start(
    config: RLConfig, *, number: int = 0, world: int = 1, devices: Sequence[str] | None = None
) -> tuple[Callable[[int], ServedEngine], int]:
    """Return a function that starts the replica with an index, or attaches to its server, and the number of replicas.

    The function also starts replicas beyond that number. See :func:`served_pool` for the arguments.

    Args:
        devices: GPUs that all replicas of this process share, as in CUDA_VISIBLE_DEVICES. None: replicas of the local runtime
            have GPUs of their own (``rollout.devices``), others see those of this process.
    """
    rollout = config.actor_rollout_ref.rollout
    transport = rollout.checkpoint_engine
    options = {
        "backend": transport.backend,
        "bucket_bytes": transport.update_weights_bucket_megabytes * 2**20,
        "delta": transport.delta,
    }
    urls = _urls(config)
    if urls:
        _check_count(rollout.num_replicas, urls, world)
        servers = urls[number::world]
        return lambda index: _attach(servers[index], config, options), len(servers)
    count = rollout.num_replicas or 1
    threads = _replica_threads(config, count)

    def start(index: int) -> ServedEngine:
        place = number * count + index if index < count else index * world + number
        gpus = _local_devices(config, index) if devices is None else tuple(devices)
        return ServedEngine.start(launch_plan(config, number=place, threads=threads, devices=gpus), **options)

    return start, count


def _local_devices(config: RLConfig, index: int) -> tuple[str, ...]:
    """Return the GPUs of a replica of the local runtime, as in CUDA_VISIBLE_DEVICES; empty means those of this process.

    ``rollout.devices`` lists them. Without it, replicas take the visible ones from the last to the first.
    """
    rollout, size = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.devices_per_engine
    if config.trainer.runtime != "local" or config.trainer.device == "cpu" or not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    numbers = rollout.devices or list(reversed(range(count)))
    first = index * size % max(1, len(numbers) // size * size)
    chosen = numbers[first : first + size]
    if len(chosen) < size or max(numbers) >= count:
        raise ConfigError(
            f"an engine needs {size} GPUs, and rollout.devices={rollout.devices} of {count} visible ones has not as many",
            why="every process of an engine needs a GPU",
            fix=f"actor_rollout_ref.rollout.devices=<{size} numbers below {count} for each replica>, or fewer devices per engine",
            where="actor_rollout_ref.rollout.devices",
            code="R79",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return tuple(names[number] for number in chosen)


def replica_limit(config: RLConfig, *, world: int = 1) -> tuple[int, str]:
    """Return the maximum number of replicas of a process that builds a pool, with the reason.

    Args:
        world: number of those processes.
    """
    rollout, urls = config.actor_rollout_ref.rollout, _urls(config)
    if urls:
        return len(urls) // world, f"rollout.engine_url names {len(urls)} servers for {world} rollout workers"
    count = rollout.num_replicas or 1
    if torch.cuda.is_available():
        return count, f"replicas share their worker's GPUs, whose memory is planned for num_replicas={count}"
    cores, threads = len(os.sched_getaffinity(0)), _replica_threads(config, count)
    workers = next(pool.per_node for pool in RunSpec(config).pools if "rollout" in pool.roles)
    reason = f"the machine has {cores} cores; rollout workers on it: {workers}, threads of each replica: {threads}"
    return max(count, cores // (workers * threads)), reason


def _urls(config: RLConfig) -> list[str]:
    """Return the addresses of running servers; empty if the run starts its engines."""
    url = config.actor_rollout_ref.rollout.engine_url
    return [url] if isinstance(url, str) else list(url or ())


def _attach(url: str, config: RLConfig, options: dict[str, Any]) -> ServedEngine:
    adapter_shape(config)  # raises for an adapter: a running server takes only whole weights
    needs_untied_head(config)  # raises where it does
    engine = ServedEngine.attach(url, **options)
    _check_attached(engine, url, config)
    return engine


def _check_count(replicas: int | None, urls: Sequence[str], world: int) -> None:
    """Check that the servers match the number of replicas and divide evenly over the workers."""
    if len(urls) % world:
        raise ConfigError(
            f"rollout.engine_url names {len(urls)} server{'s'[: len(urls) > 1]} for {world} rollout workers",
            why="a server gets its weights from one worker, and all workers must have the same number of servers",
            fix=f"the addresses of {world} servers or a multiple of it; or a pool of one worker for the rollout: "
            "actor_rollout_ref.rollout={enable_resource_pool: true, nnodes: 1, n_gpus_per_node: 1}",
            where="actor_rollout_ref.rollout.engine_url",
        )
    if replicas not in (None, len(urls)):
        raise ConfigError(
            f"rollout.num_replicas={replicas}, but rollout.engine_url names {len(urls)} server{'s'[: len(urls) > 1]}",
            why="each attached server is one replica",
            fix=f"actor_rollout_ref.rollout.num_replicas={len(urls)}, or the addresses of {replicas} servers",
            where="actor_rollout_ref.rollout.num_replicas",
        )


def launch_plan(config: RLConfig, *, number: int, threads: int, devices: tuple[str, ...] = ()) -> LaunchPlan:
    """Return the launch plan of replica ``number`` on this machine, with this number of threads, on these GPUs."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    folder = Path(config.trainer.default_local_dir) / LOGS
    return LaunchPlan(
        engine=rollout.name,
        python=str(interpreter_of(rollout.name, rollout.engine_env)),
        model=_place(model.path),
        tokenizer=_place(model.tokenizer_path or model.path),
        dtype=engine_dtype(config),
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=longest_sequence(config),
        max_cache_tokens=rollout.max_cache_tokens,
        options=engine_options(rollout, report_experts=RunSpec(config).follows_engine_experts)
        | ({"untied_head": True} if needs_untied_head(config) else {}),
        cpus=cores_of(number, threads),
        lora=adapter_shape(config),
        sleeps=RunSpec(config).engines_take_turns and rollout.free_cache_engine is not False,
        devices=devices,
        log=folder / f"{rollout.name}-{os.getpid()}-{number}.log",
        start_seconds=rollout.engine_start_seconds,
    )


def _replica_threads(config: RLConfig, count: int) -> int:
    """Return the CPU threads of each of ``count`` replicas on this machine."""
    shared = RunSpec(config).asynchronous and config.trainer.runtime == "local"
    return divided_cores(config, count)[0] if shared else threads_of(count, torch.get_num_threads())


def _place(path: str | None) -> str:
    """Return a directory as an absolute path, and a model hub's name unchanged."""
    if path is None:
        raise ConfigError(
            "actor_rollout_ref.model.path is not set",
            fix="actor_rollout_ref.model.path=DIR",
            where="actor_rollout_ref.model.path",
        )
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def threads_of(count: int, most: int | None = None) -> int:
    """Return the threads of each of ``count`` replicas, at most ``most``.

    More threads than cores would wait for each other in every operation, which makes generation several times slower.
    """
    share = max(1, len(os.sched_getaffinity(0)) // count)
    return share if most is None else min(share, most)


def cores_of(number: int, threads: int) -> tuple[int, ...]:
    """Return the CPU cores of one replica. Replicas get disjoint cores until cores run out."""
    cores = sorted(os.sched_getaffinity(0))
    return tuple(sorted({cores[(number * threads + index) % len(cores)] for index in range(threads)}))


def engine_dtype(config: RLConfig) -> str:
    """Return the compute dtype of the engine in a process of the run: ``rollout.dtype``, or the actor's where that is auto."""
    shared = config.actor_rollout_ref
    dtype = shared.actor.dtype if shared.rollout.dtype == "auto" else shared.rollout.dtype
    return dtype_on(run_device(config.trainer.device), dtype)


def _check_attached(engine: ServedEngine, url: str, config: RLConfig) -> None:
    """Check that an attached server is the configured engine, with its dtype and sequence length."""
    rollout, server_info = config.actor_rollout_ref.rollout, engine.server_info
    problem, fix = "", ""
    if server_info["engine"] != rollout.name:
        problem, fix = f"is {server_info['engine']}, not {rollout.name}", f"rollout.name={server_info['engine']}"
    elif server_info["max_model_len"] < longest_sequence(config):
        problem = (
            f"serves at most {server_info['max_model_len']} tokens, but a sequence may have {longest_sequence(config)}"
        )
        fix = f"hone engines serve ... --max-model-len {longest_sequence(config)}"
    elif server_info["dtype"] != engine_dtype(config):
        problem, fix = (
            f"computes in {server_info['dtype']}, not {engine_dtype(config)}",
            f"rollout.dtype={server_info['dtype']}",
        )
    if problem:
        engine.close()
        raise ConfigError(f"the engine at {url} {problem}", fix=fix, where="actor_rollout_ref.rollout.engine_url")
