"""Choices by the entropy of the policy: the tokens that teach it, and the weight of the entropy bonus."""

from __future__ import annotations

import math

from torch import Tensor


def largest_share(values: Tensor, mask: Tensor, share: float) -> tuple[Tensor, float]:
    """Mark the ``share`` of the positions in ``mask [N]`` with the largest ``values [N]``.

    Returns bool ``[N]`` and the least value marked (NaN for an empty mask). The bound is the quantile ``1 - share``; equals of it are
    marked too.
    """
    selected = values[mask.bool()]
    if not len(selected):
        return mask.bool(), float("nan")
    rank = math.ceil((1 - share) * (len(selected) - 1))
    bound = selected.kthvalue(rank + 1).values
    return mask.bool() & (values >= bound), float(bound)


class EntropyController:
    """Weight of the entropy bonus: constant, or following a target (Skywork-OR1, arXiv:2505.22312, section 4).

    With a target the weight grows by ``delta`` after a step whose mean entropy is at most the target, and shrinks by it after another;
    it stays in 0 to ``most``. The bonus rests (:attr:`weight` 0) unless the last step was at most at the target, and in the first step.

    Args:
        coef: weight at the start.
        target: mean entropy of a response token in nats; None for a constant weight.
    """

    def __init__(self, coef: float, target: float | None, delta: float, most: float) -> None:
        self.value, self.target, self.delta, self.most = coef, target, delta, most
        self._last: float | None = None

    @property
    def weight(self) -> float:
        """Weight in the loss of the next step."""
        if self.target is None:
            return self.value
        return self.value if self._last is not None and self._last <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Follow the mean entropy of a step; one that is not finite changes nothing."""
        if self.target is not None and math.isfinite(entropy):
            step = self.delta if entropy <= self.target else -self.delta
            self.value, self._last = min(max(self.value + step, 0.0), self.most), entropy

    def state_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "last": self._last}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore a state; without a target the weight is the configured one, also after a resume."""
        if self.target is not None and state.get("value") is not None:
            self.value, self._last = float(state["value"] or 0.0), state["last"]
