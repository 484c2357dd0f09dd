"""Scalar reward models, whose score of a response is the output after its last token."""

from __future__ import annotations

from torch import Tensor, nn

from hone.algorithms import bradley_terry_loss
from hone.algorithms.preference_losses import pair_rows
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import hidden_states
from hone.models.inputs import PackedSequences
from hone.models.loading import causal_lm, value_head
from hone.training.backends.protocol import TrainBackend
from hone.training.updates import LossFn, Statistics, Totals


class ScoreHead:
    """Computes ``scores``, the model's output after each response token."""

    reads_targets = True

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]:
        hidden = hidden_states(causal_lm(model), packed.at_targets())
        scores = value_head(model)(hidden).squeeze(-1).float()
        return {"scores": scores.clone()}  # FSDP warns about views, which could be changed in place


def response_scores(engine: TrainBackend, batch: Batch) -> Tensor:
    """Return the score of every response of ``batch``, ``[B]``, on the CPU."""
    return last_scores(engine.infer_batch(batch)["scores"])


def last_scores(scores: Ragged) -> Tensor:
    """Return the last value of every row, ``[B]``."""
    return scores.values[scores.offsets[1:].to(scores.values.device) - 1]


def bradley_terry_objective(centering_coeff: float) -> LossFn:
    """Return the Bradley-Terry loss over pairs. It reads columns ``label``, ``unit`` and ``margin``."""

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        pairs = totals.sequences // 2
        loss, metrics = bradley_terry(last_scores(outputs["scores"]), batch, centering_coeff, pairs)
        local_pairs = len(batch) // 2
        share: Statistics = {"train/loss": (loss.detach() * (pairs / local_pairs), float(local_pairs))}
        return loss, share | {name: (value, float(local_pairs)) for name, value in metrics.items()}

    return objective


def bradley_terry(
    scores: Tensor, batch: Batch, centering_coeff: float, pairs: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics of the pairs in ``batch``, given the scores ``[B]`` of its responses."""
    chosen, rejected = pair_rows(batch.tensor("label"), batch.tensor("unit"))
    return bradley_terry_loss(
        scores[chosen.to(scores.device)],
        scores[rejected.to(scores.device)],
        margin=batch.tensor("margin")[chosen].to(scores.device),
        centering_coeff=centering_coeff,
        global_batch_size=pairs,
    )
