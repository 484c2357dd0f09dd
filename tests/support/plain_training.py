"""The oracle of training backends: the same training in one process, written out without packing, micro-batches or ranks."""

from __future__ import annotations

import dataclasses
from functools import partial
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
        tokens, decided = torch.cat([prompt, response]), list[Any]()
        hooks = [layer.mlp.register_forward_hook(partial(_decisions, decided)) for layer in _mixtures(case, model)]
        if case.images:
            whole = plain_logits(model, case.model, tokens.tolist(), batch.objects("images")[row])
        else:
            whole = model(tokens[None], use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
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
        if case.balance and model.training:
            trained = batch.ragged("response_mask").row(row) > 0
            followed = batch.ragged("expert_ids").row(row).view(len(tokens), -1, 2) if case.replayed else None
            loss = balance_loss(decided, len(prompt) - 1 + trained.nonzero()[:, 0], followed)
            outputs["balance"] = loss.expand(len(response))
        for name, values in outputs.items():
            columns.setdefault(name, []).append(values)
    lengths = batch.ragged("response_ids").lengths
    return {name: Ragged.from_lengths(torch.cat(parts), lengths) for name, parts in columns.items()}


def _mixtures(case: Case, model: nn.Module) -> list[Any]:
    """The layers whose routers a balance loss is computed from."""
    decoder: Any = causal_lm(model).get_decoder()
    layers = decoder.layers if case.balance and model.training else []
    return [layer for layer in layers if hasattr(layer.mlp, "gate") or hasattr(layer.mlp, "router")]


def _decisions(decided: list[Any], mixture: Any, arguments: Any, output: Any) -> None:
    """Compute a router's normalised scores ``[N, experts]`` once more, and what it ranks experts by."""
    router = getattr(mixture, "gate", None) or mixture.router
    hidden = arguments[0].reshape(-1, router.weight.shape[1])
    logits = nn.functional.linear(hidden, router.weight, getattr(router, "bias", None))
    if hasattr(router, "e_score_correction_bias"):
        gates = 1 / (1 + (-logits).exp())
        decided.append((gates / gates.sum(1, keepdim=True), gates + router.e_score_correction_bias))
    else:
        scores = logits.exp() / logits.exp().sum(1, keepdim=True)
        decided.append((scores, scores))


def balance_loss(decided: list[Any], places: Tensor, followed: Tensor | None = None, top_k: int = 2) -> Tensor:
    """The balance loss of one sequence, token by token: N / (k T) x sum over experts of their tokens x mean score.

    ``places``: of the decisions. ``followed``: ``[N, routers, top_k]`` an engine's choice; -1 where it is not known.
    """
    losses = []
    for number, (scores, ranks) in enumerate(decided):
        experts, loads = scores.shape[1], [0] * scores.shape[1]
        for place in places.tolist():
            chosen = ranks[place].argsort(descending=True)[:top_k].tolist()
            if followed is not None and int(followed[place, number, 0]) >= 0:
                chosen = followed[place, number].tolist()
            for expert in chosen:
                loads[expert] += 1
        means = [scores[places, expert].sum() / max(len(places), 1) for expert in range(experts)]
        terms = [experts / (top_k * max(len(places), 1)) * load * mean for load, mean in zip(loads, means, strict=True)]
        losses.append(sum(terms, torch.zeros(())))
    return torch.stack(losses).mean()


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
