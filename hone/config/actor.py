"""The blocks ``actor_rollout_ref.actor`` and ``.ref``: how the policy is trained, and what it is held to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.feedback import OnlinePreferenceConfig
from hone.config.fields import block, choice, named, number
from hone.config.model import OptimConfig
from hone.config.parallel import ParallelConfig
from hone.config.ray import OwnPoolConfig

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


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
class ActorConfig(ParallelConfig):
    """How the policy is updated."""

    ppo_mini_batch_size: int = number(64, low=1)
    """Prompts an optimizer update; it must divide data.train_batch_size. Equal to it means one, on-policy, update."""
    ppo_epochs: int = number(1, low=1)
    """Passes over each batch."""
    shuffle: bool = False
    """Shuffle the prompts of a batch before cutting it into mini-batches."""
    ppo_max_token_len_per_gpu: int = number(16384, low=1)
    """Token budget of a micro-batch (prompt + response tokens, packed); on a CPU at most 4608 go together. Changes memory and
    speed, never the result."""
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
    recompute_old_log_probs: bool = False
    """Always give the old log-probs a forward pass of their own. Otherwise they have one only where something needs them before
    the update, or a batch gives several updates; else the update's own pass gives them."""
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
class RefConfig(OwnPoolConfig):
    """The reference policy: the starting weights, frozen. Made only when a KL term needs it."""

    log_prob_max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a micro-batch; null means the actor's."""
