"""The gap between the policy that sampled and the policy that is trained: weights, rejection and diagnostics.

=================  =====================================================================================
``rules``          what the configuration says, checked and parsed
``weights``        importance weights of tokens or sequences, truncated (TIS) or masked (MIS, IcePop)
``rejection``      tokens and sequences that are left out, and the token veto
``diagnostics``    how far the two policies are apart
``summary``        means, spreads and quantiles of what a mask selected
``correction``     all of it, in one call
``presets``        combinations with a name
=================  =====================================================================================
"""

from hone.algorithms.off_policy.correction import Correction, rollout_correction
from hone.algorithms.off_policy.diagnostics import off_policy_metrics
from hone.algorithms.off_policy.presets import ROLLOUT_CORRECTION_PRESETS
from hone.algorithms.off_policy.rules import (
    IMPORTANCE_LEVELS,
    REJECTION_OPTIONS,
    CorrectionRules,
    check_rollout_correction,
)

__all__ = [
    "IMPORTANCE_LEVELS",
    "REJECTION_OPTIONS",
    "ROLLOUT_CORRECTION_PRESETS",
    "Correction",
    "CorrectionRules",
    "check_rollout_correction",
    "off_policy_metrics",
    "rollout_correction",
]
