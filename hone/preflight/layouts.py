"""Rules about the processes of a run: devices, a Ray cluster that answers, rows for every rank, parallel sizes, Megatron."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from math import gcd
from pathlib import Path

from hone.cluster.torchrun.ranks import check_launched
from hone.config.derived import HALF_A_GPU, RunSpec, check_judge
from hone.config.dtypes import dtype_keys
from hone.config.limits import REPORT_EXPERTS
from hone.config.model import OptimConfig
from hone.config.offline import RewardModelConfig, SFTConfig
from hone.config.parallel import Layout
from hone.config.pools import Pool, check_engines, check_local
from hone.config.specs import spec_of
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, OfflineConfig, model_block, parallel_block
from hone.errors import ConfigError
from hone.extras import install_command
from hone.generation import is_served
from hone.preflight.evidence import Evidence, trained_models
from hone.preflight.plan.model import EXPERTS, has_tensor_plan
from hone.preflight.reading import mini_batches
from hone.preflight.rules import Finding, Findings, Stage, error, error_of, rule, warning
from hone.training.backends.fsdp2.pipeline_models import require_divisible
from hone.training.backends.megatron import support
from hone.training.backends.registry import BACKENDS, backend_of

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FSDP2_NAMES = (None, "fsdp2", "fsdp")
"""Values of ``strategy`` with which a model on several processes has the backend fsdp2."""
_CONNECT_SECONDS = 3.0
_IDLE_SHARE = 0.2  # of the ranks' time, lost because rows do not divide evenly


@rule("R02")
def enough_processes(config: AnyConfig) -> Findings:
    """The runtime provides the configured processes and nodes."""
    if config.trainer.runtime == "local":
        check_local(config)
    elif config.trainer.runtime == "torchrun":
        check_launched(config)
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


@rule("R02", Stage.ENVIRONMENT)
def devices_present(config: AnyConfig, evidence: Evidence) -> Findings:
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
        )
    elif not gpus and workers > evidence.machine.usable_cpus:
        yield warning(
            f"{requested} processes on {evidence.machine.usable_cpus} cores",
            why="processes that share cores are slower than fewer processes",
            fix=f"trainer.n_gpus_per_node={evidence.machine.usable_cpus}",
        )


@rule("R02", Stage.ENVIRONMENT)
def ranks_have_their_own_gpu(config: AnyConfig) -> Findings:
    """Each process of a model that is sharded over GPUs has a GPU of its own."""
    share, pools = config.ray.device_fraction, _divided(config)
    if config.trainer.runtime == "ray" and _on_gpus(config) and pools and share <= HALF_A_GPU:
        yield error(
            f"ray.device_fraction={share:g} puts {int(1 / share)} workers on one GPU, but the {pools[0].world} workers of "
            f"pool '{pools[0].name}' share a model",
            why="NCCL refuses two ranks on one GPU, and they would compete for its memory",
            fix="ray.device_fraction=1",
        )


@rule("R02", Stage.ENVIRONMENT)
def broadcast_between_separate_gpus(config: RLConfig) -> Findings:
    """Workers between which weights are broadcast have a GPU each."""
    share, spec = config.ray.device_fraction, RunSpec(config)
    if spec.between_workers(on_cpu=False).value == "broadcast" and share <= HALF_A_GPU and _on_gpus(config):
        key = "actor_rollout_ref.rollout.checkpoint_engine.between_workers"
        yield error(
            f"between_workers=broadcast, but ray.device_fraction={share:g} lets {int(1 / share)} workers have the same GPU",
            why="NCCL refuses two ranks on one GPU",
            fix=f"{key}=auto, or ray.device_fraction=1",
        )


@rule("R12")
def rows_for_every_rank(config: RLConfig) -> Findings:
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
            )


@rule("R12")
def offline_rows_for_every_rank(config: OfflineConfig) -> Findings:
    """A batch has a row for every data-parallel rank, and divides almost evenly over the ranks."""
    ranks, rows, key = data_parallel_ranks(config), config.data.train_batch_size, "data.train_batch_size"
    if ranks is None or rows % ranks == 0:
        return
    if rows < ranks:
        yield error(
            f"train_batch_size={rows} rows for {ranks} data-parallel ranks",
            why=f"{ranks - rows} ranks would have no row, and a pair is never split",
            fix=f"{key}={ranks}, or fewer ranks",
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
        )


@rule("R15")
def micro_batch_of_a_rank(config: RLConfig) -> Findings:
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


@rule("R74", Stage.ENVIRONMENT)
def ray_answers(config: AnyConfig) -> Findings:
    """Ray is installed, and the configured cluster accepts connections."""
    if config.trainer.runtime != "ray":
        return
    if importlib.util.find_spec("ray") is None:
        yield error(
            "trainer.runtime=ray, but Ray is not installed",
            fix=f"{install_command('ray')}, or trainer.runtime=local",
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


@rule("R70")
def sizes_multiply(config: AnyConfig) -> Findings:
    """Parallel sizes multiply to the number of processes in every pool that trains or scores."""
    divided, parallel = {"trainer": actor_processes(config)}, parallel_block(config)
    if config.trainer.runtime == "ray":
        divided |= {pool.block: pool.world for pool in spec_of(config).pools if not pool.replicated}
    for key, processes in divided.items():
        try:
            backend_of(parallel, processes)
            Layout.plan(processes, parallel)
        except ConfigError as e:
            prefix = "" if key == "trainer" else f"the pool of {key}: "
            yield Finding(ConfigError(f"{prefix}{e.what}", why=e.why, fix=e.fix, where=e.where), stops=True)


@rule("R71")
def tensor_parallel_divides(config: AnyConfig, evidence: Evidence) -> Findings:
    """The model has a tensor-parallel plan, and its heads divide over the tensor-parallel ranks."""
    parallel, model = parallel_block(config), evidence.model_settings
    size, key = parallel.tensor_model_parallel_size, parallel.key("tensor_model_parallel_size")
    if size == 1 or not model:
        return
    if not has_tensor_plan(str(model.get("model_type"))):
        yield error(
            f"tensor_model_parallel_size={size}, but transformers has no tensor-parallel plan for {model.get('model_type')}",
            why="the plan defines how each matrix is sharded",
            fix=f"{key}=1",
        )
        return
    heads = {"attention heads": model.get("num_attention_heads"), "key-value heads": model.get("num_key_value_heads")}
    counts = {kind: count for kind, count in heads.items() if count}
    if any(count % size for count in counts.values()):
        yield error(
            f"tensor_model_parallel_size={size} does not divide the model's "
            + " and ".join(f"{count} {kind}" for kind, count in counts.items()),
            why="every rank computes whole heads",
            fix=f"{key}=<one of {_divisors(gcd(*counts.values()))}>",
        )


@rule("R72")
def sequence_parallel_divides(config: AnyConfig, evidence: Evidence) -> None:
    """The heads of a tensor-parallel rank divide over the sequence-parallel ranks."""
    parallel, model = parallel_block(config), evidence.model_settings
    tensor, sequence = parallel.tensor_model_parallel_size, parallel.ulysses_sequence_parallel_size
    heads = model.get("num_attention_heads")
    key_value = model.get("num_key_value_heads") or heads
    if sequence == 1 or not heads or not key_value or heads % tensor or key_value % tensor:
        return  # R71 reports it
    from hone.training.backends.fsdp2.sequence_parallel import check_heads  # slow to import

    check_heads(heads // tensor, key_value // tensor, sequence, parallel.key("ulysses_sequence_parallel_size"))


@rule("R72")
def rings_have_no_dropout(config: SFTConfig, evidence: Evidence) -> None:
    """With context parallelism the model has no dropout of attention probabilities."""
    if config.context_parallel_size == 1 or not config.model.dropout:
        return
    from hone.training.backends.fsdp2.ring import check_dropout  # slow to import

    check_dropout(evidence.model_settings.get("attention_dropout", 0.0), config.key("context_parallel_size"))


@rule("R91")
def pipeline_divides(config: AnyConfig, evidence: Evidence) -> Findings:
    """With strategy=fsdp2: models that pipeline stages divide are of a supported family, and have a layer for every stage."""
    parallel = parallel_block(config)
    stages, key = parallel.pipeline_model_parallel_size, parallel.key("pipeline_model_parallel_size")
    if stages == 1 or parallel.strategy not in FSDP2_NAMES:
        return
    for path, settings in trained_models(config, evidence):
        yield from error_of(require_divisible, settings, stages, str(path), key)
    if isinstance(config, RLConfig) and RunSpec(config).follows_engine_experts:
        yield error(
            f"router_replay.mode=R3 with {key}={stages}",
            why="the stages of strategy=fsdp2 choose their experts themselves",
            fix=f"actor_rollout_ref.actor.router_replay.mode=disabled, or {key}=1",
        )


@rule("R73")
def experts_divide(config: AnyConfig, evidence: Evidence) -> Findings:
    """A model with expert parallelism has experts, and they divide over the ranks."""
    parallel, model = parallel_block(config), evidence.model_settings
    size, key = parallel.expert_parallel_size, parallel.key("expert_parallel_size")
    experts = next((model[key] for key in EXPERTS if model.get(key)), None)
    if size == 1 or not model:
        return
    if experts is None:
        yield error(
            f"expert_parallel_size={size}, but a {model.get('model_type')} model has no experts",
            why="expert parallelism shards experts",
            fix=f"{key}=1",
        )
    elif experts % size:
        yield error(
            f"expert_parallel_size={size} does not divide the model's {experts} experts",
            why="every rank holds the same number of whole experts",
            fix=f"{key}=<one of {_divisors(experts)}>",
        )


@rule("R87")
def experts_can_be_followed(config: RLConfig, evidence: Evidence) -> Findings:
    """Router replay has a model with experts, and an engine that reports them."""
    rollout, model = config.actor_rollout_ref.rollout, evidence.model_settings
    if not RunSpec(config).follows_engine_experts:
        return
    key = "actor_rollout_ref.actor.router_replay.mode"
    if model and not any(model.get(name) for name in EXPERTS):
        yield error(
            f"router_replay.mode=R3, but a {model.get('model_type')} model has no experts",
            why="router replay follows the experts that the engine chose",
            fix=f"{key}=disabled",
        )
    if rollout.name not in REPORT_EXPERTS:
        yield error(
            f"router_replay.mode=R3, but engine {rollout.name} does not report the experts of a token",
            why="the trainer would choose them itself, as with router_replay.mode=disabled",
            fix=f"{_ROLLOUT}.name=native, or {key}=disabled",
            where=key,
        )


@rule("R87")
def experts_can_be_balanced(config: RLConfig, evidence: Evidence) -> Findings:
    """A balance loss that is trained has experts with routers to train, and whole sequences of a mini-batch in one place."""
    actor, model, key = config.actor_rollout_ref.actor, evidence.model_settings, f"{_ACTOR}.router_aux_loss_coef"
    if actor.router_aux_loss_coef == 0:
        return
    stages, steps = f"{_ACTOR}.pipeline_model_parallel_size=1", config.trainer.save_microbatch_steps
    without = bool(model) and not any(model.get(name) for name in EXPERTS)
    streams = RunSpec(config).streams and not actor.loss_agg_mode.startswith("seq-mean")
    obstacles = (
        (without, f"a {model.get('model_type')} model has no experts", ""),
        (actor.strategy == support.NAME, "the scores of Megatron's routers are not read", f"{_ACTOR}.strategy=fsdp2"),
        (actor.pipeline_model_parallel_size > 1, "a pipeline stage does not see the routers of the others", stages),
        (
            streams,
            f"a streamed update of {actor.loss_agg_mode} does not weigh its parts by sequences",
            "trainer.async_training.stream=false",
        ),
        (bool(steps), "hone oracle does not compute it", "trainer.save_microbatch_steps=[]"),
    )
    for applies, reason, instead in obstacles:
        if applies:
            yield error(
                f"router_aux_loss_coef={actor.router_aux_loss_coef:g}, but {reason}",
                why="the loss is a mean over the routers of all layers, and over the sequences of a mini-batch",
                fix=f"{key}=0, or {instead}" if instead else f"{key}=0",
            )
    policy = config.actor_rollout_ref.model
    if policy.lora_rank > 0 or policy.lora_adapter_path is not None:
        yield warning(
            f"router_aux_loss_coef={actor.router_aux_loss_coef:g}, but an adapter leaves the routers frozen",
            why="the loads could be evened out by the routers' inputs alone, at the cost of what these say",
            fix=f"{key}=0, or actor_rollout_ref.model.lora_rank=0",
        )


@rule("R79")
def engines_fit_devices(config: RLConfig, evidence: Evidence) -> Findings:
    """The workers of a node divide into whole engines, and the model's heads over the processes of an engine."""
    yield from error_of(check_engines, config)
    yield from error_of(check_judge, config)
    rollout, model, key = config.actor_rollout_ref.rollout, evidence.model_settings, f"{_ROLLOUT}.devices"
    if rollout.devices and len(rollout.devices) % rollout.devices_per_engine:
        yield error(
            f"rollout.devices has {len(rollout.devices)} GPUs, and an engine takes {rollout.devices_per_engine}",
            why="the last GPUs would belong to no engine",
            fix=f"{key}=<a multiple of {rollout.devices_per_engine} GPUs>",
        )
    heads = model.get("num_attention_heads") if model else None
    if heads and heads % rollout.tensor_model_parallel_size and is_served(rollout):
        key = f"{_ROLLOUT}.tensor_model_parallel_size"
        yield error(
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} does not divide the model's {heads} "
            "attention heads",
            why="every process of an engine computes whole heads",
            fix=f"{key}=<one of {_divisors(heads)}>",
        )


@rule("R78")
def micro_batches_can_be_saved(config: RLConfig) -> Findings:
    """The micro-batches of trainer.save_microbatch_steps belong to steps of the run, and to a model in one process."""
    trainer, key = config.trainer, "trainer.save_microbatch_steps"
    steps, processes = trainer.save_microbatch_steps, actor_processes(config)
    strategy = config.actor_rollout_ref.actor.strategy
    if steps and not _is_local(config, processes):
        yield error(
            f"{key}={steps}, but the actor has {processes} processes and strategy={strategy or 'null'}",
            why="each process holds a part of the weights and gradients; the oracle compares whole ones",
            fix=f"{key}=[], or a run in one process (trainer.runtime=local)",
        )
    if steps and RunSpec(config).follows_engine_experts:
        yield error(
            f"{key}={steps}, but router_replay.mode=R3 follows the experts of the engine",
            why="the oracle computes the forward pass by itself, with experts of its own",
            fix=f"{key}=[], or actor_rollout_ref.actor.router_replay.mode=disabled",
        )
    first = 1 + (trainer.critic_warmup if RunSpec(config).critic.value else 0)
    last = trainer.total_training_steps
    outside = [step for step in steps if step < first or (last is not None and step > last)]
    if outside:
        yield error(
            f"{key} has {outside}, but the policy is updated in steps {first} to {last or 'the end'}",
            why="nothing would be saved for `hone oracle`",
            fix=f"{key}=[{', '.join(str(step) for step in steps if step not in outside) or first}]",
        )


def _is_local(config: RLConfig, processes: int) -> bool:
    try:
        return backend_of(config.actor_rollout_ref.actor, processes) is BACKENDS.get("local")
    except ConfigError:
        return True  # R70 reports it


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


@rule("R88")
def megatron_supports_the_settings(config: AnyConfig) -> Findings:
    """With strategy=megatron: megatron-core is installed, and supports the settings of models, optimizers and layout."""
    parallel = parallel_block(config)
    strategy = parallel.key("strategy")
    if parallel.strategy != support.NAME:
        return
    yield from error_of(BACKENDS.get(support.NAME).require_package, strategy)
    if isinstance(config, RewardModelConfig):
        yield error(
            f"strategy={support.NAME} does not train reward models",
            why="their output layer has no place in Megatron's model",
            fix=f"{strategy}=fsdp2",
        )
    obstacles = [(parallel.block_path, obstacle) for obstacle in support.parallel_obstacles(parallel)]
    block, model = model_block(config)
    obstacles += [(block, obstacle) for obstacle in support.model_setting_obstacles(model)]
    for optim_block, optim in _optimizers(config):
        obstacles += [(optim_block, obstacle) for obstacle in support.optimizer_obstacles(optim)]
    for key in dtype_keys(config):
        if key.value == "float16" and "rollout" not in key.key:
            reason = "the scale of the loss that float16 needs is not built"
            obstacles.append(("", support.Obstacle(key.key, "float16", reason, "bfloat16")))
    if isinstance(config, RLConfig) and RunSpec(config).follows_engine_experts:
        reason = "Megatron's routers choose the experts themselves"
        obstacles.append((parallel.block_path, support.Obstacle("router_replay.mode", "R3", reason, "disabled")))
    if isinstance(config, RLConfig) and config.actor_rollout_ref.ref.fsdp_config.param_offload:
        obstacle = support.Obstacle("fsdp_config.param_offload", "true", "it is a setting of FSDP", "false")
        obstacles.append(("actor_rollout_ref.ref", obstacle))
    for block, obstacle in obstacles:
        yield Finding(support.setting_error(block, obstacle, strategy), stops=True)


@rule("R89")
def megatron_supports_the_models(config: AnyConfig, evidence: Evidence) -> Findings:
    """With strategy=megatron: Megatron-core computes the models as transformers does, and the layout divides them."""
    parallel = parallel_block(config)
    if parallel.strategy != support.NAME:
        return
    for path, settings in trained_models(config, evidence):
        yield from error_of(support.require_model, settings, parallel, path)


def _optimizers(config: AnyConfig) -> Iterator[tuple[str, OptimConfig]]:
    """Yield the optimizers of the run with their blocks."""
    if not isinstance(config, RLConfig):
        yield "optim", config.optim
        return
    yield "actor_rollout_ref.actor.optim", config.actor_rollout_ref.actor.optim
    if RunSpec(config).critic.value:
        yield "critic.optim", config.critic.optim
