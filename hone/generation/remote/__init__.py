"""Engines that live in a process of their own: the client's side. The server's side is :mod:`hone.generation.server`."""

from __future__ import annotations

from hone.generation.remote.connection import Connection, EngineLost
from hone.generation.remote.engine import ServedEngine
from hone.generation.remote.process import EngineProcess, LaunchPlan

__all__ = ["Connection", "EngineLost", "EngineProcess", "LaunchPlan", "ServedEngine"]
