"""Checks of a saved micro-batch against the oracle, in the order of the computation: layers, outputs, loss, gradients.

Each stage begins from what the run itself computed before it, so an error counts where it arises: the loss is recomputed from
the run's log-probs, and the backward pass from the run's gradient of the loss.

The bound of an error is measured, not assumed: the plain path also runs in the run's dtype, and its error is what rounding
explains. The run diverges where its error exceeds :data:`FACTOR` times the largest such error and the dtype's epsilon.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hone.apps.lab.oracle.plain import Places, PlainPass, load_plain, plain_pass
from hone.config import RLConfig
from hone.config.derived import RunSpec
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.training.microbatches import SavedMicroBatch
from hone.training.objectives import PolicyObjective
from hone.training.preferences import online_objective
from hone.training.updates import LossFn

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
    error: float  # the largest error
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

    saved: SavedMicroBatch  # the micro-batch
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
