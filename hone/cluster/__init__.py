"""Where it runs: the roles of a run and the local runtime that holds them."""
