"""Distances from a teacher's hidden states or top tokens: oracle, gradients of a dense computation, chunks, several teachers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import divergences as oracle
from support.examples import examples

from hone.algorithms.teacher import OutputLayer, TeacherDistance, TeacherTargets, chunked_top_k, top_k

WHOLE = ("forward_kl", "reverse_kl", "jsd")
MODES = (*WHOLE, *(f"{mode}_topk" for mode in WHOLE))
VOCABULARY, K, WIDTH = 13, 4, 6


class Case:
    """Hidden states and output layers of student and teacher, in float64."""

    def __init__(self, seed: int, rows: int = 7, teachers: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden, self.weight, self.bias = normal(rows, WIDTH), normal(VOCABULARY, WIDTH), normal(VOCABULARY)
        self.layers = [OutputLayer(normal(VOCABULARY, WIDTH + 2), normal(VOCABULARY), 3.0) for _ in range(teachers)]
        self.teacher_hidden = normal(rows, WIDTH + 2)
        self.layer = torch.arange(rows) % teachers
        for tensor in (self.hidden, self.weight, self.bias):
            tensor.requires_grad_()

    def teacher_logits(self) -> torch.Tensor:
        every = [3.0 * torch.tanh((self.teacher_hidden @ layer.weight.T + layer.bias) / 3.0) for layer in self.layers]
        return torch.stack(every)[self.layer, torch.arange(len(self.layer))]

    def targets(self, mode: str, temperature: float, k: int = K) -> TeacherTargets:
        if mode.endswith("_topk"):
            return TeacherTargets(*top_k(self.teacher_logits(), k, temperature))
        return TeacherTargets(hidden=self.teacher_hidden, layer=self.layer if len(self.layers) > 1 else None)

    def outputs(self, mode: str, temperature: float = 0.7, k: int = K, **options) -> dict[str, torch.Tensor]:
        chunk = options.pop("chunk_size", None)
        distance = TeacherDistance(mode, temperature, options, self.layers)
        targets = self.targets(mode, temperature, k)
        return distance.from_hidden(
            self.hidden, targets, weight=self.weight, bias=self.bias, softcap=5.0, chunk_size=chunk
        )

    def gradients(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(
            (values * torch.arange(1.0, len(values) + 1)).sum(), (self.hidden, self.weight, self.bias)
        )

    def student_logits(self) -> torch.Tensor:
        return 5.0 * torch.tanh((self.hidden @ self.weight.T + self.bias) / 5.0)


@pytest.mark.parametrize("mode", MODES)
@examples(5)
@given(seed=st.integers(0, 1000), teachers=st.integers(1, 3), chunk=st.none() | st.integers(1, 4))
def test_distances_equal_the_oracle_in_any_chunks(mode: str, seed: int, teachers: int, chunk: int | None) -> None:
    case, temperature = Case(seed, teachers=teachers), 0.7
    with torch.no_grad():
        outputs = case.outputs(mode, temperature, beta=0.3, chunk_size=chunk)
    student = [oracle.normalize(row) for row in (case.student_logits() / temperature).tolist()]
    teacher = [oracle.normalize(row) for row in (case.teacher_logits() / temperature).tolist()]
    for row, (log_q, log_p) in enumerate(zip(student, teacher, strict=True)):
        kept = range(VOCABULARY)
        if mode.endswith("_topk"):
            kept = sorted(kept, key=lambda token: -log_p[token])[:K]
            mass = sum(torch.tensor([log_q[token] for token in kept], dtype=torch.float64).exp())
            assert float(outputs["student_mass"][row]) == pytest.approx(float(mass), rel=1e-9)
        expected = oracle.token_loss([log_q[t] for t in kept], [log_p[t] for t in kept], mode, beta=0.3)
        assert float(outputs["distance"][row]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_those_of_whole_logits(mode: str) -> None:
    case = Case(3)
    gradients = case.gradients(case.outputs(mode, chunk_size=2)["distance"])
    dense = TeacherDistance(mode, 0.7, {}, case.layers).from_logits(case.student_logits(), case.targets(mode, 0.7))
    for found, expected in zip(gradients, case.gradients(dense["distance"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", WHOLE)
def test_top_k_of_the_whole_vocabulary_is_the_whole_divergence(mode: str) -> None:
    case = Case(4)
    whole, most = case.outputs(mode)["distance"], case.outputs(f"{mode}_topk", k=VOCABULARY)["distance"]
    torch.testing.assert_close(most, whole, rtol=0, atol=1e-12)
    for found, expected in zip(case.gradients(most), case.gradients(whole), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_a_student_that_is_its_teacher_has_neither_distance_nor_gradient(mode: str) -> None:
    case = Case(5)
    case.layers = [OutputLayer(case.weight.detach(), case.bias.detach(), 5.0)]
    case.teacher_hidden = case.hidden.detach()
    case.teacher_logits = lambda: case.student_logits().detach()  # type: ignore[method-assign]
    distance = case.outputs(mode)["distance"]
    assert float(distance.detach().abs().max()) < 1e-12
    assert all(float(gradient.abs().max()) < 1e-9 for gradient in case.gradients(distance))


def test_the_forward_kl_of_a_certain_teacher_is_cross_entropy() -> None:
    case = Case(6)
    tokens = torch.arange(len(case.hidden)) % VOCABULARY
    certain = TeacherTargets(tokens[:, None], torch.zeros(len(tokens), 1, dtype=torch.float64))
    distance = TeacherDistance("forward_kl_topk").from_hidden(case.hidden, certain, weight=case.weight, bias=case.bias)
    logits = case.hidden @ case.weight.T + case.bias
    expected = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    torch.testing.assert_close(distance["distance"], expected, rtol=0, atol=1e-12)
    for found, other in zip(case.gradients(distance["distance"]), case.gradients(expected), strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-9)


def test_a_padded_output_layer_leaves_out_tokens_that_the_other_lacks() -> None:
    """Output layers of one tokenizer may be padded to different sizes: both are normalised over the shorter one."""
    case = Case(7)
    whole = case.outputs("reverse_kl")["distance"]
    layer = case.layers[0]
    more = torch.cat([layer.weight, torch.full((3, WIDTH + 2), 9.0, dtype=torch.float64)])
    case.layers = [OutputLayer(more, torch.cat([layer.bias, torch.full((3,), 9.0, dtype=torch.float64)]), 3.0)]
    targets = TeacherTargets(hidden=case.teacher_hidden)
    padded = TeacherDistance("reverse_kl", 0.7, {}, case.layers).from_hidden(
        case.hidden, targets, weight=case.weight, bias=case.bias, softcap=5.0
    )
    torch.testing.assert_close(padded["distance"], whole)
    ids, log_probs = chunked_top_k(case.teacher_hidden, more, 20, vocabulary=VOCABULARY, chunk_size=3)
    assert int(ids.max()) < VOCABULARY
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(len(ids), dtype=torch.float64))


@examples(5)
@given(seed=st.integers(0, 1000), chunk=st.integers(1, 9))
def test_top_tokens_are_the_likeliest(seed: int, chunk: int) -> None:
    case = Case(seed)
    layer = case.layers[0]
    ids, log_probs = chunked_top_k(
        case.teacher_hidden, layer.weight, K, bias=layer.bias, softcap=3.0, temperature=0.7, chunk_size=chunk
    )
    every = (case.teacher_logits() / 0.7).log_softmax(-1)
    torch.testing.assert_close(log_probs, every.sort(-1, descending=True).values[:, :K])
    torch.testing.assert_close(every.gather(-1, ids), log_probs)
