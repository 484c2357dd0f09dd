"""The experts that the routers of a mixture of experts choose: recorded while an engine generates, followed when the tokens are trained on.

Engine and trainer compute the same token with other kernels, so a router sometimes chooses other experts in training than it did in
generation, and then the log-probs differ by more than rounding. Following the engine's choice removes that (Rollout Routing Replay,
arXiv:2510.11370). The weights of the chosen experts are those of the trained router, with their gradient.

A router is a module of transformers that takes ``torch.topk`` of its scores (``Qwen3MoeTopKRouter``, ``MixtralTopKRouter``,
``GptOssTopKRouter`` and others). Within its forward pass ``topk`` gives the values of the chosen experts; all else is the module's code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hone.data.ragged import Ragged
from hone.errors import ModelError
from hone.models.inputs import PackedSequences

SCORES, CHOSEN = "router_scores", "chosen_experts"
"""Outputs next to those of the head: what :meth:`ExpertRouters.take_kept` returns."""
UNKNOWN = -1
"""In place of an expert: the engine did not report the choice, and the router makes it."""
_ROUTER = re.compile(r"top_?k_?router$", re.IGNORECASE)
_LAYER = re.compile(r"layers\.(\d+)\.")
_ATTRIBUTE = "_hone_experts"


@dataclass
class RouterCounts:
    """Counts since they were last taken, on the routers' device."""

    chosen: Tensor  # ``[routers, experts]`` tokens that each expert computed
    probabilities: Tensor  # ``[routers, experts]`` sum over the tokens of the softmax of the router's logits
    changed: Tensor  # choices of the engine that the router would not have made
    replayed: Tensor  # choices of the engine that were followed


@dataclass
class ExpertRouters:
    """The routers of one model, which record or follow choices."""

    modules: Sequence[nn.Module]  # the routers, in the order of the layers
    layers: Sequence[int]
    num_layers: int  # layers of the model, those without experts included
    top_k: int  # experts of a token in each
    experts: int
    _followed: Tensor | None = None
    _recorded: list[Tensor] | None = None
    _counts: list[RouterCounts] = field(default_factory=list)
    _keeps: bool = False
    _kept: list[tuple[Tensor, Tensor]] | None = None

    @property
    def width(self) -> int:
        """Choices of one token, of all routers together."""
        return len(self.modules) * self.top_k

    def follow(self, choices: Tensor | None) -> None:
        """Follow ``choices [N, width]`` of the tokens of the next forward passes, until it is called again; None follows none.

        A backward pass that computes layers again needs them too. Some engines report all layers of a model, whatever those without
        experts hold.
        """
        if choices is None:
            self._followed = None
            return
        if choices.shape[1] == self.num_layers * self.top_k != self.width:
            choices = choices.unflatten(1, (self.num_layers, self.top_k))[:, self.layers].flatten(1)
        if choices.shape[1] != self.width:
            raise ModelError(
                f"the engine reported {choices.shape[1]} experts for each token, and the model's {len(self.modules)} routers choose "
                f"{self.width}",
                why="the trainer follows the engine's choice layer by layer",
                fix="actor_rollout_ref.actor.router_replay.mode=disabled, or an engine that serves this model",
                where="actor_rollout_ref.actor.router_replay.mode",
            )
        self._followed = choices.unflatten(1, (len(self.modules), self.top_k))

    def release(self) -> None:
        """Follow, count and keep nothing any more."""
        self._followed, self._counts, self._keeps, self._kept = None, [], False, None

    def record(self) -> None:
        """Begin to record what the routers choose in one forward pass."""
        self._recorded = []

    def take_recorded(self) -> Tensor:
        """Return what the routers chose since :meth:`record`, ``[N, width]`` int16, and stop recording."""
        recorded, self._recorded = self._recorded, None
        assert recorded is not None and len(recorded) == len(self.modules), "one forward pass follows `record`"
        return torch.cat(recorded, 1)

    def count(self, *, keep: bool = False) -> None:
        """Begin to count the tokens of each expert. With ``keep``, :meth:`take_kept` has what the next forward pass decides."""
        self._keeps, self._kept = keep, [] if keep else None
        device = next(self.modules[0].parameters()).device
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        chosen = zeros(len(self.modules), self.experts)
        self._counts = [RouterCounts(chosen, chosen.double(), zeros(()), zeros(()))]

    def take_counts(self) -> RouterCounts:
        """Return the counts since :meth:`count`, and stop counting."""
        (counts,), self._counts = self._counts, []
        return counts

    def take_kept(self, packed: PackedSequences) -> dict[str, Tensor]:
        """Return what the routers decided at the tokens that predict a response token; nothing unless it was to be kept.

        ``SCORES [U, routers, experts]``, positive with a sum of 1 and their gradient, and ``CHOSEN [U, routers, top_k]``.
        """
        kept, self._kept = self._kept, None
        if kept is None:
            return {}
        scores, chosen = (
            torch.stack([packed.of_outputs(part) for part in parts], 1) for parts in zip(*kept, strict=True)
        )
        return {SCORES: scores, CHOSEN: chosen}

    def route(self, number: int, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._followed is None and self._recorded is None and not self._counts:
            return forward(*arguments, **named)
        followed = None if self._followed is None else self._followed[:, number]
        mode = _ChosenExperts(self.experts, self.top_k, followed)
        with mode:
            output = forward(*arguments, **named)
        if mode.choice is None:
            raise ModelError(
                f"the routers of {type(self.modules[number]).__name__} choose experts without torch.topk",
                why="their choice can be neither counted nor followed",
                where="model.path",
                fix="a model whose routers take the topk of their scores, such as Qwen3-MoE, Mixtral or GPT-OSS",
            )
        if self._recorded is not None:
            self._recorded.append(mode.choice.to(torch.int16))
        for counts in self._counts:
            counts.probabilities[number] += output[0].detach().float().softmax(-1).sum(0)
            counts.chosen[number] += torch.bincount(mode.choice.flatten(), minlength=self.experts)
            if mode.changed is not None:
                counts.changed += mode.changed.sum()
                counts.replayed += mode.changed.numel()
        if self._keeps:  # also when a backward pass computes the layer again, which has to save the same tensors
            logits = output[0].float()
            scores = F.normalize(logits.sigmoid(), p=1, dim=-1) if mode.gates else logits.softmax(-1)
            if self._kept is not None:
                self._kept.append((scores, mode.choice))
        return output


def balance_losses(scores: Tensor, chosen: Tensor, mask: Ragged) -> Tensor:
    """Return the balance loss ``[R]`` at the response tokens of some sequences; its mean over the trained ones is a sequence's.

    The sequence-wise loss of DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20), of each router and then the mean of the routers.
    T trained tokens of one sequence have scores s, and the top k of N experts compute each of them::

        f_i = N / (k T) x tokens that expert i computes     P_i = mean of s_i / sum_j s_j     loss = sum_i f_i P_i

    It is 1 where the load is even, and N / k where the same k experts get all tokens and scores. f has no gradient.

    Args:
        scores: ``[R, routers, experts]``, which add up to 1.
        chosen: ``[R, routers, top_k]`` the experts that compute each token.
        mask: 1 on trained tokens.
    """
    trained = mask.values.to(scores)
    row = torch.arange(len(mask), device=scores.device).repeat_interleave(mask.lengths.to(scores.device))
    hits = torch.zeros_like(scores).scatter_(2, chosen, trained[:, None, None].expand(chosen.shape))
    counts = scores.new_zeros(len(mask), *scores.shape[1:]).index_add_(0, row, hits)
    tokens = scores.new_zeros(len(mask)).index_add_(0, row, trained).clamp(min=1)
    share = counts * scores.shape[2] / (chosen.shape[2] * tokens[:, None, None])
    return (scores * share[row]).sum(-1).mean(-1)


class _ChosenExperts(TorchFunctionMode):
    """Within the block ``torch.topk`` over all experts takes the chosen ones, where they are known."""

    def __init__(self, experts: int, top_k: int, followed: Tensor | None) -> None:
        super().__init__()
        self._experts, self._top_k, self._followed = experts, top_k, followed
        self.choice: Tensor | None = None  # ``[N, top_k]`` the experts in use, of the last ``topk``
        # ``[known, top_k]`` bool, True where a followed expert is not among those of the scores; None if nothing is
        # followed
        self.changed: Tensor | None = None
        self.gates = False  # whether scores are sigmoids of the logits, as in DeepSeek-V3

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.gates |= func in (torch.sigmoid, Tensor.sigmoid) and result.shape[-1] == self._experts
        if func not in (torch.topk, Tensor.topk):
            return result
        values, choice = result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.dim() != 2 or scores.shape[1] != self._experts or choice.shape[1] != self._top_k:
            return result  # a choice among groups of experts
        if self._followed is not None:
            known = (self._followed != UNKNOWN).all(-1, keepdim=True)
            followed = torch.where(known, self._followed.to(choice.dtype), choice)
            with torch.no_grad():
                self.changed = (followed[..., None] != choice[..., None, :]).all(-1)[known[:, 0]]
            values, choice = scores.gather(-1, followed), followed
        self.choice = choice
        return torch.return_types.topk((values, choice))


def expert_routers(model: nn.Module) -> ExpertRouters | None:
    """Return the routers of a model, made at the first call; None if it has no routers that can be followed."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    existing = base.__dict__.get(_ATTRIBUTE)
    if existing is not None:
        return existing
    router_of = {
        int(place[1]): module
        for name, module in base.named_modules()
        if _ROUTER.search(type(module).__name__) and hasattr(module, "num_experts") and (place := _LAYER.search(name))
    }
    if not router_of:
        return None
    modules, layers = [router_of[layer] for layer in sorted(router_of)], sorted(router_of)
    first: Any = modules[0]
    more = getattr(first, "n_routed_experts", 0)  # LongCat has some that compute nothing
    experts = max(int(first.num_experts), int(more))
    routers = ExpertRouters(modules, layers, base.config.get_text_config().num_hidden_layers, int(first.top_k), experts)
    for number, module in enumerate(modules):
        module.forward = functools.partial(routers.route, number, module.forward)  # type: ignore[method-assign]
    base.__dict__[_ATTRIBUTE] = routers
    return routers
