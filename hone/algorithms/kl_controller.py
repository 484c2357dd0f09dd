"""Coefficient of the KL penalty in the reward: constant, or controlled towards a target."""

from __future__ import annotations

import math
from typing import Protocol

from hone.errors import ConfigError, InvariantError, did_you_mean


class KLController(Protocol):
    """Holder of the coefficient, ``value``; :meth:`update` is called once per step."""

    value: float

    def update(self, kl: float, n_steps: int) -> None:
        """Update with the step's mean KL over ``n_steps`` sequences."""
        ...

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        ...


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, coef: float) -> None:
        self.value = coef

    def update(self, kl: float, n_steps: int) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore nothing: the coefficient is the configured one, also after a resume."""


class AdaptiveKLController(FixedKLController):
    """A coefficient that rises while the KL is above its target and falls while it is below.

    ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon`` (Ziegler et al. 2019, arXiv:1909.08593, section
    2.2). A step of more than ``horizon`` sequences counts as ``horizon``; otherwise one of five times the horizon would
    set the coefficient to 0, and a larger one would make it negative, which rewards distance.

    Args:
        horizon: sequences over which the coefficient moves by at most 20 %.
    """

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        if target <= 0 or horizon <= 0:
            raise ConfigError(
                f"the adaptive KL controller needs target_kl > 0 and horizon > 0, got {target} and {horizon}",
                where="algorithm.kl_ctrl",
                fix="algorithm.kl_ctrl.target_kl=0.1 algorithm.kl_ctrl.horizon=10000",
            )
        super().__init__(coef)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, n_steps: int) -> None:
        """Move the coefficient; a NaN raises InvariantError, because the coefficient would keep it forever."""
        if math.isnan(kl):
            raise InvariantError(
                "the mean KL of this step is NaN",
                why="the KL coefficient, and with it every later reward, would be NaN too",
                fix="check for NaN in the log-probs of the policy and the reference",
                where="algorithm.kl_ctrl",
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(n_steps / self.horizon, 1.0)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def kl_controller(type: str, kl_coef: float, target_kl: float = 0.1, horizon: int = 10000) -> KLController:
    """Build the controller of ``algorithm.kl_ctrl``."""
    if type == "fixed":
        return FixedKLController(kl_coef)
    if type == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    raise ConfigError(
        f"unknown KL controller '{type}'", where="algorithm.kl_ctrl.type", fix=did_you_mean(type, ["fixed", "adaptive"])
    )
