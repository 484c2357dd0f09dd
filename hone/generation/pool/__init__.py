"""Several replicas of an engine behind one: :class:`EnginePool` speaks the engine protocol.

===============  ====================================================================================================
``replica``      one engine with its state, its load and its counters
``concurrency``  how many requests a replica is given at once, from how long they wait in it
``pool``         queue, choice of replica, retries; the engine protocol
``supervision``  probes, restarts, and admission after the weights have been checked
``weights``      the published weights, kept for replicas that are started again
===============  ====================================================================================================
"""

from hone.generation.pool.pool import EnginePool
from hone.generation.pool.replica import Replica, ReplicaState

__all__ = ["EnginePool", "Replica", "ReplicaState"]
