"""Looking into runs: the viewer, comparisons, sweeps, replay, and what a run's records tell."""
