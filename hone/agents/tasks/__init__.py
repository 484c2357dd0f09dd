"""Multi-turn tasks of `hone data make`. Importing this package registers them."""

from hone.agents.tasks import book, calculator, environment, search_qa, verifiers

__all__ = ["book", "calculator", "environment", "search_qa", "verifiers"]
