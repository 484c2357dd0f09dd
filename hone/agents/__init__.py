"""Code that plays episodes: from a dataset row to a trajectory."""
