"""Runs of verl become configurations of Hone: what they set is there, what differs is named, and they pass the check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.launch_scripts import ARGUMENTS
from support.launch_scripts import FOLDER as SCRIPTS
from support.messages import raises
from typer.testing import CliRunner

from hone.apps.verl.importing import Translation, import_overrides, import_script, import_yaml
from hone.apps.verl.launch import Argument
from hone.cli.config import app
from hone.cluster.plan import model_roles
from hone.config import RLConfig, SFTConfig, documentation, load_config
from hone.config.derived import RunSpec
from hone.config.keys import leaf_values
from hone.config.migration import DEFAULTS, Outcome
from hone.errors import ConfigError
from hone.preflight import Stage, examine

POLICY, ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))

EXPECTED: dict[str, dict[str, Any]] = {
    "ppo_critic": {
        "algorithm.adv_estimator": "gae",
        "data.train_files": ["${oc.env:HOME}/data/gsm8k/train.parquet", "${oc.env:HOME}/data/math/train.parquet"],
        "data.filter_overlong_prompts": True,
        "critic.optim.lr": 1e-5,
        "critic.model.path": "Qwen/Qwen2-7B-Instruct",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 16,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 16 * 1536,
        "trainer.runtime": "ray",
        "trainer.n_gpus_per_node": 8,
    },
    "ppo_old_spellings": {
        "algorithm.adv_estimator": "gae",
        "data.val_batch_size": 1312,
        f"{ACTOR}.optim.clip_grad": 0.5,
        f"{ACTOR}.optim.lr_scheduler_type": "constant",
        "critic.optim.lr_scheduler_type": "cosine",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
        "reward.custom_reward_function.path": "my_reward.py",
        "reward.custom_reward_function.name": "score",
        "reward.custom_reward_function.reward_kwargs": {"bonus": 0.5},
        "trainer.val_before_train": False,
        "trainer.log_val_generations": 4,
        "trainer.max_ckpt_to_keep": 1,
        "trainer.runtime": "local",
    },
    "grpo": {
        f"{POLICY}.path": "Qwen/Qwen2.5-3B-Instruct",
        "data.shuffle": False,
        f"{ACTOR}.use_kl_loss": True,
        f"{ROLLOUT}.n": 5,
        f"{ACTOR}.dtype": "bfloat16",
        "trainer.logger": ["console", "tensorboard"],
    },
    "grpo_command_array": {
        f"{POLICY}.path": "Qwen/Qwen3-VL-8B-Instruct",
        f"{ACTOR}.ppo_max_token_len_per_gpu": 6144,
        "data.train_files": "${oc.env:HOME}/data/train.parquet",
        "trainer.n_gpus_per_node": 8,
        "trainer.logger": ["console"],
        "ray.runtime_env": {"py_executable": "uv run --extra vllm"},
    },
    "dapo_ray_job": {
        "data.truncation": "left",
        "data.max_response_length": 20480,
        f"{ACTOR}.clip_ratio_high": 0.28,
        f"{ACTOR}.clip_ratio_c": 10.0,
        f"{ACTOR}.optim.weight_decay": 0.1,
        "reward.overlong_buffer.len": 4096,
        "algorithm.filter_groups.metric": "acc",
        f"{ROLLOUT}.val_kwargs.top_p": 0.7,
        "trainer.default_local_dir": "${oc.env:HOME}/verl/ckpts/DAPO/DAPO-Qwen2.5-7B",
        "trainer.nnodes": 16,
        "ray.address": "auto",
        f"{ACTOR}.ulysses_sequence_parallel_size": 8,
    },
    "rloo": {
        "algorithm.adv_estimator": "rloo",
        "data.train_files": "${oc.env:HOME}/data/gsm8k/train.parquet",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.001,
    },
    "remax_arrays": {
        "algorithm.adv_estimator": "remax",
        f"{ACTOR}.ppo_max_token_len_per_gpu": 30000,
        "trainer.experiment_name": "qwen2.5_3b_remax",
    },
    "gspo": {
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        f"{ACTOR}.clip_ratio_low": 0.0003,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ACTOR}.ppo_max_token_len_per_gpu": 20480,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 30720,
        "trainer.total_training_steps": 500,
    },
    "lora": {
        f"{POLICY}.lora_rank": 32,
        f"{POLICY}.lora_alpha": 32,
        "data.train_batch_size": 116,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 116,
        f"{ROLLOUT}.max_num_seqs": 512,
    },
    "multi_turn_sglang": {
        f"{ROLLOUT}.name": "sglang",
        f"{ROLLOUT}.n": 16,
        f"{ROLLOUT}.multi_turn.enable": True,
        "data.train_batch_size": 256,
    },
    "megatron": {
        f"{ACTOR}.tensor_model_parallel_size": 4,
        f"{ACTOR}.pipeline_model_parallel_size": 2,
        f"{ACTOR}.strategy": "megatron",
        "trainer.device": "cuda",
    },
    "reinforce_plus_plus_slurm": {
        "algorithm.adv_estimator": "reinforce_plus_plus_baseline",
        "data.seed": 7,
        "trainer.rollout_dump_freq": 1,
        "trainer.max_ckpt_to_keep": 2,
        "algorithm.rollout_correction.rollout_is": "token",
        "trainer.nnodes": "${oc.env:SLURM_JOB_NUM_NODES,1}",
        "ray.num_cpus": 64,
        f"{ACTOR}.kl_loss_type": "mse",
    },
    "rollout_correction": {
        "algorithm.rollout_correction.rollout_is": "sequence",
        "algorithm.rollout_correction.rollout_is_threshold": 5.0,
        "data.val_files": ["val_a.parquet", "val_b.parquet"],
        f"{POLICY}.path": "${oc.env:HOME}/models/qwen",
        "algorithm.norm_adv_by_std_in_grpo": False,
    },
    "reward_model_bash_c": {
        "reward.reward_model.enable": True,
        "reward.reward_model.path": "/models/rm",
        f"{ROLLOUT}.name": "hf",
        f"{ROLLOUT}.top_k": -1,
        "algorithm.kl_ctrl.type": "adaptive",
        "trainer.critic_warmup": 5,
    },
    "sft_peft_torchrun": {
        "data.train_files": "${oc.env:HOME}/data/gsm8k/train.parquet",
        "data.truncation": "right",
        "data.max_length": 2048,
        "data.max_token_len_per_gpu": 4 * 2048,
        "data.train_batch_size": 256,
        "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "model.lora_rank": 32,
        "model.target_modules": ["q_proj", "v_proj"],
        "optim.lr": 1e-4,
        "optim.betas": [0.9, 0.95],
        "optim.lr_scheduler_type": "cosine",
        "optim.lr_warmup_steps_ratio": 0.1,
        "dtype": "bfloat16",
        "trainer.default_local_dir": "out",
        "trainer.total_epochs": 3,
        "ulysses_sequence_parallel_size": 2,
        "trainer.n_gpus_per_node": 8,
        "trainer.runtime": "ray",
    },
    "sft_engine": {
        "strategy": "fsdp2",
        "ulysses_sequence_parallel_size": 2,
        "fsdp_config.fsdp_size": -1,
        "trainer.n_gpus_per_node": 8,
        "trainer.runtime": "ray",
        "data.train_batch_size": 96,
        "data.max_token_len_per_gpu": 65536,
        "model.path": "/models/Qwen3-4B",
        "optim.lr": 2e-5,
        "optim.lr_scheduler_type": "cosine",
        "optim.min_lr_ratio": 0.1,
        "optim.lr_warmup_steps_ratio": 0.01,
        "trainer.experiment_name": "chats-fsdp-sp2",
        "trainer.test_freq": "after_each_epoch",
        "trainer.logger": ["console"],
    },
}

UNSUPPORTED = {
    "sft_peft_torchrun": {"data.prompt_key", "data.response_dict_keys"},
}
"""What is refused, where it is more than the engine."""


def translated(name: str, folder: Path) -> tuple[dict[str, Any], Path]:
    """The report and the file that `hone config import` writes."""
    out = folder / f"{name}.yaml"
    words = [word for argument in ARGUMENTS.get(name, ()) for word in ("--argument", argument)]
    result = CliRunner().invoke(app, ["import", str(SCRIPTS / f"{name}.sh"), *words, "--json", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout[: result.stdout.rindex("}") + 1]), out


def schema_of(name: str) -> type:
    return SFTConfig if name.startswith("sft") else RLConfig


def flat(tree: dict[str, Any], schema: type = RLConfig) -> dict[str, Any]:
    leaves = {key.path for key in documentation(schema)}
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict) and path not in leaves:
            for name, inner in value.items():
                walk(inner, f"{path}.{name}" if path else name)
        else:
            found[path] = value

    walk(tree, "")
    return found


def test_every_script_has_expectations() -> None:
    assert sorted(EXPECTED) == sorted(path.stem for path in SCRIPTS.glob("*.sh"))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_scripts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, out = translated(name, tmp_path)
    schema = schema_of(name)
    assert report["command"] == ("train" if schema is RLConfig else "sft")
    values = {key.path: key.default for key in documentation(schema)} | flat(yaml.safe_load(out.read_text()), schema)
    assert {key: values[key] for key in EXPECTED[name]} == EXPECTED[name]
    unsupported = {line["key"] for line in report["lines"] if line["outcome"] == "not supported yet"}
    assert unsupported >= UNSUPPORTED.get(name, set())
    assert all(line["instead"] for line in report["lines"] if line["outcome"] == "not supported yet")
    assert all(line["says"] or line["sets"] for line in report["lines"])
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(schema, config_path=out.parent, config_name=out.name)
    found = examine(config, (Stage.ARITHMETIC,))
    stops = [error for error in found.errors if "tracker" not in error.error.what]  # wandb is not installed here
    assert [error.error.render() for error in stops if not _concerns_paths(error.error.code)] == []


def _concerns_paths(code: str) -> bool:
    return code in ("R08", "R42")


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_line_is_accounted_for(name: str, tmp_path: Path) -> None:
    """Each word of the launch that sets a key is a line of the report, at its place in the script."""
    report, _ = translated(name, tmp_path)
    translation = import_script(
        (SCRIPTS / f"{name}.sh").read_text(), directory=SCRIPTS, arguments=ARGUMENTS.get(name, ())
    )
    assert [line["text"] for line in report["lines"]] == [line.text for line in translation.lines]
    source = (SCRIPTS / f"{name}.sh").read_text()
    counted = "actor_rollout_ref.rollout." if schema_of(name) is RLConfig else " data."
    assert len(translation.lines) >= source.count(counted) and not translation.not_understood


def overrides(*lines: str) -> Translation:
    return import_overrides([Argument(line, number) for number, line in enumerate(lines, start=1)])


@pytest.mark.parametrize(
    ("line", "outcome", "sets"),
    [
        ("data.train_batch_size=8", Outcome.KEPT, {"data.train_batch_size": 8}),
        ("+trainer.val_before_train=False", Outcome.KEPT, {"trainer.val_before_train": False}),
        ("++data.seed=3", Outcome.KEPT, {"data.seed": 3}),
        ("~critic.optim.lr", Outcome.SETTLED, {}),
        ("~reward_model.reward_kwargs", Outcome.SETTLED, {}),
        ("~actor_rollout_ref.actor.policy_loss", Outcome.SETTLED, {}),
        ("hydra/job_logging=disabled", Outcome.FOREIGN, {}),
        ("data.sampler.class_path=null", Outcome.KEPT, {"data.sampler.class_path": None}),
        ("reward_model.param_offload=False", Outcome.FOREIGN, {}),
        ("actor_rollout_ref.rollout.max_batch_size=64", Outcome.RENAMED, {f"{ROLLOUT}.max_num_seqs": 64}),
        ("reward_model.enable=true", Outcome.RENAMED, {"reward.reward_model.enable": True}),
        ("+reward_model.reward_kwargs={a: 1}", Outcome.RENAMED, {"reward.custom_reward_function.reward_kwargs.a": 1}),
        ("actor_rollout_ref.rollout.do_sample=False", Outcome.CHANGED, {f"{ROLLOUT}.temperature": 0.0}),
        ("actor_rollout_ref.rollout.do_sample=True", Outcome.SETTLED, {}),
        (
            "actor_rollout_ref.rollout.engine_kwargs.vllm={a: 1}",
            Outcome.KEPT,
            {f"{ROLLOUT}.engine_kwargs.vllm": {"a": 1}},
        ),
        (
            "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
            Outcome.CHANGED,
            {f"{ROLLOUT}.checkpoint_engine.backend": "auto"},
        ),
        (
            "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded",
            Outcome.CHANGED,
            {f"{ROLLOUT}.checkpoint_engine.backend": "auto", f"{ROLLOUT}.checkpoint_engine.delta": True},
        ),
        (
            "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
            Outcome.CHANGED,
            {f"{ROLLOUT}.checkpoint_engine.between_workers": "broadcast"},
        ),
        (
            "actor_rollout_ref.rollout.checkpoint_engine.backend=nixl",
            Outcome.UNSUPPORTED,
            {f"{ROLLOUT}.checkpoint_engine.backend": "auto"},
        ),
        ("actor_rollout_ref.rollout.nnodes=0", Outcome.SETTLED, {}),
        ("actor_rollout_ref.model.use_remove_padding=False", Outcome.UNSUPPORTED, {}),
        ("data.custom_cls.path=x.py", Outcome.KEPT, {"data.custom_cls.path": "x.py"}),
        ("data.custom_cls.path=null", Outcome.KEPT, {"data.custom_cls.path": None}),
        ("trainer.logger=[console,clearml]", Outcome.UNSUPPORTED, {"trainer.logger": ["console"]}),
        (
            "trainer.logger=[console,trackio,swanlab]",
            Outcome.KEPT,
            {"trainer.logger": ["console", "trackio", "swanlab"]},
        ),
        (f"{ROLLOUT}.trace.backend=mlflow", Outcome.CHANGED, {"trainer.logger": ["console", "mlflow"]}),
        (f"{ROLLOUT}.trace.backend=weave", Outcome.UNSUPPORTED, {}),
        (f"{ROLLOUT}.trace.backend=null", Outcome.SETTLED, {}),
        (f"{ROLLOUT}.trace.token2text=True", Outcome.SETTLED, {}),
        (f"{ROLLOUT}.trace.max_samples_per_step_per_worker=5", Outcome.SETTLED, {}),  # no backend, no traces
        ("trainer.logger=[console,file]", Outcome.CHANGED, {"trainer.logger": ["console"]}),
        ("trainer.device=npu", Outcome.UNSUPPORTED, {"trainer.device": "auto"}),
        ("algorithm.rollout_is=True", Outcome.CHANGED, {"algorithm.rollout_correction.rollout_is": "token"}),
        ("trainer.v1.trainer_mode=separate_async", Outcome.CHANGED, {"trainer.async_training.max_staleness": 1}),
        (
            "actor_rollout_ref.actor.optim.warmup_style=inverse_square_root",
            Outcome.UNSUPPORTED,
            {f"{ACTOR}.optim.lr_scheduler_type": "cosine"},
        ),
        (f"{ACTOR}.optim.lr_decay_style=WSD", Outcome.CHANGED, {f"{ACTOR}.optim.lr_scheduler_type": "wsd"}),
        (f"{ACTOR}.optim.warmup_style=linear", Outcome.CHANGED, {f"{ACTOR}.optim.lr_scheduler_type": "linear"}),
        (
            "critic.optim.lr_wsd_decay_style=exponential",
            Outcome.KEPT,
            {"critic.optim.lr_wsd_decay_style": "exponential"},
        ),
        ("critic.optim.lr_wsd_decay_steps=null", Outcome.SETTLED, {}),
        ("critic.optim.lr_wsd_decay_steps=20", Outcome.KEPT, {"critic.optim.lr_wsd_decay_steps": 20}),
        ("critic.optim.optimizer=muon", Outcome.CHANGED, {"critic.optim.optimizer": "Muon"}),
        ("critic.optim.optimizer=AdamW", Outcome.KEPT, {"critic.optim.optimizer": "AdamW"}),
        ("critic.optim.optimizer_impl=torch.optim", Outcome.SETTLED, {}),
        ("critic.optim.optimizer_impl=fast.optim", Outcome.CHANGED, {"critic.optim.optimizer": "fast.optim:AdamW"}),
        ("reward.reward_manager.name=batch", Outcome.CHANGED, {"reward.reward_manager": "batch"}),
        (
            "reward_model.reward_manager=dapo",
            Outcome.CHANGED,
            {"reward.reward_manager": "naive"},
        ),  # no buffer, no penalty
        ("actor_rollout_ref.rollout.name=sglang_async", Outcome.CHANGED, {f"{ROLLOUT}.name": "sglang"}),
        ("actor_rollout_ref.rollout.dtype=float16", Outcome.KEPT, {f"{ROLLOUT}.dtype": "float16"}),
        ("actor_rollout_ref.rollout.dtype=half", Outcome.CHANGED, {f"{ROLLOUT}.dtype": "float16"}),
        ("actor_rollout_ref.actor.fsdp_config.dtype=fp16", Outcome.CHANGED, {f"{ACTOR}.dtype": "float16"}),
        ("actor_rollout_ref.rollout.dtype=bf16", Outcome.CHANGED, {f"{ROLLOUT}.dtype": "bfloat16"}),
        ("actor_rollout_ref.rollout.dtype=bfloat16", Outcome.KEPT, {f"{ROLLOUT}.dtype": "bfloat16"}),
        ("critic.model.use_rmpad=True", Outcome.SETTLED, {}),
        ("profile.options.level=level1", Outcome.FOREIGN, {}),
        ("data.oversample_factor=4", Outcome.UNSUPPORTED, {}),
        ("data.filter_accuracy=False", Outcome.SETTLED, {}),
        ("reward_model.model.optim.lr=1e-6", Outcome.UNSUPPORTED, {}),
        ("+actor_rollout_ref.actor.policy_loss.tau_pos=1.5", Outcome.RENAMED, {f"{ACTOR}.tau_pos": 1.5}),
        ("actor_rollout_ref.actor.engine.tp=2", Outcome.FOREIGN, {}),
        ("actor@actor_rollout_ref.actor=mlite_actor", Outcome.UNSUPPORTED, {}),
        ("actor_rollout_ref.actor.model_engine=megatron", Outcome.FOREIGN, {}),
        ("actor_rollout_ref.ref.entropy_checkpointing=True", Outcome.SETTLED, {}),
        ("trainer.remove_previous_ckpt_in_save=True", Outcome.CHANGED, {"trainer.max_ckpt_to_keep": 1}),
        ("trainer.rollout_data_dir=/x", Outcome.CHANGED, {"trainer.rollout_dump_freq": 1}),
        ("trainer.worker_env.A=1", Outcome.UNSUPPORTED, {}),
        ("reward.max_rpm=60", Outcome.RENAMED, {"reward.requests_per_minute": 60}),
        ("sandbox_fusion.url=http://x", Outcome.RENAMED, {"reward.sandbox_fusion.url": "http://x"}),
    ],
)
def test_single_lines(line: str, outcome: Outcome, sets: dict[str, Any]) -> None:
    translation = overrides(line)
    assert [entry.reading.outcome for entry in translation.lines] == [outcome], translation.lines
    assert translation.lines[0].reading.sets == sets
    assert sets.items() <= translation.values.items()


def test_a_line_sets_a_block() -> None:
    translation = overrides("actor_rollout_ref.rollout.val_kwargs={n: 4, do_sample: true, temperature: 0.6}")
    assert {line.reading.key for line in translation.lines} == {
        f"{ROLLOUT}.val_kwargs.{k}" for k in ("n", "do_sample", "temperature")
    }
    assert translation.values[f"{ROLLOUT}.val_kwargs.n"] == 4


def test_the_global_micro_batch_is_divided_by_the_devices() -> None:
    translation = overrides(f"{ACTOR}.ppo_micro_batch_size=64", "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    assert translation.values[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == 4


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("torch.optim", "AdamW", "AdamW"),
        ("torchao.optim", "AdamW8bit", "AdamW8bit"),
        ("torchao.optim", "_AdamW", "torchao.optim:_AdamW"),
        ("bitsandbytes.optim", "AdamW8bit", "bitsandbytes.optim:AdamW8bit"),
    ],
)
def test_an_optimizer_of_another_module_has_an_import_path(module: str, name: str, expected: str) -> None:
    for block in (f"{ACTOR}.optim", "critic.optim"):
        translation = overrides(f"{block}.optimizer_impl={module}", f"{block}.optimizer={name}")
        assert translation.values[f"{block}.optimizer"] == expected
        assert not translation.not_understood


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["data.nonsense=1"], "unknown key data.nonsense"),
        (["actor_rollout_ref.actor.ppo_minibatch_size=3"], "did you mean actor_rollout_ref.actor.ppo_mini_batch_size"),
        (["data.train_files=[a"], "cannot be read"),
        (["gibberish"], "gibberish"),
    ],
)
def test_what_is_not_understood_is_said(lines: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["import", "data.train_batch_size=4", *lines])
    assert result.exit_code == 2 and words in result.stderr


def test_standard_input_has_a_line_each(tmp_path: Path) -> None:
    lines = "# a comment\ndata.train_batch_size=4 \\\ntrainer.logger='[\"console\"]'\n\n+data.seed=1\n"
    result = CliRunner().invoke(app, ["import", "-", "--json"], input=lines)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["config"]["data"] == {"train_batch_size": 4, "seed": 1}
    assert report["config"]["trainer"]["logger"] == ["console"]
    assert [line["line"] for line in report["lines"]] == [2, 3, 5] and report["understood"]


def test_what_verl_takes_for_granted_is_written_out() -> None:
    values = overrides("data.max_prompt_length=100").values
    assert values["algorithm.adv_estimator"] == "gae" and values["data.train_batch_size"] == 1024
    assert values["trainer.total_epochs"] == 30 and values[f"{ACTOR}.ppo_mini_batch_size"] == 256
    assert overrides("data.train_batch_size=64").values[f"{ACTOR}.ppo_mini_batch_size"] == 64


def test_yaml_files(tmp_path: Path) -> None:
    source = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref:\n  rollout: {name: trtllm, n: 4, multi_turn: {enable: true}}\n"
    translation = import_yaml(source)
    assert translation.values[f"{ROLLOUT}.n"] == 4
    assert not [line for line in translation.lines if line.reading.outcome is Outcome.UNSUPPORTED]
    assert translation.values[f"{ROLLOUT}.name"] == "trtllm"
    assert translation.values[f"{ROLLOUT}.multi_turn.enable"] is True
    with raises(ConfigError, "YAML"):
        import_yaml("a: [")


def test_a_named_file_next_to_the_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("data: {max_prompt_length: 77, train_batch_size: 5}\n")
    source = "python3 -m verl.trainer.main_ppo --config-path=config --config-name=mine data.train_batch_size=6"
    translation = import_script(source, directory=tmp_path)
    assert (translation.values["data.max_prompt_length"], translation.values["data.train_batch_size"]) == (77, 6)
    elsewhere = import_script(source, directory=tmp_path / "config")
    assert elsewhere.values["data.max_prompt_length"] == 77
    assert "mine.yaml" in import_script(source, directory=tmp_path / "nowhere").remarks[0].what


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("#!/bin/bash\nset -x\npython3 -m verl.trainer.main_generation \\\n data.n_samples=4", 3),
        ("#!/bin/bash\necho moved >&2\nexit 1", 3),
        ("set -x\nA=1\necho a.b=c\nexit 1\n", 4),
    ],
)
def test_a_script_without_training_is_not_understood(source: str, line: int) -> None:
    translation = import_script(source, directory=Path())
    assert [trouble.line for trouble in translation.not_understood] == [line]
    assert translation.values == {} and translation.lines == []


def test_several_runs_ask_which() -> None:
    source = "for n in 2 4; do python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$n; done"
    with raises(ConfigError, 2, "--launch 2", where="--launch"):
        import_script(source, directory=Path())
    assert import_script(source, directory=Path(), number=2).values[f"{ROLLOUT}.n"] == 4


def test_arguments_of_the_script() -> None:
    source = 'n=${1:-2}; shift; python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$n "$@"'
    given = import_script(source, directory=Path(), arguments=["8", "data.seed=5"])
    assert (given.values[f"{ROLLOUT}.n"], given.values["data.seed"]) == (8, 5)
    assert import_script(source, directory=Path()).values[f"{ROLLOUT}.n"] == 2


def test_settings_after_a_comment_are_used_and_reported() -> None:
    source = "python3 -m verl.trainer.main_ppo \\\n data.seed=1 \\\n # data.seed=2 \\\n data.max_prompt_length=9\n"
    translation = import_script(source, directory=Path())
    assert translation.values["data.max_prompt_length"] == 9
    assert [remark.line for remark in translation.remarks if remark.line] == [4]


def test_a_number_of_the_environment_has_a_default() -> None:
    translation = import_script(
        "python3 -m verl.trainer.main_ppo trainer.nnodes=$NODES trainer.experiment_name=$NAME", directory=Path()
    )
    assert translation.values["trainer.nnodes"] == "${oc.env:NODES,1}"
    assert translation.values["trainer.experiment_name"] == "${oc.env:NAME,NAME}"


def test_keys_without_effect_are_left_out(tmp_path: Path) -> None:
    report, out = translated("dapo_ray_job", tmp_path)
    left = {line["key"]: line["says"] for line in report["lines"] if line["outcome"].startswith("without effect")}
    assert left.keys() >= {"algorithm.kl_ctrl.kl_coef", f"{ACTOR}.kl_loss_coef"}
    assert "use_kl_loss=false" in left[f"{ACTOR}.kl_loss_coef"]
    assert "kl_ctrl" not in yaml.safe_load(out.read_text())["algorithm"]


def test_what_a_key_without_effect_holds_is_left_out_with_it(tmp_path: Path) -> None:
    """Arguments of a manager that has no function of one's own to hand them to."""
    out = tmp_path / "run.yaml"
    lines = [f"+reward_model.reward_kwargs.{line}" for line in ("weights.accuracy=1", "judge.model=small", "mode=x")]
    result = CliRunner().invoke(app, ["import", "trainer.nnodes=1", *lines, "--json", "--out", str(out)])
    report = json.loads(result.stdout[: result.stdout.rindex("}") + 1])
    found = {line["key"]: line["outcome"] for line in report["lines"] if "reward_kwargs" in line["key"]}
    assert set(found.values()) == {Outcome.WITHOUT_EFFECT} and len(found) == 3
    assert "reward_kwargs" not in yaml.safe_dump(yaml.safe_load(out.read_text()))


@pytest.mark.parametrize("arguments", [["nothere.sh"], ["--launch", "3", str(SCRIPTS / "grpo.sh")]])
def test_wrong_arguments_are_said(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["import", *arguments])
    assert isinstance(result.exception, ConfigError)


def test_a_script_of_hone_is_read_too() -> None:
    translation = import_script("hone train data.train_files=x.parquet algorithm.lam=0.9", directory=Path())
    assert translation.values == {"data.train_files": "x.parquet", "algorithm.lam": 0.9}


def test_translation_loads_to_what_it_says(tmp_path: Path) -> None:
    _, out = translated("lora", tmp_path)
    config = load_config(RLConfig, config_path=tmp_path, config_name=out.name)
    loaded, written = dict(leaf_values(config)), flat(yaml.safe_load(out.read_text()))
    assert {key: loaded[key] for key in written} == written


def test_lines_of_supervised_fine_tuning_are_known_by_their_blocks() -> None:
    older = overrides("model.partial_pretrain=/m", "optim.warmup_steps_ratio=0.2", "data.max_length=512")
    assert older.command == "sft" and not older.not_understood
    assert older.values["model.path"] == "/m" and older.values["optim.lr_warmup_steps_ratio"] == 0.2
    assert older.values["optim.betas"] == [0.9, 0.95] and older.values["optim.lr"] == 1e-5
    newer = import_yaml(
        "model: {path: /m}\nengine: {strategy: fsdp2, tensor_model_parallel_size: 2}\ndata: {truncation: left}\n"
    )
    assert newer.command == "sft" and newer.values["optim.lr"] == 1e-3 and "optim.betas" not in newer.values
    assert newer.values["tensor_model_parallel_size"] == 2 and newer.values["data.truncation"] == "left"
    assert overrides("data.train_batch_size=4").command == "train"


PROBE = """\
D=${D:-$(python3 -c x && echo npu || echo gpu)}
case "$D" in
 gpu|npu) ;;
 *) echo bad >&2; exit 1;;
esac
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$D
"""


def test_a_probe_of_the_machine_and_a_variable_from_outside() -> None:
    assert import_script(PROBE, directory=Path()).values["data.train_files"] == "gpu"
    assert import_script(PROBE, directory=Path(), variables={"D": "npu"}).values["data.train_files"] == "npu"


@pytest.mark.parametrize(
    ("condition", "line", "ending", "names"),
    [
        ('case "$D" in\n gpu) ;;\n *) exit 3;;\nesac', 4, "exit 3", ["D"]),
        ('if [ "$D" != gpu ] && [ "$E" ]; then\n exit\nfi', 3, "exit", ["D", "E"]),
        ('[ "$D" = gpu ] || exit 1', 2, "exit 1", ["D"]),
        ('check() {\n if [ "$D" != gpu ]; then return 1; fi\n}\nexit 1', 5, "exit 1", []),
    ],
)
def test_an_exit_before_training_is_reported(
    condition: str, line: int, ending: str, names: list[str], tmp_path: Path
) -> None:
    source = f"D=${{D:-none}} E=1\n{condition}\npython3 -m verl.trainer.main_ppo data.seed=1 data.shuffle=true\n"
    (trouble,) = import_script(source, directory=Path()).not_understood
    assert trouble.line == line and f"({ending})" in trouble.what
    assert ("--set D=VALUE" in trouble.what) == bool(names) and all(name in trouble.what for name in names)
    (tmp_path / "run.sh").write_text(source)
    outcome = CliRunner().invoke(app, ["import", str(tmp_path / "run.sh"), "--set", "D=gpu"])
    assert outcome.exit_code == (0 if names else 2)
    assert CliRunner().invoke(app, ["import", str(tmp_path / "run.sh"), "--set", "D"]).exit_code != 0


def test_processes_of_a_launcher_are_workers() -> None:
    script = "torchrun --nproc_per_node 4 -m verl.trainer.sft_trainer model.path=/m data.train_files=x.parquet"
    outcome = import_script(script, directory=Path())
    assert outcome.remarks == []
    assert (outcome.values["trainer.n_gpus_per_node"], outcome.values["trainer.runtime"]) == (4, "ray")
    alone = import_script(script.replace("4", "1"), directory=Path())
    assert alone.remarks == [] and "trainer.runtime" not in alone.values
    (remark,) = import_script(script.replace("4", "gpu"), directory=Path()).remarks
    assert "gpu processes" in remark.what


@pytest.mark.parametrize(
    ("foreign", "own"),
    [
        ("model.strategy=fsdp", {"strategy": "fsdp2"}),
        ("engine.strategy=fsdp2", {"strategy": "fsdp2"}),
        ("model.fsdp_config.cpu_offload=True", {"fsdp_config.offload_policy": True}),
        ("engine.param_offload=True", {"fsdp_config.param_offload": True}),
        ("engine.mixed_precision.reduce_dtype=bf16", {"fsdp_config.mixed_precision.reduce_dtype": "bfloat16"}),
        ("engine.expert_model_parallel_size=2", {"expert_parallel_size": 2}),
        ("data.balance_dp_token=False", {"trainer.balance_batch": False}),
    ],
)
def test_sharding_keys_of_supervised_fine_tuning(foreign: str, own: dict[str, Any]) -> None:
    script = f"python3 -m verl.trainer.sft_trainer model.path=/m data.train_files=x.parquet {foreign}"
    values = import_script(script, directory=Path()).values
    assert {key: values[key] for key in own} == own


@pytest.mark.parametrize(
    ("source", "values", "remarks"),
    [
        (  # a variable that the script does not set, and a program's output, among the settings
            "python3 -m verl.trainer.main_ppo data.seed=1 $EXTRA $(cat more.txt) data.max_prompt_length=9",
            {"data.seed": 1, "data.max_prompt_length": 9},
            ["$EXTRA", "$(...)"],
        ),
        (  # a comment within the command
            "python3 -m verl.trainer.main_ppo data.seed=1 `# why one` data.max_prompt_length=9",
            {"data.seed": 1, "data.max_prompt_length": 9},
            [],
        ),
        (  # settings before the command are another program's
            "A='x' data.seed=7\npython3 -m verl.trainer.main_ppo data.max_prompt_length=9",
            {"data.max_prompt_length": 9},
            [],
        ),
        (  # a here-document in a variable
            "A=$(cat <<EOF\ndata.seed=$S\ndata.max_prompt_length=9\nEOF\n)\npython3 -m verl.trainer.main_ppo $A",
            {"data.seed": "${oc.env:S,null}", "data.max_prompt_length": 9},
            ["S:"],
        ),
    ],
)
def test_other_words_among_the_settings(source: str, values: dict[str, Any], remarks: list[str]) -> None:
    translation = import_script(source, directory=Path())
    given = {key: value for key, value in translation.values.items() if key not in DEFAULTS["train"]}
    assert given == values and translation.not_understood == []
    texts = [remark.what for remark in translation.remarks]
    assert all(any(words in what for what in texts) for words in remarks), texts


def test_settings_that_are_all_read_elsewhere_are_not_understood() -> None:
    source = "read -r LINES < settings.txt\npython3 -m verl.trainer.main_ppo $LINES"
    (trouble,) = import_script(source, directory=Path()).not_understood
    assert trouble.line == 2 and "$LINES" in trouble.what


def test_the_rest_of_the_arguments() -> None:
    source = 'n=$1; python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$n "${@:2}"'
    values = import_script(source, directory=Path(), arguments=["8", "data.seed=5", "data.shuffle=false"]).values
    assert (values[f"{ROLLOUT}.n"], values["data.seed"], values["data.shuffle"]) == (8, 5, False)


def test_training_that_does_not_wait_is_translated_as_far_as_it_goes() -> None:
    translation = overrides(
        *("data.train_batch_size=0", "async_training.require_batches=2", f"{ACTOR}.ppo_mini_batch_size=32"),
        *("rollout.nnodes=1", "rollout.n_gpus_per_node=4", "rollout.total_rollout_steps=100"),
    )
    assert translation.not_understood == [] and translation.values["data.train_batch_size"] == 64
    assert translation.values[f"{ROLLOUT}.enable_resource_pool"] is True
    assert translation.values[f"{ROLLOUT}.n_gpus_per_node"] == 4
    refused = {line.reading.key for line in translation.lines if line.reading.outcome is Outcome.UNSUPPORTED}
    assert refused == {"rollout.total_rollout_steps"}


@pytest.mark.parametrize(("threshold", "staleness"), [("0", 0), ("0.1", 1), ("1", 1), ("1.5", 2)])
def test_asynchronous_training(threshold: str, staleness: int) -> None:
    translation = overrides(
        *(
            "data.train_batch_size=0",
            f"{ACTOR}.ppo_mini_batch_size=32",
            f"async_training.staleness_threshold={threshold}",
        ),
        *("async_training.trigger_parameter_sync_step=4", "async_training.require_batches=2"),
        *("async_training.partial_rollout=True", "async_training.use_dynamic_resource_scheduling=False"),
    )
    values = translation.values
    assert values["trainer.async_training.max_staleness"] == staleness
    assert values["trainer.async_training.partial_rollouts"] is True
    assert values["data.train_batch_size"] == 32 * 4 * 2
    assert all(line.reading.outcome is not Outcome.UNSUPPORTED for line in translation.lines)


def test_one_step_off() -> None:
    source = "python3 -m recipe.one_step_off_policy.main_ppo rollout.nnodes=1 rollout.n_gpus_per_node=2"
    values = import_script(source, directory=Path()).values
    assert values["trainer.async_training.max_staleness"] == 1 and values[f"{ROLLOUT}.enable_resource_pool"] is True


def test_the_reference_is_offloaded_as_it_was() -> None:
    key = "actor_rollout_ref.ref.fsdp_config.param_offload"
    translation = overrides(f"{key}=True", "trainer.save_freq=after_each_epoch")
    assert translation.values[key] is True
    assert translation.values["trainer.save_freq"] == "after_each_epoch"


def test_an_engine_over_two_of_eight_gpus_places_itself() -> None:
    """What a launch script says about the engine's tensor parallelism is all that a run needs to place it."""
    rollout = "actor_rollout_ref.rollout"
    script = (
        "python3 -m verl.trainer.main_ppo data.train_files=a.parquet trainer.n_gpus_per_node=8 trainer.nnodes=1 "
        f"{rollout}.name=vllm {rollout}.tensor_model_parallel_size=2 {rollout}.free_cache_engine=True"
    )
    words = [f"{name}={json.dumps(value)}" for name, value in import_script(script, directory=Path()).values.items()]
    config = load_config(RLConfig, words)
    (group,) = [role.group for role in model_roles(config) if role.name == "rollout"]
    assert (config.trainer.runtime, RunSpec(config).pools[0].world, group) == ("ray", 8, 2)
    assert config.actor_rollout_ref.rollout.free_cache_engine is True


MLFLOW = f"{ROLLOUT}.trace.backend=mlflow"


@pytest.mark.parametrize(
    ("settings", "loggers", "samples"),
    [
        (["trace.backend=mlflow", "trace.max_samples_per_step_per_worker=2", "n=4"], ["console", "mlflow"], 64),
        (
            ["trace.max_samples_per_step_per_worker=2", "agent.num_workers=3", "n=4", "trace.backend=mlflow"],
            ["console", "mlflow"],
            24,
        ),
        (["trace.max_samples_per_step_per_worker=null", "trace.backend=mlflow"], ["console", "mlflow"], None),
    ],
)
def test_traces_of_rollouts_become_tables_of_the_tracker(settings, loggers, samples):
    values = overrides(*(f"{ROLLOUT}.{setting}" for setting in settings)).values
    assert values["trainer.logger"] == loggers and values["trainer.log_rollout_samples"] == samples


@pytest.mark.parametrize("settings", [("trainer.logger=[wandb]", MLFLOW), (MLFLOW, "trainer.logger=[wandb]")])
def test_traces_keep_the_other_trackers(settings):
    assert overrides(*settings).values["trainer.logger"] == ["wandb", "mlflow"]


def test_weave_is_refused_by_name_with_what_to_use_instead():
    (line,) = overrides(f"{ROLLOUT}.trace.backend=weave").lines
    assert "weave" in line.reading.says and "trainer.logger=[console,otel]" in line.reading.instead
