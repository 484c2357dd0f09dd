"""Several LoRA adapters on one set of weights: each with gradients, optimizer and step of its own.

One adapter is active at a time, in training and in sampling. An inactive one costs its memory alone: nothing of it is computed, and its
gradients stay. So each adapter's update is that of training it alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import RequestError, did_you_mean
from hone.models.heads import PolicyHead
from hone.models.loading import causal_lm, narrow_frozen_matrices
from hone.training.engine import MicroBatchLoop, Outputs, TrainSettings
from hone.training.objectives import Statistics, Totals
from hone.training.ranks import SingleRank

Inputs = Mapping[str, Tensor]
"""Inputs of the tokens ``[N]``, by name."""


@dataclass(frozen=True)
class Loss:
    """A loss."""

    needs: tuple[str, ...]  # inputs without which it cannot be computed; ``weights`` is optional everywhere else
    settings: Mapping[str, float]  # keys of ``loss_fn_config`` with their defaults
    # (log-probs ``[N]``, inputs, settings) to the loss of each token, ``[N]``; the input ``row`` is the number of its datum
    compute: Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]
    factor: str | None = None  # input whose 0 makes the loss of a token 0, as a weight of 0 does
    shared: str | None = None  # input that is not 0 where a token is part of the loss of others
    warning: str | None = None  # metric of 1 that says what a client should know


def _ratio(log_probs: Tensor, inputs: Inputs) -> Tensor:
    return (log_probs - inputs["logprobs"]).exp()


def _cross_entropy(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    return -log_probs


def _importance_sampling(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    return -_ratio(log_probs, inputs) * inputs["advantages"]


def _ppo(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    ratio, advantages = _ratio(log_probs, inputs), inputs["advantages"]
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _cispo(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    ratio = _ratio(log_probs, inputs).clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -ratio.detach() * log_probs * inputs["advantages"]


def _dro(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    distance = log_probs - inputs["logprobs"]
    return -(log_probs * inputs["advantages"] - 0.5 * settings["beta"] * distance**2)


def _gspo(log_probs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """GSPO-token (Zheng et al. 2025): the ratio of a sequence, with the gradient of each token's own log-prob."""
    row, counted = inputs["row"], inputs["sequence_ratio_mask"] != 0
    sums, counts = log_probs.new_zeros(2, int(row.max()) + 1)
    sums.index_add_(0, row[counted], (log_probs.detach() - inputs["logprobs"])[counted])
    counts.index_add_(0, row[counted], torch.ones_like(log_probs.detach())[counted])
    ratio = ((sums / counts.clamp(min=1))[row] + log_probs - log_probs.detach()).exp()
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


_POLICY = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss((), {}, _cross_entropy),
    "importance_sampling": Loss(_POLICY, {}, _importance_sampling, factor="advantages"),
    "ppo": Loss(_POLICY, _CLIP, _ppo, factor="advantages"),
    "cispo": Loss(_POLICY, _CLIP, _cispo, factor="advantages"),
    "dro": Loss(_POLICY, {"beta": 0.05}, _dro),
    "gspo": Loss(
        (*_POLICY, "sequence_ratio_mask"),
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        _gspo,
        factor="advantages",
        shared="sequence_ratio_mask",
    ),
    "stable_reinforce": Loss(_POLICY, _CLIP, _cispo, factor="advantages", warning="stable_reinforce_is_cispo:max"),
}
"""Losses by name: cross-entropy; importance sampling, PPO's clip, CISPO, DRO and GSPO over sampled tokens with advantages.

The formula of ``stable_reinforce`` is not public: CISPO is computed in its place, and a metric says so.
"""


def loss_named(name: str, settings: Mapping[str, float]) -> tuple[Loss, dict[str, float]]:
    """Return a loss and its settings, those that are not given by default."""
    if name not in LOSSES:
        raise RequestError(f"there is no loss '{name}'", fix=did_you_mean(name, LOSSES), field="loss_fn")
    loss = LOSSES[name]
    unknown = sorted(set(settings) - set(loss.settings))
    if unknown:
        raise RequestError(
            f"loss '{name}' has no setting '{unknown[0]}'",
            fix=f"its settings: {', '.join(loss.settings) or 'none'}",
            field="loss_fn_config",
        )
    return loss, {**loss.settings, **settings}


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NONE = "hone_none"
"""The adapter that is active when the base model is: of rank 1, and zero."""
_ADAM_BOUNDS = {"learning_rate": (0, 1), "beta1": (0, 1 - 1e-9), "beta2": (0, 1 - 1e-9), "eps": (1e-30, 1), "weight_decay": (0, 1e4),
                "clip": (0, 1e30)}  # fmt: skip
"""Smallest and largest value of each setting of AdamW, beyond which weights become infinite."""
_LARGEST_NORM = 1e18
"""Norm of a gradient from which its squares leave float32."""
_SHAPE, _WEIGHTS, _OPTIMIZER = "shape.json", "adapter_model.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class AdapterShape:
    """Shape of an adapter."""

    rank: int  # of its matrices
    attention: bool = True  # whether it is on the projections of attention
    mlp: bool = True  # whether it is on those of the MLPs
    unembedding: bool = True  # whether it is on the output layer


@dataclass(frozen=True)
class Datum:
    """A sequence to train on."""

    tokens: Sequence[int]  # of the input, length N
    targets: Sequence[int]  # the token after each, length N
    inputs: Mapping[str, Sequence[float] | NDArray[Any] | Tensor]  # further inputs of the loss by name, length N each


@dataclass(frozen=True)
class AdamSettings:
    """Settings of one step of AdamW; a ``clip`` of 0 means no limit of the gradient's norm."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip: float = 0.0


def adam_settings(params: Mapping[str, Any]) -> AdamSettings:
    """Return the settings of a step from the client's parameters; RequestError if one is unknown or out of bounds."""
    names = {item.name: item.name for item in dataclasses.fields(AdamSettings)} | {"grad_clip_norm": "clip"}
    settings: dict[str, float] = {}
    for name, value in params.items():
        least, most = _ADAM_BOUNDS.get(names.get(name, ""), (1, 0))
        if not least <= float(value) <= most:
            bounds = f", {least:g} to {most:g}" if name in names else ""
            raise RequestError(f"{name}={value} is not a setting of AdamW{bounds}", field="adam_params")
        settings[names[name]] = float(value)
    chosen = AdamSettings(**settings)
    if chosen.learning_rate * chosen.weight_decay > 1:
        raise RequestError("learning_rate * weight_decay is more than 1, and weights would grow", field="adam_params")
    return chosen


@dataclass(frozen=True)
class Passed:
    """Result of a forward pass."""

    log_probs: list[Tensor]  # of the targets of each datum
    losses: list[Tensor]  # of the targets of each datum, weighted
    metrics: dict[str, float]  # ``loss:sum``


class AdapterSet:
    """A causal language model with Hone's attention, with adapters; ``max_tokens`` is the budget of a micro-batch."""

    def __init__(self, model: nn.Module, *, device: torch.device, dtype: str, max_tokens: int = 16384) -> None:
        model.requires_grad_(False)
        embeddings: Any = causal_lm(model).get_input_embeddings()
        self.vocabulary = int(embeddings.num_embeddings)  # number of token ids
        self._tied = bool(getattr(causal_lm(model).config, "tie_word_embeddings", False))
        # the model with its adapters, which an engine may sample from
        self.model = PeftModel(model, LoraConfig(r=1, target_modules=["q_proj"]), adapter_name=_NONE)  # type: ignore[arg-type]
        self.model.requires_grad_(False)
        narrow_frozen_matrices(self.model, device, dtype)
        self._device, self._head = device, PolicyHead(learns_entropy=False)
        settings = TrainSettings(device, dtype=dtype, max_tokens=max_tokens)
        self._loop = MicroBatchLoop(self._forward, settings, ranks=SingleRank())
        self._shapes: dict[str, AdapterShape] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        self._active = _NONE

    def _forward(self, head: Any, packed: Any, with_entropy: bool) -> dict[str, Tensor]:
        return head(self.model, packed, with_entropy=with_entropy)

    # adapters --------------------------------------------------------------------------------------------------------

    def add(self, name: str, shape: AdapterShape, *, seed: int = 0, trained: bool = True) -> None:
        """Add an adapter that changes nothing yet; its name has letters, digits and ``_``. With ``trained`` it gets an optimizer."""
        targets = [*(_ATTENTION if shape.attention else ()), *(_MLP if shape.mlp else ())]
        if shape.unembedding and not self._tied:
            targets.append("lm_head")
        if not targets:
            raise RequestError(
                "an adapter on no layer",
                why="the output layer of a model with tied embeddings has none of its own",
                fix="train_attn=True or train_mlp=True",
                field="lora_config",
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model.add_adapter(name, LoraConfig(r=shape.rank, lora_alpha=32, target_modules=targets))
        self._shapes[name] = shape
        for parameter in self.parameters(name):
            parameter.data = parameter.data.float()
        if trained:
            self._optimizers[name] = torch.optim.AdamW(self.parameters(name), fused=True)
        self._require_gradients()

    def remove(self, name: str) -> None:
        self.activate(None)
        self.model.delete_adapter(name)
        self._shapes.pop(name)
        self._optimizers.pop(name, None)

    def shape(self, name: str) -> AdapterShape:
        return self._shapes[name]

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of an adapter, in the model's order."""
        return [parameter for _, parameter in self._named(name)]

    def _named(self, name: str) -> list[tuple[str, nn.Parameter]]:
        return [(key, value) for key, value in self.model.named_parameters() if f".{name}." in key]

    def activate(self, name: str | None) -> None:
        """Compute with an adapter from now on; None computes with the model alone."""
        name = name or _NONE
        if name != self._active:
            self.model.set_adapter(name)
            self._active = name
            self._require_gradients()

    @property
    def active(self) -> str | None:
        return None if self._active == _NONE else self._active

    def _require_gradients(self) -> None:
        """Let only the active adapter, if it is trained, have gradients; PEFT changes this with every change of adapters."""
        for key, parameter in self.model.named_parameters():
            trained = self._active in self._optimizers and f".{self._active}." in key
            parameter.requires_grad_(trained)

    # training --------------------------------------------------------------------------------------------------------

    def forward(self, name: str | None, data: Sequence[Datum]) -> list[Tensor]:
        self.activate(name)
        self.model.eval()
        batch = _batch_of(data, LOSSES["cross_entropy"], self.vocabulary)
        return _rows(self._loop.infer(batch, self._head)["log_probs"])

    def forward_backward(
        self, name: str, data: Sequence[Datum], loss: Loss, settings: Mapping[str, float], *, backward: bool = True
    ) -> Passed:
        """Compute the loss, and add its gradient to that of the adapter; a call that fails leaves that as it was.

        The loss is the sum over all targets, weighted by ``weights``. A target that cannot change it may be any token; its
        log-prob is that of the token that follows.

        Raises:
            RequestError: a datum lacks an input, has ids that the model lacks, or its targets are not the tokens that follow.
        """
        batch = _batch_of(data, loss, self.vocabulary)
        self.activate(name)
        self.model.train(backward)

        def weighted(log_probs: Tensor, columns: Batch) -> Tensor:
            inputs = {key: columns.ragged(key).values.to(log_probs) for key in (*loss.needs, "weights")}
            lengths = columns.ragged("weights").lengths.to(log_probs.device)
            inputs["row"] = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
            return loss.compute(log_probs, inputs, settings) * inputs["weights"]

        def objective(outputs: dict[str, Ragged], micro: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
            return weighted(outputs["log_probs"].values, micro).sum(), {}

        outputs = Outputs(batch.ragged("response_ids"))
        if backward:
            held = [(each, None if each.grad is None else each.grad.clone()) for each in self.parameters(name)]
            try:
                self._loop.accumulate_gradients(batch, self._head, objective, outputs_seen=outputs)
            except BaseException:
                for parameter, gradient in held:
                    parameter.grad = gradient
                raise
            log_probs = outputs.columns()["log_probs"]
        else:
            log_probs = self._loop.infer(batch, self._head)["log_probs"]
        losses = log_probs.with_values(weighted(log_probs.values, batch))
        metrics = {"loss:sum": float(losses.values.double().sum())} | ({loss.warning: 1.0} if loss.warning else {})
        return Passed(_rows(log_probs), _rows(losses), metrics)

    def step(self, name: str, settings: AdamSettings) -> dict[str, float]:
        """Update an adapter by its gradient, and clear that; return metrics.

        A gradient that is not finite, or whose squares are not, leaves the adapter as it is, which ``skipped`` counts; its norm is left
        out, because JSON has no such numbers.
        """
        parameters, optimizer = self.parameters(name), self._optimizers[name]
        limit = settings.clip if settings.clip > 0 else math.inf
        norm = float(nn.utils.clip_grad_norm_(parameters, limit))
        for group in optimizer.param_groups:
            group |= {
                "lr": settings.learning_rate,
                "betas": (settings.beta1, settings.beta2),
                "eps": settings.eps,
                "weight_decay": settings.weight_decay,
            }
        usable = math.isfinite(norm) and min(norm, limit) < _LARGEST_NORM
        if usable:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return ({"grad_norm": norm} if math.isfinite(norm) else {}) | {"skipped": float(not usable)}

    # files -----------------------------------------------------------------------------------------------------------

    def save(self, name: str, folder: Path, *, optimizer: bool) -> None:
        """Write an adapter to a new folder as a PEFT directory, with the state of its optimizer if wanted."""
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters(name)):
            raise RequestError("weights of this model are not finite, and are not saved", fix="load earlier weights")
        folder.mkdir(parents=True)
        weights = get_peft_model_state_dict(self.model, adapter_name=name, save_embedding_layers=False)
        save_file({key: value.detach().cpu().contiguous() for key, value in weights.items()}, folder / _WEIGHTS)
        self.model.peft_config[name].save_pretrained(str(folder))
        (folder / _SHAPE).write_text(json.dumps(dataclasses.asdict(self._shapes[name])))
        if optimizer:
            state = self._optimizers[name].state
            tensors = {
                f"{key}.{part}": torch.as_tensor(value).detach().cpu().contiguous()
                for key, parameter in self._named(name)
                for part, value in state.get(parameter, {}).items()
            }
            save_file({key.replace(f".{name}.", "."): value for key, value in tensors.items()}, folder / _OPTIMIZER)

    def load(self, name: str, folder: Path, *, optimizer: bool) -> None:
        """Read an adapter of the same shape from a folder of :meth:`save`, with the state of its optimizer if wanted.

        Raises:
            RequestError: the shapes differ, or the folder has no state.
        """
        shape = shape_of(folder)
        if shape != self._shapes[name]:
            raise RequestError(f"the weights are of {shape}, the adapter is of {self._shapes[name]}", field="path")
        if optimizer and not (folder / _OPTIMIZER).exists():
            raise RequestError("these weights were saved without the state of an optimizer", field="optimizer")
        weights, state = _tensors(folder / _WEIGHTS), _tensors(folder / _OPTIMIZER) if optimizer else {}
        current = get_peft_model_state_dict(self.model, adapter_name=name, save_embedding_layers=False)
        if {key: value.shape for key, value in weights.items()} != {key: value.shape for key, value in current.items()}:
            raise RequestError("the weights are not those of an adapter of this model", field="path")
        set_peft_model_state_dict(self.model, weights, adapter_name=name)
        if name not in self._optimizers:
            return
        fresh = self._optimizers[name] = torch.optim.AdamW(self.parameters(name), fused=True)
        for key, parameter in self._named(name):
            parameter.grad = None
            stem = key.replace(f".{name}.", ".")
            parts = {
                part: state[f"{stem}.{part}"] for part in ("step", "exp_avg", "exp_avg_sq") if f"{stem}.{part}" in state
            }
            if parts:
                fresh.state[parameter] = {part: value.to(self._device) for part, value in parts.items()}


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"saved weights cannot be read: {error}", field="path") from None
    if not all(bool(value.isfinite().all()) for value in tensors.values()):
        raise RequestError("the saved weights are not finite", fix="load earlier weights", field="path")
    return tensors


def shape_of(folder: Path) -> AdapterShape:
    try:
        return AdapterShape(**json.loads((folder / _SHAPE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(f"saved weights cannot be read: {error}", field="path") from None


def _batch_of(data: Sequence[Datum], loss: Loss, vocabulary: int) -> Batch:
    """Return the batch of a trainer: each datum is a prompt of its first token, and a response of its targets."""
    columns: dict[str, list[Tensor]] = {name: [] for name in (*loss.needs, "weights")}
    followers = []
    for number, datum in enumerate(data):
        _check(datum, number, loss.needs, vocabulary)
        for name, rows in columns.items():
            values = datum.inputs.get(name, [1.0] * len(datum.targets))
            rows.append(torch.as_tensor(values, dtype=torch.float32))
        followers.append(_followers(datum, number, loss, {name: rows[-1] for name, rows in columns.items()}))
    responses = Ragged.from_rows(followers, torch.int64)
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([[datum.tokens[0]] for datum in data], torch.int64),
            "response_ids": responses,
            "response_mask": responses.with_values(torch.ones_like(responses.values)),
            **{name: Ragged.from_rows(rows) for name, rows in columns.items()},
        }
    )


def _check(datum: Datum, number: int, needs: Sequence[str], vocabulary: int) -> None:
    count = len(datum.tokens)
    if not count:
        raise RequestError(f"datum {number} has no tokens", field="model_input")
    for token in (*datum.tokens, *datum.targets):
        if not 0 <= token < vocabulary:
            raise RequestError(f"datum {number} has token {token}; the model has 0 to {vocabulary - 1}", field="data")
    if missing := [name for name in needs if name not in datum.inputs]:
        raise RequestError(f"datum {number} has no '{missing[0]}'", field="loss_fn_inputs")
    lengths = {"target_tokens": len(datum.targets)} | {name: len(values) for name, values in datum.inputs.items()}
    for name, length in lengths.items():
        if length != count:
            raise RequestError(f"datum {number} has {count} tokens and {length} '{name}'", field="loss_fn_inputs")


def _followers(datum: Datum, number: int, loss: Loss, inputs: Inputs) -> Tensor:
    """Return the token after each of a datum, which a target must be unless the loss does not depend on it."""
    targets = torch.tensor(list(datum.targets))
    followers = torch.tensor([*datum.tokens[1:], datum.targets[-1]])
    matters = inputs["weights"] != 0
    if loss.factor is not None:
        matters &= inputs[loss.factor] != 0
    if loss.shared is not None:
        shared = inputs[loss.shared] != 0
        if matters.any() and not shared.any():
            raise RequestError(
                f"'{loss.shared}' of datum {number} is 0 everywhere",
                why="its sequence has no ratio",
                fix="1 for each sampled token",
                field="loss_fn_inputs",
            )
        matters |= shared
    wrong = (matters & (targets != followers)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise RequestError(
            f"target {place} of datum {number} is {int(targets[place])}, and the token that follows is {int(followers[place])}",
            why="the log-prob of a target is that of the next token",
            fix="model_input=tokens[:-1], target_tokens=tokens[1:], and weights of 0 on what is not trained",
            field="loss_fn_inputs",
        )
    return followers


def _rows(column: Ragged) -> list[Tensor]:
    return [column.row(row) for row in range(len(column))]
