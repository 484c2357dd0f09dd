"""Environment doctor: finds defects of verifiers, tools and tasks while a run trains.

    every step:  trajectories, scores ──▶ History ──▶ detectors ──▶ findings (log, doctor.jsonl, proposal of a quarantine)
                        └─ some responses ──▶ Prober, in the background ──▶ History

The doctor changes nothing: it only names tasks. ``data.quarantine`` leaves them out.
"""

from hone.rewards.doctor.doctor import EnvironmentDoctor, Finding
from hone.rewards.doctor.history import History

__all__ = ["EnvironmentDoctor", "Finding", "History"]
