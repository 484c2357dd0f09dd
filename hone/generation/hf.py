"""Plain transformers `generate`: the slow reference implementation for the native engine."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hone.data.types import StopReason
from hone.errors import RequestError
from hone.generation import ENGINES
from hone.generation.grammars import Grammars, RowGrammar
from hone.generation.limits import RequestLimits
from hone.generation.native.sampler import never_sampled
from hone.generation.protocol import (
    Alternatives,
    Completion,
    Engine,
    EngineDescription,
    GenerationRequest,
    SamplingParams,
)
from hone.insight import activity
from hone.models.heads import autocast
from hone.models.routing import attention_of

Processor = Callable[[Tensor, Tensor], Tensor]
"""Returns the scores of the next token, from the tokens before it and the model's scores."""


class HuggingFaceEngine(Engine):
    """One `generate` call per request, without batching and sharing: nothing runs or is cached between two completions."""

    def __init__(
        self,
        model: nn.Module,  # a causal language model
        tokenizer: PreTrainedTokenizerBase,  # for stop strings
        *,
        device: torch.device,
        dtype: str,  # compute dtype: float32, bfloat16 or float16
        max_num_seqs: int,  # not used: requests run one by one
        max_cache_tokens: int | None,  # not used: transformers creates a cache for each request
        max_model_len: int,  # maximum of tokens in prompt and response
    ) -> None:
        del max_num_seqs, max_cache_tokens
        self.model, self.tokenizer, self.device, self.dtype = model, tokenizer, device, dtype
        self._causal: Any = getattr(model, "get_base_model", lambda: model)()
        vocabulary: int = self._causal.get_input_embeddings().weight.shape[0]
        self._limits = RequestLimits(max_model_len, vocabulary=vocabulary)
        self._grammars = Grammars(tokenizer, vocabulary)
        self._outside = never_sampled(tokenizer, vocabulary, device)
        self._version = 0
        self._aborted: set[str] | None = set()
        self._stats = {"decode_tokens": 0}

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        for request in requests:
            self._limits.check(request)
            _check_ends(request.sampling)
        grammars = [await self._grammars.start(request.sampling) for request in requests]
        self._aborted = set()
        for request, grammar in zip(requests, grammars, strict=True):
            if self._aborted is None or request.request_id in self._aborted:
                yield Completion(request.request_id, [], [], [], StopReason.ABORTED, (self._version, self._version))
            else:
                completion = self._complete(request, grammar)
                activity.tick()
                yield completion

    def _complete(self, request: GenerationRequest, grammar: RowGrammar | None) -> Completion:
        started, sampling = time.perf_counter(), request.sampling
        ids = torch.tensor([request.prompt_ids], device=self.device)
        with self._transformers_defaults(), torch.no_grad():
            torch.manual_seed(request.seed)
            with autocast(self.device, self.dtype):
                out = self._causal.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    return_dict_in_generate=True,
                    output_logits=True,
                    output_scores=True,
                    use_cache=True,
                    tokenizer=self.tokenizer,
                    logits_processor=self._processors(request, grammar),
                    **generate_arguments(sampling),
                )
        tokens = out.sequences[0, len(request.prompt_ids) :]
        temperature = sampling.temperature or 1.0
        log_probs = _log_probs(out.logits, tokens, temperature)
        drawn = log_probs if sampling.temperature == 0 else _log_probs(out.scores, tokens, 1.0)
        support_sizes, support_ids = _supports(out.scores) if sampling.wants_support else ([], [])
        ids_out = tokens.tolist()
        self._stats["decode_tokens"] += len(ids_out)
        return Completion(
            request.request_id,
            ids_out,
            log_probs,
            drawn,
            _stop_reason(ids_out, sampling, self.tokenizer),
            (self._version, self._version),
            time.perf_counter() - started,
            alternatives=_alternatives(out.logits, sampling),
            support_sizes=support_sizes,
            support_ids=support_ids,
        )

    def _processors(self, request: GenerationRequest, grammar: RowGrammar | None) -> list[Processor]:
        """Return the processors that transformers does not have, in the order of the native engine."""
        sampling, length = request.sampling, len(request.prompt_ids)
        processors: list[Processor] = []
        if sampling.presence_penalty or sampling.frequency_penalty:
            processors.append(functools.partial(_with_count_penalties, sampling, length))
        if grammar is not None:
            processors.append(_GrammarMask(self._grammars, grammar, length))
        if self._outside is not None:
            outside = self._outside
            processors.append(lambda _, scores: scores.masked_fill(outside, float("-inf")))
        return processors

    @contextlib.contextmanager
    def _transformers_defaults(self) -> Iterator[None]:
        """Set evaluation mode, transformers' attention and no sampling defaults; restore all of them afterwards."""
        training, defaults = self.model.training, self._causal.generation_config
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.eval()
        self._causal.generation_config = GenerationConfig()
        try:
            with attention_of(self.model, "eager"), torch.random.fork_rng(devices=devices):
                yield
        finally:
            self._causal.generation_config = defaults
            self.model.train(training)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        del weights, last
        self._version = version

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if request_ids is None:
            self._aborted = None
        elif self._aborted is not None:
            self._aborted.update(request_ids)

    def describe(self) -> EngineDescription:
        return EngineDescription("hf", True, self.dtype, str(self.device), dict(self._stats))


ENGINES.register("hf")(HuggingFaceEngine)


def _with_count_penalties(sampling: SamplingParams, prompt_length: int, ids: Tensor, scores: Tensor) -> Tensor:
    """Return the scores of the next token with presence and frequency penalties subtracted."""
    counts = ids[0, prompt_length:].bincount(minlength=scores.shape[1])
    return scores - (sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0))


class _GrammarMask:
    """Minus infinity for tokens that a constraint does not allow."""

    def __init__(self, grammars: Grammars, grammar: RowGrammar, prompt_length: int) -> None:
        self._grammars, self._grammar, self._accepted = grammars, grammar, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores of the next token, after the grammar has followed the tokens before it."""
        for token in input_ids[0, self._accepted :].tolist():
            self._grammar.accept(token)
        self._accepted = input_ids.shape[1]
        bits, errors = self._grammars.masks([self._grammar])
        if errors:
            raise errors[0]
        allowed = self._grammars.allowed(bits.to(scores.device))
        return scores.masked_fill(~allowed, float("-inf"))


def _check_ends(sampling: SamplingParams) -> None:
    """Check that a constrained response can end."""
    if sampling.constraint is not None and (sampling.ignore_eos or not sampling.stop_token_ids):
        raise RequestError(
            "the engine 'hf' cannot serve a constraint without stop tokens",
            why="transformers samples a token after the constraint is satisfied",
            fix="ignore_eos=false and stop_token_ids of the model, or actor_rollout_ref.rollout.name=native",
            field="constraint",
        )


def generate_arguments(sampling: SamplingParams) -> dict[str, Any]:
    """Return ``sampling`` as arguments of transformers' generate."""
    arguments: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "do_sample": sampling.temperature > 0,
        "repetition_penalty": sampling.repetition_penalty,
        "eos_token_id": None if sampling.ignore_eos else list(sampling.stop_token_ids) or None,
        "pad_token_id": 0,
    }
    if sampling.logit_bias:
        arguments["sequence_bias"] = [[[token], bias] for token, bias in sampling.logit_bias]
    if sampling.stop:
        arguments["stop_strings"] = list(sampling.stop)
    if sampling.temperature > 0:
        arguments |= {
            "temperature": sampling.temperature,
            "top_k": max(0, sampling.top_k),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    return arguments


def _log_probs(steps: Sequence[Tensor], tokens: Tensor, temperature: float) -> list[float]:
    scores = torch.stack([step[0] for step in steps]).float() / temperature
    return scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()


def _alternatives(steps: Sequence[Tensor], sampling: SamplingParams) -> list[Alternatives]:
    if not sampling.top_log_probs:
        return []
    scores = torch.stack([step[0] for step in steps]).float() / (sampling.temperature or 1.0)
    top = scores.log_softmax(-1).topk(min(sampling.top_log_probs, scores.shape[1]))
    return [list(zip(*pair, strict=True)) for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


def _supports(steps: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the number of tokens that could be sampled at each position, and their ids end to end."""
    support = torch.stack([step[0] for step in steps]).isfinite()
    return support.sum(-1).tolist(), support.nonzero()[:, 1].tolist()


def _stop_reason(tokens: list[int], sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> StopReason:
    if not sampling.ignore_eos and tokens and tokens[-1] in sampling.stop_token_ids:
        return StopReason.STOP
    if sampling.stop and any(stop in tokenizer.decode(tokens) for stop in sampling.stop):  # type: ignore[operator]
        return StopReason.STOP
    return StopReason.LENGTH
