"""Objectives over preferences, of a policy and of a scalar reward model; metrics, and the rows of KTO's KL estimate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hone.algorithms import PreferenceLoss, best_worst_pairs, bradley_terry_loss, masked_mean, preference_losses
from hone.algorithms.preference_losses import COUNTED_BY, pair_rows
from hone.config.actor import OnlinePreferenceConfig
from hone.config.offline import PreferenceConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import hidden_states
from hone.models.inputs import PackedSequences
from hone.models.loading import causal_lm, value_head
from hone.training.backends.protocol import TrainBackend
from hone.training.objectives import LossFn, Statistics, Totals, ratio_to


def preference_objective(loss: PreferenceLoss, options: dict[str, Any], name: str = "train/loss") -> LossFn:
    """Return a preference loss over responses, reported as ``name``.

    It reads columns ``response_mask``, ``label`` and ``unit``; if the loss needs them, ``ref_log_probs`` and the batch's ``kl``.
    """

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        units = totals.sequences // 2 if "pairs" in loss.needs else totals.sequences
        share, metrics, counts = measure(loss, outputs["log_probs"], batch, options, units)
        local_units = counts["units"]
        statistics: Statistics = {name: (share.detach() * (units / local_units), local_units)}
        return share, statistics | {
            key: (value, counts[COUNTED_BY.get(key, "units")]) for key, value in metrics.items()
        }

    return objective


def loss_and_options(config: PreferenceConfig) -> tuple[PreferenceLoss, dict[str, Any]]:
    """Return the loss of a configuration, and its options that are set. Raises ConfigError: the loss is unknown."""
    options = {name: value for name, value in vars(config.loss).items() if name != "name" and value is not None}
    return preference_losses.get(config.loss.name), options


def online_objective(config: OnlinePreferenceConfig) -> LossFn:
    """Return the preference loss of an RL run over pairs of the policy's responses.

    It also reports the ratio of the policy to the one that sampled (column ``old_log_probs``).

    Raises ConfigError: the loss is unknown.
    """
    options = {} if config.beta is None else {"beta": config.beta}
    learn = preference_objective(preference_losses.get(str(config.loss_mode)), options, "actor/pg_loss")

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        share, statistics = learn(outputs, batch, totals)
        log_probs = outputs["log_probs"].values
        old, mask = (batch.ragged(name).values.to(log_probs) for name in ("old_log_probs", "response_mask"))
        return share, statistics | ratio_to(log_probs, old, mask)

    return objective


def own_pairs(batch: Batch, margin: float) -> Batch:
    """Return the best and the worst response of each prompt group (column ``uid``) by ``reward``, next to each other.

    Columns ``label`` and ``unit`` are added; groups with a difference below ``margin`` are left out.
    """
    best, worst = best_worst_pairs(batch.tensor("reward"), batch.objects("uid"), margin=margin)
    pairs = torch.arange(len(best))
    return batch.reorder(torch.stack([best, worst], 1).flatten()).with_columns(
        label=torch.tensor([True, False]).repeat(len(best)), unit=pairs.repeat_interleave(2)
    )


def measure(
    loss: PreferenceLoss, log_probs: Ragged, batch: Batch, options: dict[str, Any], units: int | None = None
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Return loss, metrics, and the counts that the metrics are means over.

    If rows are pairs but the loss uses single responses (kto), accuracy and margin are those of the pairs, so that
    different losses can be compared.
    """
    device = log_probs.values.device
    mask, labels = batch.ragged("response_mask").to_padded().to(device), batch.tensor("label").to(device)
    reference = batch.ragged("ref_log_probs").to_padded().to(device) if "ref_log_probs" in batch else None
    unit, padded = batch.tensor("unit"), log_probs.to_padded()
    value, metrics = loss(
        padded,
        mask,
        labels,
        pair_ids=unit,
        ref_log_probs=reference,
        kl=batch.meta.get("kl"),
        global_batch_size=units,
        **options,
    )
    counts = {name: float(count) for name, count in loss.counts(mask, labels, unit).items()}
    if "pairs" not in loss.needs and len(unit) > 1 and bool((unit.bincount()[unit] == 2).all()):
        beta = {name: number for name, number in options.items() if name == "beta"}
        _, paired = preference_losses.get("dpo")(
            padded.detach(), mask, labels, pair_ids=unit, ref_log_probs=reference, **beta
        )
        metrics |= {name: paired[name] for name in ("rewards/accuracies", "rewards/margins")}
    if "kl" in batch.meta:
        metrics["preference/kl"] = torch.tensor(batch.meta["kl"])
    return value, metrics, counts


def mismatched_rows(batch: Batch) -> Batch:
    """Return rows with every response after the prompt of another row, for KTO's estimate of the policy's KL."""
    sides = int(batch.tensor("unit").bincount().max())
    rows = torch.arange(len(batch)).roll(sides)
    columns = {name: batch.ragged(name).select(rows) for name in ("response_ids", "response_mask")}
    return Batch({"uid": batch.objects("uid"), "prompt_ids": batch.ragged("prompt_ids"), **columns})


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
    """Return the last value of every row ``[B]``: the score of a response is the output after its last token."""
    return scores.values[scores.offsets[1:].to(scores.values.device) - 1]


def bradley_terry_objective(centering_coeff: float) -> LossFn:
    """Return the Bradley-Terry loss over pairs. It reads columns ``label``, ``unit`` and ``margin``."""

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        pairs = totals.sequences // 2
        loss, metrics, counts = bradley_terry(last_scores(outputs["scores"]), batch, centering_coeff, pairs)
        share: Statistics = {"train/loss": (loss.detach() * (pairs / counts["units"]), counts["units"])}
        return loss, share | {name: (value, counts[COUNTED_BY.get(name, "units")]) for name, value in metrics.items()}

    return objective


def bradley_terry(
    scores: Tensor, batch: Batch, centering_coeff: float, pairs: int | None = None
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Return loss, metrics and counts, as :func:`measure`, of the pairs in ``batch``, given the scores ``[B]`` of its responses."""
    chosen, rejected = pair_rows(batch.tensor("label"), batch.tensor("unit"))
    lengths = batch.ragged("response_mask").to_padded().sum(-1)
    more = (lengths[chosen] - lengths[rejected]).to(scores.device)
    counts = {"longer": float((more > 0).sum()), "shorter": float((more < 0).sum())}
    counts |= dict.fromkeys(("units", "chosen", "rejected"), float(len(chosen)))
    loss, metrics = bradley_terry_loss(
        scores[chosen.to(scores.device)],
        scores[rejected.to(scores.device)],
        margin=batch.tensor("margin")[chosen].to(scores.device),
        centering_coeff=centering_coeff,
        global_batch_size=pairs,
    )
    margins = (scores[chosen.to(scores.device)] - scores[rejected.to(scores.device)]).detach()
    right = (margins > 0) + 0.5 * (margins == 0)
    for name, rows in (("longer", more > 0), ("shorter", more < 0)):
        metrics[f"rewards/accuracies_{name}"] = masked_mean(right, rows)
    return loss, metrics, counts
