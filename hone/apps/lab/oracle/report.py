"""The verdict on a saved micro-batch in words, as a table, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hone.apps.lab.oracle.checks import FACTOR, Check, Comparison

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
