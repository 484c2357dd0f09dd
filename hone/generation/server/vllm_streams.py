"""Random streams of requests in vLLM on a CPU.

vLLM computes a long prompt in several passes. It samples after each pass, discards the samples before the prompt's end, and
rewinds the request's generator; CPU generators cannot be rewound that way, and the engine would end. Here a request has its
generator only in the passes whose sample is used.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from typing import Any


def draw_only_what_counts(runner: Any) -> None:
    """Hide the generators of unfinished prompts from the runner (vLLM's ``GPUModelRunner``, used on CPUs too)."""
    sample = runner.sample_tokens

    @functools.wraps(sample)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        unfinished = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        hidden = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        try:
            return sample(*args, **kwargs)
        finally:
            batch.generators.update(hidden)

    runner.sample_tokens = sample_tokens
