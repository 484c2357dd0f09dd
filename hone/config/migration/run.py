"""Keys of the algorithm, of the life cycle of a run, and of services beside it."""

from __future__ import annotations

from typing import Any

from hone.config.migration.entries import Changed, Entry, Foreign, Others, Refused, Renamed, Settled, Unsupported
from hone.config.migration.reasons import NPU, PROFILER, STORAGE

_CORRECTION = "algorithm.rollout_correction"


def _correction_level(value: Any, others: Others) -> dict[str, Any]:
    """``rollout_is`` was a switch before it named the level."""
    if value in (None, False):
        return {}
    level = others.get("algorithm.rollout_is_level", "token") if value is True else value
    return {f"{_CORRECTION}.rollout_is": level}


def _threshold(value: Any, others: Others) -> dict[str, Any]:
    return {} if value is None else {f"{_CORRECTION}.rollout_is_threshold": str(value)}


def _keep(value: Any, others: Others) -> dict[str, Any]:
    return {"trainer.max_ckpt_to_keep": value}


def _keep_one(value: Any, others: Others) -> dict[str, Any]:
    return {"trainer.max_ckpt_to_keep": 1} if value else {}


def _every_step(value: Any, others: Others) -> dict[str, Any]:
    return {} if value in (None, "") else {"trainer.rollout_dump_freq": 1}


def _validation_records(value: Any, others: Others) -> dict[str, Any]:
    return {}


def _sync_mode(value: Any, others: Others) -> dict[str, Any]:
    if value in ("sync", None):
        return {}
    raise Refused(f"the trainer mode {value}", "synchronous training")


ENTRIES: dict[str, Entry] = {
    "algorithm.{rollout_is,rollout_is_level}": Changed(
        "true is the level token", _correction_level, (f"{_CORRECTION}.rollout_is",)
    ),
    "algorithm.rollout_is_threshold": Changed("", _threshold, (f"{_CORRECTION}.rollout_is_threshold",)),
    "algorithm.rollout_is_mode": Settled(
        "one number truncates, two mask", ("truncate", None), f'{_CORRECTION}.rollout_is_threshold="LOW_HIGH"'
    ),
    "algorithm.rollout_is_threshold_lower": Settled(
        "one number truncates, two mask", (None,), f'{_CORRECTION}.rollout_is_threshold="LOW_HIGH"'
    ),
    "algorithm.rollout_is_veto_threshold": Renamed(f"{_CORRECTION}.rollout_token_veto_threshold"),
    "algorithm.filter_groups.max_inflight_gen_batches": Settled("prompts are tried one by one as places become free"),
    "algorithm.kl_ctrl.kl_ctrl_type": Renamed("algorithm.kl_ctrl.type"),
    "algorithm.kl_coef": Renamed("algorithm.kl_ctrl.kl_coef"),
    # checkpoints and records
    "trainer.{max_actor_ckpt_to_keep,max_critic_ckpt_to_keep}": Changed(
        "a checkpoint holds actor and critic together", _keep, ("trainer.max_ckpt_to_keep",)
    ),
    "trainer.remove_previous_ckpt_in_save": Changed("true keeps one", _keep_one, ("trainer.max_ckpt_to_keep",)),
    "trainer.del_local_ckpt_after_load": Settled("checkpoints are kept", (False, None), "trainer.max_ckpt_to_keep=1"),
    "trainer.default_hdfs_dir": Unsupported("a second copy of checkpoints on HDFS", "trainer.default_local_dir"),
    "trainer.rollout_data_dir": Changed(
        "samples of every step, in rollouts/ of the run directory", _every_step, ("trainer.rollout_dump_freq",)
    ),
    "trainer.validation_data_dir": Changed(
        "validation samples are in validation/ of the run directory, trainer.log_val_generations of them",
        _validation_records,
    ),
    "trainer.val_generations_to_log_to_wandb": Renamed("trainer.log_val_generations"),
    "trainer.esi_redundant_time": Settled("a run told to stop saves and ends"),
    "trainer.val_only": Unsupported("validation without training", "hone eval"),
    "trainer.use_v1": Settled("there is one trainer"),
    "trainer.use_legacy_worker_impl": Settled("there is one kind of worker"),
    "trainer.v1.trainer_mode": Changed("sync", _sync_mode),
    "trainer.v1.**": Settled("acts only on training that does not wait for generation, which is not supported yet"),
    "trainer.wandb_proxy": Foreign("set the environment variables HTTP_PROXY and HTTPS_PROXY"),
    "trainer.rl_insight": Foreign("a service of the other trainer"),
    "trainer.{profile_steps,profile_continuous_steps,npu_profile.**,profiler.**}": Foreign(PROFILER),
    "trainer.ray_wait_register_center_timeout": Foreign("a time limit of Megatron's workers"),
    "trainer.{npu_profile,npu}.**": Foreign(NPU),
    # services
    "{global_profiler,profiler,profile,skip}.**": Foreign(PROFILER),
    "transfer_queue.**": Foreign(STORAGE),
    "{ray_kwargs.ray_init,ray_init}.num_cpus": Renamed("ray.num_cpus"),
    "{ray_kwargs.ray_init,ray_init}.address": Renamed("ray.address"),
    "{ray_kwargs.ray_init,ray_init}.runtime_env": Renamed("ray.runtime_env"),
    "{ray_kwargs.ray_init,ray_init}.runtime_env.**": Renamed("ray.runtime_env.*"),
    "ray_kwargs.timeline_json_file": Foreign(PROFILER),
    "{ray_kwargs,ray_init}.**": Unsupported("this option of Ray", "the keys of the block ray"),
    "distillation.**": Unsupported("distillation from teachers", "hone sft on a teacher's answers"),
    "hydra.**": Foreign("the run directory is trainer.default_local_dir"),
    "{hydra/job_logging,hydra/hydra_logging,hydra/launcher,hydra/sweeper,hydra/output}": Foreign(
        "the run directory is trainer.default_local_dir, and its log is written there"
    ),
}
