"""The role of the teachers: frozen models that score what the policy sampled."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch.nn import functional

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Split, dispatch
from hone.cluster.handles import TEACHER_RESPONSES
from hone.cluster.roles import ModelRole, build_frozen_policy, first_adapter
from hone.config.distillation import SAMPLED_MODES, is_address
from hone.config.offline import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import model_block
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.teacher import IDS, LOG_PROBS, TEACHER, TEACHER_LOG_PROBS, TEACHER_PROMPTS, TopKHead
from hone.training.backends.protocol import TrainBackend
from hone.training.learners import teacher_head, teacher_model

SUPPORT = ("response_mask", "support_sizes", "support_ids")


class TeacherWorker(ModelRole):
    """Frozen teachers, one for each model of ``distillation``; or the policy itself, under a prompt of its own.

    The policy as its own teacher is the actor of this process where its weights are at hand: with ``self_teacher=current``, and
    with LoRA, whose adapter is off for ``initial``. Otherwise it is a frozen copy.
    """

    def __init__(self, context: WorkerContext[RLConfig] | WorkerContext[SFTConfig]) -> None:
        config = self.config = context.config
        distillation, model = config.distillation, model_block(config)[1]
        self_teacher = config.distillation.self_teacher if isinstance(config, RLConfig) else ""
        self._head, self._budget = teacher_head(config), distillation.log_prob_max_token_len_per_gpu
        self._adapter_off, self._adapter = False, None
        self.engines: dict[int, TrainBackend] = {}
        for number, path in enumerate(distillation.models):
            if is_address(path):
                continue
            policy = context.roles.get("actor") if path is None else None
            has_adapter = model.lora_rank > 0 or model.lora_adapter_path is not None
            if policy is not None and (has_adapter or self_teacher == "current"):
                self._adapter_off = has_adapter and self_teacher == "initial"
                self._adapter = first_adapter(model, wanted=True) if self._adapter_off else None
                self.engines[number] = policy.engine
                continue
            self.engines[number] = build_frozen_policy(context, teacher_model(config, path))
        self.engine = next(iter(self.engines.values()))

    @dispatch(Split.ALL, max)
    def take_busy_seconds(self) -> float:
        """Return seconds of the teachers' forward passes since the last call, of the slowest worker."""
        return sum(engine.take_busy_seconds() for engine in self.engines.values())

    @dispatch(Split.ROWS)
    def teach(self, batch: Batch) -> Batch:
        """Return what each row's teacher says about its response tokens.

        The columns are ``teacher_log_probs`` of the sampled tokens (or of ``teacher_response_ids``, if they are there), or those of :mod:`hone.models.teacher`. Rows whose teacher is
        behind a server get NaN; :class:`~hone.training.served_teacher.ServedTeachers` fills them in.
        """
        prompts = TEACHER_PROMPTS if TEACHER_PROMPTS in batch else "prompt_ids"
        responses = TEACHER_RESPONSES if TEACHER_RESPONSES in batch else "response_ids"
        columns = {"prompt_ids": batch[prompts], "response_ids": batch[responses]}
        if self.config.distillation.loss_mode in SAMPLED_MODES and responses == "response_ids":
            columns |= {name: batch[name] for name in SUPPORT if name in batch}
        scored = Batch(columns)
        with self._weights():
            if len(self.config.distillation.models) == 1:
                return Batch(_renamed(self._outputs(self.engine, scored)))
            return Batch(_renamed(self._by_teacher(scored, batch.tensor(TEACHER))))

    def _weights(self) -> AbstractContextManager[None]:
        return self.engine.reference_mode(self._adapter) if self._adapter_off else contextlib.nullcontext()

    def _outputs(self, engine: TrainBackend, scored: Batch) -> dict[str, Ragged]:
        return engine.infer_batch(scored, head=self._head, max_tokens=self._budget)

    def _by_teacher(self, scored: Batch, teachers: torch.Tensor) -> dict[str, Ragged]:
        """Return the outputs of each row's teacher. Every rank calls every teacher, with rows or without."""
        order: list[int] = []
        parts: list[dict[str, Ragged]] = []
        for number, engine in self.engines.items():
            rows = (teachers == number).nonzero()[:, 0].tolist()
            outputs = self._outputs(engine, scored.reorder(rows))
            if rows:
                order += rows
                parts.append(outputs)
        if served := [row for row, number in enumerate(teachers.tolist()) if number not in self.engines]:
            order += served
            parts.append(self._unknown(scored.ragged("response_ids").select(served)))
        back = torch.tensor(order).argsort()
        return {name: _joined([part[name] for part in parts]).select(back) for name in parts[0]}

    def _unknown(self, responses: Ragged) -> dict[str, Ragged]:
        """Return the outputs of rows that another teacher scores: NaN."""
        tokens = len(responses.values)
        if not isinstance(self._head, TopKHead):
            return {"log_probs": responses.with_values(torch.full((tokens,), torch.nan))}
        nothing = torch.full((tokens, min(self._head.k, self._head.vocabulary)), torch.nan)
        return {
            IDS: responses.with_values(nothing.new_zeros(nothing.shape, dtype=torch.int32)),
            LOG_PROBS: responses.with_values(nothing),
        }


def _renamed(outputs: dict[str, Ragged]) -> dict[str, Ragged]:
    return {TEACHER_LOG_PROBS if name == "log_probs" else name: column for name, column in outputs.items()}


def _joined(columns: list[Ragged]) -> Ragged:
    """Concatenate columns; vectors of different width are filled up with zeros."""
    if columns[0].values.dim() == 2:
        width = max(column.values.shape[1] for column in columns)
        columns = [c.with_values(functional.pad(c.values, (0, width - c.values.shape[1]))) for c in columns]
    return Ragged.concat(columns)
