"""Multi-turn tasks of `hone data make`. Importing this package registers them."""

from hone.agents.tasks import calculator, environment, multi_hop, search_qa, verifiers

__all__ = ["calculator", "environment", "multi_hop", "search_qa", "verifiers"]
