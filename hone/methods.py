"""Requirements of built-in methods as plain data, readable without torch.

The registries of :mod:`hone.algorithms` take the needs of their entries from here; :mod:`hone.config.derived` reads the same
tables before any model or kernel is loaded. A custom method declares its needs where it is registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EstimatorInputs:
    """Inputs of an advantage estimator, by their names in :data:`hone.algorithms.advantages.INPUTS`.

    Attributes:
        needs: required inputs.
        uses: optional inputs.
    """

    needs: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()


def _inputs(*needs: str, uses: tuple[str, ...] = ()) -> EstimatorInputs:
    return EstimatorInputs(frozenset(needs), frozenset(uses))


ESTIMATOR_INPUTS: Mapping[str, EstimatorInputs] = {
    "gae": _inputs("values"),
    "gdpo": _inputs("groups", "reward_components"),
    "gigpo": _inputs("groups", "turns", uses=("turn_groups",)),
    "gpg": _inputs("groups"),
    "grpo": _inputs("groups"),
    "grpo_passk": _inputs("groups"),
    "grpo_vectorized": _inputs("groups"),
    "hierarchical_grpo": _inputs("groups", "turns", "turn_roles"),
    "maxrl": _inputs("groups"),
    "opo": _inputs("groups"),
    "optimal_token_baseline": _inputs("groups", "old_log_probs", "sum_pi_squared", uses=("rollout_is_weights",)),
    "reinforce_plus_plus": _inputs(),
    "reinforce_plus_plus_baseline": _inputs("groups"),
    "prime": _inputs("groups", "process_rewards"),
    "rae": _inputs("turns", "turn_baselines"),
    "remax": _inputs("greedy_baseline"),
    "rloo": _inputs("groups"),
    "rloo_vectorized": _inputs("groups"),
    "turn_gae": _inputs("values", "turns"),
    "turn_rloo": _inputs("groups", "turns"),
    "turn_value_by_forks": _inputs("groups", "turns", "turn_values", "old_log_probs"),
    "tir_optimal_token_baseline": _inputs("groups", "old_log_probs", "sum_pi_squared", uses=("rollout_is_weights",)),
}
"""Inputs of every built-in advantage estimator, by registered name."""

COMPARES_ACROSS_MINI_BATCH: Mapping[str, bool] = {
    **dict.fromkeys(("bypass_mode", "cispo", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo"), False),
    **dict.fromkeys(("sapo", "topr", "vanilla", "vespo"), False),
    **dict.fromkeys(("clip_cov", "kl_cov", "m2po"), True),
}
"""True for built-in policy losses that compare tokens across the whole mini-batch before the update, by registered name."""

_WITH_REFERENCE = ("dpo", "sigmoid", "robust", "robust_dpo", "hinge", "ipo", "sppo", "sppo_hard")

PREFERENCE_LOSS_NEEDS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(_WITH_REFERENCE, frozenset({"pairs", "reference"})),
    **dict.fromkeys(("orpo", "simpo", "cpo"), frozenset({"pairs"})),
    "kto": frozenset({"reference", "kl"}),
}
"""Needs of every built-in preference loss, by registered name: pairs, reference or kl."""

_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_SEQ_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_TOKEN = {"rollout_is": "token"}
_SEQ = {"rollout_is": "sequence"}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
# a bound without effect: within the margin of token_kpop (1e-6) no ratio is larger
_KPOP = _TOKEN | {"rollout_is_threshold": "1e6", "rollout_rs": "token_kpop", "rollout_rs_threshold": 0.1}
_CLIP = {"bypass_mode": True}
_PG = {"bypass_mode": True, "loss_type": "reinforce"}

_DISABLED: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "rollout_token_veto_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
}

ROLLOUT_CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    name: _DISABLED | settings
    for name, settings in {
        "disabled": {},
        "decoupled_token_is": _TOKEN,
        "decoupled_seq_is": _SEQ,
        "decoupled_geo_is": {"rollout_is": "geometric"},
        "decoupled_token_mis": _TOKEN | {"rollout_is_threshold": "0.0_2.0"},
        "decoupled_seq_mis": _SEQ | {"rollout_is_threshold": "0.0_2.0"},
        "decoupled_token_icepop": _ICEPOP,
        "decoupled_token_kpop": _KPOP,
        "decoupled_seq_is_rs": _SEQ | _SEQ_RS,
        "decoupled_geo_rs": _GEO,
        "decoupled_geo_rs_seq_tis": _SEQ | _GEO,
        "decoupled_geo_rs_token_tis": _TOKEN | _GEO,
        "decoupled_k3_rs": _K3,
        "decoupled_k3_rs_seq_tis": _SEQ | _K3,
        "decoupled_k3_rs_token_tis": _TOKEN | _K3,
        "bypass_ppo_clip": _CLIP,
        "bypass_ppo_clip_geo_rs": _CLIP | _GEO,
        "bypass_ppo_clip_k3_rs": _CLIP | _K3,
        "bypass_pg_is": _PG | _SEQ,
        "bypass_pg_token_icepop": _PG | _ICEPOP,
        "bypass_pg_token_kpop": _PG | _KPOP,
        "bypass_pg_geo_rs": _PG | _GEO,
        "bypass_pg_geo_rs_seq_tis": _PG | _SEQ | _GEO,
        "bypass_pg_geo_rs_token_tis": _PG | _TOKEN | _GEO,
    }.items()
}
"""Preset -> every key of ``algorithm.rollout_correction`` and its value."""
