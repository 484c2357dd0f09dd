"""Runs from Python: the programs of `hone train`, `sft`, `prefer` and `reward-model`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.api.objects import Episodes, GivenObjects, Reward, Tools, dataset_files, reward_keys
from hone.api.runs import Run, model_directory
from hone.api.settings import api_call, build_config, flat_values, model_key, takes_names_of_trl
from hone.config import PreferenceConfig, RewardModelConfig, RLConfig, SFTConfig
from hone.errors import HoneError
from hone.user_objects import PREFIX

if TYPE_CHECKING:
    from hone.agents.base import AgentLoop
    from hone.agents.environments import Environment
    from hone.agents.interactions import Interaction
    from hone.config.trees import AnyConfig
    from hone.trainers.session import OnSample, OnStep


@api_call
@takes_names_of_trl(RLConfig)
def train(
    model: str | Path | Run | None = None,
    dataset: Any = None,
    *,
    reward: Reward | None = None,
    tools: Tools = None,
    environment: type[Environment] | str | None = None,
    agent_loop: type[AgentLoop] | str | None = None,
    interaction: type[Interaction] | str | None = None,
    val_dataset: Any = None,
    preset: str | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    on_step: OnStep | None = None,
    on_sample: OnSample | None = None,
    reward_weights: Sequence[float] | None = None,
    **keys: Any,
) -> Run:
    """Train a model by reinforcement learning, like `hone train`.

    Args:
        model: model directory, its name on the hub, or a run, whose newest checkpoint is used.
        dataset: files, names of the hub, rows, a table, a frame, or a `datasets.Dataset`; a row needs a ``prompt``. With
            ``environment``: seeds, or mappings with ``seed`` and ``options``.
        reward: see :data:`Reward`; None means the built-in scorer of each row's ``data_source``.
        tools: functions with type hints and docstring, tools, names of built-in tools; or a YAML or Python file.
        environment: class derived from Environment, or its name.
        agent_loop: class derived from AgentLoop, or its name.
        interaction: class derived from Interaction, or a YAML file of simulated users.
        val_dataset: held-out rows, in the same forms.
        preset: preset of the method; None means that of ``adv_estimator``, which is grpo unless it is given.
        steps: steps of the run.
        out: run directory.
        config: configuration keys, nested or dotted.
        overrides: ``key=value`` texts, which take precedence.
        on_step: function of step and metrics, called after each step; True ends the run.
        on_sample: function of each scored rollout, called at the end of its step; True ends the run.
        reward_weights: weights of several rewards; None means 1 for each.
        keys: further keys by their last part, such as ``max_response_length=256``, or by TRL's name. The value of a key that takes
            an import path may be the function or class itself.

    Raises:
        HoneError: a key, the data, the model or the reward is wrong.
        KeyboardInterrupt: the run was interrupted; the same call resumes it.
    """
    from hone.config.load import method_preset
    from hone.trainers.rl import train as program

    chosen = preset or method_preset(_estimator(config, keys, overrides))
    objects, episodes = GivenObjects(), Episodes(tools, environment, agent_loop, interaction)
    dataset, val_dataset = episodes.rows(dataset, objects), episodes.rows(val_dataset, objects)
    keys |= reward_keys(reward, objects, reward_weights) | episodes.keys(objects)
    config = episodes.implied | flat_values(config or {})
    return _run(
        *(RLConfig, program, model, dataset, val_dataset, chosen, steps, out, config, overrides, on_step, keys),
        on_sample=on_sample,
        objects=objects,
    )


def _estimator(config: Mapping[str, Any] | None, keys: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Return the advantage estimator that the arguments name, the last of them, or the default."""
    from hone.config.load import DEFAULT_ESTIMATOR

    key = "algorithm.adv_estimator"
    named = [str(flat_values(config or {}).get(key, DEFAULT_ESTIMATOR))]
    given = [value for name, value in keys.items() if name in (key, "adv_estimator")]
    named += [PREFIX if callable(value) else str(value) for value in given]
    named += [word.partition("=")[2] for word in overrides if word.startswith(f"{key}=")]
    return named[-1]


@api_call
@takes_names_of_trl(SFTConfig)
def sft(
    model: str | Path | Run | None = None,
    dataset: Any = None,
    *,
    val_dataset: Any = None,
    preset: str | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    on_step: OnStep | None = None,
    **keys: Any,
) -> Run:
    """Fine-tune a model on conversations, like `hone sft`; a row needs ``messages``. Arguments: see :func:`train`."""
    from hone.trainers.sft import train as program

    return _run(SFTConfig, program, model, dataset, val_dataset, preset, steps, out, config, overrides, on_step, keys)


@api_call
@takes_names_of_trl(PreferenceConfig)
def prefer(
    model: str | Path | Run | None = None,
    dataset: Any = None,
    *,
    val_dataset: Any = None,
    preset: str | None = "dpo",
    steps: int | None = None,
    out: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    on_step: OnStep | None = None,
    **keys: Any,
) -> Run:
    """Train a model on preferences, like `hone prefer`; a row needs ``chosen`` and ``rejected``. Arguments: see :func:`train`."""
    from hone.trainers.preference import train as program

    return _run(
        PreferenceConfig, program, model, dataset, val_dataset, preset, steps, out, config, overrides, on_step, keys
    )


@api_call
@takes_names_of_trl(RewardModelConfig)
def train_reward_model(
    model: str | Path | Run | None = None,
    dataset: Any = None,
    *,
    val_dataset: Any = None,
    preset: str | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    on_step: OnStep | None = None,
    **keys: Any,
) -> Run:
    """Train a model that scores answers on preference pairs, like `hone reward-model`. Arguments: see :func:`train`."""
    from hone.trainers.preference import train as program

    return _run(
        RewardModelConfig, program, model, dataset, val_dataset, preset, steps, out, config, overrides, on_step, keys
    )


def _run(
    tree: type[AnyConfig],
    program: Callable[[Any], int],
    model: str | Path | Run | None,
    dataset: Any,
    val_dataset: Any,
    preset: str | None,
    steps: int | None,
    out: str | Path | None,
    config: Mapping[str, Any] | None,
    overrides: Sequence[str],
    on_step: OnStep | None,
    keys: Mapping[str, Any],
    *,
    on_sample: OnSample | None = None,
    objects: GivenObjects | None = None,
) -> Run:
    from hone.cli.main import log_to_stderr
    from hone.cli.programs import announce, local_models_and_data, run_training
    from hone.cluster.torchrun.ranks import follows
    from hone.preflight import check
    from hone.trainers.session import Callbacks, calling
    from hone.user_objects import in_use

    log_to_stderr()
    objects = objects or GivenObjects()
    config = objects.named(flat_values(config or {}))
    values: dict[str, Any] = {
        model_key(tree): str(model.path) if isinstance(model, Run) else model_directory(model),
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": None if out is None else str(out),
    }
    values = {key: value for key, value in values.items() if value is not None} | objects.named(keys)
    built = build_config(tree, values, preset=preset, config=config, overrides=overrides)
    folder = Path(built.trainer.default_local_dir).expanduser() / "inputs"
    with _unless_refused(folder):
        built.data.train_files = dataset_files(dataset, folder, "train") or built.data.train_files
        built.data.val_files = dataset_files(val_dataset, folder, "val") or built.data.val_files
        downloads = local_models_and_data(built)
        if not follows(built):
            check(built)
            announce(built)
    with calling(Callbacks(on_step, on_sample)), in_use(objects):
        code = run_training(built, downloads, program)
    if code == 128 + 2:
        raise KeyboardInterrupt(
            f"the run in {built.trainer.default_local_dir} was interrupted; the same call resumes it"
        )
    return Run(built.trainer.default_local_dir)


@contextmanager
def _unless_refused(folder: Path) -> Iterator[None]:
    """Remove a new folder, and those above it that are new and empty, if the checks of a run end in an error."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except HoneError:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        for path in new[1:]:
            with suppress(OSError):
                path.rmdir()
        raise
