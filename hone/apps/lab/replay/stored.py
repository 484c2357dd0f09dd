"""A step of a run as it is stored in the rollout archive, as the batch that the trainer had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hone.apps.lab.rewards.stored import stored_trajectory
from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.config.trust import run_config
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.trajectories import to_batch
from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.insight.coverage.ledger import Fate
from hone.rewards.score import Score
from hone.trainers.update_view import KEPT

TOKEN_COLUMNS = {
    "old_log_probs": "old_log_probs",
    "new_log_probs": "new_log_probs",
    "ref_log_probs": "ref_log_probs",
    "entropy": "entropy",
    "values": "values",
    "sum_pi_squared": "sum_pi_squared",
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
    return to_batch([stored_trajectory(record, {}, folder) for record in records]).with_columns(
        **{name: column for name, column in columns.items() if column is not None}
    )
