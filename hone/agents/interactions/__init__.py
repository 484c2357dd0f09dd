"""Simulated users, which answer the model's turns in a conversation."""

from hone.agents.interactions.base import Interaction, Reply

__all__ = ["Interaction", "Reply"]
