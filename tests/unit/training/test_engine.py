"""The engine: exact under any micro-batch split and order, equal to a plain forward pass, exact after save and load."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.models import random_batch, tiny_model

from hone.config.actor import ActorConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.derived import correction_settings
from hone.config.model import OptimConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.insight.invariants import RATIO_MAX
from hone.models.heads import PolicyHead, ValueHead
from hone.training.backends.local import LocalBackend
from hone.training.engine import Outputs, TrainSettings
from hone.training.objectives import DIVISORS, PartialLoss, PolicyObjective, imitation_objective, value_objective
from hone.training.packing import pack

CPU = torch.device("cpu")
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny_model()


def engine_of(model, head=None, **kwargs) -> LocalBackend:
    return LocalBackend(model, head or PolicyHead(), TrainSettings(CPU, optim=OptimConfig(lr=1e-2), **kwargs))


def with_old(engine: LocalBackend, batch: Batch, noise: float = 0.3) -> Batch:
    log_probs = engine.infer_batch(batch)["log_probs"]
    old = log_probs.with_values(log_probs.values + noise * batch.ragged("noise").values)
    ref = log_probs.with_values(log_probs.values - noise * batch.ragged("noise").values)
    return batch.with_columns(old_log_probs=old, ref_log_probs=ref)


def gradient(engine: LocalBackend, batch: Batch, objective, **settings) -> tuple[float, torch.Tensor, float]:
    """Norm, flattened gradient and loss of one mini-batch, without the update."""
    kept = {}

    def keep(step, statistics):
        kept["grad"] = torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])
        names = ("actor/loss", "critic/vf_loss", "train/loss")
        pairs = [value for seen in statistics for name, value in seen.items() if name in names]
        kept["loss"] = float(sum(v * w for v, w in pairs) / sum(w for _, w in pairs))

    engine._apply = keep  # type: ignore[method-assign]
    engine.train_batch(batch, objective, step=0, **{"with_entropy": True, **settings})
    return float(kept["grad"].norm()), kept["grad"], kept["loss"]


def test_log_probs_equal_a_plain_forward_pass_of_each_sequence(model):
    batch = random_batch(9, seed=1)
    found = engine_of(model, PolicyHead(temperature=0.7), max_tokens=30).infer_batch(batch, with_entropy=True)
    model.config._attn_implementation = "eager"
    for row in range(len(batch)):
        prompt, response = batch.ragged("prompt_ids").row(row), batch.ragged("response_ids").row(row)
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float() / 0.7
        log_softmax = logits.log_softmax(-1)
        expected = log_softmax.gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(found["log_probs"].row(row), expected.detach(), atol=1e-5, rtol=0)
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        torch.testing.assert_close(found["entropy"].row(row), entropy.detach(), atol=1e-5, rtol=0)


def policy_objective(actor: ActorConfig) -> PolicyObjective:
    return PolicyObjective(actor, correction_settings(RolloutCorrectionConfig()), max_response_length=16)


@pytest.mark.parametrize("mode", MODES)
@examples(8)
@given(seed=st.integers(0, 1000), budget=st.integers(8, 120), rows=st.none() | st.integers(1, 4))
def test_policy_loss_and_gradient_do_not_depend_on_the_split_or_the_order(mode, seed, budget, rows):
    batch = random_batch(8, seed)
    objective = policy_objective(
        ActorConfig(loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
    )
    whole = engine_of(tiny_model(), max_tokens=10**6)
    batch = with_old(whole, batch)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    norm, grad, loss = gradient(whole, batch, objective)
    split = engine_of(tiny_model(), max_tokens=budget, max_sequences=rows)
    norm2, grad2, loss2 = gradient(split, batch.reorder(order), objective)
    terms = float(batch.ragged("response_mask").values.sum()) if "sum" in mode else 1.0  # of the order of the loss
    assert abs(loss - loss2) <= 1e-6 * terms
    torch.testing.assert_close(grad2, grad, atol=1e-6 * max(1.0, norm), rtol=0)


@examples(6)
@given(seed=st.integers(0, 1000), budget=st.integers(8, 120))
def test_value_and_imitation_losses_do_not_depend_on_the_split(seed, budget):
    from transformers import Qwen3ForTokenClassification

    from hone.models.routing import use_hone_attention

    batch = random_batch(8, seed)
    config = copy.deepcopy(tiny_model().config)
    config.num_labels, config.classifier_dropout = 1, 0.0
    torch.manual_seed(0)
    critic = Qwen3ForTokenClassification(config)
    use_hone_attention(critic)
    value = value_objective(cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=16)
    for head, model, objective in ((ValueHead(), critic, value), (PolicyHead(), tiny_model(), imitation_objective())):
        norm, grad, loss = gradient(engine_of(copy.deepcopy(model), head, max_tokens=10**6), batch, objective)
        _, grad2, loss2 = gradient(engine_of(copy.deepcopy(model), head, max_tokens=budget), batch, objective)
        assert abs(loss - loss2) <= 1e-6 * max(1, abs(loss))
        torch.testing.assert_close(grad2, grad, atol=1e-6 * max(1.0, norm), rtol=0)


def test_ratio_is_one_on_the_first_update_whatever_the_split(model):
    batch = random_batch(16, seed=3, holes=False)
    engine = engine_of(model, max_tokens=64)
    batch = batch.with_columns(old_log_probs=engine.infer_batch(batch)["log_probs"])
    result = engine_of(model, max_tokens=40).train_batch(batch, policy_objective(ActorConfig()), step=0)
    assert max(float(seen[RATIO_MAX][0]) for seen in result.statistics) < 1e-5


@pytest.mark.parametrize("learns_entropy", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_an_update_gives_what_its_pass_saw(fused, learns_entropy):
    """The outputs of the pass are those of a pass before the update, row by row; and looking at them changes no gradient."""
    batch, head = random_batch(16, seed=3), PolicyHead(0.7, learns_entropy=learns_entropy)
    engine, other = engine_of(tiny_model(), head, max_tokens=40), engine_of(tiny_model(), head, max_tokens=40)
    if not fused:
        for each in (engine, other):
            each.model.config.logits_scaling = 1.5  # such models go through their own forward pass, logits and all
            each.model.register_forward_hook(lambda *_: None)
    before = other.infer_batch(batch, with_entropy=True)
    seen = Outputs(batch.ragged("response_ids"))
    norm, grad, _ = gradient(engine, batch, imitation_objective(), outputs_seen=seen)
    assert seen.columns().keys() == before.keys() == {"log_probs", "entropy"}
    for name, values in seen.columns().items():
        torch.testing.assert_close(values.values, before[name].values, atol=1e-6, rtol=1e-6)
    _, plain, _ = gradient(other, batch, imitation_objective(), with_entropy=False)
    assert norm > 0
    torch.testing.assert_close(grad, plain, atol=1e-7, rtol=1e-6)


def test_without_old_log_probs_the_policy_is_the_old_one(model):
    batch = with_old(engine_of(model), random_batch(16, seed=3), noise=0.0)
    alone = batch.select(*(name for name in batch.names() if name != "old_log_probs"))
    objective = policy_objective(ActorConfig(entropy_coeff=0.01))
    _, known, loss = gradient(engine_of(tiny_model()), batch, objective)
    _, found, same = gradient(engine_of(tiny_model()), alone, objective)
    assert same == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(found, known, atol=1e-6, rtol=1e-5)


def test_masked_tokens_get_no_gradient(model):
    batch = with_old(engine_of(model), random_batch(6, seed=5))
    changed = batch.ragged("advantages")
    outside = batch.ragged("response_mask").values == 0
    assert outside.any()
    other = batch.with_columns(advantages=changed.with_values(torch.where(outside, 99.0, changed.values)))
    objective = policy_objective(ActorConfig())
    _, first, _ = gradient(engine_of(tiny_model()), batch, objective)
    _, second, _ = gradient(engine_of(tiny_model()), other, objective)
    assert torch.equal(first, second)


def test_gradient_checkpointing_changes_nothing(model):
    batch = random_batch(6, seed=6)
    other = tiny_model()
    other.register_forward_hook(lambda *_: None)  # computed by its own module, as with checkpointing
    _, plain, _ = gradient(engine_of(other), batch, imitation_objective())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, checkpointed, _ = gradient(engine_of(model), batch, imitation_objective())
    torch.testing.assert_close(checkpointed, plain, atol=1e-7, rtol=1e-5)


def test_a_gradient_that_is_not_finite_is_not_applied(model):
    batch = random_batch(4, seed=7)
    engine = engine_of(model)
    before = [p.detach().clone() for p in model.parameters()]

    def broken(outputs, micro, totals):
        return outputs["log_probs"].values.sum() * float("nan"), {}

    result = engine.train_batch(batch, broken, step=0)
    assert not result.applied
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_optimizer_state_survives_saving(model, tmp_path):
    batch, objective = random_batch(6, seed=8), imitation_objective()
    engine = engine_of(model)
    engine.train_batch(batch, objective, step=0)
    engine.stage(str(tmp_path), "actor")()
    again = engine_of(type(model).from_pretrained(tmp_path / "actor", dtype=torch.float32))
    from hone.models.routing import use_hone_attention

    use_hone_attention(again.model)
    again.restore(str(tmp_path), "actor")
    for each in (engine, again):
        each.train_batch(batch, objective, step=1)
    for a, b in zip(engine.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
@examples(8)
@given(cuts=st.sets(st.integers(1, 8), max_size=3), seed=st.integers(0, 50))
def test_a_mini_batch_in_parts_has_the_gradient_of_the_whole(mode, cuts, seed):
    model, batch = tiny_model(), random_batch(9, seed=seed)
    actor = ActorConfig(loss_agg_mode=mode, loss_scale_factor=7.0, entropy_coeff=0.1, use_kl_loss=True)
    objective = PolicyObjective(actor, correction_settings(RolloutCorrectionConfig()), max_response_length=8)
    whole, parts = engine_of(model, max_tokens=40), engine_of(copy.deepcopy(model), max_tokens=40)
    batch = with_old(whole, batch)
    expected = whole.train_batch(batch, objective, step=0, with_entropy=True)
    loss = PartialLoss(objective, DIVISORS[mode])
    parts.begin_update()
    bounds = [0, *sorted(cuts), 9]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        parts.accumulate(batch.slice(start, stop), loss, with_entropy=True)
    result = parts.apply_gradients(0, loss)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4) and result.applied == expected.applied
    for one, other in zip(parts.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("wanted", [False, True])
def test_only_the_backward_pass_is_deterministic_when_asked_for(model, wanted):
    """Sampling has operations without a deterministic form on CUDA, so nothing else may be so."""
    engine, seen = engine_of(model, deterministic=wanted), []
    first = next(model.parameters())
    model.get_decoder().register_forward_hook(lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()))
    first.register_hook(lambda _: seen.append(torch.are_deterministic_algorithms_enabled()))
    engine.begin_update()
    engine._loop.accumulate_gradients(random_batch(4, seed=0), engine.head, imitation_objective())
    assert seen == [False, wanted] and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_that_several_outputs_use_get_the_sum_of_their_gradients(dtype):
    """Rows of a group share the last token of their prompt, which predicts the first token of each."""
    batch = Batch(
        {
            "prompt_ids": Ragged.from_rows([[5, 6, 7]] * 3 + [[8, 9]], torch.int64),
            "response_ids": Ragged.from_rows([[1, 2], [3], [4, 2], [6]], torch.int64),
            "response_mask": Ragged.from_rows([[1, 1], [1], [1, 1], [1]], torch.int64),
        }
    )
    packed = pack(batch, torch.device("cpu"))
    assert packed.predictors is not None and len(packed.output_index.unique()) < len(packed.output_index)
    hidden = torch.randn(packed.input_ids.shape[1], 8, dtype=dtype, requires_grad=True)
    slopes = torch.randn(len(packed.output_index), 8, dtype=dtype)
    outputs = packed.of_outputs(hidden)
    assert torch.equal(outputs, hidden[packed.output_index])
    (found,) = torch.autograd.grad(outputs, hidden, slopes)
    expected = torch.zeros(hidden.shape, dtype=torch.float64).index_add_(0, packed.output_index, slopes.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-6 if dtype == torch.float32 else 0.05, rtol=0)
