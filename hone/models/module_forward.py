"""The forward pass for generation of any model, by its own module: the reference for the faster executors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hone.models.attention.context import AttentionContext
from hone.models.experts import expert_routers
from hone.models.images import decoder_inputs


class Forward(Protocol):
    """A forward pass for generation."""

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Enter the mode in which ``hidden`` and ``logits`` may be called."""
        ...

    def release(self) -> None:
        """Drop copies of weights; call it when the weights have changed."""
        ...

    def hidden(self, ids: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden states ``[batch, length, H]`` of ``ids [batch, length]``; the context receives keys and values."""
        ...

    def logits(self, ids: Tensor, context: AttentionContext) -> Tensor:
        """Logits ``[batch, length, V]``."""
        ...


class ModuleForward:
    """Forward pass of any causal language model by its own module, with matmuls in ``dtype``."""

    def __init__(self, causal: nn.Module, *, dtype: torch.dtype) -> None:
        self._causal, self._dtype = causal, dtype
        self._decoder: Any = causal.get_decoder()  # type: ignore[operator]
        self._routers = None

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Enter the compute mode: no gradients, autocast in a narrow dtype.

        Autocast keeps its narrow copy of a weight for the length of the block only if the weight requires a gradient, so
        within the block all weights do.
        """
        narrow = self._dtype != torch.float32
        parameters = list(self._causal.parameters())
        frozen = [p for p in parameters if not p.requires_grad] if narrow else []
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            with torch.no_grad(), torch.autocast(parameters[0].device.type, self._dtype, narrow):
                yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def release(self) -> None:
        """Nothing is copied, so nothing is dropped."""

    def keep_experts(self) -> bool:
        """Pass the experts of every token to ``context.keep_experts`` from now on; return False if the model has no routers."""
        self._routers = expert_routers(self._causal)
        return self._routers is not None

    def hidden(self, ids: Tensor, context: AttentionContext) -> Tensor:
        return self._run(self._decoder, ids, context).last_hidden_state

    def logits(self, ids: Tensor, context: AttentionContext) -> Tensor:
        if not getattr(self._decoder, "hidden_size_per_layer_input", 0):
            return self._run(self._causal, ids, context).logits
        # Gemma 4 takes a sampled mark of an image for padding; its decoder of text does not
        states = self._run(self._decoder, ids, context).last_hidden_state
        logits = self._causal.get_output_embeddings()(states)  # type: ignore[operator]
        cap = self._decoder.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _run(self, module: Any, ids: Tensor, context: AttentionContext) -> Any:
        if self._routers is not None:
            self._routers.record()
        images = getattr(context, "images", None)
        if images is None:
            output = module(input_ids=ids, position_ids=context.position_ids, context=context, use_cache=False)
        else:
            positions = context.position_ids if images.positions is None else images.positions.to(ids.device)
            inputs = decoder_inputs(self._causal, ids, images.by_key)
            output = module(**inputs, position_ids=positions, context=context, use_cache=False)
        if self._routers is not None:
            keep: Any = context
            keep.keep_experts(self._routers.take_recorded().view(*ids.shape, -1))
        return output
