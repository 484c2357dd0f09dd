"""Memory of one device in each phase of a step, as named parts.

    generation   weights, optimizer, KV cache, the engine's copies of weights, activations of the prompts or logits
    log-probs    weights, optimizer, KV cache unless it is freed, activations of one layer at a time, logits
    update       weights, optimizer, KV cache unless it is freed, gradients, everything kept for the backward pass, logits
    weight sync  to engines with a copy: whole parameters, bucket by bucket
    checkpoint   on a CPU: the copies that are written while training continues

An engine whose weights are its own keeps its copies of them, made for decoding, in all phases unless its memory is freed.

Weights, gradients and AdamW's two moments are float32. An update has four moments, of which the largest counts: before the
backward pass (all is kept, logits exist), in the last layer (all is kept, its gradients exist), at its end (all gradients
exist, and the embedding's twice), and in the optimizer's step (its state is on the device, wherever it was before).

vLLM and SGLang take a share of a GPU, ``gpu_memory_utilization``, at their start and keep it through all phases of a step. So the
weights are on the device twice, and the trainer has what the share leaves. On a CPU the engine's processes add what they hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hone.config.engines import SERVED
from hone.config.limits import (
    ADAM_BYTES,
    BROADCAST_BUFFERS,
    FROZEN_BYTES,
    GATHER_BUCKET_BYTES,
    GRADIENT_BYTES,
    OFFLOAD_IN_FLIGHT_BYTES,
    ORTHOGONALISED_NUMBERS,
    PREFILL_TOKENS,
)
from hone.config.model import OptimConfig
from hone.config.pools import Pool
from hone.config.rollout import RolloutConfig
from hone.config.tree import RLConfig
from hone.models.registry import family_of
from hone.preflight.plan.model import ModelShape, Passes
from hone.preflight.plan.work import TrainedModel, Work
from hone.training.backends.megatron.support import NAME as MEGATRON

SERVED_PREFILL_TOKENS = 8192  # tokens of a forward pass of vLLM and SGLang where ``max_num_batched_tokens`` is not set
VLLM_CPU_CACHE_BYTES, SGLANG_CPU_CACHE_TOKENS = 2 * 2**30, 65536
"""Limits of the caches on a CPU (:mod:`hone.generation.server`)."""
SHARE_STEP = 0.05  # proposed shares of a device are multiples of this
_SAMPLING_BYTES = 24  # bytes per logit while a token is sampled: four float32 copies, and their sums in float64
_CACHE_ROUNDING = 32
_SHARE_OF_FREE = 0.9  # share of the free memory that pages take at most (:mod:`hone.generation.native.paged.support`)


class CacheShape(NamedTuple):
    """Capacity of the native engine's KV cache: sequences, the prompts that they share, and tokens of both."""

    rows: int
    prompts: int
    tokens: int


def uses_pages(work: Work, pool: Pool) -> bool:
    """Return whether the native engine in this process has a KV cache of pages, which takes what its share of a GPU leaves."""
    rollout, shares_weights = work.rollout, "actor" in pool.roles and not pool.divided
    if rollout is None or work.on_cpu or rollout.name != "native" or rollout.speculative.method is not None:
        return False
    return family_of(work.actor.shape.kind).llama_shaped and not (shares_weights and work.actor.lora_rank)


def space_for_pages(work: Work, pool: Pool, capacity: float, resident: float) -> float:
    """Return the bytes that a KV cache may take: without pages any, else what the engine's share and the free memory allow.

    Args:
        capacity: bytes of its device.
        resident: bytes that training holds in all phases.
    """
    if not uses_pages(work, pool):
        return math.inf
    assert work.rollout is not None
    return min(
        work.rollout.gpu_memory_utilization * capacity - _engine_weights(work), _SHARE_OF_FREE * (capacity - resident)
    )


def least_share_for_pages(work: Work, capacity: float) -> float:
    """Return the smallest ``gpu_memory_utilization`` with which the cache of pages holds one sequence."""
    one = (work.prompt + work.response) * token_bytes(work)
    return round(math.ceil((_engine_weights(work) + one) / capacity / SHARE_STEP) * SHARE_STEP, 2)


def _engine_weights(work: Work) -> float:
    """Return the bytes of the weights that count into an engine's share: those of the model and the fused ones."""
    return work.actor.shape.parameters * (FROZEN_BYTES + _number_bytes(work))


def cache_shape(work: Work, pool: Pool, space: float = math.inf) -> CacheShape:
    """Return the KV cache at its largest: in training, or when validation prompts are answered, each once. ``space``:
    bytes that the cache may take; one sequence counts anyway.
    """
    config, rollout = work.config, work.rollout
    assert isinstance(config, RLConfig) and rollout is not None
    limit = rollout.max_cache_tokens or rollout.max_num_seqs * (work.prompt + work.response)
    if space < math.inf:
        limit = min(limit, int(space / token_bytes(work)))
    shapes = [_cache_for(work, rollout, math.ceil(work.batch * work.samples / pool.world), work.samples, limit)]
    if config.data.val_files and (config.trainer.test_freq != 0 or config.trainer.val_before_train):
        shapes.append(_cache_for(work, rollout, rollout.max_num_seqs, 1, limit))
    return max(shapes, key=lambda shape: shape.tokens)


def _cache_for(work: Work, rollout: RolloutConfig, sequences: int, samples: int, limit: int) -> CacheShape:
    def tokens(rows: int, unit: int = 1) -> int:
        response, prompt = (math.ceil(length / unit) * unit for length in (work.response, work.prompt))
        return rows * response + math.ceil(rows / samples) * prompt

    rows = min(rollout.max_num_seqs, sequences)
    while rows > 1 and tokens(rows) > limit:
        rows -= 1
    rounded = tokens(rows, _CACHE_ROUNDING)
    return CacheShape(rows, math.ceil(rows / samples), rounded if rounded <= limit else tokens(rows))


def cache_bytes(work: Work, pool: Pool, space: float = math.inf) -> float:
    size, (rows, prompts, tokens) = work.actor.shape.cache, cache_shape(work, pool, space)
    return (tokens * size.per_token + (rows + prompts) * size.per_sequence) * _number_bytes(work)


def decoding(work: Work, pool: Pool, space: float = math.inf) -> dict[str, float]:
    """Return what the native engine holds while it decodes, without its KV cache, which has ``space`` bytes."""
    shape, passes = work.actor.shape, _decoding_passes(work, pool)
    rows, prompts, _ = cache_shape(work, pool, space)
    tokens = min(prompts * work.prompt, max(PREFILL_TOKENS, work.prompt))
    prefill = tokens * (passes.forward_peak + 4 * shape.hidden)
    sampling = rows * shape.vocabulary * (_SAMPLING_BYTES + 2 * work.rollout_bf16)
    moment = {"activations": prefill} if prefill > sampling else {"logits": sampling}
    return {**decoding_copies(work, pool), **moment}


def decoding_copies(work: Work, pool: Pool) -> dict[str, float]:
    """Return the native engine's copies of weights; an engine with weights of its own keeps them until it gets the next."""
    shape, passes = work.actor.shape, _decoding_passes(work, pool)
    if passes.packed:
        output = work.rollout_bf16 and not work.narrows_frozen(work.actor, pool)
        return {"copies of weights": passes.weight_copies + passes.number * shape.embedding * output}
    copies = work.rollout_bf16 or (family_of(shape.kind).llama_shaped and not passes.lora_rank)
    copies = copies and not (passes.lora_rank and work.narrows_frozen(work.actor, pool))
    matrices = (shape.layers * shape.matrices + shape.embedding) * passes.number
    return {"copies of weights": matrices if copies else 0}


def shares_weights(pool: Pool) -> bool:
    """Return whether the native engine of a pool decodes with the weights that are trained."""
    return "actor" in pool.roles and not pool.divided


def _decoding_passes(work: Work, pool: Pool) -> Passes:
    lora_rank = work.actor.lora_rank if shares_weights(pool) else 0
    packed = bool(work.actor.packed) and shares_weights(pool)
    return Passes(work.actor.shape, work.on_cpu, work.rollout_bf16, lora_rank=lora_rank, packed=packed)


# engines with processes of their own -------------------------------------------------------------------------------------


def engine_bytes(work: Work, pool: Pool, capacity: float, overhead: float) -> float:
    """Return the bytes of a device that the engines of its process take in every phase; 0 where there are none.

    A share that is too small for an engine to start counts as the device for which it would suffice.

    Args:
        capacity: bytes of its device.
        overhead: bytes of a bare process.
    """
    rollout = work.rollout
    if rollout is None or not work.served or rollout.engine_url is not None or "rollout" not in pool.roles:
        return 0.0
    replicas = rollout.num_replicas or 1
    held = weights = work.actor.shape.parameters * _number_bytes(work)
    if work.on_cpu and rollout.checkpoint_engine.delta:
        held += weights  # the server's copy, to which it adds deltas
    if rollout.name == "native":
        return replicas * (overhead + held + sum(decoding(work, pool).values())) + cache_bytes(work, pool)
    if work.on_cpu:
        return replicas * (rollout.tensor_model_parallel_size * overhead + held + _cpu_cache(work))
    share, least = rollout.gpu_memory_utilization, least_bytes(work, overhead)
    return replicas * (share * capacity if share * capacity >= least else least / share)


def frees_memory(work: Work) -> bool:
    """Return whether engines free cache and copies of weights while the policy trains."""
    rollout, spec = work.rollout, work.spec
    if rollout is None or spec is None or rollout.name == "trtllm" or (work.on_cpu and rollout.name in SERVED):
        return False
    wanted = not work.on_cpu if rollout.free_cache_engine is None else rollout.free_cache_engine
    return wanted and spec.engines_take_turns


def least_bytes(work: Work, overhead: float) -> float:
    """Return what one replica needs of a GPU to answer a prompt: weights, a forward pass, and the cache of a group."""
    rollout, shape = work.rollout, work.actor.shape
    assert rollout is not None
    passes = Passes(shape, on_cpu=False, bf16=work.rollout_bf16)
    held = shape.parameters * _number_bytes(work) + _group_bytes(work)
    held += (rollout.max_num_batched_tokens or SERVED_PREFILL_TOKENS) * passes.forward_peak
    return overhead + held / rollout.tensor_model_parallel_size


def least_share(work: Work, capacity: float, overhead: float) -> float:
    return math.ceil(least_bytes(work, overhead) / capacity / SHARE_STEP) * SHARE_STEP


def served_rows(work: Work, capacity: float, overhead: float) -> int:
    """Return the sequences that one replica decodes at once: those that its cache holds, at most ``max_num_seqs``."""
    rollout = work.rollout
    assert rollout is not None
    cache = math.inf
    if rollout.name != "native":
        free = rollout.gpu_memory_utilization * capacity - least_bytes(work, overhead)
        cache = _cpu_cache(work) if work.on_cpu else free * rollout.tensor_model_parallel_size + _group_bytes(work)
    if rollout.max_cache_tokens:
        cache = min(cache, rollout.max_cache_tokens * token_bytes(work))
    rows = cache / ((work.response + work.prompt / work.samples) * token_bytes(work))
    return max(1, int(min(rows, rollout.max_num_seqs)))


def token_bytes(work: Work) -> float:
    return work.actor.shape.cache.per_token * _number_bytes(work)


def _group_bytes(work: Work) -> float:
    """Return the KV cache of one prompt with the responses that an engine decodes at once."""
    assert work.rollout is not None
    return (work.prompt + min(work.samples, work.rollout.max_num_seqs) * work.response) * token_bytes(work)


def _number_bytes(work: Work) -> int:
    return 2 if work.rollout_bf16 else FROZEN_BYTES


def _cpu_cache(work: Work) -> float:
    rollout, token = work.rollout, token_bytes(work)
    assert rollout is not None
    limit = token * SGLANG_CPU_CACHE_TOKENS if rollout.name == "sglang" else VLLM_CPU_CACHE_BYTES
    return token * rollout.max_cache_tokens if rollout.max_cache_tokens is not None else limit


CACHE, ENGINE = "KV cache", "colocated engine"
_BUCKET_COPIES = 3
"""Copies of a bucket while it is gathered: this rank's shards and their message, what arrives, and the whole."""
_HEAP_BYTES = 64 * 2**20
"""Memory of a CPU process besides tensors once it has computed: holes of the heap, prepared kernels (measured)."""
_LAYERS_IN_FLIGHT = {True: 4, False: 2}
"""Layers that FSDP gathers or sends at a time, on a CPU (gloo copies each of them) or a GPU."""


@dataclass(frozen=True)
class Phase:
    """A device at the fullest moment of a phase, in bytes by part."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def size(self, part: str) -> float:
        return self.parts.get(part, 0.0)


@dataclass(frozen=True)
class Memory:
    """The phases of one process of a pool, in the order of a step."""

    pool: Pool
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    def as_json(self, unit: float = 1.0) -> dict[str, Any]:
        """Return the memory as plain data, sizes in multiples of ``unit`` bytes."""

        def sized(parts: Mapping[str, float]) -> dict[str, float]:
            return {part: round(size / unit, 4) for part, size in parts.items()}

        return {
            "pool": self.pool.name,
            "nodes": self.pool.nodes,
            "per_node": self.pool.per_node,
            "roles": list(self.pool.roles),
            "layout": dataclasses.asdict(self.pool.layout),
            "peak_phase": self.peak.name,
            **sized({"peak": self.peak.total}),
            "phases": {phase.name: sized({"total": phase.total, **phase.parts}) for phase in self.phases},
        }


def memory_of(work: Work, pool: Pool, overhead: float = 0.0, capacity: float | None = None) -> Memory:
    """Predict the memory of a process of a pool, or of its device.

    Args:
        overhead: bytes that the process takes before it holds a model.
        capacity: bytes of its device; if given, colocated engines count too.
    """
    always = [*_resident(work, pool), {"process": overhead + _HEAP_BYTES * work.on_cpu}]
    engine = {} if capacity is None else {ENGINE: engine_bytes(work, pool, capacity, overhead)}
    generates = "rollout" in pool.roles and not work.served
    space = cache_space(work, pool, overhead, capacity)
    if generates:
        engine[CACHE] = cache_bytes(work, pool, space)
        if capacity is not None and uses_pages(work, pool) and work.rollout is not None:
            least, share = least_share_for_pages(work, capacity), work.rollout.gpu_memory_utilization
            if least > share:  # no sequence fits: counts as the device for which the share would suffice
                engine[CACHE] = max(engine[CACHE], least / share * capacity)
    asleep = {} if frees_memory(work) else engine
    keeps = generates and not shares_weights(pool) and not frees_memory(work)
    copies = decoding_copies(work, pool) if keeps else {}

    def fullest(name: str, moments: Iterable[dict[str, float]]) -> Iterable[Phase]:
        held = engine if name in ("generation", "weight sync") else asleep
        kept = {} if name == "generation" else copies  # which has them among its moments
        phases = [Phase(name, _sum([*always, held, kept, moment])) for moment in moments]
        return [max(phases, key=lambda phase: phase.total)] if phases else []

    phases: list[Phase] = []
    if "rollout" in pool.roles:
        phases += fullest("generation", [decoding(work, pool, space) if generates else {}])
    phases += fullest("log-probs", _scoring(work, pool))
    for name, role, trained in (("critic update", "critic", work.critic), ("update", "actor", work.actor)):
        if trained is not None and role in pool.roles:
            phases += fullest(name, _updating(work, pool, trained))
    phases += fullest("weight sync", _syncing(work, pool))
    if work.config.trainer.save_freq != 0 and work.on_cpu and "actor" in pool.roles:
        phases += fullest("checkpoint", [{"copies that are written": checkpoint_bytes(work) / pool.world}])
    return Memory(pool, tuple(phases))


def cache_space(work: Work, pool: Pool, overhead: float, capacity: float | None) -> float:
    """Return the bytes that the KV cache of a process may take; without a ``capacity`` of its device there is no limit."""
    if capacity is None:
        return math.inf
    resident = sum(size for parts in _resident(work, pool) for size in parts.values())
    return space_for_pages(work, pool, capacity, overhead + resident)


def _sum(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    sizes: dict[str, float] = {}
    for part in parts:
        for name, size in part.items():
            sizes[name] = sizes.get(name, 0.0) + size
    return {name: size for name, size in sizes.items() if size}


def checkpoint_bytes(work: Work) -> float:
    """Return the bytes of one checkpoint: weights and optimizer state of the trained models, and twice their averages."""
    trained = [model for model in (work.actor, work.critic) if model is not None]
    return sum(model.trained_parameters * FROZEN_BYTES + state_bytes(model) + average_bytes(model) for model in trained)


def shards_of(pool: Pool) -> int:
    """Return the ranks over which one copy of a model is divided."""
    layout = pool.layout
    return layout.dp_shard * layout.ranks_a_shard if pool.divided else 1


def weight_shards_of(pool: Pool) -> int:
    """Return the ranks over which weights and gradients of one copy are divided; with Megatron-core each data-parallel rank has all."""
    if pool.divided and pool.parallel.strategy == MEGATRON:
        return pool.layout.tensor * pool.layout.pipeline
    return shards_of(pool)


def _resident(work: Work, pool: Pool) -> Iterable[dict[str, float]]:
    """Yield weights and optimizer state while none of them is in use: offloaded ones are on the host then."""
    shards, roles, parameters = shards_of(pool), pool.roles, work.actor.shape.parameters
    whole = weight_shards_of(pool)
    offloaded = _offloaded(work, pool)
    for role, trained in (("actor", work.actor), ("critic", work.critic)):
        if role in roles and trained is not None:
            yield {
                "weights": 0 if "weights" in offloaded else _weight_bytes(work, pool, trained) / whole,
                "optimizer": 0 if "optimizer" in offloaded else state_bytes(trained) / shards,
            }
    if "rollout" in roles and work.served and work.on_cpu:
        yield {"weights kept for engines": parameters * FROZEN_BYTES}
    elif "rollout" in roles and not work.served and not shares_weights(pool):
        yield {"engine's own weights": parameters * FROZEN_BYTES}
    is_base_model = "actor" in roles and work.actor.lora_rank > 0
    if work.reference and ("reference" in roles or work.rollout is None) and not is_base_model:
        held = parameters * FROZEN_BYTES - _saved_when_frozen(work, pool, work.actor)
        yield {"reference": 0 if "weights" in _offloaded(work, pool, "reference") else held / whole}
    if work.teachers and "teacher" in roles:
        held = sum(t.shape.parameters * FROZEN_BYTES - _saved_when_frozen(work, pool, t) for t in work.teachers)
        yield {"teachers": 0 if "weights" in _offloaded(work, pool, "teacher") else held / whole}
    if work.reward_model is not None and "reward_model" in roles:
        model = work.reward_model
        yield {"reward model": model.shape.parameters * FROZEN_BYTES - _saved_when_frozen(work, pool, model)}


def _weight_bytes(work: Work, pool: Pool, model: TrainedModel) -> float:
    """Return the bytes of a trained model's weights, adapters and their frozen base included."""
    saved = _saved_when_frozen(work, pool, model) if model.lora_rank else 0.0
    return model.parameters * FROZEN_BYTES - saved


def _saved_when_frozen(work: Work, pool: Pool, model: TrainedModel) -> float:
    """Return the bytes that frozen matrices save where they are held in bfloat16, or those of the layers in 4 bits."""
    shape = model.shape
    narrow = 2.0 * work.narrows_frozen(model, pool)
    in_layers = FROZEN_BYTES - model.packed if model.packed else narrow
    return in_layers * shape.layers * shape.matrices + narrow * shape.embedding * (not shape.tied and not model.value)


def _offloaded(work: Work, pool: Pool, role: str = "actor") -> set[str]:
    """Return what is on the host while it is not in use: weights, optimizer; ``policy`` when it stays there in use.

    Offloading changes nothing on a CPU, or where the model is not divided.
    """
    if work.on_cpu or not pool.divided:
        return set()
    parallel = pool.parallel
    if role in ("reference", "teacher") and work.spec is not None:
        parallel = work.spec.reference_parallel
    fsdp = parallel.fsdp_config
    if fsdp.offload_policy:
        return {"policy", "weights", "optimizer"}
    return {name for name, on in (("weights", fsdp.param_offload), ("optimizer", fsdp.optimizer_offload)) if on}


def _in_use(work: Work, pool: Pool, model: TrainedModel, role: str = "actor") -> float:
    """Return the bytes of offloaded weights that come back to the device while the model is in use."""
    offloaded = _offloaded(work, pool, role)
    returned = "weights" in offloaded and "policy" not in offloaded
    return model.parameters * FROZEN_BYTES / weight_shards_of(pool) if returned else 0.0


def _scoring(work: Work, pool: Pool) -> Iterable[dict[str, float]]:
    """Yield the moments of passes that keep nothing: old log-probs, the reference's, values, scores."""
    models = (
        ("actor", work.actor if work.old_log_probs else None),
        ("reference", work.actor if work.reference else None),
        ("critic", work.critic),
        ("reward_model", work.reward_model),
        *(("teacher", teacher) for teacher in work.teachers),
    )
    for role, model in models:
        if model is not None and role in pool.roles:
            passes = work.passes(model, pool)
            passing = passes.tokens * (passes.forward_peak + passes.outside_kept)
            logits = 0.0 if model.value else passes.logits
            yield {
                "activations": max(passing, passes.responses * model.shape.hidden * 4),
                "logits": max(0.0, logits - passing),
                "copies of weights": passes.weight_copies if passes.bf16 or passes.packed else 0,
                "gathered weights": _gathered(work, pool, model.shape),
                "weights": _in_use(work, pool, model, role),
            }


def _updating(work: Work, pool: Pool, model: TrainedModel) -> Iterable[dict[str, float]]:
    """Yield the four moments of an update."""
    passes, shape, count, shards = work.passes(model, pool), model.shape, model.trained_parameters, shards_of(pool)
    offloaded, embedding = _offloaded(work, pool), GRADIENT_BYTES * shape.embedding / passes.tensor
    policy_head, trains_embedding = not model.value, count >= shape.embedding
    gradients = 0.0 if "policy" in offloaded else count * GRADIENT_BYTES / weight_shards_of(pool)
    earlier = gradients if work.micro_batch(model, pool).per_update > 1 else 0.0
    weights = {"weights": _in_use(work, pool, model)}
    gathered = {**weights, "gathered weights": _gathered(work, pool, shape)}
    passing = {**gathered, "copies of weights": passes.weight_copies * (model.packed or not model.checkpointing)}
    in_layers = passes.tokens * shape.layers * passes.layer_kept
    kept = passes.tokens * passes.outside_kept
    kept += min(in_layers, OFFLOAD_IN_FLIGHT_BYTES) if passes.on_host else in_layers
    yield {
        **passing,
        "gradients": earlier,
        "activations": kept + passes.log_probs_kept * policy_head,
        "logits": passes.logits_backward * policy_head,
    }
    in_flight = 0.0
    if not model.lora_rank:
        layers = _LAYERS_IN_FLIGHT[work.on_cpu] * pool.divided
        in_flight = embedding * policy_head + layers * GRADIENT_BYTES * shape.layer / passes.tensor
    last_layer = kept + passes.tokens * passes.backward_peak
    yield {**passing, "gradients": earlier + in_flight, "activations": last_layer}
    yield {**gathered, "gradients": gradients + (embedding if trains_embedding else GRADIENT_BYTES * count)}
    returned = "optimizer" in offloaded and "policy" not in offloaded
    yield {
        **weights,
        "gradients": gradients,
        "optimizer": state_bytes(model) / shards if returned else 0,
        "orthogonalised matrix": step_bytes(model, divided=pool.divided, on_cpu=work.on_cpu),
    }


def _gathered(work: Work, pool: Pool, shape: ModelShape) -> float:
    """Return the parameters that FSDP holds whole: those outside the layers, and the layers in flight."""
    if not pool.divided or pool.parallel.strategy == MEGATRON:
        return 0.0
    reshards = pool.parallel.fsdp_config.reshard_after_forward
    layers = _LAYERS_IN_FLIGHT[work.on_cpu] if reshards else shape.layers
    outside = shape.parameters - shape.layers * shape.layer
    return (outside + layers * shape.layer) / pool.layout.tensor * (2 if work.actor.bf16 else 4)


def _syncing(work: Work, pool: Pool) -> Iterable[dict[str, float]]:
    """Yield the buckets of parameters that go to engines with a copy; a broadcast has two at both ends."""
    if work.rollout is None or work.spec is None:
        return
    number = 2 if work.rollout_bf16 else FROZEN_BYTES
    whole, embedding = work.actor.shape.parameters * number, work.actor.shape.embedding * number
    bucket = work.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
    copies = _BUCKET_COPIES if pool.divided else 1
    if work.spec.between_workers(on_cpu=work.on_cpu).value == "broadcast":
        if {"actor", "rollout"} & set(pool.roles):
            gathered = copies * min(whole, max(GATHER_BUCKET_BYTES, embedding)) if pool.divided else 0.0
            yield {"weights in transfer": BROADCAST_BUFFERS * min(whole, max(bucket, embedding)) + gathered}
        return
    if "rollout" in pool.roles and (pool.divided or work.served):
        sent = bucket if work.served else GATHER_BUCKET_BYTES
        yield {"weights in transfer": copies * min(whole, max(sent, embedding))}


MUON = "Muon"
_EIGHT_BIT_BYTES = 2 * (1 + 4 / 256)  # two moments of a byte a number, with a float32 scale for 256 numbers
_MOMENTS = {"Adagrad": 1, "RMSprop": 1, "SGD": 0, MUON: 1}
"""Numbers of optimizer state per parameter; 2 for optimizers of Adam's kind."""


def moment_bytes(optim: OptimConfig) -> float:
    """Return the bytes of an optimizer's state per parameter; of Muon, per parameter of a layer's matrix."""
    if optim.optimizer == "AdamW8bit":
        return _EIGHT_BIT_BYTES
    moments = _MOMENTS.get(optim.optimizer.rpartition(":")[2].rpartition(".")[2], 2)
    return GRADIENT_BYTES * (moments + bool(optim.override_optimizer_config.get("momentum") and not moments))


def state_bytes(model: TrainedModel) -> float:
    """Return the bytes of a model's optimizer state and of the average of its weights, over all ranks."""
    optim, count = model.optim, model.trained_parameters
    matrices = _matrix_parameters(model) if optim.optimizer == MUON else count
    return moment_bytes(optim) * matrices + ADAM_BYTES * (count - matrices) + average_bytes(model)


def average_bytes(model: TrainedModel) -> float:
    """Return the bytes of the average of a model's weights, over all ranks."""
    return 0.0 if model.optim.ema_decay is None else FROZEN_BYTES * model.trained_parameters


def step_bytes(model: TrainedModel, *, divided: bool, on_cpu: bool) -> float:
    """Return the bytes that a step of the optimizer takes besides its state, on each rank.

    Muon orthogonalises the matrices of the layers, which takes copies of the largest one; every rank computes whole matrices.

    Args:
        divided: whether the model is divided over ranks, so that a matrix is all-gathered first.
        on_cpu: whether matrices are orthogonalised in float32 instead of bfloat16.
    """
    if model.optim.optimizer != MUON:
        return 0.0
    shape, number = model.shape, 4 if on_cpu else 2
    if model.lora_rank:
        matrix = model.lora_rank * max(shape.hidden, shape.width, shape.queries)
    else:
        matrix = shape.hidden * max(shape.width, shape.queries)
        if shape.experts:  # the matrices that read the residual stream are one
            matrix = min(2 * matrix * shape.experts, max(2 * matrix, ORTHOGONALISED_NUMBERS))
    # the direction, the whole matrix, an iteration's input and output, and the result
    return matrix * (4 + 4 * divided + 3 * number + 4)


def _matrix_parameters(model: TrainedModel) -> int:
    return model.trained_parameters if model.lora_rank else model.shape.layers * model.shape.matrices
