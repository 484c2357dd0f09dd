"""The block ``algorithm`` of the RL tree: what is learned from rewards, and from which samples."""

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
    """The (first) coefficient."""
    target_kl: float = number(0.1, above=0)
    """KL a sequence-averaged token, that the adaptive controller aims at."""
    horizon: int = number(10000, low=1)
    """How slowly the adaptive coefficient moves, in sequences."""


@dataclass
class RolloutCorrectionConfig:
    """The gap between the engine that samples and the model that trains: measured always, corrected on request."""

    preset: str | None = named(None, "rollout correction")
    """A named combination of the keys below, for example decoupled_token_is or bypass_pg_is; a key below that is set to
    something else than its default wins over it. `hone algorithms show rollout_correction` lists them."""
    bypass_mode: bool = False
    """Take the engine's log-probs as old log-probs, and not the trainer's: no forward pass for them, and the ratio of the loss is
    then trainer against engine."""
    loss_type: str = choice("ppo_clip", "ppo_clip", "reinforce")
    """With bypass_mode: ppo_clip (the ratio corrects) or reinforce (the importance weights below correct)."""
    rollout_is: str | None = choice(None, "token", "sequence", "geometric")
    """Level of the importance weights trainer / engine that multiply the loss; null gives none. Token is biased and of low
    variance, sequence is unbiased and needs truncation, geometric is the sequence's length-normalised ratio."""
    rollout_is_threshold: str = "2.0"
    """A number truncates the weights at it (TIS); two as "0.5_5.0" set weights outside of them to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """What is left out of the loss: comma list of token_k1, token_k2, token_k3 (single tokens), seq_sum_k1, seq_mean_k1, ...,
    seq_max_k2, seq_max_k3 (whole sequences); a sample must pass all. null leaves out nothing."""
    rollout_rs_threshold: str | None = None
    """Its bounds, one for all or a comma list: k1 takes ratios as "0.5_2.0", k2 and k3 an upper bound."""
    rollout_token_veto_threshold: float | None = number(None, above=0, high=1)
    """Leave out whole sequences in which the trainer gives some token less than this share of the engine's probability."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): groups whose answers are all equally good teach nothing, and are replaced by new prompts."""

    enable: bool = False
    """Replace such groups until the batch is full of useful ones. The prompts tried count towards the epoch, and scoring
    then happens while generating (it is part of timing_s/gen)."""
    metric: str | None = None
    """What has to differ within a group: null is the reward (before the overlong punishment), else a term that the reward
    function returns, such as acc."""
    max_num_gen_batches: int = number(10, low=1)
    """Most prompts tried a step, in batches of data.train_batch_size; a step that needs more stops the run and says why."""


@dataclass
class PFPPOConfig:
    """Policy filtration: which samples PPO learns from (Shen and Zhang 2024)."""

    reweight_method: str = choice("pow", "pow", "max_min", "max_random")
    """How likely a sample is drawn: |score|^weight_pow; only the best and the worst; or the best (0.4) and others (0.1)."""
    weight_pow: float = number(2.0, above=0)
    """Exponent of pow."""


@dataclass
class AlgorithmConfig:
    """What is learned from rewards."""

    adv_estimator: str = named("grpo", "advantage estimator")
    """Advantage estimator: a name of the registry (`hone algorithms list`), such as grpo (groups, no critic) or gae (PPO with
    a critic); or one of your own by its import path, my_module:my_estimator."""
    gamma: float = number(1.0, low=0, high=1)
    """Discount a token (gae, reinforce_plus_plus) or a turn (gigpo)."""
    lam: float = number(1.0, low=0, high=1)
    """GAE's lambda: 1 is unbiased, less trades bias for variance."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation; false is Dr. GRPO."""
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """Terms of the reward that gdpo normalises one by one, as the reward function names them: [acc,format] for example; score
    is the reward itself."""
    gdpo_reward_weights: list[float] | None = None
    """Their weights; null weighs all alike."""
    step_advantage_w: float = number(1.0, low=0)
    """Weight of the turn's advantage beside the response's (gigpo)."""
    adv_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further options of the estimator that have no key here, by name, for example {epsilon: 1e-4}."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty to the reference policy from the token rewards (PPO's way)."""
    kl_penalty: str = named("kl", "KL estimator", instead="algorithm.kl_ctrl.kl_coef")
    """Its estimator: k1/kl, abs, k2/mse, k3/low_var_kl. A name, not a number; the coefficient is kl_ctrl.kl_coef."""
    kl_ctrl: KLCtrlConfig = block(KLCtrlConfig)
    """Its coefficient."""
    filter_groups: FilterGroupsConfig = block(FilterGroupsConfig)
    """Dynamic sampling."""
    use_pf_ppo: bool = False
    """Draw the samples of the update anew, with replacement, by their scores (PF-PPO)."""
    pf_ppo: PFPPOConfig = block(PFPPOConfig)
    """How."""
    rollout_correction: RolloutCorrectionConfig = block(RolloutCorrectionConfig)
    """Sampling engine against trainer."""
