"""Parse and check ``algorithm.rollout_correction``.

A threshold is a number or ``lower_upper``, with a decimal point in both numbers: ``0.5_5.0``. Without the points a
command line or a YAML file reads one number with a separator of thousands (``0.5_5`` is 0.55). The resulting bound
below 1 is refused with the reason. The list ``[0.5, 5]`` means the same without this problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hone.errors import ConfigError, did_you_mean

KEY = "algorithm.rollout_correction"

IMPORTANCE_LEVELS = ("token", "sequence", "geometric")
REJECTION_OPTIONS = (
    *(f"{reduction}_{k}" for reduction in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
    "token_kpop",
)
LOSS_TYPES = ("ppo_clip", "reinforce")
RENAMED = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1", "binary_kl": "token_kpop"}

Threshold = float | str | Sequence[float | str]


@dataclass(frozen=True)
class WeightRule:
    """Rule for importance weights."""

    level: str  # one of :data:`IMPORTANCE_LEVELS`
    low: float | None  # weights below it become 0; None: truncation at ``high`` only
    high: float  # with ``low``, weights above it become 0; without, they become ``high``
    normalize: bool  # divide by the mean weight of the batch


@dataclass(frozen=True)
class RejectionRule:
    """Rule that keeps units with ``low <= statistic <= high``."""

    option: str  # one of :data:`REJECTION_OPTIONS`
    low: float  # bound in units of the statistic (for k1 minus the logarithm of the ratio's upper bound)
    high: float  # bound in units of the statistic (for k1 minus the logarithm of the ratio's lower bound)

    @property
    def reduction(self) -> str:
        return self.option.rpartition("_")[0]

    @property
    def statistic(self) -> str:
        return self.option.rpartition("_")[2]


@dataclass(frozen=True)
class CorrectionRules:
    """All rules of :func:`~hone.algorithms.off_policy.correction.rollout_correction`."""

    weight: WeightRule | None
    rejections: tuple[RejectionRule, ...]
    veto: float | None

    @classmethod
    def parse(
        cls,
        *,
        rollout_is: str | None = None,
        rollout_is_threshold: Threshold = 2.0,
        rollout_is_batch_normalize: bool = False,
        rollout_rs: str | Sequence[str] | None = None,
        rollout_rs_threshold: Threshold | None = None,
        rollout_token_veto_threshold: float | None = None,
    ) -> CorrectionRules:
        """Parse the options of :func:`~hone.algorithms.off_policy.correction.rollout_correction`.

        Raises:
            ConfigError: an unknown name, a threshold that cannot be parsed or excludes the on-policy ratio 1, the wrong number of
                thresholds, or a threshold or normalisation without its switch.
        """
        return cls(
            _weight_rule(rollout_is, rollout_is_threshold, rollout_is_batch_normalize),
            _rejection_rules(rollout_rs, rollout_rs_threshold),
            _veto(rollout_token_veto_threshold),
        )


def check_rollout_correction(*, bypass_mode: bool = False, loss_type: str = "ppo_clip", **options) -> CorrectionRules:
    """Check a whole ``algorithm.rollout_correction`` block before anything runs, and return its rules.

    With ``bypass_mode`` the engine's log-probs are the old log-probs; the ratio of the loss ``ppo_clip`` then is the
    importance weight. ConfigError also refuses combinations in which a switch would have no effect.
    """
    rules = CorrectionRules.parse(**options)
    if loss_type not in LOSS_TYPES:
        raise ConfigError(
            f"unknown loss_type '{loss_type}'", where=f"{KEY}.loss_type", fix=did_you_mean(loss_type, LOSS_TYPES)
        )
    if loss_type != "ppo_clip" and not bypass_mode:
        raise ConfigError(
            f"loss_type={loss_type} has an effect in bypass mode only, and bypass_mode is false",
            why="the run would train with the ordinary policy loss",
            fix=f"{KEY}.bypass_mode=true, or {KEY}.loss_type=ppo_clip",
            where=f"{KEY}.loss_type",
        )
    if bypass_mode and loss_type == "ppo_clip" and rules.weight:
        raise ConfigError(
            f"rollout_is={rules.weight.level} has no effect in bypass mode with loss_type=ppo_clip",
            why="the PPO ratio is computed against the engine's log-probs, so it already is the importance weight",
            fix=f"{KEY}.rollout_is=null, or {KEY}.loss_type=reinforce",
            where=f"{KEY}.rollout_is",
        )
    if bypass_mode and rules.weight and rules.weight.normalize:
        raise ConfigError(
            "rollout_is_batch_normalize=true cannot be used in bypass mode",
            why="weights are computed in every micro-batch; a mean over one would depend on the split of the batch",
            fix=f"{KEY}.rollout_is_batch_normalize=false, or {KEY}.bypass_mode=false",
            where=f"{KEY}.rollout_is_batch_normalize",
        )
    return rules


def _weight_rule(level: str | None, threshold: Threshold, normalize: bool) -> WeightRule | None:
    if level is None:
        if normalize:
            raise ConfigError(
                "rollout_is_batch_normalize=true, but rollout_is is null: there are no weights to normalise",
                fix=f"{KEY}.rollout_is=token, or {KEY}.rollout_is_batch_normalize=false",
                where=f"{KEY}.rollout_is_batch_normalize",
            )
        return None
    if level not in IMPORTANCE_LEVELS:
        raise ConfigError(
            f"unknown level of importance weights '{level}'",
            where=f"{KEY}.rollout_is",
            fix=did_you_mean(level, IMPORTANCE_LEVELS),
        )
    low, high = _bounds(threshold, "rollout_is_threshold")
    return WeightRule(level, low, high, normalize)


def _rejection_rules(options: str | Sequence[str] | None, threshold: Threshold | None) -> tuple[RejectionRule, ...]:
    names = [str(name) for name in _entries(options)]
    where = f"{KEY}.rollout_rs_threshold"
    if not names:
        if threshold is not None:
            raise ConfigError(
                f"rollout_rs_threshold={threshold}, but rollout_rs is null: nothing is rejected",
                fix=f"{KEY}.rollout_rs=seq_mean_k3, or {where}=null",
                where=where,
            )
        return ()
    for name in names:
        if name not in REJECTION_OPTIONS:
            fix = f"{KEY}.rollout_rs={RENAMED[name]}" if name in RENAMED else did_you_mean(name, REJECTION_OPTIONS)
            raise ConfigError(f"unknown rejection option '{name}'", where=f"{KEY}.rollout_rs", fix=fix)
    thresholds = _entries(threshold)
    if not thresholds:
        example = ",".join(_example(name) for name in names)
        raise ConfigError(
            f"rollout_rs={','.join(names)} needs a threshold, and rollout_rs_threshold is null",
            fix=f"'{where}=\"{example}\"'" if len(names) > 1 else f"{where}={example}",
            where=where,
        )
    if len(thresholds) not in (1, len(names)):
        raise ConfigError(
            f"{len(thresholds)} thresholds for {len(names)} rejection options ({', '.join(names)})",
            fix="give one threshold for all of them, or one each, in the same order",
            where=where,
        )
    if len(thresholds) == 1:
        thresholds *= len(names)
    rules: dict[str, RejectionRule] = {}
    for name, entry in zip(names, thresholds, strict=True):
        rules.setdefault(name, _rejection_rule(name, entry))  # the first of repeated options counts
    return tuple(rules.values())


def _rejection_rule(option: str, threshold: float | str) -> RejectionRule:
    if option.endswith("_k1"):
        low, high = _bounds(threshold, "rollout_rs_threshold")
        low = 1.0 / high if low is None else low
        return RejectionRule(option, -math.log(high), -math.log(low) if low > 0 else math.inf)
    if isinstance(threshold, str) and "_" in threshold:
        raise ConfigError(
            f"{option} takes one upper bound, got '{threshold}'",
            why="the statistic is never negative and is 0 on policy, so a lower bound has no use",
            fix=f"{KEY}.rollout_rs_threshold={threshold.rpartition('_')[2]}",
            where=f"{KEY}.rollout_rs_threshold",
        )
    return RejectionRule(option, -math.inf, _positive(threshold, "rollout_rs_threshold", _example(option)))


def _example(option: str) -> str:
    return {"k1": "0.5_2.0", "kpop": "0.1"}.get(option.rpartition("_")[2], "0.01")


def _veto(threshold: float | None) -> float | None:
    if threshold is None:
        return None
    value = _positive(threshold, "rollout_token_veto_threshold", "1e-4")
    if value >= 1:
        raise ConfigError(
            f"rollout_token_veto_threshold={threshold} must be below 1",
            why="one token whose ratio is below it rejects its sequence; on policy every ratio is 1",
            fix=f"{KEY}.rollout_token_veto_threshold=1e-4",
            where=f"{KEY}.rollout_token_veto_threshold",
        )
    return value


def _entries(value: Threshold | str | Sequence[str] | None) -> list[float | str]:
    """Return the entries of a comma list, of a list, or the value itself."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, Sequence) else [value]


def _bounds(threshold: Threshold, key: str) -> tuple[float | None, float]:
    """Return the ``(lower, upper)`` bounds of a ratio; a single number is the upper one."""
    parts = threshold.split("_") if isinstance(threshold, str) else _entries(threshold)
    where, example = f"{KEY}.{key}", "0.5_5.0" if key == "rollout_is_threshold" else "0.5_2.0"
    if len(parts) not in (1, 2):
        raise ConfigError(
            f"{key}={threshold} is neither a number nor 'lower_upper'", where=where, fix=f"{where}={example}"
        )
    high = _positive(parts[-1], key, example)
    low = None
    if len(parts) == 2:
        # 0 is not a lower bound: only too large ratios are masked
        low = 0.0 if _number(parts[0]) == 0 else _positive(parts[0], key, example)
    if high < 1 or (low is not None and low > 1):
        raise ConfigError(
            f"{key}={threshold} excludes the ratio 1 of a token that is on policy",
            why="the bounds must contain 1; 'lower_upper' without decimal points is read as one number (0.5_5 as 0.55)",
            fix=f"{where}={example}",
            where=where,
        )
    return low, high


def _positive(value: object, key: str, example: str) -> float:
    number = _number(value)
    if number is None or not 0 < number < math.inf:
        raise ConfigError(
            f"{key}: '{value}' is not a positive number", where=f"{KEY}.{key}", fix=f"{KEY}.{key}={example}"
        )
    return number


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
