"""Preference losses: pure functions from log-probs of chosen and rejected responses to a scalar.

>>> import torch
>>> log_probs = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]])           # a chosen and a rejected response of two tokens
>>> loss, metrics = preference_losses.get("dpo")(
...     log_probs, torch.ones(2, 2), torch.tensor([True, False]), ref_log_probs=torch.full((2, 2), -1.5), beta=0.5
... )
>>> round(float(loss), 4), float(metrics["rewards/margins"])           # beta h = 0.5 x (1 - -1) = 1
(0.3133, 1.0)
"""

from hone.algorithms.preference_losses import direct
from hone.algorithms.preference_losses.base import (
    COUNTED_BY,
    LabelLoss,
    PairLoss,
    PreferenceLoss,
    Responses,
    preference_losses,
    register_preference_loss,
)
from hone.algorithms.preference_losses.direct import kto_kl
from hone.algorithms.preference_losses.pairs import best_worst_pairs, pair_rows

__all__ = [
    "COUNTED_BY",
    "LabelLoss",
    "PairLoss",
    "PreferenceLoss",
    "Responses",
    "best_worst_pairs",
    "direct",
    "kto_kl",
    "pair_rows",
    "preference_losses",
    "register_preference_loss",
]
