"""Both log-probs of every token that vLLM samples: under the raw policy, and under the distribution sampled from.

vLLM reports one log-prob per token, here of the distribution sampled from. The other one is computed from the same logits,
before constraint, penalties, top-k and the other filters. Its float32 bits are sent in place of the token's rank, which Hone does
not use. Other tokens that are reported are the likeliest ones under the raw policy.
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
from vllm.v1.worker import gpu_model_runner

from hone.errors import GenerationError

_GREEDY = 1e-5
"""Temperature below which vLLM samples greedily."""


def report_both(model_runner: Any) -> None:
    """Let the samplers of a worker report both log-probs.

    Raises:
        GenerationError: the worker has samplers of an unknown class.
    """
    sampler, verifier = model_runner.sampler, getattr(model_runner, "rejection_sampler", None)
    for actual, expected in ((sampler, Sampler), (verifier, RejectionSampler | None)):
        if not isinstance(actual, expected):
            raise GenerationError(f"this vLLM samples with {type(actual).__name__}, which Hone does not support")
    raw = _RawLogits()
    gpu_model_runner.apply_grammar_bitmask = raw.kept_by(gpu_model_runner.apply_grammar_bitmask)
    sampler.forward = _wrap_sampler(sampler.forward, raw)
    if verifier is not None:
        verifier.forward = _wrap_verifier(verifier.forward)
        if current_platform.is_cpu():
            rejection_sampler.expand_batch_to_tokens = _expanded
            rejection_sampler.apply_sampling_constraints = _unless_empty(rejection_sampler.apply_sampling_constraints)


class _RawLogits:
    """Logits of a step before constraints: vLLM masks them in place, before it calls the sampler."""

    def __init__(self) -> None:
        self._logits: Tensor | None = None

    def kept_by(self, mask: Any) -> Any:
        """Wrap the function that masks logits."""

        def masked(scheduler_output: Any, grammar_output: Any, input_batch: Any, logits: Tensor) -> None:
            self._logits = logits.clone()
            mask(scheduler_output, grammar_output, input_batch, logits)

        return masked

    def take(self, logits: Tensor) -> Tensor:
        """Return the raw logits of the step whose logits the sampler has got."""
        raw, self._logits = self._logits, None
        return logits if raw is None else raw


def _wrap_sampler(forward: Any, raw: _RawLogits) -> Any:
    """Wrap the sampler of one token per request."""

    def sample(logits: Tensor, sampling_metadata: Any, predict_bonus_token: bool = False, **kwargs: Any) -> Any:
        if predict_bonus_token:  # called by the verifier of drafts, which reports the token itself
            return forward(logits, sampling_metadata, predict_bonus_token=True, **kwargs)
        policy = _policy_log_probs(raw.take(logits), sampling_metadata.temperature)
        output = forward(logits, sampling_metadata, **kwargs)
        tokens = output.sampled_token_ids[:, :1].long()
        output = _with_policy(output, lambda: policy.gather(1, tokens)[:, 0])
        return _with_likeliest(output, policy, tokens)

    return sample


def _wrap_verifier(forward: Any) -> Any:
    """Wrap the verifier of drafts (speculative decoding).

    For each request it gets the logits after the last token and after every drafted token. It samples the accepted drafts
    and one more token.
    """

    def sample(metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        counts = torch.tensor(metadata.num_draft_tokens, device=logits.device) + 1
        temperature = sampling_metadata.temperature
        if temperature is not None:
            temperature = temperature.repeat_interleave(counts)
        policy = _policy_log_probs(logits, temperature)
        output = forward(metadata, draft_probs, logits, sampling_metadata)
        tokens = output.sampled_token_ids  # [requests, longest draft + 1], padded with -1

        def drawn() -> Tensor:
            first = counts.cumsum(0) - counts
            rows = first[:, None] + torch.arange(tokens.shape[1], device=logits.device)
            log_probs = policy[rows.flatten().clamp(max=len(policy) - 1)]
            return log_probs.gather(1, tokens.flatten().clamp(min=0)[:, None].long())[:, 0]

        return _with_policy(output, drawn)

    return sample


def _expanded(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeat each request's value for each of its tokens.

    On a CPU vLLM 0.32.0 uses a function for 64-bit integers that writes to a copy of the result, so that temperature, top-k
    and top-p of drafts are uninitialised.
    """
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return values.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)), output_size=num_tokens)


def _unless_empty(constrain: Any) -> Any:
    """Skip temperature, top-k and top-p without drafts: with top-k vLLM 0.32.0 takes the maximum of an empty tensor on a CPU."""

    def constrained(logits: Tensor, *arguments: Any) -> Tensor:
        return constrain(logits, *arguments) if len(logits) else logits

    return constrained


def _with_policy(output: Any, policy: Any) -> Any:
    """Put log-probs under the policy in place of ranks, if the output has log-probs."""
    reported = output.logprobs_tensors
    if reported is not None:
        ranks = policy().float().view(torch.int32).to(reported.selected_token_ranks.dtype)
        output.logprobs_tensors = reported._replace(selected_token_ranks=ranks)
    return output


def _with_likeliest(output: Any, policy: Tensor, tokens: Tensor) -> Any:
    """Report the likeliest other tokens under the policy, if a request wants more than the sampled one."""
    reported = output.logprobs_tensors
    if reported is None or reported.logprobs.shape[1] == 1:
        return output
    others = policy.scatter(1, tokens, -torch.inf).topk(reported.logprobs.shape[1] - 1, dim=1)
    ids, log_probs = reported.logprob_token_ids[:, :1], reported.logprobs[:, :1]
    output.logprobs_tensors = reported._replace(
        logprob_token_ids=torch.cat([ids, others.indices.to(ids.dtype)], 1),
        logprobs=torch.cat([log_probs, others.values.to(log_probs.dtype)], 1),
    )
    return output


def _policy_log_probs(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Return log-probs under the policy, ``[rows, vocabulary]``; temperature None is greedy."""
    scores = logits.float()
    if temperature is not None:
        scores = scores / torch.where(temperature < _GREEDY, 1.0, temperature)[:, None]
    return scores.log_softmax(-1)
