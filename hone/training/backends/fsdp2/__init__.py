"""Training backend of a model that is sharded by FSDP2, tensor, sequence and expert parallelism."""
