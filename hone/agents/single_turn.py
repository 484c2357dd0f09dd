"""The simplest episode: one prompt, one response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from transformers import PreTrainedTokenizerBase

from hone.data.types import Sample, Trajectory
from hone.generation.protocol import Completion, Engine, GenerationRequest, SamplingParams


async def play(
    samples: Sequence[Sample],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    *,
    n: int,
    seed_of: Callable[[str, int], int],
) -> AsyncIterator[Trajectory]:
    """Ask every sample ``n`` times; yield trajectories as they finish.

    Args:
        samples: rows with distinct uids.
        seed_of: seed of response ``index`` to the row ``uid``.
    """
    asked: dict[str, tuple[Sample, int]] = {}
    requests: list[GenerationRequest] = []
    for sample in samples:
        for index in range(n):
            name = f"{sample.uid}#{index}"
            asked[name] = (sample, index)
            requests.append(GenerationRequest(name, sample.prompt_ids, sampling, seed_of(sample.uid, index)))
    async for completion in engine.generate(requests):
        sample, index = asked[completion.request_id]
        yield _trajectory(sample, index, completion, tokenizer)


def _trajectory(sample: Sample, index: int, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Trajectory:
    return Trajectory(
        uid=sample.uid,
        index=index,
        prompt_ids=sample.prompt_ids,
        response_ids=completion.token_ids,
        response_mask=[1] * len(completion.token_ids),
        rollout_log_probs=completion.log_probs,
        sampling_log_probs=completion.sampling_log_probs,
        text=tokenizer.decode(completion.token_ids, skip_special_tokens=True),  # type: ignore[arg-type]
        stop_reason=completion.stop_reason,
        sample=sample,
        weight_versions=completion.weight_versions,
        seconds=completion.seconds,
    )
