"""What a run is: the typed configuration trees, the only source of defaults.

Every key is a dataclass field; the string below it is its documentation (meaning, unit, default and why). The page
``docs/config.md`` is generated from here. A key stands here only when something reads it.

Units: a *prompt* is one dataset row; a *sequence* is one sampled response with its prompt (``rollout.n`` of them a prompt);
a *step* is one pass of the RL loop (one batch of prompts), which may hold several optimizer updates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.algorithm import AlgorithmConfig
from hone.config.feedback import OnlinePreferenceConfig, RewardModelUseConfig
from hone.config.fields import block, choice, named, number, numbers, texts

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")

# --------------------------------------------------------------------------------------------------------------- data


@dataclass
class DataConfig:
    """Where prompts come from and how many are taken a step."""

    train_files: Any = texts(None, "path")
    """Training files (parquet, json or jsonl): a path or a list of paths. Required for training."""
    val_files: Any = texts(None, "path")
    """Held-out files, a path or a list of paths; null means no validation."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a list of chat messages, a plain string, or a list of token ids (left alone)."""
    reward_fn_key: str = "data_source"
    """Column that names the kind of problem; it selects the built-in scorer and groups validation metrics."""
    max_prompt_length: int = number(512, low=1)
    """Longest prompt in tokens, chat template included."""
    max_response_length: int = number(512, low=1)
    """Most tokens sampled for one response."""
    truncation: str = choice("error", "error", "drop", "truncate")
    """What to do with a prompt longer than max_prompt_length: stop, drop the row, or cut its beginning. Counted in
    the log either way."""
    train_batch_size: int = number(64, low=1)
    """Prompts a step; sequences a step = train_batch_size x rollout.n."""
    train_max_samples: int = number(-1, low=-1)
    """Use at most this many training rows (the first ones); -1 means all."""
    val_max_samples: int = number(-1, low=-1)
    """Use at most this many validation rows (the first ones); -1 means all."""
    shuffle: bool = True
    """Visit the training rows in a new random order every epoch; the order depends on trainer.seed and the epoch only."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, for example {enable_thinking: false}."""


# -------------------------------------------------------------------------------------------------- model and optimizer


@dataclass
class ModelConfig:
    """Which model, and how it is held."""

    path: str | None = None
    """Hugging Face model directory (config, tokenizer, safetensors). Required."""
    tokenizer_path: str | None = None
    """Tokenizer directory; null means the model's own."""
    custom_chat_template: str | None = None
    """Jinja chat template, or the path of a file that holds one, in place of the tokenizer's own."""
    trust_remote_code: bool = False
    """Run Python code that ships inside the model directory. Only for models whose code you have read."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's config.json, for example {attention_dropout: 0.0}."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time. The first knob when memory is
    short; off by default because the models that run on a laptop do not need it."""
    lora_rank: int = number(0, low=0)
    """Rank of LoRA adapters; 0 trains all weights. With LoRA the reference policy is the model with its adapter off."""
    lora_alpha: float = number(16, above=0)
    """LoRA scale; the adapter's output is multiplied by lora_alpha / lora_rank."""
    target_modules: Any = texts("all-linear", "module name")
    """Modules that get an adapter: "all-linear" or a list of module names."""
    lora_adapter_path: str | None = None
    """PEFT adapter directory to start from; null starts from a fresh adapter."""


@dataclass
class OptimConfig:
    """AdamW and its schedule. The schedule advances once a step (RL) or once an update (SFT)."""

    lr: float = number(1e-6, low=0)
    """Peak learning rate."""
    lr_scheduler_type: str = choice("constant", "constant", "cosine")
    """Shape after warm-up: constant, or cosine down to min_lr_ratio x lr at the last step."""
    lr_warmup_steps: int = -1
    """Linear warm-up in steps; negative means lr_warmup_steps_ratio decides."""
    lr_warmup_steps_ratio: float = number(0.0, low=0, high=1)
    """Linear warm-up as a share of all steps, used when lr_warmup_steps is negative."""
    min_lr_ratio: float = number(0.0, low=0, high=1)
    """Where the cosine ends, as a share of lr."""
    weight_decay: float = number(0.01, low=0)
    """Decoupled weight decay, applied to matrices only (not to norms and biases)."""
    betas: list[float] = numbers([0.9, 0.999], low=0, high=1)
    """AdamW's two decay rates."""
    eps: float = number(1e-8, above=0)
    """AdamW's epsilon."""
    clip_grad: float = number(1.0, above=0)
    """Largest gradient norm; larger gradients are scaled down to it."""


# ------------------------------------------------------------------------------------------------------ actor_rollout_ref


@dataclass
class PolicyLossConfig:
    """Which policy loss, and the options that only some losses have."""

    loss_mode: str = named("vanilla", "policy loss")
    """Policy loss: a name of the registry (`hone algorithms list`; `vanilla` is PPO's clipped objective with dual clip), or
    one of your own by its import path, my_module:my_loss."""
    clip_cov_ratio: float = number(0.0002, low=0, high=1)
    """clip_cov: share of the tokens whose gradient is cut."""
    clip_cov_lb: float = 1.0
    """clip_cov: only tokens whose covariance of advantage and log-prob is above this ..."""
    clip_cov_ub: float = 5.0
    """... and below this."""
    kl_cov_ratio: float = number(0.0002, low=0, high=1)
    """kl_cov: share of the tokens, those of the highest covariance, that get a KL penalty."""
    ppo_kl_coef: float = number(0.1, low=0)
    """kl_cov: weight of that penalty."""
    dro_beta: float = number(0.05, above=0)
    """dro: weight of the squared log-ratio."""
    m2_threshold: float = number(0.04, above=0)
    """m2po: largest mean squared log-ratio; the tokens that exceed it most are left out."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further options of the loss that have no key here, by name."""


@dataclass
class ActorConfig:
    """How the policy is updated."""

    ppo_mini_batch_size: int = number(64, low=1)
    """Prompts an optimizer update; it must divide data.train_batch_size. Equal to it means one, on-policy, update."""
    ppo_epochs: int = number(1, low=1)
    """Passes over each batch."""
    shuffle: bool = False
    """Shuffle the prompts of a batch before cutting it into mini-batches."""
    ppo_max_token_len_per_gpu: int = number(16384, low=1)
    """Token budget of a micro-batch (prompt + response tokens, packed). Changes memory and speed, never the result."""
    ppo_micro_batch_size_per_gpu: int | None = number(None, low=1)
    """At most this many sequences a micro-batch, on top of the token budget; null means no such limit."""
    clip_ratio: float = number(0.2, above=0)
    """PPO's clip range; used where clip_ratio_low or clip_ratio_high is null."""
    clip_ratio_low: float | None = number(None, above=0, high=1)
    """Lower clip: ratios under 1 - clip_ratio_low give no gradient when the advantage is negative."""
    clip_ratio_high: float | None = number(None, above=0)
    """Upper clip: ratios over 1 + clip_ratio_high give no gradient when the advantage is positive."""
    clip_ratio_c: float = number(3.0, above=1)
    """Dual clip: with a negative advantage the loss is at most -clip_ratio_c x advantage."""
    tau_pos: float = number(1.0, above=0)
    """sapo: temperature of the soft gate of tokens with a positive advantage."""
    tau_neg: float = number(1.05, above=0)
    """sapo: the same for a negative advantage; larger closes the gate sooner."""
    loss_agg_mode: str = choice("token-mean", *LOSS_AGG_MODES)
    """How per-token losses become one number, over the whole mini-batch whatever the micro-batches."""
    loss_scale_factor: float | None = number(None, above=0)
    """Divisor of seq-mean-token-sum-norm; null means data.max_response_length."""
    entropy_coeff: float = number(0.0, low=0)
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL penalty to the reference policy to the loss (GRPO's way)."""
    kl_loss_coef: float = number(0.001, low=0)
    """Weight of that penalty."""
    kl_loss_type: str = named("low_var_kl", "KL estimator", instead="actor_rollout_ref.actor.kl_loss_coef")
    """Its estimator: k1/kl, abs, k2/mse, k3/low_var_kl."""
    calculate_sum_pi_squared: bool | None = None
    """Also compute the sum of squared probabilities of each token's distribution, with the old log-probs; null means when the
    estimator needs it (optimal_token_baseline). It costs a second projection onto the vocabulary."""
    policy_loss: PolicyLossConfig = block(PolicyLossConfig)
    """The policy loss."""
    preference_loss: OnlinePreferenceConfig = block(OnlinePreferenceConfig)
    """Pairs of one's own answers in place of the policy loss."""
    optim: OptimConfig = block(OptimConfig, lr=1e-6)
    """Optimizer of the policy."""
    dtype: str = choice("float32", "float32", "bfloat16")
    """Compute dtype of forward and backward; parameters and optimizer state stay float32."""


@dataclass
class RefConfig:
    """The reference policy: the starting weights, frozen. Made only when a KL term needs it."""

    log_prob_max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a micro-batch; null means the actor's."""


@dataclass
class ValKwargsConfig:
    """Sampling for validation."""

    n: int = number(1, low=1)
    """Responses a validation prompt."""
    temperature: float = number(0.0, low=0)
    """0 is greedy; n > 1 needs a positive temperature."""
    top_k: int = number(-1, low=-1)
    """Sample among the top_k likeliest tokens; -1 means all."""
    top_p: float = number(1.0, above=0, high=1)
    """Sample among the likeliest tokens that hold this much probability."""


@dataclass
class RolloutConfig:
    """How responses are generated."""

    name: str = named("native", "generation engine")
    """Engine: native (continuous batching on the trainer's own weights) or hf (plain transformers generate, the slow
    golden path)."""
    n: int = number(1, low=1)
    """Responses a prompt: the group size. Group estimators such as grpo need at least 2."""
    temperature: float = number(1.0, low=0)
    """Sampling temperature; the trainer's log-probs use the same one."""
    top_k: int = number(-1, low=-1)
    """Sample among the top_k likeliest tokens; -1 means all (recommended for training)."""
    top_p: float = number(1.0, above=0, high=1)
    """Nucleus sampling; 1 means all (recommended for training)."""
    min_p: float = number(0.0, low=0, high=1)
    """Drop tokens less likely than min_p x the likeliest; 0 drops none."""
    repetition_penalty: float = number(1.0, above=0)
    """Divide the scores of tokens already seen; 1 changes nothing."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response (kept in it), besides the end-of-sequence tokens."""
    ignore_eos: bool = False
    """Sample on to max_response_length whatever the tokens say; for benchmarks."""
    max_num_seqs: int = number(256, low=1)
    """Most sequences decoded at once."""
    max_cache_tokens: int | None = number(None, low=1)
    """Capacity of the key-value cache in tokens; null means enough for max_num_seqs sequences of full length."""
    dtype: str = choice("auto", "auto", "float32", "bfloat16")
    """Compute dtype of generation; auto means the actor's."""
    val_kwargs: ValKwargsConfig = block(ValKwargsConfig)
    """Sampling for validation."""


@dataclass
class ActorRolloutRefConfig:
    """The policy in its three roles: trained (actor), sampled (rollout), frozen (ref)."""

    model: ModelConfig = block(ModelConfig)
    """The policy's model."""
    actor: ActorConfig = block(ActorConfig)
    """Training."""
    rollout: RolloutConfig = block(RolloutConfig)
    """Generation."""
    ref: RefConfig = block(RefConfig)
    """Reference."""


# ------------------------------------------------------------------------------------------------------------- critic


@dataclass
class CriticModelConfig:
    """The value model."""

    path: str | None = None
    """Model directory to start from, a causal or a token-classification model; null means the policy's."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""


@dataclass
class CriticConfig:
    """The critic, for estimators that need values (gae)."""

    enable: bool | None = None
    """Train a critic; null means when algorithm.adv_estimator needs values."""
    model: CriticModelConfig = block(CriticModelConfig)
    """The value model."""
    optim: OptimConfig = block(OptimConfig, lr=1e-5)
    """Optimizer of the critic."""
    ppo_mini_batch_size: int | None = number(None, low=1)
    """Prompts an optimizer update; null means the actor's."""
    ppo_epochs: int | None = number(None, low=1)
    """Passes over each batch; null means the actor's."""
    ppo_max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a micro-batch; null means the actor's."""
    cliprange_value: float = number(0.5, above=0)
    """Value predictions move at most this far from the old ones before the loss is clipped."""
    loss_agg_mode: str | None = choice(None, *LOSS_AGG_MODES)
    """How per-token value losses become one number; null means the actor's."""
    dtype: str | None = choice(None, "float32", "bfloat16")
    """Compute dtype; null means the actor's."""


# ------------------------------------------------------------------------------------------------------------- reward


@dataclass
class CustomRewardConfig:
    """A reward function of your own."""

    path: str | None = None
    """Python file that holds it; null uses the built-in scorer of each data_source."""
    name: str = "compute_score"
    """Name of the function: f(data_source, solution_str, ground_truth, extra_info) -> float or dict with "score"."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of every call."""


@dataclass
class OverlongBufferConfig:
    """Soft overlong punishment (DAPO): the last tokens before the limit cost more and more."""

    enable: bool = False
    """Subtract the penalty from the reward of training responses; validation shows the reward without it."""
    len: int = number(128, low=1)
    """Tokens before data.max_response_length over which the penalty grows from 0 to penalty_factor."""
    penalty_factor: float = number(1.0, low=0)
    """The penalty of a response of full length."""
    log: bool = False
    """Also log the penalty and the share of responses that have one, as reward/overlong_reward/mean and
    reward/overlong/mean."""


@dataclass
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: CustomRewardConfig = block(CustomRewardConfig)
    """A reward function of your own."""
    reward_model: RewardModelUseConfig = block(RewardModelUseConfig)
    """A trained reward model."""
    scorer: str | None = named(None, "scorer")
    """Built-in scorer for every row; null means the one registered for the row's data_source."""
    scorer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of the built-in scorer, for example {method: flexible} for gsm8k."""
    overlong_buffer: OverlongBufferConfig = block(OverlongBufferConfig)
    """Punishment of responses that are nearly too long."""
    num_workers: int = number(2, low=1)
    """Worker processes that run a reward function of your own."""
    timeout: float = number(30.0, above=0)
    """Seconds one call may take."""
    on_error: str = choice("count", "count", "stop")
    """A call that raises, times out or returns no number: count it (score 0, reward/error_rate, first traceback in the
    log) or stop the run."""
    max_error_rate: float = number(0.5, low=0, high=1)
    """With on_error=count, stop the run when more than this share of a batch fails: nothing could be learned."""


# ------------------------------------------------------------------------------------------------------------ trainer


@dataclass
class RunConfig:
    """The life cycle of a run, shared by all trainers."""

    project_name: str = "hone"
    """Groups runs in trackers and in the default directory."""
    experiment_name: str = "default"
    """Names the run."""
    default_local_dir: str = "runs/${trainer.project_name}/${trainer.experiment_name}"
    """Run directory: config, metrics, rollouts, checkpoints."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Trackers: console, tensorboard, wandb, mlflow. metrics.jsonl is always written."""
    total_epochs: int = number(1, low=1)
    """Passes over the training data, when total_training_steps is null."""
    total_training_steps: int | None = number(None, low=1)
    """Steps of training; null means total_epochs over the data."""
    seed: int = number(1, low=0)
    """Seed of everything random in the run."""
    device: str = choice("auto", "auto", "cpu", "cuda")
    """auto takes a CUDA GPU when there is one."""
    num_threads: int | None = number(None, low=1)
    """CPU threads of torch; null means the cores this process may use."""
    save_freq: int = number(-1, low=-1)
    """Save a checkpoint every so many steps, and at the end; -1 only at the end, 0 never."""
    max_ckpt_to_keep: int | None = number(3, low=1)
    """Keep the newest k checkpoints; null keeps all."""
    test_freq: int = number(-1, low=-1)
    """Validate every so many steps, and at the end; -1 only at the end, 0 never."""
    val_before_train: bool = True
    """Validate before the first step."""
    resume_mode: str = choice("auto", "auto", "disable", "resume_path")
    """auto continues from the newest checkpoint of the run directory; disable refuses a directory that has one;
    resume_path takes resume_from_path."""
    resume_from_path: str | None = None
    """Checkpoint directory (.../checkpoints/step_N), with resume_mode=resume_path."""


@dataclass
class TrainerConfig(RunConfig):
    """The life cycle of an RL run."""

    critic_warmup: int = number(0, low=0)
    """Steps that train the critic alone before the policy moves."""
    rollout_dump_freq: int = number(10, low=0)
    """Write every sample of each k-th step (and of the first) to rollouts/; 0 never."""
    log_val_generations: int = number(8, low=0)
    """Validation samples written to validation/ each time."""


@dataclass
class RLConfig:
    """`hone train`: reinforcement learning."""

    data: DataConfig = block(DataConfig)
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = block(ActorRolloutRefConfig)
    """The policy."""
    critic: CriticConfig = block(CriticConfig)
    """The value model."""
    reward: RewardConfig = block(RewardConfig)
    """Scoring."""
    algorithm: AlgorithmConfig = block(AlgorithmConfig)
    """The algorithm."""
    trainer: TrainerConfig = block(TrainerConfig)
    """Life cycle."""


# ---------------------------------------------------------------------------------------------------------------- SFT


@dataclass
class SFTDataConfig:
    """Conversations to imitate."""

    train_files: Any = texts(None, "path")
    """Training files (parquet, json or jsonl) with a column of messages: a path or a list. Required."""
    val_files: Any = texts(None, "path")
    """Held-out files; null means no validation loss."""
    messages_key: str = "messages"
    """Column of chat messages; the loss counts assistant tokens only, of every assistant turn."""
    max_length: int = number(1024, low=1)
    """Longest conversation in tokens."""
    truncation: str = choice("error", "error", "drop", "truncate")
    """What to do with a longer one: stop, drop the row, or cut its end."""
    train_batch_size: int = number(64, low=1)
    """Conversations an optimizer update."""
    max_token_len_per_gpu: int = number(16384, low=1)
    """Token budget of a packed micro-batch. Changes memory and speed, never the result."""
    train_max_samples: int = number(-1, low=-1)
    """Use at most this many training rows; -1 means all."""
    val_max_samples: int = number(-1, low=-1)
    """Use at most this many validation rows; -1 means all."""
    shuffle: bool = True
    """Visit the rows in a new random order every epoch."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template."""


@dataclass
class SFTConfig:
    """`hone sft`: supervised fine-tuning."""

    data: SFTDataConfig = block(SFTDataConfig)
    """Conversations."""
    model: ModelConfig = block(ModelConfig)
    """The model."""
    optim: OptimConfig = block(OptimConfig, lr=1e-5)
    """Its optimizer; the schedule advances once an update."""
    dtype: str = choice("float32", "float32", "bfloat16")
    """Compute dtype of forward and backward; parameters and optimizer state stay float32."""
    trainer: RunConfig = block(RunConfig, experiment_name="sft")
    """Life cycle."""
