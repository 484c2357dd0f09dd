"""The blocks ``actor_rollout_ref.actor`` and ``.ref``: training of the policy, and the reference policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from hone.config.algorithm import corrects
from hone.config.fields import block, choice, named, number
from hone.config.model import OptimConfig
from hone.config.parallel import ParallelConfig
from hone.config.run import OwnPoolConfig

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


@dataclass
class PolicyLossConfig:
    """The policy loss, and options of single losses."""

    loss_mode: str = named("vanilla", "policy loss")
    """Policy loss: a name of the registry (`hone algorithms list`; `vanilla` is PPO's clipped objective with dual clip), or
    the import path of a custom loss, my_module:my_loss."""
    clip_cov_ratio: float = number(0.0002, low=0, high=1)
    """clip_cov: share of the tokens whose gradient is removed."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of the covariance of advantage and log-prob of tokens that may lose their gradient."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper bound of that covariance."""
    kl_cov_ratio: float = number(0.0002, low=0, high=1)
    """kl_cov: share of the tokens, those with the highest covariance, that get a KL penalty."""
    ppo_kl_coef: float = number(0.1, low=0)
    """kl_cov: weight of that penalty."""
    dro_beta: float = number(0.05, above=0)
    """dro: weight of the squared log-ratio."""
    vespo_k_pos: float = number(2.0, low=0)
    """vespo: power of a sequence's ratio in its weight, for advantages of at least 0; larger fades ratios below 1 faster."""
    vespo_lambda_pos: float = number(3.0, low=0)
    """vespo: decay of that weight; larger fades ratios above 1 faster."""
    vespo_k_neg: float = number(3.0, low=0)
    """vespo: the power for negative advantages."""
    vespo_lambda_neg: float = number(2.0, low=0)
    """vespo: the decay for negative advantages."""
    m2_threshold: float = number(0.04, above=0)
    """m2po: largest mean squared log-ratio; tokens with the largest log-ratios are masked until it holds."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further options of the loss, by name."""


def policy_loss_name(loss_mode: str, settings: dict[str, Any]) -> str:
    """Return the policy loss in use: ``vanilla`` becomes ``bypass_mode`` in bypass mode with a correction.

    ``settings``: all keys of ``algorithm.rollout_correction``.
    """
    if loss_mode == "vanilla" and settings["bypass_mode"]:
        return "bypass_mode" if corrects(settings) or settings["loss_type"] != "ppo_clip" else "vanilla"
    return loss_mode


@dataclass
class RouterReplayConfig:
    """Routing of a mixture of experts in training."""

    mode: str = choice("disabled", "disabled", "R3")
    """R3 (rollout routing replay, arXiv:2510.11370): the experts that the engine chose for each token are used again when its
    log-probs are computed and trained, by the actor and the reference. Where engine and trainer round differently, the routers would
    choose others, and the log-probs would differ by more than rounding. disabled: every forward pass chooses for itself. Needs a
    mixture of experts and the engine native or vllm."""


@dataclass
class OnlinePreferenceConfig:
    """Online preference optimisation: the best and the worst answer to each prompt are a training pair."""

    loss_mode: str | None = named(None, "preference loss", instead="actor_rollout_ref.actor.preference_loss.beta")
    """Preference loss on those pairs (dpo, ipo, hinge, robust, sppo, orpo, simpo or cpo); null trains on advantages with
    policy_loss."""
    beta: float | None = number(None, above=0)
    """Its beta; null means the loss's default."""
    margin: float = number(0.0, low=0)
    """Least difference of rewards between best and worst; other groups give no pair."""


@dataclass
class ActorConfig(ParallelConfig):
    """The update of the policy."""

    block_path: ClassVar[str] = "actor_rollout_ref.actor"

    ppo_mini_batch_size: int = number(64, low=1)
    """Prompts per optimizer update; must divide data.train_batch_size. When both are equal there is one on-policy update."""
    ppo_epochs: int = number(1, low=1)
    """Passes over each batch."""
    shuffle: bool = False
    """Shuffle the prompts of a batch before splitting it into mini-batches."""
    ppo_max_token_len_per_gpu: int = number(16384, low=1)
    """Token budget of a micro-batch (prompt + response tokens, packed); at most 4608 on a CPU. Changes memory and
    speed, never the result."""
    ppo_micro_batch_size_per_gpu: int | None = number(None, low=1)
    """Most sequences per micro-batch, in addition to the token budget; null means no limit."""
    clip_ratio: float = number(0.2, above=0)
    """PPO's clip range; used when clip_ratio_low or clip_ratio_high is null."""
    clip_ratio_low: float | None = number(None, above=0, high=1)
    """Lower clip: ratios under 1 - clip_ratio_low give no gradient when the advantage is negative."""
    clip_ratio_high: float | None = number(None, above=0)
    """Upper clip: ratios over 1 + clip_ratio_high give no gradient when the advantage is positive."""
    clip_ratio_c: float = number(3.0, above=1)
    """Dual clip: with a negative advantage the loss is at most -clip_ratio_c x advantage."""
    tau_pos: float = number(1.0, above=0)
    """sapo: temperature of the soft gate for tokens with a positive advantage."""
    tau_neg: float = number(1.05, above=0)
    """sapo: temperature of the soft gate for tokens with a negative advantage; a larger value closes the gate sooner."""
    loss_agg_mode: str = choice("token-mean", *LOSS_AGG_MODES)
    """Aggregation of per-token losses over the whole mini-batch, independent of micro-batches."""
    loss_scale_factor: float | None = number(None, above=0)
    """Divisor of seq-mean-token-sum-norm; null means data.max_response_length."""
    entropy_coeff: float = number(0.0, low=0)
    """Weight of the entropy bonus; with entropy_target, its weight at the start."""
    entropy_target: float | None = number(None, low=0)
    """Mean entropy of a response token in nats. After a step at most at it, the bonus acts and its weight grows; after another it rests
    and its weight shrinks (Skywork-OR1). Null means a constant weight."""
    entropy_coeff_delta: float = number(0.005, above=0)
    """entropy_target: change of the weight a step."""
    entropy_coeff_max: float = number(1.0, above=0)
    """entropy_target: largest weight."""
    use_kl_loss: bool = False
    """Add a KL penalty against the reference policy to the loss (as in GRPO)."""
    kl_loss_coef: float = number(0.001, low=0)
    """Weight of the KL penalty in the loss."""
    kl_loss_type: str = named("low_var_kl", "KL estimator", instead="actor_rollout_ref.actor.kl_loss_coef")
    """Estimator of the KL penalty in the loss: k1/kl, abs, k2/mse, k3/low_var_kl."""
    recompute_old_log_probs: bool = False
    """Always compute the old log-probs in a separate forward pass. Otherwise that pass runs only when they are needed before the
    update, or when a batch has several updates; else the update's forward pass provides them."""
    calculate_sum_pi_squared: bool | None = None
    """Compute the sum of squared probabilities of each token's distribution with the old log-probs; null means when the
    estimator needs it (optimal_token_baseline). It costs a second projection onto the vocabulary."""
    policy_loss: PolicyLossConfig = block(PolicyLossConfig)
    """The policy loss."""
    preference_loss: OnlinePreferenceConfig = block(OnlinePreferenceConfig)
    """A preference loss on pairs of sampled answers, instead of the policy loss."""
    router_replay: RouterReplayConfig = block(RouterReplayConfig)
    """Routing of a mixture of experts."""
    optim: OptimConfig = block(OptimConfig, lr=1e-6)
    """Optimizer of the policy."""
    dtype: str = choice("auto", "auto", "float32", "bfloat16", "float16")
    """Compute dtype of forward and backward; parameters and optimizer state stay float32. auto is bfloat16 on a GPU that computes in
    it (compute capability 8.0), else float32, and float32 on a CPU. float32 matmuls are exact: TF32 is never used. float16 rounds
    eight times finer than bfloat16; the loss is scaled, and an update whose scaled gradient overflows is skipped."""
    router_aux_loss_coef: float = number(0.0, low=0)
    """Weight of the balance loss of a mixture of experts: the sequence-wise loss of DeepSeek-V3 over the trained tokens of each
    response, mean over the sequences of a mini-batch and the routers; 1 where the load is even. 0 computes none."""


@dataclass
class RefFsdpConfig:
    """Sharding of the reference; everything else is as for the actor."""

    param_offload: bool | None = None
    """Keep the reference's shards in the host's memory while it is not in use; null means the actor's setting."""


@dataclass
class RefConfig(OwnPoolConfig):
    """The reference policy: the frozen starting weights. Created only when a KL term needs it."""

    log_prob_max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a micro-batch; null means the actor's."""
    fsdp_config: RefFsdpConfig = block(RefFsdpConfig)
    """Where its shards are kept."""
    adapter: str = choice("start", "start", "off")
    """With model.lora_adapter_path. start: the reference is the model at the start of the run, with that adapter, of which a copy
    is kept. off: the base model alone."""
