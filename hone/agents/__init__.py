"""How an episode is played: from a dataset row to a trajectory."""
