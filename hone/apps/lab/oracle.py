"""The oracle of an update: a saved micro-batch recomputed by the plain path, and the first place where the run diverges.

Checks of a saved micro-batch against the oracle, in the order of the computation: layers, outputs, loss, gradients.

Each stage begins from what the run itself computed before it, so an error counts where it arises: the loss is recomputed from
the run's log-probs, and the backward pass from the run's gradient of the loss. The oracle is the plain path: each sequence
alone, unpacked and unpadded, with eager attention, in float64 or in the run's dtype.

The bound of an error is measured, not assumed: the plain path also runs in the run's dtype, and its error is what rounding
explains. The run diverges where its error exceeds :data:`FACTOR` times the largest such error and the dtype's epsilon.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hone.algorithms.support import restricted_logits
from hone.config import RLConfig
from hone.config.derived import RunSpec
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import HoneError
from hone.models.heads import autocast
from hone.models.loading import causal_lm, load_policy, saved_model
from hone.models.registry import family_of
from hone.models.routing import attention_of
from hone.training.microbatches import MAX_ELEMENTS, SavedMicroBatch, layer_hooks
from hone.training.objectives import LossFn, PolicyObjective
from hone.training.packing import packed_rows, supports_of
from hone.training.preferences import online_objective

CPU = torch.device("cpu")
_LOW = (torch.float16, torch.bfloat16, torch.float32)


class InFloat64(TorchFunctionMode):
    """Replaces casts to float32 and below by casts to float64: models compute norms, softmax and RoPE in float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value


@dataclass(frozen=True)
class Places:
    """The tokens whose states are compared: every token of every sequence that the run saved."""

    sequence: Tensor  # ``[P]``, row of the micro-batch
    token: Tensor  # ``[P]``, position in prompt + response
    slot: Tensor  # ``[P]``, row of the saved states
    packed: Tensor  # ``[P]``, index in the run's packed row

    @classmethod
    def from_saved(cls, batch: Batch, token_index: Tensor) -> Places:
        """Find the tokens in the packed row; a token that rows share is compared in each."""
        _, index = packed_rows(batch.ragged("prompt_ids"), batch.ragged("response_ids"))
        slot_of = torch.full((max(int(index.values.max()), int(token_index.max())) + 1,), -1)
        slot_of[token_index] = torch.arange(len(token_index))
        lengths, slot = index.lengths, slot_of[index.values]
        sequence = torch.arange(len(index)).repeat_interleave(lengths)
        token = torch.arange(len(slot)) - index.offsets[:-1].repeat_interleave(lengths)
        return cls(*(values[slot >= 0] for values in (sequence, token, slot, index.values)))


@dataclass
class PlainPass:
    states: dict[str, Tensor]  # ``hidden.<layer>`` and ``router.<layer>`` at the compared tokens, ``[P, ...]`` float64
    outputs: dict[str, Tensor]  # ``log_probs`` and ``entropy`` of the response tokens, ``[R]`` float64
    norms: dict[str, float]  # gradient norm of every trained parameter
    gradients: dict[str, Tensor]  # whole gradients of small parameters


def load_plain(saved: SavedMicroBatch) -> nn.Module:
    """Load the saved weights in float32, without the run's savings of memory."""
    config = saved.config.actor_rollout_ref.model
    plain = dataclasses.replace(
        saved_model(dataclasses.replace(config, path=saved.about["base_model"]), saved.directory / "model"),
        enable_gradient_checkpointing=False,
        tiled_mlp=dataclasses.replace(copy.deepcopy(config.tiled_mlp), enabled=False),
    )
    model = load_policy(plain, device=CPU, seed=saved.config.trainer.seed, trainable=True).eval()
    causal = causal_lm(model)
    if family_of(causal.config.model_type).own_attention:
        raise HoneError(
            f"a {causal.config.model_type} model has an attention of its own, without an eager form to compare with",
            fix="hone oracle works for models whose attention goes through transformers' interface",
        )
    causal.config._experts_implementation = "eager"
    return model


def plain_pass(
    model: nn.Module, saved: SavedMicroBatch, places: Places, output_gradients: Mapping[str, Tensor], *, dtype: str
) -> PlainPass:
    """Run every sequence alone, forward and backward; float64 converts the model.

    ``output_gradients [R]`` of the head's outputs are where the backward pass begins; ``places`` are the tokens whose states
    are returned.
    """
    precise = dtype == "float64"
    model = model.double() if precise else model
    model.zero_grad()
    batch, causal = saved.batch, causal_lm(model)
    rollout = saved.config.actor_rollout_ref.rollout
    temperature = rollout.temperature if rollout.temperature > 0 else 1.0
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    states: dict[str, list[Tensor]] = {}
    outputs: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
    for row in range(len(batch)):
        prompt, response = prompts.row(row), responses.row(row)
        tokens = places.token[places.sequence == row]

        def record(kind: str, layer: int, values: Tensor, tokens: Tensor = tokens) -> None:
            kept = values.detach().reshape(-1, values.shape[-1])[tokens].double()
            states.setdefault(f"{kind}.{layer}", []).append(kept)

        with _precision(dtype), attention_of(causal, "eager"), layer_hooks(causal, record):
            logits = causal(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
            scores = logits[len(prompt) - 1 : -1].float() / temperature
            log_softmax = scores.log_softmax(-1)
            supports = supports_of(batch.reorder([row]), CPU)
            restricted = scores if supports is None else restricted_logits(scores, supports)
            computed = {
                "log_probs": restricted.log_softmax(-1).gather(1, response[:, None])[:, 0],
                "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
            }
        begin, end = int(responses.offsets[row]), int(responses.offsets[row + 1])
        objective = [(computed[name] * values[begin:end].to(scores)).sum() for name, values in output_gradients.items()]
        torch.stack(objective).sum().backward()
        for name, values in computed.items():
            outputs[name].append(values.detach().double())
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return PlainPass(
        {name: torch.cat(parts) for name, parts in states.items()},
        {name: torch.cat(parts) for name, parts in outputs.items()},
        {name: float(gradient.norm()) for name, gradient in gradients.items()},
        {name: gradient for name, gradient in gradients.items() if gradient.numel() <= MAX_ELEMENTS},
    )


@contextlib.contextmanager
def _precision(dtype: str) -> Iterator[None]:
    with InFloat64() if dtype == "float64" else autocast(CPU, dtype):
        yield


FACTOR = 8
LOSS_BOUND = 100 * torch.finfo(torch.float32).eps
"""Relative error of the loss and of its gradient, which every run computes in float32."""
_SMALLEST_GRADIENT = 1e-4  # relative to the norm of all gradients; errors of smaller ones are relative to this
_REPRODUCED = 0.1
"""Share of tokens that may still diverge under a shifted mask: those at the ends of responses."""


@dataclass(frozen=True)
class Place:
    """A token: its row in the micro-batch, its position in the sequence, and the length of its prompt; all from 0 on."""

    sequence: int
    token: int
    prompt: int


@dataclass(frozen=True)
class Check:
    """One comparison of the run with the oracle."""

    kind: str  # router, hidden, log_probs, entropy, loss, loss_gradient or gradient
    layer: int | None  # index of the layer; None outside layers
    error: float
    bound: float  # the error that rounding explains
    diverging: int  # number of tokens (or parameters) whose error exceeds it
    compared: int  # number of tokens (or parameters)
    # of the first token that diverges in the sequence with the largest error, else of the largest error
    place: Place | None = None
    typical: float = 0.0  # median error of the diverging tokens
    detail: str = ""  # the parameter with the largest error, or the two numbers

    @property
    def diverges(self) -> bool:
        """True if rounding does not explain the error."""
        return self.diverging > 0


@dataclass
class Comparison:
    """All checks of a micro-batch."""

    saved: SavedMicroBatch
    checks: list[Check] = field(default_factory=list)  # in the order of the computation
    misplaced: int = 0  # tokens whose position in the run differs from that in their sequence
    mask_shift: int = 0  # shift of the response mask that reproduces the run's gradient of the loss; 0 if none does

    @property
    def first(self) -> Check | None:
        return next((check for check in self.checks if check.diverges), None)


def compare(saved: SavedMicroBatch) -> Comparison:
    computed, dtype = saved.computed, saved.about["dtype"]
    places = Places.from_saved(saved.batch, computed["token_index"])
    pushed = {name.split(".", 1)[1]: x for name, x in computed.items() if name.startswith("output_gradient.")}
    model = load_plain(saved)
    rounded = plain_pass(model, saved, places, pushed, dtype=dtype)
    exact = plain_pass(model, saved, places, pushed, dtype="float64")
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    compared = _Compared(saved, places, exact, rounded, epsilon)
    result = Comparison(saved, misplaced=int((computed["position_ids"][places.packed] != places.token).sum()))
    result.checks += [*compared.states(), *compared.outputs(), *compared.loss(pushed), *compared.gradients()]
    if any(check.kind == "loss_gradient" and check.diverges for check in result.checks):
        result.mask_shift = compared.mask_shift(pushed)
    return result


class _Compared:
    """The run, the oracle, and the plain path in the run's dtype."""

    def __init__(
        self, saved: SavedMicroBatch, places: Places, exact: PlainPass, rounded: PlainPass, epsilon: float
    ) -> None:
        self._saved, self._places, self._exact, self._rounded = saved, places, exact, rounded
        self._epsilon = epsilon
        batch = saved.batch
        self._prompts = batch.ragged("prompt_ids").lengths
        responses = batch.ragged("response_ids").lengths
        rows = torch.arange(len(batch)).repeat_interleave(responses)
        within = torch.arange(len(rows)) - batch.ragged("response_ids").offsets[:-1].repeat_interleave(responses)
        self._response_places = rows, within + self._prompts[rows]

    def states(self) -> list[Check]:
        """Check the routers' logits and the layers' hidden states, layer by layer."""
        checks = []
        names = sorted(self._exact.states, key=lambda name: (int(name.split(".")[1]), not name.startswith("router")))
        for name in names:
            if name not in self._saved.computed:
                continue
            exact = self._exact.states[name]
            run = self._saved.computed[name].double()[self._places.slot]
            norms = exact.norm(dim=-1)
            scale = norms.clamp(
                min=float(norms.median())
            )  # small logits of a router cancel, so their own size says little
            errors, calm = ((x - exact).norm(dim=-1) / scale for x in (run, self._rounded.states[name]))
            kind, _, layer = name.partition(".")
            places = (self._places.sequence, self._places.token)
            checks.append(self._check(kind, int(layer), errors, self._bound(calm.max()), places))
        return checks

    def outputs(self) -> list[Check]:
        """Check log-probs, and entropy if the run computed it: absolute errors."""
        checks = []
        for name, exact in self._exact.outputs.items():
            run = self._saved.computed.get(f"output.{name}")
            if run is not None:
                errors, calm = ((x.double() - exact).abs() for x in (run, self._rounded.outputs[name]))
                checks.append(self._check(name, None, errors, self._bound(calm.max()), self._response_places))
        return checks

    def loss(self, pushed: dict[str, Tensor]) -> list[Check]:
        """Check the gradient of the loss and the loss, recomputed in float64 from the run's outputs."""
        value, gradients = self._objective(self._saved.batch)
        scale = max(abs(value), *(float(gradient.abs().sum()) for gradient in gradients.values()))
        error = abs(self._saved.about["loss"] - value) / (scale or 1.0)
        detail = f"run {self._saved.about['loss']:.6g}, oracle {value:.6g}"
        errors = self._gradient_errors(pushed, gradients)
        _, single = self._objective(self._saved.batch, torch.float32)
        rounding = float(self._gradient_errors(single, gradients).max())  # large where terms of the loss cancel
        return [
            self._check("loss_gradient", None, errors, max(FACTOR * rounding, LOSS_BOUND), self._response_places),
            Check("loss", None, error, LOSS_BOUND, int(not error <= LOSS_BOUND), 1, detail=detail),
        ]

    def mask_shift(self, pushed: dict[str, Tensor]) -> int:
        """Return the shift of the response mask with which the oracle's gradient of the loss is the run's; 0 if none."""
        mask = self._saved.batch.ragged("response_mask")
        for shift in (1, -1):
            rows = [mask.row(row).roll(shift) for row in range(len(mask))]
            for row in rows:
                row[0 if shift == 1 else -1] = 0
            _, gradients = self._objective(self._saved.batch.with_columns(response_mask=Ragged.from_rows(rows)))
            errors = self._gradient_errors(pushed, gradients)
            if float((errors > LOSS_BOUND).double().mean()) < _REPRODUCED:
                return shift
        return 0

    def gradients(self) -> list[Check]:
        """Check the gradients of the parameters, grouped by layer, from the last to the first."""
        run_norms = self._saved.about["gradient_norms"]
        total = sum(norm**2 for norm in self._exact.norms.values()) ** 0.5
        groups: dict[str, list[str]] = {}
        for name in run_norms:
            match = re.search(r"\.layers\.(\d+)\.", name)
            groups.setdefault(match[1] if match else "", []).append(name)
        checks = []
        for group in sorted(groups, key=lambda group: -int(group or 10**6)):
            errors, calm = [], []
            for name in groups[group]:
                scale = max(self._exact.norms[name], _SMALLEST_GRADIENT * total) or 1.0
                exact = self._exact.gradients.get(name)
                if exact is None:
                    errors.append(abs(run_norms[name] - self._exact.norms[name]) / scale)
                    calm.append(abs(self._rounded.norms[name] - self._exact.norms[name]) / scale)
                else:
                    run = self._saved.computed[f"gradient.{name}"].double()
                    errors.append(float((run - exact).norm()) / scale)
                    calm.append(float((self._rounded.gradients[name] - exact).norm()) / scale)
            values, bound = torch.tensor(errors, dtype=torch.float64), self._bound(torch.tensor(max(calm)))
            worst = groups[group][int(values.nan_to_num(torch.inf).argmax())]
            diverging = int((~(values <= bound)).sum())
            layer = int(group) if group else None
            checks.append(Check("gradient", layer, float(values.max()), bound, diverging, len(values), detail=worst))
        return checks

    def _bound(self, calm: Tensor) -> float:
        return max(FACTOR * float(calm), self._epsilon)

    def _check(
        self, kind: str, layer: int | None, errors: Tensor, bound: float, places: tuple[Tensor, Tensor]
    ) -> Check:
        """Find the worst sequence, and in it the first token that diverges."""
        diverges, errors = ~(errors <= bound), errors.nan_to_num(torch.inf)
        worst = int(errors.argmax())
        sequence, tokens = places
        if diverges.any():
            inside = diverges & (sequence == sequence[worst])
            worst = int(torch.where(inside, tokens, torch.iinfo(torch.int64).max).argmin())
        row = int(sequence[worst])
        place = Place(row, int(tokens[worst]), int(self._prompts[row]))
        typical = float(errors[diverges].median()) if diverges.any() else 0.0
        return Check(kind, layer, float(errors.max()), bound, int(diverges.sum()), len(errors), place, typical)

    def _objective(self, batch: Batch, dtype: torch.dtype = torch.float64) -> tuple[float, dict[str, Tensor]]:
        """Return loss and gradients ``[R]`` of the run's outputs, computed in ``dtype``."""
        outputs = {
            name.split(".", 1)[1]: values.to(dtype, copy=True).requires_grad_()
            for name, values in self._saved.computed.items()
            if name.startswith("output.")
        }
        lengths = batch.ragged("response_ids").lengths
        ragged = {name: Ragged.from_lengths(values, lengths) for name, values in outputs.items()}
        loss, _ = _loss_of(self._saved.config)(ragged, batch, self._saved.totals)
        if loss.requires_grad:
            loss.backward()
        return float(loss.detach()), {
            name: torch.zeros_like(values) if values.grad is None else values.grad for name, values in outputs.items()
        }

    def _gradient_errors(self, pushed: dict[str, Tensor], gradients: dict[str, Tensor]) -> Tensor:
        """Return ``[R]`` errors of the loss's gradient, relative to the largest gradient of a token."""
        zeros = torch.zeros_like(gradients["log_probs"])
        largest = max(float(gradient.abs().max()) for gradient in gradients.values()) or 1.0
        return (
            torch.stack([(pushed.get(name, zeros) - gradient).abs() for name, gradient in gradients.items()]).amax(0)
            / largest
        )


def _loss_of(config: RLConfig) -> LossFn:
    """Return the loss function of a run's update."""
    actor = config.actor_rollout_ref.actor
    if actor.preference_loss.loss_mode is not None:
        return online_objective(actor.preference_loss)
    return PolicyObjective(actor, RunSpec(config).correction, max_response_length=config.data.max_response_length)


_NAMES = {
    "router": "router",
    "hidden": "layer",
    "log_probs": "log-probs",
    "entropy": "entropy",
    "loss": "loss",
    "loss_gradient": "gradient of the loss",
    "gradient": "parameter gradients",
}


def verdict(result: Comparison) -> str:
    """Return the verdict: where the run diverges first, or that it does not."""
    first = result.first
    if first is None:
        return f"nothing diverges beyond rounding of {result.saved.about['dtype']}"
    place = "" if first.place is None else f", sequence {first.place.sequence}, token {first.place.token}"
    return f"diverges first at {_named(first)}{place}"


def hints(result: Comparison) -> list[str]:
    """Return likely causes of the first divergence."""
    first, suggestions = result.first, []
    if first is None:
        return suggestions
    if result.misplaced:
        suggestions.append(
            f"the packed row gives {result.misplaced} tokens another position than they have in their sequence: segment "
            "lengths or position_ids of packing"
        )
    place = first.place
    if place is not None and first.kind in ("hidden", "router", "log_probs") and place.token in (0, place.prompt):
        suggestions.append(
            "it is the first token after a segment boundary (of the "
            f"{'sequence' if place.token == 0 else 'response'}): segment lengths, positions and the attention of packing"
        )
    if first.kind == "router":
        suggestions.append("the router's logits diverge: the dtype of its weights and matmul")
    elif first.kind == "hidden" and any(
        check.kind == "router" and check.layer == first.layer for check in result.checks
    ):
        suggestions.append("the router of this layer agrees, its output does not: attention or experts")
    if first.kind == "loss_gradient" or first.kind == "loss":
        sign = f"shifted by {result.mask_shift:+d} token" if result.mask_shift else ""
        suggestions.append(
            f"the run's gradient is that of a response mask {sign}: mask off by one"
            if sign
            else "log-probs agree, so the loss: mask, advantages, clipping, or the totals that normalise it"
        )
    if first.kind == "log_probs":
        suggestions.append(
            "all layers agree, so the last norm, the output layer, the softmax, or the index of the targets"
        )
    if first.kind == "gradient":
        suggestions.append(
            "the forward pass and the loss agree, so the backward pass: a kernel's gradient, or a scaled loss"
        )
    coarse = torch.finfo(torch.bfloat16).eps
    if result.saved.about["dtype"] == "float32" and coarse / 64 <= first.typical <= coarse:
        suggestions.append(f"the errors ({first.typical:.1g} in the median) have the size of rounding in bfloat16")
    return suggestions


def as_json(result: Comparison) -> dict[str, Any]:
    """Return all checks and the verdict as plain values."""
    first = result.first
    return {
        "agrees": first is None,
        "verdict": verdict(result),
        "hints": hints(result),
        "first": None if first is None else _plain(first),
        "misplaced_tokens": result.misplaced,
        "mask_shift": result.mask_shift,
        "checks": [_plain(check) for check in result.checks],
        "about": {name: result.saved.about[name] for name in ("step", "dtype", "device", "torch")},
        "bytes": result.saved.size,
    }


def show(result: Comparison, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "largest error", "bound", "diverges", "where"):
        table.add_column(heading, justify="left" if heading in ("stage", "where") else "right")
    for check in result.checks:
        place = "" if check.place is None else f"sequence {check.place.sequence}, token {check.place.token}"
        share = f"{check.diverging} of {check.compared}" if check.diverges else ""
        where = place or check.detail
        table.add_row(_named(check), f"{check.error:.2g}", f"{check.bound:.2g}", share, where)
    console.print(table)
    about = result.saved.about
    console.print(
        f"Step {about['step']}, {about['dtype']} on {about['device']}, against float64 on this CPU: each sequence alone, eager "
        f"attention. Layers, sequences and tokens count from 0. A bound is {FACTOR} times the error of the same plain path in "
        f"{about['dtype']}.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"Verdict: {verdict(result)}", highlight=False, soft_wrap=True)
    for hint in hints(result):
        console.print(f"  {hint}", highlight=False, soft_wrap=True)


def _named(check: Check) -> str:
    if check.kind == "gradient":
        return f"gradients of layer {check.layer}" if check.layer is not None else "gradients outside layers"
    return _NAMES[check.kind] if check.layer is None else f"{_NAMES[check.kind]} {check.layer}"


def _plain(check: Check) -> dict[str, Any]:
    return asdict(check) | {"name": _named(check), "diverges": check.diverges}
