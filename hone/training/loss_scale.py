"""Dynamic loss scaling for updates in float16 (Micikevicius et al. 2018, arXiv:1710.03740)."""

from __future__ import annotations

from dataclasses import dataclass

INITIAL, GROWTH_INTERVAL = 2.0**16, 2000
"""Those of ``torch.amp.GradScaler``, whose rule this is. Its own search for infinities is not needed: every update has the gradient's norm,
the same on all ranks."""


@dataclass
class LossScale:
    """The factor of the loss in the backward pass: a power of two, so that no gradient within range is rounded differently.

    Attributes:
        value: the factor.
        streak: finite updates in succession.

    >>> scale = LossScale()
    >>> scale.explains_overflow(), scale.update(finite=False), scale.value
    (True, None, 32768.0)
    """

    value: float = INITIAL
    streak: int = 0

    def explains_overflow(self) -> bool:
        """Return whether a smaller scale may make the gradient finite."""
        return self.value > 1.0

    def update(self, *, finite: bool) -> None:
        """Halve after an overflow, to 1 at the least; double after ``GROWTH_INTERVAL`` finite updates in succession."""
        if not finite:
            self.value, self.streak = max(1.0, self.value / 2), 0
            return
        self.streak += 1
        if self.streak == GROWTH_INTERVAL:
            self.value, self.streak = self.value * 2, 0
