"""The greedy baseline of ReMax: one greedy response a prompt, scored like any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.agents import single_turn
from hone.data.types import Sample, Trajectory
from hone.generation.protocol import Engine, SamplingParams
from hone.rewards.score import Score


async def greedy_baselines(
    samples: Sequence[Sample],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    score: Callable[[Sequence[Trajectory]], Awaitable[list[Score]]],
) -> Tensor:
    """Return the reward of the greedy response to each row's prompt, ``[B]``.

    Every prompt is asked once, however many rows it has. A greedy response is the likeliest token at every place, under
    the training limits on length and stop strings.

    Args:
        samples: the prompt of each row of the batch.
        engine: with the weights that sampled the batch.
        tokenizer: decodes responses.
        sampling: of training; taken at temperature 0, without truncation of the distribution.
        score: scores trajectories, in order.
    """
    prompts = {sample.uid: sample for sample in samples}
    greedy = dataclasses.replace(sampling, temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0)
    episodes = single_turn.play(list(prompts.values()), engine, tokenizer, greedy, n=1, seed_of=lambda uid, index: 0)
    played = sorted([trajectory async for trajectory in episodes], key=lambda trajectory: trajectory.uid)
    totals = {t.uid: found.total for t, found in zip(played, await score(played), strict=True)}
    return torch.tensor([totals[sample.uid] for sample in samples], dtype=torch.float32)
