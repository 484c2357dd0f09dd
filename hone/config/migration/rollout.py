"""Keys of generation: sampling, engines, episodes."""

from __future__ import annotations

from typing import Any

from hone.config.migration.actor import ROLLOUT
from hone.config.migration.entries import Changed, Entry, Foreign, Others, Refused, Renamed, Settled, Unsupported
from hone.config.migration.reasons import ENGINE, ENGINE_LAYOUT, PROFILER


def _sampling_off(block: str) -> Changed:
    def sets(value: Any, others: Others) -> dict[str, Any]:
        return {} if value in (True, None) else {f"{block}.temperature": 0.0}

    return Changed("false is temperature 0", sets, (f"{block}.temperature",))


def _mode(value: Any, others: Others) -> dict[str, Any]:
    if value in ("async", "sync", None):
        return {}
    raise Refused(f"the rollout mode {value}", "leave it out")


ENTRIES: dict[str, Entry] = {
    f"{ROLLOUT}.mode": Changed(
        "generation always streams: answers are taken in the order in which they are finished", _mode
    ),
    f"{ROLLOUT}.do_sample": _sampling_off(ROLLOUT),
    f"{ROLLOUT}.val_kwargs.do_sample": _sampling_off(f"{ROLLOUT}.val_kwargs"),
    f"{ROLLOUT}.{{prompt_length,response_length}}": Settled("are data.max_prompt_length and data.max_response_length"),
    f"{ROLLOUT}.max_model_len": Settled("is data.max_prompt_length + data.max_response_length"),
    f"{ROLLOUT}.seed": Settled("every random draw comes from trainer.seed"),
    f"{ROLLOUT}.full_determinism": Settled("runs repeat exactly"),
    f"{ROLLOUT}.calculate_log_probs": Settled("every sampled token comes with its log-prob"),
    f"{ROLLOUT}.logprobs_mode": Settled("log-probs come twice: under the policy, and under what was sampled from"),
    f"{ROLLOUT}.load_format": Settled("the engine gets its weights from the trainer"),
    f"{ROLLOUT}.{{layered_summon,checkpoint_engine.**,checkpoint_manager_class}}": Foreign(
        "how weights get to an external engine; see rollout.checkpoint_engine.backend"
    ),
    f"{ROLLOUT}.{{standalone_gpu_memory_utilization,cudagraph_capture_sizes,free_cache_engine,enable_sleep_mode}}": Foreign(
        ENGINE
    ),
    f"{ROLLOUT}.{{scheduling_policy,disable_log_stats,skip_tokenizer_init,swap_space,use_fire_sampling}}": Foreign(
        ENGINE
    ),
    f"{ROLLOUT}.{{server,limit_images,moe_load_balance_metrics_interval,prometheus,mtp,custom}}.**": Foreign(ENGINE),
    f"{ROLLOUT}.{{multi_stage_wake_up,over_sample_rate,layer_name_map,sglang_engine_mode,block_size}}": Foreign(ENGINE),
    f"{ROLLOUT}.{{data_parallel_size,pipeline_model_parallel_size}}": Foreign(ENGINE_LAYOUT),
    f"{ROLLOUT}.{{moe_tensor_parallel_size,disaggregation.**}}": Foreign(ENGINE_LAYOUT),
    f"{ROLLOUT}.{{quantization,quantization_config_file}}": Unsupported(
        "generation with quantized weights", "leave it out"
    ),
    f"{ROLLOUT}.enable_rollout_routing_replay": Unsupported("router replay", "leave it out"),
    f"{ROLLOUT}.{{profiler,trace}}.**": Foreign(PROFILER),
    f"{ROLLOUT}.val_kwargs.{{min_p,repetition_penalty}}": Unsupported(
        "this restriction in validation", "val_kwargs.top_p, top_k and temperature", (0, 0.0, 1, 1.0, None)
    ),
    f"{ROLLOUT}.update_weights_bucket_megabytes": Renamed(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    ),
    f"{ROLLOUT}.max_batch_size": Renamed(f"{ROLLOUT}.max_num_seqs"),
    "rollout.nnodes": Renamed(f"{ROLLOUT}.nnodes"),
    "rollout.n_gpus_per_node": Renamed(f"{ROLLOUT}.n_gpus_per_node"),
    "rollout.n": Renamed(f"{ROLLOUT}.n"),
    "rollout.{total_rollout_steps,test_freq}": Unsupported(
        "training that does not wait for generation", "trainer.total_training_steps and trainer.test_freq"
    ),
    # episodes
    f"{ROLLOUT}.multi_turn.max_turns": Renamed(f"{ROLLOUT}.multi_turn.max_assistant_turns"),
    f"{ROLLOUT}.multi_turn.{{use_inference_chat_template,num_repeat_rollouts}}": Settled(
        "text is never tokenized again: the tokens trained on are the tokens sampled"
    ),
    f"{ROLLOUT}.agent.num_workers": Settled("episodes of one batch are played in one event loop"),
    f"{ROLLOUT}.agent.{{agent_loop_config_path,custom_agent_loop_loader,custom_async_server.**,agent_loop_manager_class}}": Unsupported(
        "registries of agent loops in files",
        "agent_name or agent.default_agent_loop as an import path, my_loops:MyLoop",
    ),
    f"{ROLLOUT}.chat_scheduler": Unsupported(
        "chat schedulers", "an agent loop of your own: agent.default_agent_loop=my_loops:MyLoop"
    ),
    "async_training.**": Unsupported("training that does not wait for generation", "synchronous training"),
}
