"""Client side of engines in separate processes. The server side is :mod:`hone.generation.server`."""

from __future__ import annotations

from hone.generation.remote.engine import ServedEngine
from hone.generation.remote.messages import Connection, EngineLost
from hone.generation.remote.process import EngineProcess, LaunchPlan

__all__ = ["Connection", "EngineLost", "EngineProcess", "LaunchPlan", "ServedEngine"]
