"""Rules about rows with images, video or sound: what the model reads, and which settings let a run read it."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.derived import RunSpec
from hone.config.preference import RewardModelConfig
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig, parallel_block
from hone.errors import ConfigError, Finding
from hone.preflight.cluster import actor_processes
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Stage, error, rule
from hone.training.backends.registry import BACKENDS, backend_of


@rule("R86", *TREES.values(), stage=Stage.FILES)
def rows_are_read_whole(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """Rows have no media that the model does not read, and as many images as places for them."""
    yield from (Finding(problem, stops=True) for problem in evidence.media)


@rule("R86", *TREES.values(), stage=Stage.FILES)
def run_reads_images(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """Engine and training backend read images, if rows have some."""
    if evidence.has_images:
        yield from image_limits(config)


def image_limits(config: AnyConfig) -> Iterator[Finding]:
    """Yield an error for each setting with which a run reads no images."""
    parallel = parallel_block(config)
    processes = actor_processes(config)
    key = parallel.key("strategy")
    try:
        local = backend_of(parallel, processes) is BACKENDS.get("local")
    except ConfigError:
        local = True  # R70 reports it
    if not local:
        yield error(
            f"rows have images, but {key}={parallel.strategy or 'null'} with {processes} processes does not read them",
            why="only a model that one process holds whole reads images",
            fix=f"{key}=local trainer.nnodes=1 trainer.n_gpus_per_node=1",
            where=key,
        )
    if isinstance(config, RewardModelConfig):
        yield error(
            "rows have images, but reward models do not read them",
            why="transformers has no scalar model of this kind",
            fix="leave such rows out, or describe the images in the text",
            where="model.path",
        )
    if not isinstance(config, RLConfig):
        return
    from hone.generation import is_served

    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "native" or is_served(rollout):
        block = "actor_rollout_ref.rollout"
        yield error(
            f"rows have images, but the engine {rollout.name} runs in processes of its own",
            why="Hone sends images only to its own engine in the process of the trainer",
            fix=f"{block}.name=native {block}.num_replicas=null",
            where=f"{block}.num_replicas" if rollout.name == "native" else f"{block}.name",
        )
    if RunSpec(config).critic.value:
        yield error(
            "rows have images, but critics do not read them",
            why="transformers has no value model of this kind",
            fix="algorithm.adv_estimator=grpo, which needs no critic",
            where="algorithm.adv_estimator",
        )
