"""Ray runtime: worker processes, their batches in the object store, and groups that call them."""
