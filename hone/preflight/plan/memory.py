"""Memory of one device in each phase of a step, as a list of parts: what :mod:`hone.training` and :mod:`hone.generation` hold.

    generation   weights, optimizer, key-value cache, the engine's copies of weights, activations of the prompts, logits
    log-probs    weights, optimizer, key-value cache (it stays), activations of one layer at a time, logits
    update       weights, optimizer, key-value cache, gradients, everything kept for the backward pass, logits
    publication  to engines that hold a copy: whole parameters on their way, bucket by bucket
    checkpoint   on a CPU: the copies that are written while training goes on

Weights, gradients and AdamW's two moments are float32. An update has four moments of which the largest counts: before the
backward pass (all is kept, logits exist), in the last layer (all is kept, its gradients exist), at its end (all gradients
exist, and the embedding's once more), and in the optimizer's step (its state is there, wherever it was before).

An engine in a process of its own (:mod:`hone.preflight.plan.serving`) takes its part of the device through all of them; the
process that it answers to generates nothing and has no cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hone.catalogue.memory import FROZEN_BYTES
from hone.config.model import OptimConfig
from hone.preflight.plan.activations import (
    backward_moment,
    forward_moment,
    head_kept,
    layer_kept,
    logits_moment,
    outside_kept,
)
from hone.preflight.plan.generation import cache_bytes, generating
from hone.preflight.plan.model import ModelShape
from hone.preflight.plan.parts import (
    ACTIVATIONS,
    CACHE,
    COPIES,
    ENGINE,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    OVERHEAD,
    WEIGHTS,
    Part,
    Phase,
)
from hone.preflight.plan.serving import engine_bytes
from hone.preflight.plan.work import MicroBatch, Process, Trained, Work

GRADIENT_BYTES = 4
BUCKET_BYTES = 256 * 2**20
"""Whole parameters that are gathered at a time (:data:`hone.training.export_stream.BUCKET_BYTES`)."""
BUCKET_COPIES = 3
"""Of a bucket while it is gathered: this rank's pieces and their message, what arrives, and the whole."""
HEAP_BYTES = 64 * 2**20
"""What stays in a CPU process beside tensors once it has computed: holes of the heap, kernels that were prepared (measured)."""
_ON_THE_WAY = {True: 4, False: 2}
"""Layers' worth of what FSDP gathers, or sends off, at a time: in use and on the way, by gloo on a CPU with copies of each."""
_MOMENTS = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "RMSprop": 1,
    "SGD": 0,
}


@dataclass(frozen=True)
class Memory:
    """The phases of one process.

    Attributes:
        process: whose.
        phases: in the order of a step.
    """

    process: Process
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


def memory_of(work: Work, process: Process, overhead: float = 0.0, capacity: float | None = None) -> Memory:
    """Predict the memory of a process, or of its device.

    Args:
        work: of the run.
        process: whose memory.
        overhead: bytes that the process takes before it holds a model.
        capacity: bytes of its device; given, the engines beside it on that device are counted too.
    """
    always = [*_resident(work, process), Part(OVERHEAD, overhead + HEAP_BYTES * work.on_cpu)]
    if capacity is not None:
        always.append(Part(ENGINE, engine_bytes(work, process, capacity, overhead)))
    generates = "rollout" in process.roles and not work.served
    cache = Part(CACHE, cache_bytes(work, process) if generates else 0)
    phases = []
    if "rollout" in process.roles:
        phases.append(Phase.of("generation", [*always, cache, *(generating(work, process) if generates else ())]))
    scored = [*_scoring(work, process)]
    if scored:
        most = max(scored, key=lambda parts: sum(part.size for part in parts))
        phases.append(Phase.of("log-probs", [*always, cache, *most]))
    for name, role, trained in (("critic update", "critic", work.critic), ("update", "actor", work.actor)):
        if trained is not None and role in process.roles:
            moments = [Phase.of(name, [*always, cache, *moment]) for moment in _updating(work, process, trained)]
            phases.append(max(moments, key=lambda phase: phase.total))
    phases += [Phase.of(name, [*always, cache, *parts]) for name, parts in _between(work, process)]
    return Memory(process, tuple(phases))


def trained_parameters(work: Work, trained: Trained) -> int:
    """Parameters that an optimizer changes."""
    return trained.shape.adapter(work.rank) if work.adapters and not trained.value else trained.shape.parameters


def state_bytes(optim: OptimConfig) -> int:
    """Bytes of optimizer state for each parameter."""
    moments = _MOMENTS.get(optim.optimizer.rpartition(":")[2].rpartition(".")[2], 2)
    return GRADIENT_BYTES * (moments + bool(optim.override_optimizer_config.get("momentum") and not moments))


def checkpoint_bytes(work: Work) -> float:
    """Bytes of one checkpoint: weights and optimizer state of what is trained."""
    return sum(
        trained_parameters(work, trained) * (FROZEN_BYTES + state_bytes(trained.optim))
        for trained in (work.actor, work.critic)
        if trained is not None
    )


def _shards(process: Process) -> int:
    """Ranks that one copy of a divided model is cut over."""
    layout = process.layout
    return layout.dp_shard * layout.sequence * layout.tensor if process.divided else 1


def _resident(work: Work, process: Process) -> list[Part]:
    """Weights and optimizer state while nothing of them is in use: what is offloaded is on the host then."""
    parts, shards, roles = [], _shards(process), process.roles
    on_host = _on_host(work, process)
    weights = 0.0 if on_host & {"offload_policy", "param_offload"} else FROZEN_BYTES / shards
    states = 0.0 if on_host & {"offload_policy", "optimizer_offload"} else 1 / shards
    for role, trained in (("actor", work.actor), ("critic", work.critic)):
        if role in roles and trained is not None:
            parts.append(Part(WEIGHTS, _held(work, trained) * weights))
            parts.append(Part(OPTIMIZER, trained_parameters(work, trained) * state_bytes(trained.optim) * states))
    shape = work.actor.shape
    if "rollout" in roles and work.served and work.on_cpu:
        parts.append(Part("weights kept for engines", shape.parameters * FROZEN_BYTES))
    elif "rollout" in roles and not work.served and (process.divided or "actor" not in roles):
        parts.append(Part("engine's own weights", shape.parameters * FROZEN_BYTES))
    if work.reference and ("reference" in roles or work.rollout is None):
        shared = "actor" in roles and work.adapters
        parts.append(Part("reference", 0 if shared else shape.parameters * weights))
    if work.reward_model is not None and "reward_model" in roles:
        parts.append(Part("reward model", work.reward_model.parameters * FROZEN_BYTES))
    return parts


def _on_host(work: Work, process: Process) -> set[str]:
    """Which keys of offloading are on; none of them changes anything on a CPU, or where the model is not divided."""
    if work.on_cpu or not process.divided:
        return set()
    return {name for name in ("offload_policy", "param_offload", "optimizer_offload") if getattr(work.fsdp, name)}


def _held(work: Work, trained: Trained) -> int:
    """Parameters of a model that is trained, adapters and what they stand on."""
    count = trained_parameters(work, trained)
    return trained.shape.parameters + (count if count != trained.shape.parameters else 0)


def _returned(work: Work, process: Process, trained: Trained) -> tuple[Part, Part]:
    """What offloading brings back to the device: weights while the model is in use, the optimizer's state for its own step."""
    on_host, shards = _on_host(work, process), _shards(process)
    if "offload_policy" in on_host:
        return Part(WEIGHTS, 0), Part(OPTIMIZER, 0)
    weights = _held(work, trained) * FROZEN_BYTES / shards if "param_offload" in on_host else 0
    states = trained_parameters(work, trained) * state_bytes(trained.optim) / shards
    return Part(WEIGHTS, weights), Part(OPTIMIZER, states if "optimizer_offload" in on_host else 0)


def _scoring(work: Work, process: Process) -> Iterable[list[Part]]:
    """Passes that keep nothing: old log-probs, the reference's, values, scores."""
    if "actor" in process.roles and work.old_log_probs:
        yield _forward(work, process, work.actor)
    if work.reference and "reference" in process.roles:
        yield _forward(work, process, work.actor)
    if work.critic is not None and "critic" in process.roles:
        yield _forward(work, process, work.critic)


def _forward(work: Work, process: Process, trained: Trained) -> list[Part]:
    how, shape = work.computation(trained, process), trained.shape
    micro = work.micro_batch(trained, process)
    tokens, responses = _own_share(micro, process)
    copies = 0.0
    if how.narrow and not how.gathered:
        copies = shape.layers * shape.matrices / how.tensor * 2
    passing = tokens * (forward_moment(shape, how) + outside_kept(shape, how).a_token)
    logits = 0.0 if trained.value else logits_moment(shape, how, responses, backward=False)
    return [
        Part(ACTIVATIONS, max(passing, responses * shape.hidden * 4)),
        Part(LOGITS, max(0.0, logits - passing)),
        Part(COPIES, copies),
        Part("gathered weights", _gathered(work, process, shape)),
        _returned(work, process, trained)[0],
    ]


def _updating(work: Work, process: Process, trained: Trained) -> Iterable[list[Part]]:
    """The moments of an update."""
    how, shape = work.computation(trained, process), trained.shape
    micro = work.micro_batch(trained, process)
    tokens, responses = _own_share(micro, process)
    count, shards = trained_parameters(work, trained), _shards(process)
    all_gradients = 0.0 if "offload_policy" in _on_host(work, process) else count * GRADIENT_BYTES / shards
    weights, states = _returned(work, process, trained)
    before = all_gradients if micro.count > 1 else 0.0
    layers = layer_kept(shape, how).times(shape.layers)
    of_output = 0.0 if trained.value or how.adapter_rank else shape.embedding / how.tensor * 4
    kept = 0.0 if how.on_host else tokens * layers.a_token
    kept += outside_kept(shape, how).of(tokens)
    copies, gathered = Part(COPIES, layers.weights), Part("gathered weights", _gathered(work, process, shape))
    scored = 0.0 if trained.value else head_kept(shape, how).of(responses)
    logits = 0.0 if trained.value else logits_moment(shape, how, responses, backward=True)
    yield [Part(GRADIENTS, before), Part(ACTIVATIONS, kept + scored), Part(LOGITS, logits), copies, gathered, weights]
    yield [
        Part(GRADIENTS, before + of_output + _layer_gradient(work, process, trained)),
        Part(ACTIVATIONS, kept + tokens * backward_moment(shape, how)),
        copies,
        gathered,
        weights,
    ]
    last = count * GRADIENT_BYTES if count < shape.embedding else shape.embedding / how.tensor * GRADIENT_BYTES
    yield [Part(GRADIENTS, all_gradients + last), gathered, weights]
    yield [Part(GRADIENTS, all_gradients), weights, states]


def _own_share(micro: MicroBatch, process: Process) -> tuple[float, float]:
    """Tokens and response tokens of a micro-batch that one rank computes: those that share a row have a piece each."""
    return micro.tokens / process.layout.sequence, micro.responses / process.layout.sequence


def _gathered(work: Work, process: Process, shape: ModelShape) -> float:
    """Parameters that FSDP has put together: what lies outside the layers, and two layers (one computes, one arrives). Gloo makes
    copies of what it sends.
    """
    if not process.divided:
        return 0.0
    size = 2 if work.actor.narrow else 4
    outside = shape.parameters - shape.layers * shape.layer
    layers = _ON_THE_WAY[work.on_cpu] if work.fsdp.reshard_after_forward else shape.layers
    return (outside + layers * shape.layer) / process.layout.tensor * size


def _layer_gradient(work: Work, process: Process, trained: Trained) -> float:
    """Gradients of a layer before they are summed over the ranks, and once more on their way."""
    if not process.divided or work.adapters:
        return 0.0
    return _ON_THE_WAY[work.on_cpu] * trained.shape.layer / process.layout.tensor * GRADIENT_BYTES


def _between(work: Work, process: Process) -> Iterable[tuple[str, list[Part]]]:
    """Phases in which nothing is computed."""
    if "rollout" in process.roles and (process.divided or work.served):
        whole = work.actor.shape.parameters * FROZEN_BYTES
        bucket = work.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20 if work.rollout else 0
        sent = min(whole, max(bucket if work.served else BUCKET_BYTES, work.actor.shape.embedding * FROZEN_BYTES))
        sent *= BUCKET_COPIES if process.divided else 1
        yield "publication", [Part("parameters on their way", sent)]
    if work.saves and work.on_cpu and "actor" in process.roles:
        yield "checkpoint", [Part("copies that are written", checkpoint_bytes(work) / process.world)]
