"""Losses of distillation in the training loop: no gradient from a teacher that is the student, any micro-batches, plain sequences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.models import random_batch, tiny_model

from hone.algorithms.distillation import distillation_token_loss
from hone.algorithms.teacher import OutputLayer, TeacherDistance
from hone.config.actor import ActorConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.derived import correction_settings
from hone.config.distillation import SAMPLED_MODES, TOP_K_MODES, WHOLE_MODES, DistillationConfig
from hone.config.model import OptimConfig
from hone.data.batch import Batch
from hone.models.heads import PolicyHead
from hone.models.teacher import HiddenHead, TopKHead
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import PolicyObjective

CPU = torch.device("cpu")
MODES = ("k2", "k3", *TOP_K_MODES, *WHOLE_MODES)
TEMPERATURE, K = 0.7, 5


def student(mode: str, teacher: torch.nn.Module, **settings) -> LocalBackend:
    layer = OutputLayer(teacher.get_output_embeddings().weight.detach())
    distance = None if mode in SAMPLED_MODES else TeacherDistance(mode, TEMPERATURE, {}, [layer])
    return LocalBackend(
        tiny_model(), PolicyHead(TEMPERATURE, distance=distance), TrainSettings(CPU, optim=OptimConfig(), **settings)
    )


def taught(mode: str, batch: Batch, teacher: torch.nn.Module) -> Batch:
    head = TopKHead(K, TEMPERATURE, 61) if mode in TOP_K_MODES else HiddenHead()
    head = PolicyHead(TEMPERATURE) if mode in SAMPLED_MODES else head
    columns = LocalBackend(teacher, head, TrainSettings(CPU)).infer_batch(batch)
    return batch.with_columns(**{"teacher_log_probs" if n == "log_probs" else n: c for n, c in columns.items()})


def objective_of(mode: str, **keys) -> PolicyObjective:
    settings = DistillationConfig(enable=True, loss_mode=mode, **keys)
    actor = ActorConfig(loss_agg_mode="token-mean")
    correction = correction_settings(RolloutCorrectionConfig())
    return PolicyObjective(actor, correction, max_response_length=16, distillation=settings)


def gradient(engine: LocalBackend, batch: Batch, objective: PolicyObjective) -> tuple[torch.Tensor, float]:
    kept = {}

    def keep(step, statistics):
        kept["grad"] = torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])
        pairs = [seen["distillation/loss"] for seen in statistics if seen]
        kept["loss"] = float(sum(v * w for v, w in pairs) / sum(w for _, w in pairs))

    engine._apply = keep  # type: ignore[method-assign]
    engine.train_batch(batch, objective, step=0)
    return kept["grad"], kept["loss"]


@pytest.mark.parametrize("mode", MODES)
def test_a_teacher_that_is_the_student_gives_no_gradient(mode: str) -> None:
    batch = taught(mode, random_batch(8, 3), tiny_model())
    grad, loss = gradient(student(mode, tiny_model()), batch, objective_of(mode))
    assert abs(loss) < 1e-6
    assert float(grad.abs().max()) < 1e-6


@pytest.mark.parametrize("mode", MODES)
@examples(4)
@given(seed=st.integers(0, 1000), budget=st.integers(8, 120), rows=st.none() | st.integers(1, 4))
def test_loss_and_gradient_do_not_depend_on_the_split_or_the_order(mode, seed, budget, rows) -> None:
    teacher = tiny_model(seed=1)
    batch = taught(mode, random_batch(8, seed), teacher)
    objective = objective_of(mode, task_weight=0.5, coef=2.0)
    grad, loss = gradient(student(mode, teacher, max_tokens=10**6), batch, objective)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    split = student(mode, teacher, max_tokens=budget, max_sequences=rows)
    grad2, loss2 = gradient(split, batch.reorder(order), objective)
    assert loss2 == pytest.approx(loss, abs=1e-5)
    torch.testing.assert_close(grad2, grad, atol=2e-6 * max(1.0, float(grad.norm())), rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_that_of_plain_forward_passes(mode: str) -> None:
    """Each sequence by itself through both models in float64, the whole table of logits at once."""
    teacher, batch = tiny_model(seed=1), random_batch(6, seed=2)
    _, loss = gradient(student(mode, teacher), taught(mode, batch, teacher), objective_of(mode, beta=0.5))
    models = [tiny_model().double(), tiny_model(seed=1).double()]
    for model in models:
        model.config._attn_implementation = "eager"
    total, tokens = 0.0, 0
    for row in range(len(batch)):
        prompt, response = batch.ragged("prompt_ids").row(row), batch.ragged("response_ids").row(row)
        mask = batch.ragged("response_mask").row(row)
        with torch.no_grad():
            every = [model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] for model in models]
        log_q, log_p = ((logits / TEMPERATURE).log_softmax(-1) for logits in every)
        if mode in TOP_K_MODES:
            ids = log_p.topk(K).indices
            log_q, log_p = log_q.gather(1, ids), log_p.gather(1, ids)
        elif mode in SAMPLED_MODES:
            log_q, log_p = (x.gather(1, response[:, None])[:, 0] for x in (log_q, log_p))
        total += float((distillation_token_loss(log_q, log_p, mode) * mask).sum())
        tokens += int(mask.sum())
    assert loss == pytest.approx(total / tokens, abs=2e-5)


def test_rows_that_share_tokens_may_have_different_teachers() -> None:
    """Equal rows are packed once; a row keeps the targets of its own teacher."""
    teachers = [tiny_model(seed=1), tiny_model(seed=2)]
    batch = random_batch(4, 5).reorder([0, 0, 1, 1])
    by_teacher = [taught("reverse_kl", batch, teacher) for teacher in teachers]
    rows = [by_teacher[row % 2].ragged("teacher_hidden").row(row) for row in range(4)]
    mixed = batch.with_columns(
        teacher_hidden=type(batch.ragged("response_ids")).from_rows(rows), teacher=torch.tensor([0, 1, 0, 1])
    )
    engine = student("reverse_kl", teachers[0])
    engine.head.distance = TeacherDistance(  # type: ignore[union-attr]
        "reverse_kl", TEMPERATURE, {}, [OutputLayer(t.get_output_embeddings().weight.detach()) for t in teachers]
    )
    _, loss = gradient(engine, mixed, objective_of("reverse_kl"))
    expected, weights = 0.0, 0.0
    for number, teacher in enumerate(teachers):
        part = by_teacher[number].reorder([number, 2 + number])
        tokens = float(part.ragged("response_mask").values.sum())
        expected += tokens * gradient(student("reverse_kl", teacher), part, objective_of("reverse_kl"))[1]
        weights += tokens
    assert loss == pytest.approx(expected / weights, abs=1e-5)
