"""Combinations of rollout correction with a name.

Names read ``mode_what``: *decoupled* recomputes old log-probs and corrects between engine and trainer; *bypass* takes
the engine's, with PPO's clip (``ppo_clip``) or plain policy gradient (``pg``). Then importance weights (``is``,
``tis`` truncated, ``mis`` and ``icepop`` masked; ``token``, ``seq`` or ``geo``) and rejection (``rs``; ``geo`` by the
geometric mean of the ratio, ``k3`` by the KL estimate).
"""

from __future__ import annotations

from typing import Any

GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
SEQ_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
TOKEN = {"rollout_is": "token"}
SEQ = {"rollout_is": "sequence"}
ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
CLIP = {"bypass_mode": True}
PG = {"bypass_mode": True, "loss_type": "reinforce"}

DISABLED: dict[str, Any] = {
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
    name: DISABLED | settings
    for name, settings in {
        "disabled": {},
        "decoupled_token_is": TOKEN,
        "decoupled_seq_is": SEQ,
        "decoupled_geo_is": {"rollout_is": "geometric"},
        "decoupled_token_mis": TOKEN | {"rollout_is_threshold": "0.0_2.0"},
        "decoupled_seq_mis": SEQ | {"rollout_is_threshold": "0.0_2.0"},
        "decoupled_token_icepop": ICEPOP,
        "decoupled_seq_is_rs": SEQ | SEQ_RS,
        "decoupled_geo_rs": GEO,
        "decoupled_geo_rs_seq_tis": SEQ | GEO,
        "decoupled_geo_rs_token_tis": TOKEN | GEO,
        "decoupled_k3_rs": K3,
        "decoupled_k3_rs_seq_tis": SEQ | K3,
        "decoupled_k3_rs_token_tis": TOKEN | K3,
        "bypass_ppo_clip": CLIP,
        "bypass_ppo_clip_geo_rs": CLIP | GEO,
        "bypass_ppo_clip_k3_rs": CLIP | K3,
        "bypass_pg_is": PG | SEQ,
        "bypass_pg_token_icepop": PG | ICEPOP,
        "bypass_pg_geo_rs": PG | GEO,
        "bypass_pg_geo_rs_seq_tis": PG | SEQ | GEO,
        "bypass_pg_geo_rs_token_tis": PG | TOKEN | GEO,
    }.items()
}
"""Preset -> every key of ``algorithm.rollout_correction`` and its value."""
