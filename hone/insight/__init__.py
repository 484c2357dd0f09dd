"""How you see it: metrics, trackers, the run directory and the always-on invariants."""
