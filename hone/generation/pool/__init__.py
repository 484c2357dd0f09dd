"""Several engine replicas that act as one: :class:`EnginePool` implements the engine protocol.

===============  ====================================================================================================
``replica``      one engine with its state, its load and its counters, and the limit of its requests
``pool``         queue, choice of replica, retries, more or fewer replicas; the engine protocol
``supervision``  probes, restarts, admission after the weights have been checked; the latest weights for replicas that restart
===============  ====================================================================================================
"""

from hone.generation.pool.pool import EnginePool
from hone.generation.pool.replica import Replica, ReplicaState

__all__ = ["EnginePool", "Replica", "ReplicaState"]
