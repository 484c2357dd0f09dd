"""Training backend of a model in one process."""

from hone.training.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]
