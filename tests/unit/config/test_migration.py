"""The one table of verl's keys: it contradicts neither itself nor the tree, and knows every key that is to be known."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages.config import config_page
from support.messages import raises

from hone.config import RLConfig, SFTConfig, documentation, load_config
from hone.config.keys import blocks, leaf_of
from hone.config.migration import DEFAULTS, TABLES, VALUES, Outcome, read_setting
from hone.config.migration import table as tables
from hone.config.migration.entries import OFF, Changed, Foreign, Renamed, Settled, Table, Unsupported, expand
from hone.config.migration.reading import trl_setting
from hone.errors import ConfigError
from hone.text import read_yaml

FOLDER = Path(tables.__file__).parent

TREE_KEYS = {tree: {key.path: key for key in documentation(tree)} for tree in TABLES}
KEYS, TABLE = TREE_KEYS[RLConfig], TABLES[RLConfig]
ENTRIES = [(tree, path, entry) for tree, table in TABLES.items() for path, entry in table.paths().items()]

NAMED = """
data.{train_files,val_files,prompt_key,reward_fn_key,max_prompt_length,max_response_length,train_batch_size,val_batch_size}
data.{return_raw_chat,filter_overlong_prompts,truncation,shuffle,seed,custom_cls.path,custom_cls.name}
data.{apply_chat_template_kwargs,tokenizer,gen_batch_size,image_key,return_full_prompt,dataloader_num_workers}
actor_rollout_ref.model.{path,tokenizer_path,trust_remote_code,override_config,enable_gradient_checkpointing}
actor_rollout_ref.model.{enable_activation_offload,use_remove_padding,use_fused_kernels,tiled_mlp.enabled,lora_rank,lora_alpha}
actor_rollout_ref.model.{target_modules,lora_adapter_path,custom_chat_template,use_liger,external_lib,exclude_modules,lora.rank}
actor_rollout_ref.actor.{ppo_mini_batch_size,ppo_micro_batch_size_per_gpu,ppo_micro_batch_size,use_dynamic_bsz}
actor_rollout_ref.actor.{ppo_max_token_len_per_gpu,policy_loss.loss_mode,clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}
actor_rollout_ref.actor.{loss_agg_mode,entropy_coeff,use_kl_loss,kl_loss_coef,kl_loss_type,optim.lr,optim.lr_warmup_steps}
actor_rollout_ref.actor.{optim.lr_warmup_steps_ratio,optim.weight_decay,ppo_epochs,shuffle,strategy,grad_clip,use_torch_compile}
actor_rollout_ref.actor.{fsdp_config.param_offload,ulysses_sequence_parallel_size,checkpoint.save_contents,profiler.enable}
actor_rollout_ref.actor.{megatron.tensor_model_parallel_size,megatron.override_transformer_config.recompute_method,router_replay.mode}
actor_rollout_ref.rollout.{name,gpu_memory_utilization,tensor_model_parallel_size,data_parallel_size,expert_parallel_size}
actor_rollout_ref.rollout.{max_num_batched_tokens,max_model_len,max_num_seqs,n,calculate_log_probs,temperature,top_p,top_k}
actor_rollout_ref.rollout.{multi_turn.enable,multi_turn.tool_config_path,multi_turn.max_assistant_turns}
actor_rollout_ref.rollout.{multi_turn.max_user_turns,multi_turn.format,multi_turn.tokenization_sanity_check_mode}
actor_rollout_ref.rollout.{val_kwargs.n,val_kwargs.do_sample,agent.num_workers,agent.default_agent_loop,engine_kwargs.vllm}
actor_rollout_ref.rollout.{enforce_eager,free_cache_engine,load_format,layered_summon,mode,prompt_length,response_length,dtype}
actor_rollout_ref.ref.{log_prob_micro_batch_size_per_gpu,log_prob_use_dynamic_bsz,log_prob_max_token_len_per_gpu,strategy}
critic.{enable,model.path,ppo_mini_batch_size,ppo_micro_batch_size_per_gpu,cliprange_value,loss_agg_mode,fsdp.param_offload}
critic.{model.use_remove_padding,model.tokenizer_path,optim.lr,forward_micro_batch_size_per_gpu,strategy,rollout_n}
reward.{custom_reward_function.path,custom_reward_function.name,reward_model.enable,reward_model.enable_resource_pool}
reward.{reward_model.rollout.name,reward_manager.name,sandbox_fusion.url,num_workers,reward_kwargs.overlong_buffer_cfg.len}
reward_model.{reward_manager,enable,model.path,overlong_buffer.enable,sandbox_fusion.url}
custom_reward_function.{path,name}
algorithm.{adv_estimator,gamma,lam,use_kl_in_reward,kl_penalty,kl_ctrl.type,kl_ctrl.kl_coef,kl_ctrl.horizon,kl_ctrl.target_kl}
algorithm.{rollout_correction.rollout_is,rollout_correction.bypass_mode,filter_groups.enable,norm_adv_by_std_in_grpo,use_pf_ppo}
trainer.{nnodes,n_gpus_per_node,total_epochs,total_training_steps,save_freq,test_freq,val_before_train,resume_mode}
trainer.{resume_from_path,logger,project_name,experiment_name,use_legacy_worker_impl,default_local_dir,default_hdfs_dir,device}
trainer.{balance_batch,critic_warmup,max_actor_ckpt_to_keep,val_only,rollout_data_dir,log_val_generations,use_v1,esi_redundant_time}
{ray_kwargs.ray_init.num_cpus,transfer_queue.enable,global_profiler.tool,async_training.staleness_threshold,distillation.enabled}
"""
SFT_NAMED = """
data.{train_files,val_files,train_batch_size,micro_batch_size,micro_batch_size_per_gpu,max_token_len_per_gpu,use_dynamic_bsz}
data.{train_max_samples,val_max_samples,prompt_key,response_key,prompt_dict_keys,response_dict_keys,messages_key,tools_key}
data.{multiturn.enable,multiturn.messages_key,multiturn.tools_key,enable_thinking_key,enable_thinking_default,pad_mode,max_length}
data.{truncation,balance_dp_token,chat_template,custom_cls.path,use_shm,apply_chat_template_kwargs,num_workers}
data.ignore_input_ids_mismatch
model.{partial_pretrain,path,tokenizer_path,use_shm,fsdp_config.model_dtype,fsdp_config.wrap_policy.min_num_params}
model.{fsdp_config.cpu_offload,external_lib,enable_gradient_checkpointing,enable_activation_offload,trust_remote_code,lora_rank}
model.{lora_alpha,target_modules,exclude_modules,lora_adapter_path,use_liger,use_fused_kernels,strategy,use_remove_padding}
model.{custom_chat_template,override_config,tiled_mlp.enabled,mtp.enable,lora.rank,hf_config_path}
optim.{lr,betas,weight_decay,warmup_steps_ratio,lr_warmup_steps_ratio,lr_warmup_steps,clip_grad,lr_scheduler,lr_scheduler_type}
optim.{warmup_style,min_lr_ratio,num_cycles,optimizer,optimizer_impl,override_optimizer_config,total_training_steps,min_lr}
optim.{lr_decay_style,lr_warmup_init,lr_decay_steps,zero_indexed_step}
engine.{strategy,fsdp_size,ulysses_sequence_parallel_size,param_offload,optimizer_offload,dtype,model_dtype,wrap_policy.x}
engine.{tensor_model_parallel_size,pipeline_model_parallel_size,context_parallel_size,use_mbridge,override_transformer_config.x}
{engine,ulysses_sequence_parallel_size,use_remove_padding}
trainer.{default_local_dir,default_hdfs_dir,project_name,experiment_name,total_epochs,total_training_steps,logger,seed,save_freq}
trainer.{test_freq,nnodes,n_gpus_per_node,max_ckpt_to_keep,resume_mode,resume_from_path,resume_path,device,balance_batch}
trainer.{checkpoint.save_contents,profile_interval}
checkpoint.{save_contents,load_contents}
profiler.tool
"""
ALL_NAMED = [key for line in NAMED.split() for key in expand(line)]


@pytest.mark.parametrize("tree", TABLES)
def test_every_key_is_known(tree: type) -> None:
    """A key of the tree, or one whose fate the table tells."""
    named = ALL_NAMED if tree is RLConfig else [key for line in SFT_NAMED.split() for key in expand(line)]
    assert len(named) > 100
    assert [key for key in named if read_setting(key, "x", {}, tree).outcome is Outcome.UNKNOWN] == []


def test_the_page_names_them() -> None:
    page = config_page()
    for key in ALL_NAMED:
        block, _, last = key.rpartition(".")
        own = (f"### {block}\n" in page and f"| `{last}` |" in page) or block in KEYS  # a key that holds a mapping
        blocks_above = [key.rsplit(".", count)[0] + ".**" for count in range(1, key.count(".") + 1)]
        assert own or f"`{key}`" in page or any(f"`{pattern}`" in page for pattern in blocks_above), key


def test_no_entry_is_a_key_of_the_tree() -> None:
    """The tree wins; an entry of the same name would never be asked. Delete the lines named here from the table."""
    assert sorted(path for tree, path, _ in ENTRIES if path in TREE_KEYS[tree]) == []


def test_other_names_lead_to_keys() -> None:
    for tree, path, entry in ENTRIES:
        targets = (entry.to,) if isinstance(entry, Renamed) else entry.to if isinstance(entry, Changed) else ()
        for target in targets:
            assert leaf_of(target.removesuffix(".*"), tree) is not None, (path, target)
    assert all(set(VALUES[tree]) <= set(TREE_KEYS[tree]) for tree in TABLES)


@pytest.mark.parametrize(
    ("tree", "defaults"),
    [(RLConfig, DEFAULTS["train"]), (SFTConfig, DEFAULTS["sft"]), (SFTConfig, DEFAULTS["fsdp_sft"])],
)
def test_defaults_are_of_keys(tree: type, defaults: dict[str, Any]) -> None:
    keys = TREE_KEYS[tree]
    assert set(defaults) <= set(keys)
    assert {key: keys[key].default for key in defaults} != defaults


def test_entries_speak() -> None:
    for _, path, entry in ENTRIES:
        if isinstance(entry, Unsupported):
            assert entry.what and entry.instead, path
        elif isinstance(entry, Settled):
            assert entry.says and (entry.only is None or entry.instead), path
        elif isinstance(entry, Foreign):
            assert entry.reason, path


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_rows_of_the_tables_have_words_that_are_read(file: Path) -> None:
    """A word that YAML reads as a boolean (``off``) would be a key that nothing reads."""

    def rows(value: Any) -> Iterator[dict[Any, Any]]:
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from rows(item)
        if isinstance(value, dict) and "keys" in value:
            yield value

    known = {
        *("keys", "says", "what", "reason", "instead", "only", "unset", "to", "by"),
        *inspect.signature(tables.Words).parameters,
    }
    read = read_yaml(file.read_text(encoding="utf-8"))
    assert [*rows(read)]
    assert {key for row in rows(read) for key in row} <= known


@pytest.mark.parametrize(("name", "value"), [("num_iterations", 1), ("adam_beta2", 0.999), ("entropy_coef_min", 0.0)])
def test_a_default_of_trl_asks_for_nothing(name: str, value: Any) -> None:
    settled = trl_setting(name, value, {}, RLConfig)
    refused = trl_setting(name, value * 2 or 0.1, {}, RLConfig)
    assert settled is not None and settled.outcome is Outcome.SETTLED
    assert refused is not None and refused.outcome is Outcome.UNSUPPORTED


def test_trls_adaptive_bonus_has_its_own_target() -> None:
    def target(value: bool, others: dict[str, Any]) -> dict[str, Any]:
        read = trl_setting("use_adaptive_entropy", value, others, RLConfig)
        assert read is not None
        return dict(read.sets)

    key = "actor_rollout_ref.actor.entropy_target"
    assert target(True, {}) == {key: 0.2} and target(True, {"entropy_target": 0.5}) == {key: 0.5}
    assert target(False, {"entropy_target": 0.5}) == {}


def test_a_longest_sequence_holds_a_prompt_and_a_response() -> None:
    key, lengths = (
        "actor_rollout_ref.rollout.max_model_len",
        {"data.max_prompt_length": 512, "data.max_response_length": 512},
    )
    assert read_setting(key, 1023, lengths).outcome is Outcome.UNSUPPORTED
    for value, others in ((1024, lengths), (8192, lengths), (None, lengths), (100, {})):
        reading = read_setting(key, value, others)
        assert reading.outcome is not Outcome.UNSUPPORTED and not reading.sets


def test_what_is_off_passes_and_what_is_on_is_refused() -> None:
    for tree, path, entry in ENTRIES:
        if isinstance(entry, Unsupported) and "*" not in path:
            assert all(read_setting(path, value, {}, tree).outcome is Outcome.SETTLED for value in entry.off), path
            assert read_setting(path, "something", {}, tree).outcome is Outcome.UNSUPPORTED, path


@given(st.sampled_from(sorted(KEYS)), st.sampled_from([*OFF, 3, 0.5, "text", True]))
def test_a_key_of_the_tree_stays_itself(path: str, value: Any) -> None:
    reading = read_setting(path, value, {})
    assert set(reading.sets) <= {path} or path in VALUES[RLConfig]
    assert reading.outcome is Outcome.KEPT or path in VALUES[RLConfig]


def test_the_most_exact_entry_wins() -> None:
    table = Table(
        {"a.**": Foreign("block"), "a.*.x": Foreign("any"), "a.b.x": Foreign("one"), "a.{c,d}.**": Renamed("n.*")}
    )
    found = [table.find(path) for path in ("a.q.r", "a.q.x", "a.b.x", "a.c.y.z", "b")]
    assert found == [Foreign("block"), Foreign("any"), Foreign("one"), Renamed("n.y.z"), None]
    with raises(ValueError, "a.b"):
        Table({"a.{b,c}": Foreign(""), "a.b": Foreign("")})


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("reward_model.enable=True", "reward.reward_model.enable", True),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.len=7", "reward.overlong_buffer.len", 7),
        ("data.truncation=left", "data.truncation", "left"),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("trainer.logger=['console','file']", "trainer.logger", ["console"]),
        ("+data.shuffle=false", "data.shuffle", False),
        ("custom_reward_function.path='a b/it''s.py'", "reward.custom_reward_function.path", None),
        ("actor_rollout_ref.rollout.enable_sleep_mode=true", "actor_rollout_ref.rollout.n", 1),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.x=1", "actor_rollout_ref.rollout.n", 1),
        ("actor_rollout_ref.actor.fsdp_config.dtype=bf16", "actor_rollout_ref.actor.dtype", "bfloat16"),
    ],
)
def test_lines_of_verl_work_on_the_command_line(
    line: str, key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("hone").propagate = True
    if value is None:
        with pytest.raises(ConfigError):
            load_config(RLConfig, [line])
        return
    with caplog.at_level(logging.INFO, logger="hone.config"):
        config: Any = load_config(RLConfig, [line])
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value
    renamed = key not in line.lstrip("+") or "logger" in line
    assert (line in caplog.text) == renamed  # the translation is logged


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("model.partial_pretrain=/m", "model.path", "/m"),
        ("data.truncation=right", "data.truncation", "right"),
        ("optim.lr_scheduler=cosine", "optim.lr_scheduler_type", "cosine"),
        ("+data.enable_thinking_default=false", "data.apply_chat_template_kwargs", {"enable_thinking": False}),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("use_remove_padding=True", "model.path", None),
        ("engine=fsdp", "model.path", None),
    ],
)
def test_lines_of_supervised_fine_tuning_work_too(line: str, key: str, value: Any) -> None:
    config: Any = load_config(SFTConfig, [line])
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("actor_rollout_ref.actor.strategy=torchtitan", ["torchtitan", "strategy=fsdp2"]),
        ("actor_rollout_ref.model.use_remove_padding=False", ["use_remove_padding"]),
    ],
)
def test_what_is_not_supported_is_refused(line: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, [line])
    assert caught.value.code == "E-unsupported" and line in caught.value.render()
    assert all(word in caught.value.render() for word in words)


def test_files_with_keys_of_verl_are_refused_with_the_translation(tmp_path: Any) -> None:
    (tmp_path / "config.yaml").write_text("reward_model: {enable: true}\ntrainer: {val_only: true}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, config_path=tmp_path)
    text = caught.value.render()
    assert "reward.reward_model.enable=true" in text and "hone eval" in text and "hone config import" in text


def test_distillation_has_the_defaults_of_verl_and_one_teacher() -> None:
    loss, teacher = "distillation.distillation_loss", "distillation.teacher_models"
    lines = ["distillation.enabled=true", f"{teacher}.teacher_model.model_path=/t", "distillation.nnodes=1"]
    config = load_config(RLConfig, lines).distillation
    assert (config.path, config.loss_mode, config.by_advantage, config.task_weight) == ("/t", "k3", False, 1.0)
    assert config.enable_resource_pool
    lines += [f"{loss}.loss_mode=forward_kl_topk", f"{loss}.use_task_rewards=false", f"{loss}.topk=64"]
    config = load_config(RLConfig, lines).distillation
    assert (config.loss_mode, config.topk, config.task_weight, config.tail_bucket) == (
        "forward_kl_topk",
        64,
        0.0,
        False,
    )
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, [*lines, f"{teacher}.other.model_path=/u"])
    assert "distillation.teachers=" in caught.value.render()


def test_other_trees_do_not_know_them() -> None:
    with raises(ConfigError, "reward_model.enable", code="R09"):
        load_config(SFTConfig, ["reward_model.enable=true"])


def test_blocks_are_not_entries() -> None:
    assert not set(blocks(RLConfig)) & set(TABLE.paths())
