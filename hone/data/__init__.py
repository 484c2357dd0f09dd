"""Data of a run: batches, trajectories, datasets, chat rendering, samplers and task makers."""
