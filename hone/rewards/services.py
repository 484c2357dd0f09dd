"""What scorers may ask outside the trainer, made when it is first needed."""

from __future__ import annotations

from functools import cached_property

from hone.config.reward import RewardConfig
from hone.rewards.judge import Judge
from hone.rewards.sandbox import Limits, Sandbox
from hone.rewards.sandbox.fusion import FusionSandbox


class Services:
    """The sandbox and the judge of a run.

    Args:
        config: the block ``reward``.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    @cached_property
    def sandbox(self) -> Sandbox | FusionSandbox:
        """Where programs run."""
        here, there = self.config.sandbox, self.config.sandbox_fusion
        if there.url is not None:
            limits = Limits(seconds=here.timeout, memory_mb=there.memory_limit_mb)
            return FusionSandbox(there.url, limits=limits, max_concurrent=there.max_concurrent)
        limits = Limits(seconds=here.timeout, memory_mb=here.memory_mb, processes=here.processes)
        return Sandbox(backend=here.backend, limits=limits, max_concurrent=here.max_concurrent)

    @cached_property
    def judge(self) -> Judge:
        """Who judges."""
        return Judge(self.config.judge, timeout=self.config.timeout)

    def close(self) -> None:
        """Close what was made."""
        for name in ("sandbox", "judge"):
            if name in vars(self):
                getattr(self, name).close()
