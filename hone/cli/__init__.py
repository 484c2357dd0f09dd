"""How you call it: one file a command group."""
