"""Agents that are separate programs and use only an OpenAI-compatible endpoint."""
