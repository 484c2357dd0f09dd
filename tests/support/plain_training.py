"""The oracle of training backends: the same training in one process, written out without packing, micro-batches or ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from support.backend_cases import CPU, SEED, TEMPERATURE, Case, Outcome, batch_of, loss_name, objective_of
from support.image_models import plain_logits
from support.models import VOCABULARY
from torch import Tensor, nn

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.experts import expert_routers
from hone.models.loading import causal_lm, load_policy, load_value_model
from hone.training.objectives import Totals
from hone.training.optimizer import LR_MULT, build_optimizer, learning_rate


def load(case: Case) -> nn.Module:
    """The model of ``case``, with the attention of transformers."""
    config = dataclasses.replace(case.model_config(), enable_gradient_checkpointing=False)
    if case.kind == "value":
        model = load_value_model(config, device=CPU)
    else:
        model = load_policy(config, device=CPU, seed=SEED, trainable=case.kind == "policy")
    causal_lm(model).set_attn_implementation("eager")
    return model


def outputs_of(case: Case, model: nn.Module, batch: Batch) -> dict[str, Ragged]:
    """The head's outputs, one row after the other through the model's own forward pass."""
    columns: dict[str, list[Tensor]] = {}
    for row in range(len(batch)):
        prompt, response = batch.ragged("prompt_ids").row(row), batch.ragged("response_ids").row(row)
        if case.replayed:
            routers = expert_routers(model)
            assert routers is not None
            routers.follow(batch.ragged("expert_ids").row(row).view(-1, routers.width))
        tokens = torch.cat([prompt, response])
        if case.images:
            whole = plain_logits(model, case.model, tokens.tolist(), batch.objects("images")[row])
        else:
            whole = model(tokens[None], use_cache=False).logits[0]
        logits = whole[len(prompt) - 1 : -1].float()
        if case.kind == "value":
            outputs = {"values": logits[:, 0]}
        else:
            log_softmax = (logits / TEMPERATURE).log_softmax(-1)
            restricted = log_softmax
            if case.restricted:  # to tokens that differ by a multiple of 3, at every other place
                tokens = torch.arange(logits.shape[1])
                outside = ((tokens - response[:, None]) % 3 != 0) | (tokens >= VOCABULARY)
                outside &= (torch.arange(len(response)) % 2 == 0)[:, None]
                restricted = (logits / TEMPERATURE).masked_fill(outside, float("-inf")).log_softmax(-1)
            outputs = {
                "log_probs": restricted.gather(1, response[:, None])[:, 0],
                "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
            }
        for name, values in outputs.items():
            columns.setdefault(name, []).append(values)
    lengths = batch.ragged("response_ids").lengths
    return {name: Ragged.from_lengths(torch.cat(parts), lengths) for name, parts in columns.items()}


def alone(case: Case) -> Outcome:
    """Losses, gradient norms, weights and outputs of a training in one process."""
    model, objective = load(case), objective_of(case)
    config, losses, norms = case.optim_config(), [], []
    optimizer = build_optimizer(model, config)
    for update in range(case.updates):
        batch: Any = batch_of(case, update)
        if case.kind != "value" and objective.needs_preparation:
            batch = objective.prepare(batch, batch.ragged("ref_log_probs"))
        model.train()
        loss, statistics = objective(outputs_of(case, model, batch), batch, Totals.from_batch(batch))
        loss.backward()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norms.append(float(nn.utils.clip_grad_norm_(trainable, config.clip_grad)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, update, 10) * group[LR_MULT]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(statistics[loss_name(case)][0]) if statistics else 0.0)
    model.eval()
    with torch.no_grad():
        columns = outputs_of(case, model, batch_of(case, 0))
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return Outcome(losses, norms, weights, {name: column.values for name, column in columns.items()})
