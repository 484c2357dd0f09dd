"""Environments that answer the model's turns, and adapters for other libraries' environments."""

from hone.agents.environments.base import ENVIRONMENTS, Environment, Step, make_environment

__all__ = ["ENVIRONMENTS", "Environment", "Step", "make_environment"]
