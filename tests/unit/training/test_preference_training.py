"""Preference training: pairs stay together, no split changes a gradient, every way to the reference gives the same numbers,
and a reward model's score is that of transformers.
"""

import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from support.examples import examples
from support.messages import raises
from support.models import VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3ForSequenceClassification

from hone.algorithms import preference_losses
from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import RowGroups
from hone.cluster.offline_roles import FrozenPolicyWorker, LearnerWorker
from hone.cluster.roles import ReferenceWorker
from hone.config.actor import OnlinePreferenceConfig
from hone.config.model import ModelConfig, OptimConfig
from hone.config.offline import PreferenceConfig
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.preferences import Preference, preference_batch
from hone.data.responses import Response
from hone.errors import ModelError
from hone.insight.invariants import RATIO_MAX
from hone.models.heads import PolicyHead
from hone.models.loading import load_policy, load_reward_model
from hone.models.routing import use_hone_attention
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.packing import plan_micro_batches
from hone.training.preferences import (
    ScoreHead,
    bradley_terry_objective,
    measure,
    mismatched_rows,
    online_objective,
    own_pairs,
    preference_objective,
    response_scores,
)

CPU = torch.device("cpu")
NAMES = ["dpo", "ipo", "hinge", "robust", "sppo", "orpo", "simpo", "cpo", "kto"]


def preferences(pairs: int, seed: int, longest: int = 9) -> Batch:
    """Random pairs with holes in their masks; every other pair's sides begin after different prompts."""
    draw = torch.Generator().manual_seed(seed)

    def ids(low: int = 1) -> list[int]:
        length = int(torch.randint(low, longest, (1,), generator=draw))
        return torch.randint(0, VOCABULARY, (length,), generator=draw).tolist()

    def response(prompt: list[int]) -> Response:
        tokens = ids()
        mask = (torch.rand(len(tokens), generator=draw) < 0.8).long().tolist()
        return Response(prompt, tokens, [1, *mask[1:]])

    rows = []
    for number in range(pairs):
        prompt = ids()
        other = prompt if number % 2 else ids()
        rows.append(Preference([(True, response(prompt)), (False, response(other))], 0.1 * number, str(number)))
    return preference_batch(rows)


def engine_of(model=None, head=None, **settings) -> LocalBackend:
    how = TrainSettings(CPU, optim=OptimConfig(lr=1e-2), **settings)
    return LocalBackend(model or tiny_model(), head or PolicyHead(), how)


def with_reference(batch: Batch, needs) -> Batch:
    if "reference" in needs:
        batch = batch.with_columns(ref_log_probs=engine_of(tiny_model(seed=1)).infer_batch(batch)["log_probs"])
    if "kl" in needs:
        batch.meta["kl"] = 0.3
    return batch


def gradient(engine: LocalBackend, batch: Batch, objective) -> tuple[torch.Tensor, dict[str, float]]:
    """Flattened gradient and weighted means of the statistics of one mini-batch, without the update."""
    kept = {}

    def keep(step, statistics):
        kept["grad"] = torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])
        for name in {name for seen in statistics for name in seen}:
            pairs = [seen[name] for seen in statistics if name in seen]
            kept[name] = sum(float(v) * w for v, w in pairs) / max(sum(w for _, w in pairs), 1e-9)

    engine._apply = keep  # type: ignore[method-assign]
    engine.train_batch(batch, objective, step=0)
    return kept.pop("grad"), kept


@given(st.integers(1, 8), st.integers(0, 99), st.integers(1, 60), st.none() | st.integers(1, 6))
@examples(40)
def test_the_sides_of_a_pair_share_a_micro_batch(pairs, seed, budget, rows):
    batch = preferences(pairs, seed)
    plan = plan_micro_batches(
        batch.ragged("prompt_ids"), batch.ragged("response_ids"), budget, rows, batch.tensor("unit")
    )
    assert sorted(row for micro in plan for row in micro) == list(range(2 * pairs))
    for micro in plan:
        units = batch.tensor("unit")[micro].tolist()
        assert units[0::2] == units[1::2], "chosen and rejected stand beside each other"
        assert len(micro) == 2 or rows is None or len(micro) <= rows


@pytest.mark.parametrize("name", NAMES)
@examples(5)
@given(seed=st.integers(0, 1000), budget=st.integers(8, 120))
def test_no_split_changes_gradient_or_metrics(name, seed, budget):
    loss = preference_losses.get(name)
    batch = with_reference(preferences(5, seed), loss.needs)
    objective = preference_objective(loss, {})
    whole, numbers = gradient(engine_of(max_tokens=10**6), batch, objective)
    split, others = gradient(engine_of(max_tokens=budget), batch, objective)
    torch.testing.assert_close(split, whole, atol=2e-6 * max(1.0, float(whole.norm())), rtol=0)
    for key, value in numbers.items():
        assert others[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    value, metrics, _ = measure(loss, engine_of().infer_batch(batch)["log_probs"], batch, {})
    assert numbers["train/loss"] == pytest.approx(float(value), rel=1e-4)
    assert {k: pytest.approx(float(v), rel=1e-4, abs=1e-5) for k, v in metrics.items()} == {
        k: v for k, v in numbers.items() if k != "train/loss"
    }


@pytest.mark.parametrize("name", NAMES)
def test_an_update_raises_the_margin(name):
    loss = preference_losses.get(name)
    batch = with_reference(preferences(6, seed=3), loss.needs)
    engine = engine_of()
    engine.optimizer.config.lr = 1e-3

    def margin() -> float:
        return float(measure(loss, engine.infer_batch(batch)["log_probs"], batch, {})[1]["rewards/margins"])

    before = margin()
    for step in range(8):
        engine.train_batch(batch, preference_objective(loss, {}), step=step)
    assert margin() > before


def test_kto_of_pairs_reports_their_accuracy():
    loss, batch = preference_losses.get("kto"), preferences(4, seed=5)
    batch = with_reference(batch, loss.needs)
    log_probs = engine_of().infer_batch(batch)["log_probs"]
    _, metrics, _ = measure(loss, log_probs, batch, {"beta": 0.2})
    _, paired, _ = measure(preference_losses.get("dpo"), log_probs, batch, {"beta": 0.2})
    for name in ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"):
        torch.testing.assert_close(metrics[name], paired[name])
    alone = batch.reorder([0, 2, 5]).with_columns(unit=torch.arange(3))
    assert "rewards/margins" not in measure(loss, log_probs.select([0, 2, 5]), alone, {})[1]


# --------------------------------------------------------------------------------------------------------- reference


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    return folder


def learner_and_reference(
    directory, mode: str, lora: int = 0, adapter: str | None = None, **ref: object
) -> tuple[LearnerWorker, FrozenPolicyWorker]:
    """The roles of a run in this process."""
    config = PreferenceConfig()
    config.model.path, config.model.lora_rank, config.ref.mode, config.optim.lr = str(directory), lora, mode, 1e-2
    config.model.lora_adapter_path = adapter
    config.ref = dataclasses.replace(config.ref, **ref)
    context = WorkerContext(config, CPU, roles={})
    context.roles["actor"] = LearnerWorker(context)
    return context.roles["actor"], FrozenPolicyWorker(context)


def train(learner: LearnerWorker, batch: Batch, updates: int) -> None:
    for step in range(updates):
        learner.update(batch, RowGroups([range(len(batch))]), step)


def test_every_way_to_the_reference_gives_the_same_and_stays(directory):
    batch = preferences(5, seed=7)
    first, _ = learner_and_reference(directory, "copy")
    expected = first.outputs(batch).ragged("log_probs").values
    for mode, lora in (("copy", 0), ("copy", 4), ("adapter_off", 4), ("auto", 4), ("auto", 0)):
        learner, reference = learner_and_reference(directory, mode, lora)
        assert (reference.engine is learner.engine) == (lora > 0 and mode != "copy")
        known = batch.updated(reference.log_probs(batch))
        torch.testing.assert_close(known.ragged("ref_log_probs").values, expected, atol=4e-6, rtol=0)
        train(learner, known, 2)
        assert not torch.allclose(learner.outputs(batch).ragged("log_probs").values, expected, atol=1e-3)
        torch.testing.assert_close(
            reference.log_probs(batch).ragged("ref_log_probs").values, expected, atol=4e-6, rtol=0
        )


def adapter_of(directory, tmp_path) -> str:
    """A saved adapter that moves the model far from its base."""
    torch.manual_seed(3)
    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(directory), settings)
    model.save_pretrained(str(tmp_path / "adapter"))
    return str(tmp_path / "adapter")


@pytest.mark.parametrize("mode", ["auto", "adapter_off", "copy", "precompute"])
def test_the_reference_of_a_continued_adapter_is_the_start_unless_it_is_off(directory, tmp_path, mode):
    batch, adapter = preferences(5, seed=7), adapter_of(directory, tmp_path)
    learner, reference = learner_and_reference(directory, mode, adapter=adapter)
    start = learner.outputs(batch).ragged("log_probs").values
    base = engine_of(tiny_model()).infer_batch(batch)["log_probs"].values
    assert not torch.allclose(start, base, atol=0.1)
    expected = base if mode == "adapter_off" else start
    for _ in range(2):
        before = learner.outputs(batch).ragged("log_probs").values
        known = batch.updated(reference.log_probs(batch))
        torch.testing.assert_close(known.ragged("ref_log_probs").values, expected, atol=4e-6, rtol=0)
        assert torch.equal(learner.outputs(batch).ragged("log_probs").values, before), "the trained adapter is back"
        train(learner, known, 1)
    assert not torch.allclose(learner.outputs(batch).ragged("log_probs").values, start, atol=1e-3)


def test_the_kl_of_a_continued_adapter_is_0_at_the_start(directory, tmp_path):
    batch, config = preferences(3, seed=4), RLConfig()
    model = config.actor_rollout_ref.model
    model.path, model.lora_adapter_path = str(directory), adapter_of(directory, tmp_path)
    policy = ModelConfig(path=str(directory), lora_adapter_path=model.lora_adapter_path)
    engine = engine_of(load_policy(policy, device=CPU, seed=0))
    gaps = {}
    for kind in ("start", "off"):
        config.actor_rollout_ref.ref.adapter = kind
        reference = ReferenceWorker(WorkerContext(config, CPU, roles={"actor": SimpleNamespace(engine=engine)}))
        gap = reference.log_probs(batch)["ref_log_probs"].values - engine.infer_batch(batch)["log_probs"].values
        gaps[kind] = float(gap.abs().max())
    assert gaps["start"] < 1e-6 and gaps["off"] > 0.1


def test_another_reference_and_its_budget(directory, tmp_path):
    tiny_model(seed=9).save_pretrained(tmp_path / "other")
    budget = {"model_path": str(tmp_path / "other"), "log_prob_max_token_len_per_gpu": 20}
    _, reference = learner_and_reference(directory, "auto", 4, **budget)
    batch = preferences(4, seed=8)
    other = engine_of(tiny_model(seed=9)).infer_batch(batch)["log_probs"].values
    torch.testing.assert_close(reference.log_probs(batch).ragged("ref_log_probs").values, other, atol=1e-6, rtol=1e-6)


def test_mismatched_rows_have_responses_after_the_prompts_of_other_pairs():
    batch = preferences(3, seed=2)
    rows = mismatched_rows(batch)
    prompts, responses = batch.ragged("prompt_ids").to_lists(), batch.ragged("response_ids").to_lists()
    masks = batch.ragged("response_mask").to_lists()
    assert rows.ragged("prompt_ids").to_lists() == prompts
    for row in range(6):
        other = (row - 2) % 6
        assert rows.ragged("response_ids").row(row).tolist() == responses[other]
        assert rows.ragged("response_mask").row(row).tolist() == masks[other]


# ------------------------------------------------------------------------------------------------------ online pairs


def test_own_pairs_and_their_objective():
    rows = [("a", 0.1), ("a", 0.9), ("b", 0.5), ("a", 0.5), ("b", 0.5), ("c", 0.0), ("c", 0.2)]
    base = preferences(4, seed=1).reorder(range(7))
    batch = Batch({name: base[name] for name in ("prompt_ids", "response_ids", "response_mask")})
    batch = batch.with_columns(uid=[u for u, _ in rows], reward=torch.tensor([r for _, r in rows]))
    pairs = own_pairs(batch, 0.0)
    assert pairs.objects("uid") == ["a", "a", "c", "c"] and pairs.tensor("unit").tolist() == [0, 0, 1, 1]
    assert pairs.tensor("reward").tolist() == pytest.approx([0.9, 0.1, 0.2, 0.0])
    assert pairs.tensor("label").tolist() == [True, False, True, False]
    assert len(own_pairs(batch, 0.5)) == 2 and len(own_pairs(batch, 1.0)) == 0

    engine = engine_of(max_tokens=30)
    log_probs = engine.infer_batch(pairs)["log_probs"]
    pairs = pairs.with_columns(old_log_probs=log_probs, ref_log_probs=log_probs)
    _, numbers = gradient(engine, pairs, online_objective(OnlinePreferenceConfig(loss_mode="dpo", beta=0.3)))
    assert numbers["actor/pg_loss"] == pytest.approx(0.6931, abs=1e-4) and numbers["rewards/accuracies"] == 0.5
    assert numbers[RATIO_MAX] < 1e-5


# ------------------------------------------------------------------------------------------------------ reward model


def scalar_model(seed: int = 0) -> torch.nn.Module:
    config = copy.deepcopy(tiny_model().config)
    config.num_labels = 1
    torch.manual_seed(seed)
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    return model


def test_scores_are_those_of_transformers():
    batch, model = preferences(5, seed=4), scalar_model()
    plain = copy.deepcopy(model).eval()
    plain.set_attn_implementation("eager")
    use_hone_attention(model)
    scores = response_scores(engine_of(model, ScoreHead(), max_tokens=40), batch)
    for row in range(len(batch)):
        ids = torch.cat([batch.ragged("prompt_ids").row(row), batch.ragged("response_ids").row(row)])
        with torch.no_grad():
            assert float(scores[row]) == pytest.approx(float(plain(input_ids=ids[None]).logits), abs=1e-5)


@examples(6)
@given(seed=st.integers(0, 1000), budget=st.integers(8, 120))
def test_bradley_terry_does_not_depend_on_the_split(seed, budget):
    batch, model = preferences(5, seed), scalar_model()
    use_hone_attention(model)
    objective = bradley_terry_objective(0.05)
    whole, numbers = gradient(engine_of(copy.deepcopy(model), ScoreHead(), max_tokens=10**6), batch, objective)
    split, others = gradient(engine_of(copy.deepcopy(model), ScoreHead(), max_tokens=budget), batch, objective)
    torch.testing.assert_close(split, whole, atol=2e-6 * max(1.0, float(whole.norm())), rtol=0)
    assert others == {key: pytest.approx(value, rel=1e-4, abs=1e-5) for key, value in numbers.items()}


def test_loading_a_reward_model(directory, tmp_path):
    fresh = load_reward_model(ModelConfig(path=str(directory)), device=CPU)
    assert not fresh.score.weight.any() and fresh.score.weight.requires_grad
    batch = preferences(3, seed=6)
    engine = engine_of(fresh, ScoreHead())
    assert not response_scores(engine, batch).any()
    for step in range(3):
        engine.train_batch(batch, bradley_terry_objective(0.0), step=step)
    engine.stage(str(tmp_path), "rm")()
    scores = response_scores(engine, batch)
    again = load_reward_model(ModelConfig(path=str(tmp_path / "rm")), device=CPU, trainable=False)
    assert not any(p.requires_grad for p in again.parameters())
    assert torch.equal(response_scores(engine_of_frozen(again), batch), scores)
    elsewhere = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32).eval()
    ids = torch.cat([batch.ragged("prompt_ids").row(0), batch.ragged("response_ids").row(0)])
    assert float(elsewhere(input_ids=ids[None]).logits.detach()) == pytest.approx(float(scores[0]), abs=1e-5)
    saved = json.loads((tmp_path / "rm/config.json").read_text())
    saved |= {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (tmp_path / "rm/config.json").write_text(json.dumps(saved))
    with raises(ModelError, "2 labels"):
        load_reward_model(ModelConfig(path=str(tmp_path / "rm")), device=CPU)


def engine_of_frozen(model) -> LocalBackend:
    return LocalBackend(model, ScoreHead(), TrainSettings(CPU))
