"""Sandbox for untrusted programs: model-written code, for rewards and tools.

>>> from hone.rewards.sandbox import run
>>> result = await run("print(6 * 7)")                                  # doctest: +SKIP
>>> result.stdout                                                       # doctest: +SKIP
'42\\n'
"""

from hone.rewards.sandbox.limits import Ending, Limits, Result
from hone.rewards.sandbox.runner import Sandbox, run

__all__ = ["Ending", "Limits", "Result", "Sandbox", "run"]
