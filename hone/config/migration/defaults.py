"""Where the defaults of verl differ from Hone's: a script that leaves such a key out means verl's value."""

from __future__ import annotations

from typing import Any

VERL_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.dtype": "bfloat16",
    "critic.model.enable_gradient_checkpointing": True,
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": 30,
    "trainer.max_ckpt_to_keep": None,
    "trainer.log_val_generations": 0,
}
"""Its values for the keys of `hone train`. Names of runs, trackers, seeds and directories keep Hone's defaults: they say
nothing about what is learned."""

VERL_SFT_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "model.enable_gradient_checkpointing": True,
    "optim.lr": 1e-3,
    "dtype": "bfloat16",
    "trainer.total_epochs": 4,
    "trainer.max_ckpt_to_keep": None,
}
"""The same for `hone sft`, as verl's ``sft_trainer`` has them."""

VERL_OLD_SFT_DEFAULTS: dict[str, Any] = {
    **VERL_SFT_DEFAULTS,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler_type": "cosine",
}
"""The same as its ``fsdp_sft_trainer`` has them."""
