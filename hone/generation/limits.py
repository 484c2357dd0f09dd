"""Limits of a generation request: the one place that says which requests an engine can serve.

An endpoint checks a request before it reaches an engine, and every engine checks it once more before the request joins its batch. A
value that a tensor cannot hold, a token without an embedding or text that cannot be encoded would otherwise fail in the middle of a
step that other requests share.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from hone.data.images import key_of
from hone.errors import RequestError
from hone.generation.constraints import check_constraint
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.text import is_valid

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-9, 1e6
"""Bounds of a temperature above 0: logits divided by it stay finite in float32."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
MAX_PENALTY = 2.0
"""Bound on the size of presence and frequency penalties, as in OpenAI's API."""
MAX_BIAS, MAX_BIASES = 100.0, 1024
"""Bound on the size of a logit bias, and maximum number of biased tokens."""
MAX_TOP_LOG_PROBS = 20
MAX_TOP_K = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
"""Seeds that every engine's random generator accepts."""
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024
"""Maximum number of stop strings, and of characters in each: every step searches for all of them."""


def check_sampling(sampling: SamplingParams) -> None:
    """Check that sampling parameters can be used: finite, in range, and valid text."""
    temperature, penalty = sampling.temperature, sampling.repetition_penalty
    if temperature != 0:
        _check_range("temperature", temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, or_zero=True)
    _check_range("top_k", sampling.top_k, -1, MAX_TOP_K)
    _check_range("top_p", sampling.top_p, 0, 1)
    _check_range("min_p", sampling.min_p, 0, 1)
    _check_range("repetition_penalty", penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _check_range("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("top_log_probs", sampling.top_log_probs, 0, MAX_TOP_LOG_PROBS)
    _check_bias(sampling.logit_bias)
    if sampling.top_p == 0:
        raise _unusable("top_p=0 leaves no token", "the tokens of this total probability stay", "top_p > 0", "top_p")
    if not all(0 <= token < 2**63 for token in sampling.stop_token_ids):
        raise _unusable(
            f"stop_token_ids={sampling.stop_token_ids} has an id outside the range of tokens",
            "ids are not negative and fit in 64 bits",
            "stop_token_ids of tokens in the vocabulary",
            "stop_token_ids",
        )
    _check_stops(sampling.stop)
    if sampling.constraint is not None:
        check_constraint(sampling.constraint)


def _check_bias(bias: tuple[tuple[int, float], ...]) -> None:
    if len(bias) > MAX_BIASES or len({token for token, _ in bias}) < len(bias):
        raise _unusable(
            f"logit_bias has {len(bias)} entries",
            "each is added to one logit in every step",
            f"one entry per token, for at most {MAX_BIASES} tokens",
            "logit_bias",
        )
    for _, value in bias:
        _check_range("logit_bias", value, -MAX_BIAS, MAX_BIAS)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        longest = max(map(len, stops))
        raise _unusable(
            f"{len(stops)} stop strings, the longest of {longest} characters",
            "every step searches for all of them",
            f"at most {MAX_STOPS} stop strings of {MAX_STOP_CHARACTERS} characters",
            "stop",
        )
    for stop in stops:
        if not stop or not is_valid(stop):
            problem = "a lone surrogate, which cannot be encoded" if stop else "no character"
            raise _unusable(f"stop string {stop!r} has {problem}", "no reply can contain it", "remove it", "stop")


def _check_range(name: str, value: float, low: float, high: float, *, or_zero: bool = False) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        zero = "0, or " if or_zero else ""
        raise _unusable(
            f"{name}={value} is out of range",
            "the distribution to sample from would not be finite",
            f"{zero}{low:g} <= {name} <= {high:g}",
            name,
        )


def _unusable(what: str, why: str, fix: str, field: str) -> RequestError:
    return RequestError(what, why=why, fix=fix, field=field)


@dataclass(frozen=True)
class RequestLimits:
    """Limits that follow from a model and its engine."""

    max_model_len: int  # maximum of tokens in prompt and response
    max_cache_tokens: int | None = None  # capacity of the cache; None sets none
    vocabulary: int | None = None  # number of tokens with an embedding; None leaves the check to the engine
    reads_images: bool = False  # whether engine and model read images

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that an engine cannot serve.

        Raises:
            RequestError: it has no prompt, no tokens to generate, more tokens than model or cache allow, a token outside the
                vocabulary, or sampling parameters that cannot be used.
        """
        self._check_lengths(request)
        self._check_tokens(request)
        check_sampling(request.sampling)
        if not MIN_SEED <= request.seed <= MAX_SEED:
            raise _unusable(
                "the seed is out of range",
                "random generators have 64 bits",
                f"{MIN_SEED} <= seed <= {MAX_SEED}",
                "seed",
            )

    def _check_lengths(self, request: GenerationRequest) -> None:
        prompt, response = len(request.prompt_ids), request.sampling.max_tokens
        name, need = f"request '{request.request_id}'", prompt + response
        if prompt == 0 or response < 1:
            raise RequestError(
                f"{name} has {prompt} prompt tokens and max_tokens={response}",
                why="generation adds at least one token to a prompt",
                fix="at least one prompt token and max_tokens >= 1",
                field="prompt" if prompt == 0 else "max_tokens",
            )
        if need > self.max_model_len:
            raise RequestError(
                f"{name} needs {need} tokens ({prompt} prompt + {response} response); the engine's limit is "
                f"{self.max_model_len}",
                why="data.max_prompt_length + data.max_response_length limit a sequence",
                fix=f"data.max_response_length={max(1, self.max_model_len - prompt)} for this prompt, or larger limits",
                field="max_tokens",
            )
        if self.max_cache_tokens is not None and need > self.max_cache_tokens:
            raise RequestError(
                f"{name} needs {need} cache tokens ({prompt} prompt + {response} response); the cache has "
                f"{self.max_cache_tokens}",
                why="the request would wait forever",
                fix=f"actor_rollout_ref.rollout.max_cache_tokens={need}",
                field="max_tokens",
            )

    def _check_tokens(self, request: GenerationRequest) -> None:
        name, limit = f"request '{request.request_id}'", self.vocabulary or 2**63
        if request.images and not self.reads_images:
            raise RequestError(
                f"{name} has {len(request.images)} images",
                why="this engine reads text alone",
                fix="a model that reads images, such as Qwen3-VL, and actor_rollout_ref.rollout.name=native or vllm",
                field="images",
            )
        keys = {image.key for image in request.images}
        try:
            array("q", request.prompt_ids)
            text = [token for token in request.prompt_ids if token >= 0 or key_of(token) not in keys]
            smallest, largest = min(text), max(text)
        except (OverflowError, TypeError, ValueError):
            smallest, largest = -1, 2**63
        if smallest < 0 or request.prompt_ids[-1] < 0 or largest >= limit:
            raise RequestError(
                f"{name} has a prompt token outside the vocabulary of {limit} tokens",
                why="it has no embedding",
                fix=f"token ids from 0 to {limit - 1}",
                field="prompt",
            )
        biased = [token for token, _ in request.sampling.logit_bias]
        if biased and not 0 <= min(biased) <= max(biased) < limit:
            raise RequestError(
                f"{name} biases token {max(biased) if min(biased) >= 0 else min(biased)}, of a vocabulary of {limit} tokens",
                why="it has no logit",
                fix=f"logit_bias of tokens from 0 to {limit - 1}",
                field="logit_bias",
            )
