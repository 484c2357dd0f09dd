"""Training backend that builds models with Megatron-core (extra ``megatron``): tensor, pipeline and expert parallelism."""

from __future__ import annotations

import warnings

# Megatron-core reports at every import and start what it does without Transformer Engine and Apex, which this backend does not use,
# and calls collectives of torch by names that torch has replaced.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", r".*(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning)
