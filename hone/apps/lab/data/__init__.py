"""Reports about datasets and chat templates, and the cleaning of data."""
