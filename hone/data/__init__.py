"""What goes in: batches, trajectories, datasets, chat rendering, samplers and task makers."""
