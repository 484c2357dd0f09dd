"""Services for scorers outside the trainer, created on first use."""

from __future__ import annotations

from functools import cached_property

from hone.config.reward import RewardConfig
from hone.rewards.judge import Judge
from hone.rewards.sandbox import Limits, Sandbox
from hone.rewards.sandbox.fusion import FusionSandbox


class Services:
    """Sandbox and judge of a run.

    Args:
        config: config block ``reward``.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    @cached_property
    def sandbox(self) -> Sandbox | FusionSandbox:
        """Sandbox for programs."""
        local, fusion = self.config.sandbox, self.config.sandbox_fusion
        if fusion.url is not None:
            limits = Limits(seconds=local.timeout, memory_mb=fusion.memory_limit_mb)
            return FusionSandbox(fusion.url, limits=limits, max_concurrent=fusion.max_concurrent)
        limits = Limits(seconds=local.timeout, memory_mb=local.memory_mb, processes=local.processes)
        return Sandbox(backend=local.backend, require=local.require, limits=limits, max_concurrent=local.max_concurrent)

    @cached_property
    def judge(self) -> Judge:
        """Judge of responses."""
        return Judge(self.config.judge, timeout=self.config.timeout)

    def close(self) -> None:
        """Close the created services."""
        for name in ("sandbox", "judge"):
            if name in vars(self):
                getattr(self, name).close()
