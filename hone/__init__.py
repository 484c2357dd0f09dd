"""Hone trains language models with reinforcement learning, from a laptop CPU to a cluster of GPUs.

Importing this package is cheap: it loads neither torch nor transformers. Import the package you need, for example
``from hone.algorithms import advantage_estimators`` or ``from hone.data import Batch``.
"""

__version__ = "0.1.0"
