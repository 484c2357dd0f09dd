"""Training backend that builds models with Megatron-core (extra ``megatron``): tensor, pipeline and expert parallelism."""
