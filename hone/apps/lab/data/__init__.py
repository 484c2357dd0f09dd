"""Reports about datasets, and their cleaning."""
