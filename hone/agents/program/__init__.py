"""Agents that are programs of their own: all they know is the address of an OpenAI-compatible endpoint."""
