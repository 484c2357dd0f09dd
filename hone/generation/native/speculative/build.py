"""Construction of the configured speculation."""

from __future__ import annotations

import torch

from hone.config.model import ModelConfig
from hone.config.rollout import SpeculativeConfig
from hone.generation.native.speculative.draft_model import ModelDrafter
from hone.generation.native.speculative.drafts import Drafter, Speculation
from hone.generation.native.speculative.ngram import NgramDrafter
from hone.generation.native.speculative.training import DraftTrainer
from hone.models.loading import load_policy


def speculation_from_config(
    config: SpeculativeConfig, *, device: torch.device, dtype: str, trust_remote_code: bool = False
) -> Speculation | None:
    """Return the configured speculation of an engine, with the draft model loaded; None without one.

    Args:
        config: its keys.
        device: of the engine.
        dtype: compute dtype of the engine.
        trust_remote_code: whether the draft model may have code of its own.

    Raises:
        ModelError: the draft model cannot be loaded.
    """
    if config.method is None:
        return None
    drafter: Drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "draft_model":
        settings = ModelConfig(path=config.model, trust_remote_code=trust_remote_code)
        model = load_policy(settings, device=device, seed=0, trainable=False)
        trainer = None
        if config.draft_lr > 0:
            trainer = DraftTrainer(model, learning_rate=config.draft_lr, device=device, dtype=dtype)
        drafter = ModelDrafter(model, device=device, dtype=getattr(torch, dtype), trainer=trainer)
    return Speculation(drafter, num_tokens=config.num_speculative_tokens, max_rows=config.disable_by_batch_size)
