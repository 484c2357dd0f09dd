"""vLLM's own reload of weights, layer by layer, for the layers whose weights are not simply copied: experts, packed kinds.

It lets each layer keep what it gets until that is whole, and makes the layer anew then. It knows what a layer gets by the loaders
of its parameters; some models (GPT-OSS) copy into parameters past them, which it would take for nothing and put the old weights back.
Here such a copy is a load.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  what a mode is told when somebody reads ``tensor.data``


class Reload:
    """One update, from its first weight to :meth:`finish`, which must be called however it goes.

    Args:
        model: of the engine; its layers await their weights from now on.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        if current_platform.is_cpu():
            _pack_experts_again(model)
        initialize_layerwise_reload(model)
        self._copies = _CopiesAreLoads(model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Hand on weights, which are kept until their layers are whole; returns the names of the parameters they went to."""
        with self._copies:
            return self._model.load_weights(weights)

    def finish(self, model_config: Any) -> list[str]:
        """Make the last layers anew; returns the names of those of which only parts have arrived."""
        missing = [
            name
            for name, module in self._model.named_modules()
            if isinstance(module, LinearBase) and _is_part(get_layerwise_info(module))
        ]
        finalize_layerwise_reload(self._model, model_config)
        return missing

    def untouched(self, but: set[str]) -> list[str]:
        """Names of layers that have got nothing so far, without parameters of the names ``but``."""
        found = []
        for name, module in self._model.named_modules():
            own = {f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)} - but
            info = get_layerwise_info(module)
            if own and info.can_load() and not info.load_numel and not is_deferred_attention_layer(module):
                found.append(name)
        return found


class _CopiesAreLoads(TorchFunctionMode):
    """While it is on, ``parameter.copy_(weight)`` and ``parameter.data.copy_(weight)`` load the weight into a parameter that awaits it."""

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
        """Not within a loader, which copies itself, and in which vLLM counts what it copies."""
        return id(tensor) in self._places and tensor.is_meta and not _get_current_dispatch_mode_stack()


def _pack_experts_again(model: nn.Module) -> None:
    """On a CPU experts compute from packed copies, which vLLM makes when it first loads them and not when they are loaded again."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and "process_weights_after_loading" not in vars(method):
            method.process_weights_after_loading = partial(_processed_and_packed, method.process_weights_after_loading)


def _processed_and_packed(process: Callable[[Any], None], layer: Any) -> None:
    process(layer)
    layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _is_part(info: Any) -> bool:
    return info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0)
