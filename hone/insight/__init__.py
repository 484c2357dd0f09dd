"""Observation of a run: metrics, trackers, the run directory and the always-on invariants."""
