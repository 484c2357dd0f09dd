"""The Ray runtime: worker processes, what they keep in the object store, and groups that call them."""
