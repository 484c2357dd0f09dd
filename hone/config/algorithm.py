"""The block ``algorithm`` of the RL tree: advantages, KL in the reward, and selection of samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import block, choice, named, number


@dataclass
class KLCtrlConfig:
    """Coefficient of the KL penalty in the reward."""

    type: str = choice("fixed", "fixed", "adaptive")
    """fixed, or adaptive: the coefficient follows target_kl (Ziegler et al. 2019)."""
    kl_coef: float = number(0.001, low=0)
    """Coefficient; with type=adaptive the initial one."""
    target_kl: float = number(0.1, above=0)
    """Target of the adaptive controller: KL per token, averaged over sequences."""
    horizon: int = number(10000, low=1)
    """Time constant of the adaptive coefficient in sequences; larger means slower."""


@dataclass
class RolloutCorrectionConfig:
    """Correction of the mismatch between the sampling engine and the trained model; the mismatch is always measured."""

    preset: str | None = named(None, "rollout correction")
    """A named combination of the keys below, for example decoupled_token_is or bypass_pg_is. A key below that is not at its
    default takes precedence. `hone algorithms show rollout_correction` lists the presets."""
    bypass_mode: bool = False
    """Use the engine's log-probs as old log-probs instead of the trainer's. This saves a forward pass, and the ratio of the loss
    becomes trainer / engine."""
    loss_type: str = choice("ppo_clip", "ppo_clip", "reinforce")
    """With bypass_mode: ppo_clip (the ratio corrects) or reinforce (the importance weights below correct)."""
    rollout_is: str | None = choice(None, "token", "sequence", "geometric")
    """Level of the importance weights trainer / engine that multiply the loss; null means none. token is biased with low
    variance, sequence is unbiased and needs truncation, geometric is the sequence's length-normalised ratio."""
    rollout_is_threshold: str = "2.0"
    """One number truncates the weights (TIS); two numbers such as "0.5_5.0" set weights outside of them to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Rejection from the loss: comma list of token_k1, token_k2, token_k3, token_kpop (single tokens), seq_sum_k1,
    seq_mean_k1, ..., seq_max_k2, seq_max_k3 (whole sequences); a sample must pass all. null rejects nothing."""
    rollout_rs_threshold: str | None = None
    """Bounds of rollout_rs, one for all or a comma list: ratios such as "0.5_2.0" for k1, an upper bound for the others."""
    rollout_token_veto_threshold: float | None = number(None, above=0, high=1)
    """Reject whole sequences that contain a token whose probability under the trainer is below this share of the engine's."""


def corrects(settings: dict[str, Any]) -> bool:
    return any(settings[name] is not None for name in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold"))


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): groups with equal rewards carry no signal and are replaced by new prompts."""

    enable: bool = False
    """Replace groups with equal rewards until the batch is full. Replaced prompts count towards the epoch, and scoring runs during
    generation (it is part of timing_s/gen)."""
    metric: str | None = None
    """Value that must differ within a group: null means the reward (before the overlong penalty), else a term that the reward
    function returns, such as acc."""
    max_num_gen_batches: int = number(10, low=1)
    """Most prompts tried per step, in batches of data.train_batch_size; a step that needs more ends the run with an error."""


@dataclass
class PFPPOConfig:
    """Policy filtration: selection of the samples that PPO learns from (Shen and Zhang 2024)."""

    reweight_method: str = choice("pow", "pow", "max_min", "max_random")
    """Probability of drawing a sample. pow: |score|^weight_pow; max_min: only the best and the worst; max_random: the best (0.4)
    and others (0.1)."""
    weight_pow: float = number(2.0, above=0)
    """Exponent of pow."""


@dataclass
class ForksConfig:
    """Values of turns by continuations (adv_estimator=turn_value_by_forks)."""

    samples: int = number(4, low=1)
    """Continuations of each forked turn."""
    min_entropy: float = number(0.5, low=0)
    """Entropy in nats of a turn's first token from which on the turn is forked."""
    max_turns: int = number(16, low=0)
    """Most forked turns of a step."""


@dataclass
class AlgorithmConfig:
    """From rewards to advantages."""

    adv_estimator: str = named("grpo", "advantage estimator")
    """Advantage estimator: a name of the registry (`hone algorithms list`), such as grpo (groups, no critic) or gae (PPO with
    a critic); or the import path of a custom one, my_module:my_estimator."""
    gamma: float = number(1.0, low=0, high=1)
    """Discount per token (gae, reinforce_plus_plus) or per turn (gigpo, turn_gae, turn_rloo)."""
    lam: float = number(1.0, low=0, high=1)
    """GAE's lambda: 1 is unbiased; lower values have less variance and more bias."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation; false is Dr. GRPO."""
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """Terms of the reward function that gdpo normalises separately, for example [acc,format]; score is the reward itself."""
    gdpo_reward_weights: list[float] | None = None
    """Weights of gdpo_reward_keys; null means equal weights."""
    process_coef: float = number(1.0, low=0)
    """prime: weight of the process rewards of the tokens to come, next to the outcome."""
    step_advantage_w: float = number(1.0, low=0)
    """Weight of the turn's advantage relative to the response's (gigpo)."""
    forks: ForksConfig = block(ForksConfig)
    """Values of turns by continuations."""
    top_entropy_share: float | None = number(None, above=0, high=1)
    """Share of a step's sampled tokens that teach the policy. They are those with the largest entropy; the advantages of the others
    become 0, and null means all. A pass for the old log-probs gives the entropies (arXiv:2506.01939)."""
    adv_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further options of the estimator, by name, for example {epsilon: 1e-4}."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from the token rewards (as in PPO)."""
    kl_penalty: str = named("kl", "KL estimator", instead="algorithm.kl_ctrl.kl_coef")
    """Estimator of the KL penalty in the reward: k1/kl, abs, k2/mse, k3/low_var_kl. The coefficient is kl_ctrl.kl_coef."""
    kl_ctrl: KLCtrlConfig = block(KLCtrlConfig)
    """Coefficient of the KL penalty in the reward."""
    filter_groups: FilterGroupsConfig = block(FilterGroupsConfig)
    """Dynamic sampling."""
    use_pf_ppo: bool = False
    """Resample the samples of the update with replacement, by their scores (PF-PPO)."""
    pf_ppo: PFPPOConfig = block(PFPPOConfig)
    """Policy filtration."""
    rollout_correction: RolloutCorrectionConfig = block(RolloutCorrectionConfig)
    """Correction of the mismatch between engine and trainer."""
    role_baseline_decay: float = number(0.95, low=0, high=1)
    """Weight of the average so far in the moving average of a role's returns (rae)."""
