"""Several engine replicas that act as one: :class:`EnginePool` implements the engine protocol.

===============  ====================================================================================================
``replica``      one engine with its state, its load and its counters, and the limit of its requests
``pool``         queue, choice of replica, retries, more or fewer replicas; probes, restarts, the latest weights and
                 admission once they have been checked; the engine protocol
===============  ====================================================================================================
"""

from hone.generation.pool.pool import EnginePool
from hone.generation.pool.replica import Replica, ReplicaState

__all__ = ["EnginePool", "Replica", "ReplicaState"]
