"""Rules about runs with strategy=megatron: settings, layouts and models that the backend does not support."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.derived import RunSpec
from hone.config.dtypes import dtype_keys
from hone.config.model import OptimConfig
from hone.config.preference import RewardModelConfig
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig, model_block, parallel_block
from hone.errors import ConfigError, ModelError
from hone.preflight.evidence import Evidence, trained_models
from hone.preflight.rules import Finding, error, rule
from hone.training.backends import BACKENDS
from hone.training.backends.megatron import support


@rule("R88", *TREES.values())
def megatron_supports_the_settings(config: AnyConfig) -> Iterator[Finding]:
    """With strategy=megatron: megatron-core is installed, and supports the settings of models, optimizers and layout."""
    parallel = parallel_block(config)
    strategy = parallel.key("strategy")
    if parallel.strategy != support.NAME:
        return
    try:
        BACKENDS.get(support.NAME).require_package(strategy)
    except ConfigError as problem:
        yield Finding(problem, stops=True)
    if isinstance(config, RewardModelConfig):
        yield error(
            f"strategy={support.NAME} does not train reward models",
            why="their output layer has no place in Megatron's model",
            where=strategy,
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


@rule("R89", *TREES.values())
def megatron_supports_the_models(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """With strategy=megatron: Megatron-core computes the models as transformers does, and the layout divides them."""
    parallel = parallel_block(config)
    if parallel.strategy != support.NAME:
        return
    for path, settings in trained_models(config, evidence):
        try:
            support.require_model(settings, parallel, path)
        except ModelError as problem:
            yield Finding(problem, stops=True)


def _optimizers(config: AnyConfig) -> Iterator[tuple[str, OptimConfig]]:
    """Yield the optimizers of the run with their blocks."""
    if not isinstance(config, RLConfig):
        yield "optim", config.optim
        return
    yield "actor_rollout_ref.actor.optim", config.actor_rollout_ref.actor.optim
    if RunSpec(config).critic.value:
        yield "critic.optim", config.critic.optim
