"""The oracle of an update: a saved micro-batch recomputed by the plain path, and the first place where the run diverges."""
