"""Rules about rows with images, video or sound: what the model reads, and which settings let a run read it."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.derived import RunSpec
from hone.config.preference import RewardModelConfig
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig, model_block, parallel_block
from hone.errors import ConfigError, Finding
from hone.generation.options import sends_adapter
from hone.preflight.cluster import actor_processes
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Stage, error, rule
from hone.training.backends.registry import BACKENDS, backend_of


@rule("R86", *TREES.values(), stage=Stage.FILES)
def rows_are_read_whole(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """Rows have no media that the model does not read, and as many images as places for them."""
    yield from (Finding(problem, stops=True) for problem in evidence.media)


@rule("R86", *TREES.values(), stage=Stage.FILES)
def frozen_tower_exists(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """A vision tower that is frozen exists."""
    from hone.data.image_processor import reads_images

    path, model = model_block(config)
    kind = evidence.model_settings.get("model_type")
    if model.freeze_vision_tower and kind is not None and not reads_images(evidence.model_settings):
        yield error(
            f"{path}.freeze_vision_tower=true, but a model of type {kind} has no vision tower that Hone trains",
            why="nothing would be frozen",
            fix=f"{path}.freeze_vision_tower=false",
            where=f"{path}.freeze_vision_tower",
        )


@rule("R86", *TREES.values(), stage=Stage.FILES)
def run_reads_images(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """Engine and training backend read images, if rows have some."""
    if evidence.has_images:
        yield from image_limits(config, str(evidence.model_settings.get("model_type")))


_ENGINES = ("native", "vllm")
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "ulysses_sequence_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
)


def _backend_limits(config: AnyConfig) -> Iterator[Finding]:
    """Yield an error if the training backend or its layout does not read images."""
    parallel, key = parallel_block(config), parallel_block(config).key
    try:
        entry = backend_of(parallel, actor_processes(config))
    except ConfigError:
        return  # R70 reports it
    if entry not in (BACKENDS.get("local"), BACKENDS.get("fsdp2")):
        yield error(
            f"rows have images, but {key('strategy')}={parallel.strategy} does not read them",
            why="only the backends local and fsdp2 have a vision tower",
            fix=f"{key('strategy')}=fsdp2",
            where=key("strategy"),
        )
        return
    for name in _SIZES:
        if (size := getattr(parallel, name)) > 1:
            yield error(
                f"rows have images, but {key(name)}={size} divides a row over processes, which is not supported with images",
                why="the tokens of an image would be computed without its pixels",
                fix=f"{key(name)}=1: FSDP2 divides the parameters over the same processes",
                where=key(name),
            )


def image_limits(config: AnyConfig, kind: str = "qwen3_vl") -> Iterator[Finding]:
    """Yield an error for each setting with which a run reads no images. ``kind``: ``model_type`` of the model."""
    yield from _backend_limits(config)
    if isinstance(config, RewardModelConfig):
        yield error(
            "rows have images, but reward models do not read them",
            why="transformers has no scalar model of this kind",
            fix="leave such rows out, or describe the images in the text",
            where="model.path",
        )
    if isinstance(config, RLConfig):
        yield from _engine_limits(config, kind)
        if RunSpec(config).critic.value:
            yield error(
                "rows have images, but critics do not read them",
                why="transformers has no value model of this kind",
                fix="algorithm.adv_estimator=grpo, which needs no critic",
                where="algorithm.adv_estimator",
            )


def _engine_limits(config: RLConfig, kind: str) -> Iterator[Finding]:
    """Yield an error if the engine does not read images."""
    rollout, block = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.name not in _ENGINES:
        yield error(
            f"rows have images, but the engine {rollout.name} does not get them",
            why=f"Hone sends images to {' and '.join(_ENGINES)} only",
            fix=f"{block}.name=native",
            where=f"{block}.name",
        )
    elif rollout.name == "vllm" and not kind.startswith("qwen"):
        yield error(
            f"rows have images, but Hone does not send them to vLLM for a model of type {kind}",
            why="only Qwen-VL models were compared with the trainer there",
            fix=f"{block}.name=native",
            where=f"{block}.name",
        )
    elif sends_adapter(config):
        yield error(
            f"rows have images, but {block}.merge_lora=false",
            why="vLLM takes no adapter of a vision tower",
            fix=f"{block}.merge_lora=true",
            where=f"{block}.merge_lora",
        )
