"""Log-probs of the tokens of a text that a model reads, for servers (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import autocast
from hone.models.teacher import IDS, LOG_PROBS, PromptHead
from hone.training.packing import pack


@torch.no_grad()
def prompt_log_probs(
    model: nn.Module, ids: Sequence[int], top: int, *, device: torch.device, dtype: str
) -> list[list[tuple[int, float]]]:
    """Return the log-prob of each token after the first, followed by the likeliest tokens at its place. Returns for
    each token after the first: its id with its log-prob, then ``top`` ids with theirs, the likeliest first.
    """
    rows = Batch(
        {
            "prompt_ids": Ragged.from_rows([ids[:1]], torch.int64),
            "response_ids": Ragged.from_rows([ids[1:]], torch.int64),
        }
    )
    with autocast(device, dtype):
        outputs = PromptHead(top)(model, pack(rows, device), with_entropy=False)
    places: list[list[tuple[int, float]]] = [
        [pair] for pair in zip(ids[1:], outputs["log_probs"].tolist(), strict=True)
    ]
    if top:
        likeliest = zip(outputs[IDS].tolist(), outputs[LOG_PROBS].tolist(), strict=True)
        for place, (tokens, log_probs) in zip(places, likeliest, strict=True):
            place += zip(tokens, log_probs, strict=True)
    return places
