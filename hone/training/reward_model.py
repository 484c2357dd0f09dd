"""Scalar reward models: the score of a response, read after its last token."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from hone.algorithms import bradley_terry_loss
from hone.algorithms.preference_losses import pair_rows
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.training.engine import LossFn, Statistics, Totals, TrainEngine
from hone.training.heads import hidden_states
from hone.training.model import causal_lm, value_head
from hone.training.packing import PackedSequences


class ScoreHead:
    """``scores``: the model's output after each response token; that after the last one is the response's score."""

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]:
        total, responses = packed.input_ids.shape[1], len(packed.targets)
        own = torch.arange(total - responses, total, device=packed.input_ids.device)  # responses stand at the row's end
        hidden = hidden_states(causal_lm(model), dataclasses.replace(packed, output_index=own))
        return {"scores": value_head(model)(hidden).squeeze(-1).float()}


def response_scores(engine: TrainEngine, batch: Batch) -> Tensor:
    """The score of every response of ``batch``, ``[B]``, on the CPU."""
    return last_scores(engine.infer_batch(batch)["scores"])


def last_scores(scores: Ragged) -> Tensor:
    """Of every row the last value, ``[B]``."""
    return scores.values[scores.offsets[1:].to(scores.values.device) - 1]


def bradley_terry_objective(centering_coeff: float) -> LossFn:
    """The Bradley-Terry loss over pairs. Reads columns ``label``, ``unit`` and ``margin``."""

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        pairs = totals.sequences // 2
        loss, metrics = bradley_terry(last_scores(outputs["scores"]), batch, centering_coeff, pairs)
        here = len(batch) // 2
        share: Statistics = {"train/loss": (loss.detach() * (pairs / here), float(here))}
        return loss, share | {name: (value, float(here)) for name, value in metrics.items()}

    return objective


def bradley_terry(
    scores: Tensor, batch: Batch, centering_coeff: float, pairs: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of the pairs of ``batch``, given the scores ``[B]`` of its responses."""
    chosen, rejected = pair_rows(batch.tensor("label"), batch.tensor("unit"))
    return bradley_terry_loss(
        scores[chosen.to(scores.device)],
        scores[rejected.to(scores.device)],
        margin=batch.tensor("margin")[chosen].to(scores.device),
        centering_coeff=centering_coeff,
        global_batch_size=pairs,
    )
