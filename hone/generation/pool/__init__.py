"""Several engine replicas that act as one: :class:`EnginePool` implements the engine protocol.

===============  ====================================================================================================
``replica``      one engine with its state, its load and its counters
``concurrency``  limit of requests per replica, from the time that they wait in it
``pool``         queue, choice of replica, retries; the engine protocol
``supervision``  probes, restarts, and admission after the weights have been checked
``resizing``     more or fewer replicas during a run
``weights``      the latest weights, kept for replicas that restart
===============  ====================================================================================================
"""

from hone.generation.pool.pool import EnginePool
from hone.generation.pool.replica import Replica, ReplicaState

__all__ = ["EnginePool", "Replica", "ReplicaState"]
