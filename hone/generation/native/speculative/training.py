"""Training of a draft model between steps, on the tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hone.models.attention.packed import PackedContext
from hone.models.heads import PolicyHead, autocast
from hone.models.inputs import PackedSequences

MAX_TOKENS = 1 << 18
"""Most tokens that are kept for the next training; older responses are dropped."""
MICRO_BATCH_TOKENS = 4096
"""Most tokens of an update, if every response has fewer."""
_GRADIENT_NORM = 1.0


class Example(NamedTuple):
    """A response of the policy."""

    ids: list[int]  # prompt and sampled tokens
    first: int  # place of the first sampled token
    temperature: float  # at which it was sampled


class DraftTrainer:
    """Fits a draft model to the policy's samples: cross-entropy of the sampled tokens at their temperature, by AdamW."""

    def __init__(
        self,
        model: nn.Module,  # the draft model, float32
        *,
        learning_rate: float,  # of AdamW
        device: torch.device,
        dtype: str,  # of matmuls: float32, bfloat16 or float16
        max_tokens: int = MAX_TOKENS,  # most tokens kept for the next training
    ) -> None:
        self._model, self._device, self._dtype, self._max_tokens = model, device, dtype, max_tokens
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=learning_rate, weight_decay=0.0)
        self._examples: list[Example] = []
        self._tokens = 0

    def add(self, example: Example) -> None:
        """Keep a response for the next training."""
        if example.first < len(example.ids) <= self._max_tokens:
            self._examples.append(example)
            self._tokens += len(example.ids)
        while self._tokens > self._max_tokens:
            self._tokens -= len(self._examples.pop(0).ids)

    def train(self) -> float | None:
        """Take one update per micro-batch of the responses since the last training.

        Return the mean cross-entropy of the micro-batches in nats, each before its update; None without responses.
        """
        examples, self._examples, self._tokens = self._examples, [], 0
        losses = []
        with torch.inference_mode(False), torch.enable_grad():
            for parameter in self._parameters:
                parameter.requires_grad_(True)
            for part in _micro_batches(examples):
                loss = self._loss(part)
                loss.backward()
                nn.utils.clip_grad_norm_(self._parameters, _GRADIENT_NORM)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                losses.append(loss.detach())
            for parameter in self._parameters:
                parameter.requires_grad_(False)
        return float(torch.stack(losses).mean()) if losses else None

    def _loss(self, examples: Sequence[Example]) -> Tensor:
        """Return the mean cross-entropy of the sampled tokens of responses of one temperature."""
        with autocast(self._device, self._dtype):
            head = PolicyHead(examples[0].temperature)
            return -head(self._model, _packed(examples, self._device), with_entropy=False)["log_probs"].mean()


def _packed(examples: Sequence[Example], device: torch.device) -> PackedSequences:
    """Pack responses with their prompts end to end."""
    ids = torch.tensor([token for example in examples for token in example.ids], device=device)
    start, targets = 0, []
    for example in examples:
        targets.append(torch.arange(start + example.first, start + len(example.ids)))
        start += len(example.ids)
    index = torch.cat(targets).to(device)
    context = PackedContext.from_lengths([len(example.ids) for example in examples], device)
    return PackedSequences(ids[None], context, index - 1, ids[index], index)


def _micro_batches(examples: Sequence[Example]) -> list[list[Example]]:
    """Divide responses into micro-batches of one temperature and :data:`MICRO_BATCH_TOKENS`, or of one longer response."""
    batches: list[list[Example]] = []
    tokens = 0
    for example in sorted(examples, key=lambda example: example.temperature):
        same = bool(batches) and batches[-1][0].temperature == example.temperature
        if same and tokens + len(example.ids) <= MICRO_BATCH_TOKENS:
            batches[-1].append(example)
            tokens += len(example.ids)
        else:
            batches.append([example])
            tokens = len(example.ids)
    return batches
