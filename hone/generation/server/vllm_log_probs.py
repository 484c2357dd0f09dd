"""Both log-probs of every token that vLLM samples: under the raw policy, and under what was sampled from.

vLLM reports one log-prob a token, here that of the distribution sampled from. The other one is computed from the same logits, before
top-k and the like, and travels as the bits of a float32 in the place of the token's rank, which nobody asks for.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from hone.errors import GenerationError

_GREEDY = 1e-5
"""vLLM takes temperatures below this as 0."""


def report_both(model_runner: Any) -> None:
    """Have the samplers of a worker report both.

    Raises:
        GenerationError: it has others than those that are known.
    """
    sampler, checker = model_runner.sampler, getattr(model_runner, "rejection_sampler", None)
    for found, known in ((sampler, Sampler), (checker, RejectionSampler | None)):
        if not isinstance(found, known):
            raise GenerationError(f"this vLLM samples with {type(found).__name__}, which Hone does not know")
    sampler.forward = _of_sampler(sampler.forward)
    if checker is not None:
        checker.forward = _of_checker(checker.forward)
        if current_platform.is_cpu():
            rejection_sampler.expand_batch_to_tokens = _expanded
            rejection_sampler.apply_sampling_constraints = _unless_empty(rejection_sampler.apply_sampling_constraints)


def _of_sampler(forward: Any) -> Any:
    """The sampler of one token a request."""

    def sample(logits: Tensor, sampling_metadata: Any, predict_bonus_token: bool = False, **kwargs: Any) -> Any:
        if predict_bonus_token:  # called by the sampler that checks drafts, which reports the token itself
            return forward(logits, sampling_metadata, predict_bonus_token=True, **kwargs)
        policy = _policy_log_probs(logits, sampling_metadata.temperature)
        output = forward(logits, sampling_metadata, **kwargs)
        return _with(output, lambda: policy.gather(1, output.sampled_token_ids[:, :1].long())[:, 0])

    return sample


def _of_checker(forward: Any) -> Any:
    """The sampler that checks drafts (speculative decoding): of each request it has the logits behind every drafted token and
    behind the token before them, and it samples as many tokens as it accepts drafts, and one.
    """

    def sample(metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        counts = torch.tensor(metadata.num_draft_tokens, device=logits.device) + 1
        temperature = sampling_metadata.temperature
        if temperature is not None:
            temperature = temperature.repeat_interleave(counts)
        policy = _policy_log_probs(logits, temperature)
        output = forward(metadata, draft_probs, logits, sampling_metadata)
        tokens = output.sampled_token_ids  # [requests, longest draft + 1], -1 behind the last

        def drawn() -> Tensor:
            first = counts.cumsum(0) - counts
            rows = first[:, None] + torch.arange(tokens.shape[1], device=logits.device)
            log_probs = policy[rows.flatten().clamp(max=len(policy) - 1)]
            return log_probs.gather(1, tokens.flatten().clamp(min=0)[:, None].long())[:, 0]

        return _with(output, drawn)

    return sample


def _expanded(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Each request's number, once for each of its tokens. vLLM 0.32.0 does this on a CPU with a function for 64-bit integers, which
    fills a copy of the result: temperature, top-k and top-p of drafts are then whatever was in memory.
    """
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return values.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)), output_size=num_tokens)


def _unless_empty(constrain: Any) -> Any:
    """Temperature, top-k and top-p of drafts, where there are drafts: with top-k vLLM 0.32.0 asks on a CPU for the largest of none."""

    def constrained(logits: Tensor, *arguments: Any) -> Tensor:
        return constrain(logits, *arguments) if len(logits) else logits

    return constrained


def _with(output: Any, policy: Any) -> Any:
    """The output with log-probs under the policy in the place of ranks, if log-probs are asked for at all."""
    reported = output.logprobs_tensors
    if reported is not None:
        ranks = policy().float().view(torch.int32).to(reported.selected_token_ranks.dtype)
        output.logprobs_tensors = reported._replace(selected_token_ranks=ranks)
    return output


def _policy_log_probs(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Of every token, [rows, vocabulary]; None is greedy."""
    scores = logits.float()
    if temperature is not None:
        scores = scores / torch.where(temperature < _GREEDY, 1.0, temperature)[:, None]
    return scores.log_softmax(-1)
