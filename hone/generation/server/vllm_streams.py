"""The random streams of requests in vLLM on a CPU.

A prompt that does not fit into a pass is computed in several. vLLM samples after each, throws away what it sampled before the prompt's
end, and sets the request's generator back; those of a CPU cannot be set back so, and the engine would end. Here a request has its
generator only where what is sampled counts.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from typing import Any


def draw_only_what_counts(runner: Any) -> None:
    """Let the runner (vLLM's ``GPUModelRunner``, which computes on CPUs too) leave the generators of unfinished prompts alone."""
    sample = runner.sample_tokens

    @functools.wraps(sample)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        unfinished = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        apart = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        try:
            return sample(*args, **kwargs)
        finally:
            batch.generators.update(apart)

    runner.sample_tokens = sample_tokens
