"""Cases of rules that only read keys: batches, methods, layouts, names."""

from __future__ import annotations

from support.preflight_cases.world import Case

ACTOR, ROLLOUT, MODEL, REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model", "ref"))
CORRECTION = "algorithm.rollout_correction"
RAY = "trainer.runtime=ray"
GAE = "algorithm.adv_estimator=gae"
JUDGE = "reward.reward_model"
ONLINE = f"{ACTOR}.preference_loss"
MULTI, AGENT = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.agent"
SHOWN = f"{MODEL}.custom_chat_template=TMP/tools.jinja"
TOOLS = f"{MULTI}.enable=true {MULTI}.max_assistant_turns=4 {MULTI}.tool_config_path=TMP/tools.yaml"

BATCHES = [
    Case(
        "R13 training.mini_batch_not_larger",
        f"{ACTOR}.ppo_mini_batch_size=16",
        ("ppo_mini_batch_size=16 prompts", "data.train_batch_size=8"),
        fix=f"{ACTOR}.ppo_mini_batch_size=8",
    ),
    Case(
        "R14 training.mini_batch_divides",
        f"{ACTOR}.ppo_mini_batch_size=3",
        ("ppo_mini_batch_size=3", "data.train_batch_size=8", "2 prompts"),
        fix=f"{ACTOR}.ppo_mini_batch_size=4",
    ),
    Case(
        "R15 training.micro_batch_limits",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=33",
        ("ppo_micro_batch_size_per_gpu=33", "8 prompts x 4 = 32"),
        advice="32,",
        then=f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
        warns=True,
    ),
    Case(
        "R17 training.clip_without_effect",
        f"{ACTOR}.clip_ratio_high=0.28",
        ("1 update per batch", "clip_ratio_high"),
        fix=f"{ACTOR}.ppo_mini_batch_size=2",
        warns=True,
    ),
    Case(
        "R18 training.many_updates",
        f"{ACTOR}.ppo_epochs=17",
        ("17 updates", "8 prompts / 8 x 17 epochs"),
        advice="16 updates",
        then=f"{ACTOR}.ppo_epochs=16",
        warns=True,
    ),
    Case(
        "R29 training.token_budgets",
        f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
        ("=1000 tokens", "=512", "= 1024"),
        fix=f"{ACTOR}.ppo_max_token_len_per_gpu=2048",
    ),
    Case(
        "R29 training.sft_token_budget",
        "data.max_token_len_per_gpu=1000",
        ("=1000 tokens", "data.max_length=1024"),
        fix="data.max_token_len_per_gpu=1024",
        tree="sft",
    ),
    Case(
        "R29 methods.overlong_buffer",
        "reward.overlong_buffer.enable=true data.max_response_length=100",
        ("overlong_buffer.len=128 tokens", "max_response_length=100"),
        fix="reward.overlong_buffer.len=20",
    ),
    Case(
        "R29 training.budget_for_two_sequences",
        f"{ACTOR}.ppo_max_token_len_per_gpu=2047",
        ("=2047 tokens", "two sequences of 1024"),
        fix=f"{ACTOR}.ppo_max_token_len_per_gpu=2048",
        warns=True,
    ),
    Case(
        "R56 training.steps_and_saving",
        f"trainer.total_training_steps=20 {ACTOR}.optim.lr_warmup_steps=20",
        ("20 steps", "total_training_steps=20"),
        fix=f"{ACTOR}.optim.lr_warmup_steps=2",
    ),
    Case(
        "R85 training.optimizer_settings",
        f"{ACTOR}.optim.param_groups=[{{params:embed,lr:0.1}}]",
        ("'lr'",),
        advice="lr_mult",
        then=f"{ACTOR}.optim.param_groups=[{{params:embed,lr_mult:0.1}}]",
    ),
    Case(
        "R85 training.optimizer_of_this_model",
        "optim.param_groups=[{params:lm_heads,lr_mult:0.1}]",
        ("'lm_heads'",),
        advice="model.layers",
        then="optim.param_groups=[{params:lm_head,lr_mult:0.1}]",
        tree="sft",
    ),
]

METHODS = [
    Case(
        "R19 methods.groups_of_one",
        f"{ROLLOUT}.n=1",
        ("adv_estimator=grpo", "rollout.n=1"),
        fix=f"{ROLLOUT}.n=8",
    ),
    Case(
        "R19 methods.large_enough_groups",
        f"algorithm.adv_estimator=remax {ROLLOUT}.n=1 algorithm.filter_groups.enable=true",
        ("rollout.n=1", "algorithm.filter_groups.enable"),
        fix=f"{ROLLOUT}.n=8",
    ),
    Case(
        "R21 methods.critic_matches_estimator",
        "critic.enable=false",
        ("adv_estimator=gae", "critic.enable=false"),
        fix="critic.enable=true",
        given=GAE,
    ),
    Case(
        "R22 methods.kl_twice",
        f"algorithm.use_kl_in_reward=true {ACTOR}.use_kl_loss=true algorithm.kl_ctrl.kl_coef=0.02",
        ("0.02", "0.001", "algorithm.use_kl_in_reward"),
        fix=f"{ACTOR}.use_kl_loss=false",
        given=GAE,
        warns=True,
    ),
    Case(
        "R22 methods.kl_twice",
        "algorithm.use_kl_in_reward=true",
        ("adv_estimator=prime", "use_kl_in_reward=true"),
        advice="use_kl_loss=true",
        then="algorithm.use_kl_in_reward=false",
        given="algorithm.adv_estimator=prime",
    ),
    Case(
        "R23 effectless.effectless_keys",
        f"{ACTOR}.kl_loss_coef=0.01",
        ("kl_loss_coef=0.01",),
        fix=f"{ACTOR}.use_kl_loss=true",
    ),
    Case(
        "R24 training.reference_is_the_start",
        "",
        ("'/x/other'", "path=TMP/model"),
        advice=f"{MODEL}.path=/x/other, unless both are the same weights",
        given=f"{MODEL}.lora_adapter_path=TMP/adapter {ACTOR}.optim.lr=1e-4",
        breaks=lambda world: adapter_of(world, "/x/other"),
        repairs=lambda world: adapter_of(world, "/x/model"),
        warns=True,
    ),
    Case(
        "R25 training.kl_in_its_usual_place",
        "algorithm.use_kl_in_reward=true",
        ("grpo", "use_kl_in_reward=true"),
        fix=f"algorithm.use_kl_in_reward=false {ACTOR}.use_kl_loss=true",
        warns=True,
    ),
    Case(
        "R26 methods.rollout_correction",
        f"{CORRECTION}.loss_type=reinforce",
        ("loss_type=reinforce", "bypass_mode"),
        fix=f"{CORRECTION}.bypass_mode=true",
    ),
    Case(
        "R27 training.engine_log_probs_match_the_update",
        f"{ACTOR}.dtype=bfloat16 {CORRECTION}.bypass_mode=true",
        (f"{ACTOR}.dtype=bfloat16", "16384 tokens", "0.01"),
        fix=f"{CORRECTION}.bypass_mode=false",
        warns=True,
    ),
    Case(
        "R27 training.float16_on_both_sides",
        f"{ROLLOUT}.dtype=float16",
        (f"{ROLLOUT}.dtype=float16", "float32"),
        fix=f"{ACTOR}.dtype=float16 {ROLLOUT}.dtype=auto",
        warns=True,
    ),
    Case(
        "R27 training.reference_log_probs_match_the_policy",
        f"{REF}.log_prob_max_token_len_per_gpu=2048",
        ("2048 tokens", "4096", "0.01"),
        fix=f"{REF}.log_prob_max_token_len_per_gpu=null",
        given=f"{ACTOR}.dtype=bfloat16 {ACTOR}.use_kl_loss=true {ACTOR}.ppo_max_token_len_per_gpu=4096 trainer.device=cuda",
        breaks=lambda world: world.gpus(),
        warns=True,
    ),
    Case(
        "R32 methods.sampling",
        f"{ROLLOUT}.temperature=0",
        ("temperature=0", "4 identical"),
        fix=f"{ROLLOUT}.temperature=1.0",
    ),
    Case(
        "R60 training.adapter_learning_rate",
        f"{MODEL}.lora_rank=8",
        ("lr=1e-06", "10 times"),
        fix=f"{ACTOR}.optim.lr=1e-05",
        warns=True,
    ),
    Case(
        "R60 training.learning_rate_fits_adam",
        f"{ACTOR}.optim.lr=1",
        ("lr=1", "AdamW"),
        advice=f"{ACTOR}.optim.lr=1e-6",
        then=f"{ACTOR}.optim.lr=1e-6",
        warns=True,
    ),
    Case(
        "R62 methods.known_options",
        "algorithm.adv_kwargs={epsilom:0.1}",
        ("'grpo'", "'epsilom'"),
        advice="epsilon",
        then="algorithm.adv_kwargs={epsilon:0.1}",
    ),
    Case(
        "R62 methods.sum_pi_squared",
        f"{ACTOR}.calculate_sum_pi_squared=false",
        ("adv_estimator=optimal_token_baseline", "calculate_sum_pi_squared=false"),
        fix=f"{ACTOR}.calculate_sum_pi_squared=null",
        given="algorithm.adv_estimator=optimal_token_baseline",
    ),
    Case(
        "R62 methods.top_entropy",
        "algorithm.rollout_correction.bypass_mode=true",
        ("top_entropy_share", "bypass_mode=true"),
        fix="algorithm.rollout_correction.bypass_mode=false",
        given="algorithm.top_entropy_share=0.2",
    ),
    Case(
        "R62 methods.reward_components",
        "algorithm.gdpo_reward_weights=[1.0]",
        ("1 weights", "2 reward components (a, b)"),
        fix="algorithm.gdpo_reward_weights=[1.0,1.0]",
        given="algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a,b]",
    ),
    Case(
        "R63 training.reference_keeps_up",
        f"{REF}.log_prob_max_token_len_per_gpu=2048",
        ("=2048 tokens", "8 forward passes", "16384 tokens"),
        fix=f"{REF}.log_prob_max_token_len_per_gpu=16384",
        given=f"{ACTOR}.use_kl_loss=true",
        warns=True,
    ),
    Case(
        "R37 agents.tool_results_fit",
        "data.max_response_length=256",
        ("max_tool_response_length=256", "data.max_response_length=256"),
        fix="data.max_response_length=512",
        given=f"{TOOLS} {SHOWN}",
        warns=True,
    ),
    Case(
        "R62 methods.turns_can_be_forked",
        f"{MULTI}.subagents=true",
        ("turn_value_by_forks", "replayed"),
        fix=f"{MULTI}.subagents=false",
        given=f"{TOOLS} {SHOWN} algorithm.adv_estimator=turn_value_by_forks",
    ),
    Case(
        "R37 agents.conversations_fit",
        f"{MULTI}.compaction.context_tokens=700",
        ("context_tokens=700 < 848", "=512", "=80", "256 tokens"),
        fix=f"{MULTI}.compaction.context_tokens=1696",
        given=f"{TOOLS} {SHOWN} {MULTI}.compaction.strategy=drop_results {MULTI}.max_tokens_per_turn=80"
        f" {MULTI}.compaction.reserve_tokens=256",
    ),
    Case(
        "R38 agents.episodes_are_bounded",
        "",
        ("max_assistant_turns", "512 tokens"),
        fix=f"{MULTI}.max_assistant_turns=8",
        given=f"{MULTI}.enable=true {MULTI}.tool_config_path=TMP/tools.yaml {SHOWN}",
    ),
    Case(
        "R80 agents.sandboxes_outlive_episodes",
        f"{AGENT}.program.timeout=60",
        ("60 s", "max_episode_seconds=300"),
        advice=f"{AGENT}.program.timeout=330",
        then=f"{AGENT}.program.timeout=330",
        given=f"{MULTI}.enable=true {MULTI}.max_episode_seconds=300 {AGENT}.default_agent_loop=program {AGENT}.program.command=[python,agent.py] {SHOWN}",
        warns=True,
    ),
]

NAMES = [
    Case(
        "R11 methods.registered_names",
        "algorithm.adv_estimator=grop",
        ("'grop'", "algorithm.adv_estimator"),
        advice="grpo",
        then="algorithm.adv_estimator=grpo",
    ),
    Case(
        "R11 methods.reward_terms",
        "reward.terms=[{scorer:formatt}]",
        ("'formatt'",),
        advice="format",
        then="reward.terms=[{scorer:format}]",
    ),
    Case(
        "R97 methods.form_earns_less_than_the_result",
        "reward.terms=[{scorer:exact,weight:0.5},{scorer:format},{scorer:repetition}]",
        ("(format) can earn 1", "the result 0.5"),
        advice="0.1 or less",
        then="reward.terms=[{scorer:exact,weight:0.5},{scorer:format,weight:0.1},{scorer:repetition}]",
        warns=True,
    ),
    Case(
        "R11 methods.import_paths",
        "algorithm.adv_estimator=nowhere_at_all:f",
        ("nowhere_at_all", "algorithm.adv_estimator"),
        advice="director",
        then="algorithm.adv_estimator=grpo",
    ),
    Case(
        "R56 methods.trackers",
        "trainer.logger=[console,wndb]",
        ("'wndb'", "trainer.logger"),
        advice="wandb",
        then="trainer.logger=[console]",
    ),
    Case(
        "R61 lifecycle.no_secrets_in_the_configuration",
        "reward.custom_reward_function.reward_kwargs={api_key:a1}",
        ("reward_kwargs", "(api_key)"),
        advice="os.environ['...']",
        then="reward.custom_reward_function.reward_kwargs={}",
        given="reward.custom_reward_function.path=TMP/own.py",
        warns=True,
    ),
    Case(
        "R92 lifecycle.the_webhook_is_an_address",
        "insight.notify_end=true",
        ("insight.notify_end=true", "insight.webhook"),
        fix="insight.notify_end=false",
        advice="${oc.env:NAME}",
    ),
    Case(
        "R76 engines.engine_has_replicas",
        f"{ROLLOUT}.name=hf {ROLLOUT}.num_replicas=2",
        ("engine 'hf'", "num_replicas=2"),
        fix=f"{ROLLOUT}.num_replicas=null",
    ),
    Case(
        "R76 engines.engine_follows_constraints",
        f"{ROLLOUT}.constraint.kind=regex",
        ("kind=regex",),
        advice=f"{ROLLOUT}.constraint.text",
        then=f"{ROLLOUT}.constraint.kind=null",
        also=("R32",),
    ),
    Case(
        "R90 engines.engine_drafts_as_configured",
        f"{ROLLOUT}.name=hf {ROLLOUT}.speculative.method=ngram",
        ("'hf'", "method=ngram", "native"),
        fix=f"{ROLLOUT}.name=native",
    ),
    Case(
        "R76 engines.engine_takes_the_adapter",
        f"{ROLLOUT}.merge_lora=false",
        ("'native'",),
        fix=f"{ROLLOUT}.merge_lora=true",
        given=f"{MODEL}.lora_rank=4 {ACTOR}.optim.lr=1e-4",
        also=("R23",),
    ),
]

PROCESSES = [
    Case(
        "R02 layouts.enough_processes",
        "trainer.n_gpus_per_node=4",
        ("runtime=local", "4"),
        fix=RAY,
    ),
    Case(
        "R12 layouts.rows_for_every_rank",
        f"{ACTOR}.ppo_mini_batch_size=1",
        ("1 prompts x 4 = 4 sequences", "8 data-parallel ranks", "4 ranks"),
        fix=f"{ACTOR}.ppo_mini_batch_size=2",
        given=f"{RAY} trainer.n_gpus_per_node=8",
    ),
    Case(
        "R12 layouts.offline_rows_for_every_rank",
        "data.train_batch_size=3",
        ("3 rows", "4 data-parallel ranks", "1 ranks"),
        fix="data.train_batch_size=4",
        given=f"{RAY} trainer.n_gpus_per_node=4",
        tree="prefer",
    ),
    Case(
        "R15 layouts.micro_batch_of_a_rank",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=9",
        ("=9 sequences", "32", "4 ranks = 8"),
        advice="8,",
        then=f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
        given=f"{RAY} trainer.n_gpus_per_node=4",
        warns=True,
    ),
    Case(
        "R70 layouts.sizes_multiply",
        f"{ACTOR}.fsdp_config.fsdp_size=3",
        ("3 of 4 ranks",),
        advice="fsdp_size=<one of 1, 2, 4",
        then=f"{ACTOR}.fsdp_config.fsdp_size=2",
        given=f"{RAY} trainer.n_gpus_per_node=4",
    ),
    Case(
        "R71 layouts.tensor_parallel_divides",
        f"{ACTOR}.tensor_model_parallel_size=4",
        ("=4", "4 attention heads", "2 key-value heads"),
        advice="tensor_model_parallel_size=<one of 1, 2>",
        then=f"{ACTOR}.tensor_model_parallel_size=2",
        given=f"{RAY} trainer.n_gpus_per_node=4",
    ),
    Case(
        "R79 layouts.engines_fit_devices",
        f"{ROLLOUT}.name=vllm {ROLLOUT}.tensor_model_parallel_size=3",
        ("3 tensor", "4 rollout workers"),
        advice="tensor_model_parallel_size=<one of 1, 2, 4>",
        then=f"{ROLLOUT}.name=native {ROLLOUT}.tensor_model_parallel_size=1",
        given=f"{RAY} trainer.n_gpus_per_node=4",
        also=("R76",),
    ),
    Case(
        "R72 layouts.sequence_parallel_divides",
        f"{ACTOR}.ulysses_sequence_parallel_size=3",
        ("4 attention heads", "2 key-value heads", "3"),
        advice=f"{ACTOR}.ulysses_sequence_parallel_size=1 {ACTOR}.context_parallel_size=3",
        then=f"{ACTOR}.ulysses_sequence_parallel_size=1 {ACTOR}.context_parallel_size=3",
        given=f"{RAY} trainer.n_gpus_per_node=3 data.train_batch_size=6 {ACTOR}.ppo_mini_batch_size=6",
    ),
    Case(
        "R72 layouts.rings_have_no_dropout",
        "model.dropout=true",
        ("attention_dropout=0.1",),
        fix="model.dropout=false",
        given=f"{RAY} trainer.n_gpus_per_node=3 context_parallel_size=3 model.override_config={{attention_dropout:0.1}}",
        tree="sft",
    ),
    Case(
        "R73 layouts.experts_divide",
        f"{ACTOR}.expert_parallel_size=2",
        ("expert_parallel_size=2", "qwen3"),
        fix=f"{ACTOR}.expert_parallel_size=1",
        given=f"{RAY} trainer.n_gpus_per_node=2",
    ),
    Case(
        "R91 layouts.pipeline_divides",
        f"{ACTOR}.pipeline_model_parallel_size=8",
        ("layers", "8 stages"),
        advice=f"{ACTOR}.pipeline_model_parallel_size=<at most",
        then=f"{ACTOR}.pipeline_model_parallel_size=2",
        given=f"{RAY} trainer.n_gpus_per_node=8",
    ),
    Case(
        "R87 layouts.experts_can_be_followed",
        f"{ACTOR}.router_replay.mode=R3",
        ("R3", "qwen3"),
        fix=f"{ACTOR}.router_replay.mode=disabled",
    ),
    Case(
        "R87 layouts.experts_can_be_balanced",
        f"{ACTOR}.router_aux_loss_coef=0.001",
        ("router_aux_loss_coef=0.001", "qwen3", "no experts"),
        fix=f"{ACTOR}.router_aux_loss_coef=0",
    ),
    Case(
        "R84 distillation.teachers_can_teach",
        "distillation.use_policy_gradient=true",
        ("reverse_kl_topk", "use_policy_gradient"),
        advice="use_policy_gradient=false",
        then="distillation.use_policy_gradient=false",
        given="distillation.enable=true distillation.loss_mode=reverse_kl_topk distillation.teacher_prompt='{prompt}!'",
    ),
    Case(
        "R84 distillation.stored_answers_have_a_teacher",
        "distillation.enable=true",
        ("distillation.enable=true", "distillation.path"),
        advice="distillation.path=",
        then="distillation.enable=true distillation.path=TMP/model",
        tree="sft",
    ),
    Case(
        "R84 distillation.served_teachers_fit",
        "distillation.path=http://127.0.0.1:9/v1",
        ("loss_mode=jsd", "http://127.0.0.1:9/v1"),
        advice="the directory of the teacher",
        then="distillation.path=TMP/model",
        given="distillation.enable=true distillation.loss_mode=jsd",
    ),
    Case(
        "R83 lifecycle.profiled_steps_exist",
        "trainer.profile_steps=[1,9]",
        ("[9]", "1 to 4"),
        advice="trainer.profile_steps=[1]",
        then="trainer.profile_steps=[1]",
        given="trainer.total_training_steps=4",
        warns=True,
    ),
    Case(
        "R78 layouts.micro_batches_can_be_saved",
        "trainer.save_microbatch_steps=[1]",
        ("[1]", "4 processes"),
        advice="trainer.save_microbatch_steps=[]",
        then="trainer.save_microbatch_steps=[]",
        given=f"{RAY} trainer.n_gpus_per_node=4",
    ),
]

PREFERENCES = [
    Case(
        "R11 methods.preference_loss_options",
        "loss.simpo_gamma=0.5",
        ("simpo_gamma=0.5", "loss.name=dpo"),
        fix="loss.simpo_gamma=null",
        tree="prefer",
    ),
    Case(
        "R24 methods.reference_fits",
        "loss.name=kto data.train_batch_size=1",
        ("loss.name=kto", "data.train_batch_size=1"),
        advice="data.train_batch_size=64",
        then="data.train_batch_size=2",
        given="data.train_files=TMP/labels.jsonl",
        tree="prefer",
    ),
    Case(
        "R11 methods.online_preference_loss",
        f"{ONLINE}.beta=0.5",
        ("beta=0.5", "loss_mode=null"),
        fix=f"{ONLINE}.loss_mode=dpo",
    ),
]


def adapter_of(world, base: str) -> None:
    """Write the configuration of an adapter of a base model."""
    import json

    (world.folder / "adapter").mkdir(exist_ok=True)
    world.write("adapter/adapter_config.json", json.dumps({"base_model_name_or_path": base}))


ASYNC = "trainer.async_training"
ASYNCHRONOUS = [
    Case(
        "R65 engines.something_to_overlap",
        RAY,
        ("max_staleness=1", "'native'"),
        fix=f"{ROLLOUT}.enable_resource_pool=true {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=1",
        given=f"{RAY} {ASYNC}.max_staleness=1",
    ),
    Case(
        "R68 engines.batch_can_stream",
        f"{ACTOR}.ppo_mini_batch_size=4",
        ("stream=true", "2 updates"),
        fix=f"{ASYNC}.stream=false",
        given=f"{ASYNC}.stream=true",
    ),
    Case(
        "R66 engines.age_is_corrected",
        f"{CORRECTION}.preset=disabled",
        ("max_staleness=2", "2 updates"),
        fix=f"{CORRECTION}.preset=decoupled_token_is",
        given=f"{ASYNC}.max_staleness=2",
        warns=True,
    ),
    Case(
        "R67 engines.responses_can_be_interrupted",
        f"{ASYNC}.partial_rollouts=true",
        ("partial_rollouts=true", "END"),
        fix=f"{ASYNC}.partial_rollouts=false",
        given=f"{ASYNC}.max_staleness=1 {ROLLOUT}.stop=[END]",
    ),
    Case(
        "R77 engines.cache_can_be_kept",
        f"{ASYNC}.interrupted_cache=keep",
        ("interrupted_cache=keep", "'vllm'"),
        fix=f"{ROLLOUT}.name=native",
        given=f"{ASYNC}.max_staleness=1 {ASYNC}.partial_rollouts=true {ROLLOUT}.name=vllm",
        also=("R76",),
    ),
]

KEY_CASES = [*BATCHES, *METHODS, *NAMES, *PROCESSES, *PREFERENCES, *ASYNCHRONOUS]
