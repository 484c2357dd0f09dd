"""Gates: may a model be released? A suite of checks on held-out data, and their verdict."""
