"""Preference optimisation of a policy: the objective of an update, its metrics, and the rows of KTO's KL estimate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms import PreferenceLoss, best_worst_pairs, preference_losses
from hone.algorithms.preference_losses import COUNTED_BY
from hone.config.feedback import OnlinePreferenceConfig
from hone.config.preference import PreferenceConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.insight.invariants import RATIO_MAX, RATIO_MEAN
from hone.training.updates import LossFn, Statistics, Totals


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
    """Return the loss of a configuration, and its options that are set.

    Raises:
        ConfigError: the loss is unknown.
    """
    options = {name: value for name, value in vars(config.loss).items() if name != "name" and value is not None}
    return preference_losses.get(config.loss.name), options


def online_objective(config: OnlinePreferenceConfig) -> LossFn:
    """Return the preference loss of an RL run over pairs of the policy's responses.

    It also reports the ratio of the policy to the one that sampled (column ``old_log_probs``).

    Raises:
        ConfigError: the loss is unknown.
    """
    options = {} if config.beta is None else {"beta": config.beta}
    learn = preference_objective(preference_losses.get(str(config.loss_mode)), options, "actor/pg_loss")

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        share, statistics = learn(outputs, batch, totals)
        log_probs = outputs["log_probs"].values.detach()
        mask = batch.ragged("response_mask").values.to(log_probs)
        gap = (log_probs - batch.ragged("old_log_probs").values.to(log_probs)).abs() * mask
        tokens = float(mask.sum())
        return share, statistics | {RATIO_MAX: (gap.max(), tokens), RATIO_MEAN: (gap.sum() / tokens, tokens)}

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
