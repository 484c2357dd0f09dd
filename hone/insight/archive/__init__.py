"""Archive of rollouts: one parquet file per step, exact to the token."""
