"""Stored steps: compute again what a step of a run made of its rollouts, or what another configuration would have made."""
