"""Gap between the sampling policy and the trained policy: weights, rejection and diagnostics.

============  ==================================================================================================
``rules``       the configuration, checked and parsed
``correction``  importance weights of tokens or sequences, truncated (TIS) or masked (MIS, IcePop); exclusion of tokens and
              sequences, and the token veto; distance of the two policies; and all of them in one call. Named
              combinations are in :data:`hone.methods.ROLLOUT_CORRECTION_PRESETS`
============  ==================================================================================================
"""

from hone.algorithms.off_policy.correction import Correction, off_policy_metrics, rollout_correction
from hone.algorithms.off_policy.rules import (
    IMPORTANCE_LEVELS,
    REJECTION_OPTIONS,
    CorrectionRules,
    check_rollout_correction,
)

__all__ = [
    "IMPORTANCE_LEVELS",
    "REJECTION_OPTIONS",
    "Correction",
    "CorrectionRules",
    "check_rollout_correction",
    "off_policy_metrics",
    "rollout_correction",
]
