"""Rules about rows with images, video or sound: what the model reads, and which settings let a run read it."""

from __future__ import annotations

from collections.abc import Iterator

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
            f"rows have images, but {key}={parallel.strategy or 'null'} shards the model over {processes} processes",
            why="a sharded model reads no images yet",
            fix=f"{key}=local trainer.nnodes=1 trainer.n_gpus_per_node=1",
            where=key,
        )
    if isinstance(config, RLConfig) and config.actor_rollout_ref.rollout.name != "native":
        engine = "actor_rollout_ref.rollout.name"
        yield error(
            f"rows have images, but {engine}={config.actor_rollout_ref.rollout.name}",
            why="Hone sends images to its own engine alone",
            fix=f"{engine}=native",
            where=engine,
        )
