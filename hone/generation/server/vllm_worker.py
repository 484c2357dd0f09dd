"""Hone's extension of vLLM's worker processes, which loads weights and reports a second log-prob.

vLLM combines it with its worker class; every worker of a tensor-parallel engine runs each method.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner

from hone.errors import GenerationError
from hone.generation.protocol import require_weights
from hone.generation.remote.transports import Mappings, open_chunk
from hone.generation.server.processes import die_with_parent
from hone.generation.server.vllm_cpu_weights import UnsupportedCopy, WeightRoutes, weight_routes

_GREEDY = 1e-5
"""Temperature below which vLLM samples greedily."""


def report_both(model_runner: Any) -> None:
    """Let the samplers of a worker report both log-probs: under the raw policy, and under the distribution sampled from.

    vLLM reports one per token, here of the distribution sampled from. The other one is computed from the same logits, before
    constraint, penalties, top-k and the other filters. Its float32 bits are sent in place of the token's rank, which Hone
    does not use. Other tokens that are reported are the likeliest ones under the raw policy.

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


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  the function that a mode gets for ``tensor.data``


class Reload:
    """One weight sync, from the first weight to :meth:`finish`, which must be called even after an error."""

    def __init__(self, model: Any) -> None:
        self._model = model
        if current_platform.is_cpu():
            _pack_experts_again(model)
        initialize_layerwise_reload(model)
        self._copies = _CopiesAreLoads(model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights, which are kept until their layers are complete; return the names of the loaded parameters."""
        with self._copies:
            return self._model.load_weights(weights)

    def finish(self, model_config: Any) -> list[str]:
        """Rebuild the last layers; return the names of incomplete ones."""
        missing = [
            name
            for name, module in self._model.named_modules()
            if isinstance(module, LinearBase) and _is_incomplete(get_layerwise_info(module))
        ]
        finalize_layerwise_reload(self._model, model_config)
        return missing

    def untouched(self, ignored: set[str]) -> list[str]:
        """Return the names of layers without any new weight so far; parameters in ``ignored`` do not count."""
        layers = []
        for name, module in self._model.named_modules():
            parameters = {f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)} - ignored
            info = get_layerwise_info(module)
            if parameters and info.can_load() and not info.load_numel and not is_deferred_attention_layer(module):
                layers.append(name)
        return layers


class _CopiesAreLoads(TorchFunctionMode):
    """Mode in which ``parameter.copy_(weight)`` and ``parameter.data.copy_(weight)`` load the weight of a waiting parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._places = {
            id(parameter): (module, name)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.is_meta
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _DATA and self._awaits(args[0]):
            return args[0]
        if func is Tensor.copy_ and self._awaits(args[0]):
            module, name = self._places[id(args[0])]
            args[0].weight_loader = default_weight_loader
            make_online_process_loader(module, name)(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _awaits(self, tensor: Tensor) -> bool:
        """Return whether a parameter waits for its weight; False inside a loader, whose copies vLLM counts itself."""
        return id(tensor) in self._places and tensor.is_meta and not _get_current_dispatch_mode_stack()


def _pack_experts_again(model: nn.Module) -> None:
    """Pack experts after each load: on a CPU they compute from packed copies, which vLLM makes only at the first load."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and "process_weights_after_loading" not in vars(method):
            method.process_weights_after_loading = partial(_process_and_pack, method.process_weights_after_loading)


def _process_and_pack(process: Callable[[Any], None], layer: Any) -> None:
    process(layer)
    layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _is_incomplete(info: Any) -> bool:
    return info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0)


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


die_with_parent()


class HoneWorker:
    """Methods that the server calls by name on every worker; ``model_runner`` is an attribute of the worker."""

    model_runner: Any

    def hone_prepare(self) -> None:
        """Prepare the worker, once before the first request."""
        report_both(self.model_runner)
        if current_platform.is_cpu():
            draw_only_what_counts(self.model_runner)
        model = self.model_runner.get_model()
        self._hone_tied = {name for name, _ in _tied_heads(model)}
        self._hone_expected = {name for name, _ in model.named_parameters()} - self._hone_tied
        self._hone_routes = weight_routes(model, self._hone_tied)
        self._hone_reload: Reload | None = None
        self._hone_mappings = Mappings()

    def hone_begin_weights(self) -> None:
        """Start a weight sync."""
        if self._hone_reload is not None:  # the previous weight sync failed: drop the collected weights of its layers
            self._hone_reload.finish(self.model_runner.model_config)
            self._hone_reload = None
        self._hone_copied = False
        if self._hone_routes is not None:
            self._hone_routes.begin()

    def hone_load_weights(self, chunk: dict[str, Any]) -> None:
        """Load a chunk.

        Raises:
            GenerationError: previous weights were copied directly, which is not possible for these.
        """
        with open_chunk(chunk, self._hone_mappings) as tensors:
            routes = self._routes_for(tensors)
            if routes is not None:
                routes.load(tensors)
            else:
                assert self._hone_reload is not None
                self._hone_arrived |= self._hone_reload.load((name, tensor.clone()) for name, tensor in tensors)
        self._hone_copied = True

    def _routes_for(self, tensors: list[tuple[str, Tensor]]) -> WeightRoutes | None:
        """Return the routes of these weights; None after starting vLLM's layer-by-layer reload for them."""
        if self._hone_routes is not None:
            try:
                self._hone_routes.record(tensors)
                return self._hone_routes
            except UnsupportedCopy as error:
                self._hone_routes = None
                if self._hone_copied:
                    raise GenerationError(
                        f"vLLM does not just copy one of these weights ({error})",
                        why="previous weights were copied directly, but vLLM's reload needs all weights",
                        fix="send all weights of the version again",
                    ) from error
        if self._hone_reload is None:
            self._hone_arrived: set[str] = set()
            self._hone_reload = Reload(self.model_runner.get_model())
        return None

    def hone_finish_weights(self) -> None:
        """Complete the weight sync: update what is derived from weights.

        Raises:
            GenerationError: some weights have not arrived; vLLM would keep the old ones.
        """
        model = self.model_runner.get_model()
        if self._hone_reload is not None:
            untouched = self._hone_reload.untouched(ignored=self._hone_tied)
            incomplete = self._hone_reload.finish(self.model_runner.model_config)
            missing = {*incomplete, *(self._hone_expected - self._hone_arrived)}
            self._hone_reload = None
        else:
            missing = self._hone_expected if self._hone_routes is None else self._hone_routes.missing()
            untouched = []
        _renew_packed_heads(model)
        require_weights(self._hone_expected, missing)
        if untouched:
            raise GenerationError(
                f"vLLM did not load new weights into {len(untouched)} layers of this model, such as '{untouched[0]}'",
                why="the model's loader bypasses vLLM's reload, which restores old weights: it would sample from a mixture",
                fix="actor_rollout_ref.rollout.name=native",
            )


def _tied_heads(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the output heads with the embedding's weight, each with the name of its weight."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return []
    return [(f"{name}.weight", module) for name, module in model.named_modules() if isinstance(module, ParallelLMHead)]


def _renew_packed_heads(model: nn.Module) -> None:
    """Update the packed copies of output heads on a CPU.

    Embeddings and heads have a packed copy besides their weight. A reload does not update that of a tied head; that of an
    embedding with a separate head is never used, and is removed.
    """
    embedding = next((module for name, module in model.named_modules() if name.endswith("embed_tokens")), None)
    for _, head in _tied_heads(model):
        if embedding is not None:
            head.weight = embedding.weight
    packed: list[Any] = [
        m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and hasattr(m, "cpu_linear")
    ]
    heads = [module for module in packed if isinstance(module, ParallelLMHead)]
    for module in packed:
        if heads and module not in heads:
            del module.cpu_linear
            continue
        module.cpu_linear = None  # its memory can be reused
        module.quant_method.process_weights_after_loading(module)
