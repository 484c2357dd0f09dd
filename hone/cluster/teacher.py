"""The role of the teachers: frozen models that score what the policy sampled."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch.nn import functional

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Split, dispatch
from hone.cluster.roles import ModelRole, build_frozen_policy
from hone.config.distillation import SAMPLED_MODES
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.teacher import TEACHER
from hone.training.backends.protocol import TrainBackend
from hone.training.teacher import teacher_head, teacher_model

PROMPTS = "teacher_prompt_ids"
"""Column of the prompts that teachers see; missing if they are the policy's."""
SUPPORT = ("response_mask", "support_sizes", "support_ids")


class TeacherWorker(ModelRole):
    """Frozen teachers, one for each model of ``distillation``; or the policy itself, under a prompt of its own.

    The policy as its own teacher is the actor of this process where its weights are at hand: with ``self_teacher=current``, and
    with LoRA, whose adapter is off for ``initial``. Otherwise it is a frozen copy.

    Args:
        context: context of the process.
    """

    def __init__(self, context: WorkerContext) -> None:
        config = self.config = context.config
        distillation = config.distillation
        self._head, self._budget = teacher_head(config), distillation.log_prob_max_token_len_per_gpu
        self._adapter_off = False
        self.engines: list[TrainBackend] = []
        for path in distillation.models:
            policy, model = context.roles.get("actor") if path is None else None, config.actor_rollout_ref.model
            has_adapter = model.lora_rank > 0 or model.lora_adapter_path is not None
            if policy is not None and (has_adapter or distillation.self_teacher == "current"):
                self._adapter_off = has_adapter and distillation.self_teacher == "initial"
                self.engines.append(policy.engine)
                continue
            self.engines.append(build_frozen_policy(context, teacher_model(config, path)))
        self.engine = self.engines[0]

    @dispatch(Split.ALL, max)
    def take_busy_seconds(self) -> float:
        """Return seconds of the teachers' forward passes since the last call, of the slowest worker."""
        return sum(engine.take_busy_seconds() for engine in self.engines)

    @dispatch(Split.ROWS)
    def teach(self, batch: Batch) -> Batch:
        """Return what each row's teacher says about its response tokens.

        The columns are ``teacher_log_probs`` of the sampled tokens, or those of :mod:`hone.models.teacher`.
        """
        prompts = PROMPTS if PROMPTS in batch else "prompt_ids"
        columns = {"prompt_ids": batch[prompts], "response_ids": batch["response_ids"]}
        if self.config.distillation.loss_mode in SAMPLED_MODES:
            columns |= {name: batch[name] for name in SUPPORT if name in batch}
        scored = Batch(columns)
        with self._weights():
            if len(self.engines) == 1:
                return Batch(_renamed(self._outputs(self.engine, scored)))
            return Batch(_renamed(self._by_teacher(scored, batch.tensor(TEACHER))))

    def _weights(self) -> AbstractContextManager[None]:
        return self.engine.reference_mode() if self._adapter_off else contextlib.nullcontext()

    def _outputs(self, engine: TrainBackend, scored: Batch) -> dict[str, Ragged]:
        return engine.infer_batch(scored, head=self._head, max_tokens=self._budget)

    def _by_teacher(self, scored: Batch, teachers: torch.Tensor) -> dict[str, Ragged]:
        """Return the outputs of each row's teacher. Every rank calls every teacher, with rows or without."""
        order: list[int] = []
        parts: list[dict[str, Ragged]] = []
        for number, engine in enumerate(self.engines):
            rows = (teachers == number).nonzero()[:, 0].tolist()
            outputs = self._outputs(engine, scored.reorder(rows))
            if rows:
                order += rows
                parts.append(outputs)
        back = torch.tensor(order).argsort()
        return {name: _joined([part[name] for part in parts]).select(back) for name in parts[0]}


def _renamed(outputs: dict[str, Ragged]) -> dict[str, Ragged]:
    return {"teacher_log_probs" if name == "log_probs" else name: column for name, column in outputs.items()}


def _joined(columns: list[Ragged]) -> Ragged:
    """Concatenate columns; vectors of different width are filled up with zeros."""
    if columns[0].values.dim() == 2:
        width = max(column.values.shape[1] for column in columns)
        columns = [c.with_values(functional.pad(c.values, (0, width - c.values.shape[1]))) for c in columns]
    return Ragged.concat(columns)
