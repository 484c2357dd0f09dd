"""vLLM's layer-by-layer reload, for layers whose weights are not simply copied: experts and packed layouts.

The reload collects the weights of each layer and rebuilds the layer when they are complete. It observes the loaders of
parameters; some models (GPT-OSS) copy to parameters without their loaders, so the reload would restore the old weights.
Here such a copy counts as a load.
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

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  the function that a mode gets for ``tensor.data``


class Reload:
    """One weight sync, from the first weight to :meth:`finish`, which must be called even after an error.

    Args:
        model: of the engine; its layers wait for their weights from now on.
    """

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
