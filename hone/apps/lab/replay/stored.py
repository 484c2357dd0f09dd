"""A step of a run as it is stored in the rollout archive, as the batch that the trainer had."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.apps.lab.rewards.comparison import stored_trajectory
from hone.cluster.context import WorkerContext
from hone.cluster.roles import PolicyWorker
from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.config.trust import run_config
from hone.data.batch import Batch, to_batch
from hone.data.images import IMAGES
from hone.data.ragged import Ragged
from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.insight.coverage import Fate
from hone.models.devices import run_device
from hone.rewards.score import Score
from hone.trainers.estimates import KEPT
from hone.training.backends.local import LocalBackend
from hone.training.checkpoints.checkpoint import complete_steps
from hone.training.checkpoints.storage import Storage
from hone.training.objectives import PartialLoss, Statistics, Totals

TOKEN_COLUMNS = {
    "old_log_probs": "old_log_probs",
    "new_log_probs": "new_log_probs",
    "ref_log_probs": "ref_log_probs",
    "entropy": "entropy",
    "values": "values",
    "sum_pi_squared": "sum_pi_squared",
    "process_rewards": "process_rewards",
    "token_scores": "token_level_scores",
    "token_rewards": "token_level_rewards",
    "advantages": "advantages",
    "returns": "returns",
    "correction": "rollout_is_weights",
    "loss_mask": KEPT,
}
"""Column of the archive by token, and the column of a batch."""


@dataclass(frozen=True)
class StoredStep:
    run: Path
    step: int
    config: RLConfig
    batch: Batch  # sequences that the step trained on, in the order of the trainer, with every column that is stored


def load_step(run: Path, step: int, overrides: Sequence[str] = ()) -> StoredStep:
    """Read a step from the rollout archive of a run; ``overrides`` (``key=value``) change its configuration."""
    archive = open_archive(run)
    records = [record for record in archive.records(step) if record["fate"] == Fate.TRAINED]
    if not archive.complete(step):
        raise HoneError(
            f"step {step} has only the prompts that are stored at every step",
            why="advantages and losses need all sequences of the batch",
            where=str(archive.folder),
            fix=f"a step with all of them (trainer.rollout_dump_freq), or a run with trainer.rollout_dump_steps=[{step}]",
            code="E-runs",
        )
    lacking = sum(record["response_ids"] is None for record in records)
    if not records:
        raise HoneError(
            f"step {step} trained on no sequence",
            where=str(archive.folder),
            fix=f"one of the steps {', '.join(map(str, archive.steps()[-12:]))}",
            code="E-runs",
        )
    if lacking:
        raise HoneError(
            f"{lacking} of the {len(records)} sequences that step {step} trained on have no token ids",
            why="an import of text has none, and where a credential is hidden in a conversation, its tokens are left out",
            where=str(archive.folder),
            fix="another step, or a run whose rows hold no credentials",
            code="E-runs",
        )
    return StoredStep(run, step, run_config(run, overrides), as_batch(records, archive.folder))


def require_stored_inputs(config: RLConfig, *, weights: bool, code: str, fix: str) -> None:
    """Check that the archive has what the update of a run is computed from.

    With ``weights`` the model computes log-probs again; otherwise those of the archive are used.
    """
    used = {
        "the support of sampling (actor_rollout_ref.rollout.keep_support)": RunSpec(config).keeps_support.value,
        "what teachers said (distillation.enable)": config.distillation.enable,
        "the experts of the engine (actor_rollout_ref.actor.router_replay.mode)": weights
        and RunSpec(config).follows_engine_experts,
    }
    missing = [name for name, is_used in used.items() if is_used]
    if missing:
        raise HoneError(
            f"the update used {', '.join(missing)}",
            why="the archive does not have it, so the result would be of another update",
            fix=fix,
            code=code,
        )


def as_batch(records: Sequence[dict[str, Any]], folder: Path) -> Batch:
    """Convert records of the archive in a folder to the batch that the trainer had."""
    scores = [Score(r["score"], r["terms"] or {}, r["extra"] or {}, unshaped=r["unshaped"]) for r in records]
    columns: dict[str, Any] = {
        "score": scores,
        "reward": torch.tensor([score.total for score in scores], dtype=torch.float32),
    }
    for stored, name in TOKEN_COLUMNS.items():
        if all(record[stored] is not None for record in records):
            dtype = torch.int64 if name == KEPT else torch.float32
            columns[name] = Ragged.from_rows([record[stored] for record in records], dtype)
    columns.setdefault("token_level_scores", columns.get("token_level_rewards"))
    if all(record["baseline"] is not None for record in records):
        columns["reward_baselines"] = torch.tensor([record["baseline"] for record in records], dtype=torch.float32)
    if all(record["turn_values"] is not None for record in records):
        columns["turn_values"] = [{int(turn): value for turn, value in r["turn_values"].items()} for r in records]
    if all(record["turn_baselines"] is not None for record in records):
        columns["turn_baselines"] = [record["turn_baselines"] for record in records]
    return to_batch([stored_trajectory(record, {}, folder) for record in records]).with_columns(
        **{name: column for name, column in columns.items() if column is not None}
    )


LARGEST_EXACT = 500_000_000
"""Trained parameters up to which all gradients are compared; beyond it, those of the last layer."""
_DERIVATIVE = "token_gradient"
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class WeightGradients:
    """Gradients of a step by the weights before it.

    The loss is linear in the log-probs at its point: its gradient is that of the sum of log-prob x derivative.
    """

    def __init__(self, stored: StoredStep) -> None:
        require_stored_inputs(stored.config, weights=True, code="E-what-if", fix="--no-weights, or a run without it")
        names = ("prompt_ids", "response_ids", "response_mask", IMAGES)
        self._batch = stored.batch.select(*(name for name in names if name in stored.batch))
        device = run_device(stored.config.trainer.device)
        worker = PolicyWorker(WorkerContext(stored.config, device, resume=checkpoint_before(stored)))
        engine = worker.engine
        if not isinstance(engine, LocalBackend):
            raise HoneError(
                f"{type(engine).__name__} does not have all gradients in this process",
                fix="--no-weights",
                code="E-what-if",
            )
        self._engine = engine
        trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
        # whether all trained parameters are compared, not only those of the last layer
        self.exact = sum(parameter.numel() for parameter in trained) <= LARGEST_EXACT
        self._parameters = trained if self.exact else _last_layer(engine.model)
        if not self.exact:
            kept = set(map(id, self._parameters))
            for parameter in trained:
                parameter.requires_grad_(id(parameter) in kept)

    def gradient(self, token_gradient: Ragged) -> Tensor:
        """Return the gradient for derivatives by the log-probs of the batch's tokens, as one float32 vector."""
        self._engine.begin_update()
        self._engine.accumulate(self._batch.with_columns(**{_DERIVATIVE: token_gradient}), PartialLoss(_linear, None))
        gradients = [parameter.grad for parameter in self._parameters]
        flat = [
            torch.zeros(parameter.numel()) if gradient is None else gradient.detach().float().flatten().cpu()
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        return torch.cat(flat)


def checkpoint_before(stored: StoredStep) -> str | None:
    """Return the checkpoint of the weights that a step began with; None for the model that the run began with."""
    if stored.step == 1:
        return None
    root = checkpoints(stored)
    if stored.step - 1 not in complete_steps(root):
        raise HoneError(
            f"there is no checkpoint of step {stored.step - 1}",
            why=f"the gradient is that of the weights with which step {stored.step} began",
            where=str(root),
            fix=f"--no-weights, or a run with trainer.save_steps_for_replay=[{stored.step}]",
            code="E-what-if",
        )
    return str(root / f"step_{stored.step - 1}")


def checkpoints(stored: StoredStep) -> Storage:
    """Return the folder of the run's checkpoints, a path or a URL."""
    return Storage(stored.config.trainer.checkpoint_dir or stored.run / "checkpoints")


def _linear(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
    log_probs = outputs["log_probs"].values
    return (log_probs * batch.ragged(_DERIVATIVE).values.to(log_probs)).sum(), {}


def _last_layer(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters of the last layer."""
    numbered = [
        (int(match[1]), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (match := _LAYER.search(name))
    ]
    last = max(number for number, _ in numbered)
    return [parameter for number, parameter in numbered if number == last]
