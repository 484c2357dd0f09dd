"""Hone's extension of vLLM's worker processes, which loads weights and reports a second log-prob.

vLLM combines it with its worker class; every worker of a tensor-parallel engine runs each method.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

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

from hone.errors import GenerationError
from hone.generation.remote.transports import Mappings, open_chunk
from hone.generation.server.processes import die_with_parent
from hone.generation.server.vllm_log_probs import report_both
from hone.generation.server.vllm_weights import UnsupportedCopy, WeightRoutes, weight_routes

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
            missing = sorted({*incomplete, *(self._hone_expected - self._hone_arrived)})
            self._hone_reload = None
        else:
            missing = sorted(self._hone_routes.missing() if self._hone_routes is not None else self._hone_expected)
            untouched = []
        _renew_packed_heads(model)
        if missing:
            raise GenerationError(
                f"{len(missing)} of {len(self._hone_expected)} weights have not arrived, such as '{missing[0]}'",
                why="the engine would sample from a mixture of two policies",
                fix="send every parameter of the policy",
            )
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
