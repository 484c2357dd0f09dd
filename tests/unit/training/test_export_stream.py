"""Merged weights sent to an engine of its own give the trained model's log-probs, tied embeddings included."""

import asyncio
import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.families import make_engine, model_of, serve, tiny_config
from support.messages import raises
from support.preflight import findings_of

from hone.config.load import load_config
from hone.config.tree import RLConfig
from hone.data.ragged import Ragged
from hone.errors import InvariantError
from hone.generation.options import needs_untied_head
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.insight.invariants import Invariants
from hone.models.tied import parts_embeddings, untie
from hone.preflight.engines import engine_takes_the_adapter
from hone.training.export_stream import merged_weights

PROMPT = [5, 9, 30, 11]
ADAPTERS = [
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj"]},
]


def trained(name: str, tied: bool, changes: dict) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A base model, and the same with a trained adapter."""
    config = tiny_config(name)
    config.tie_word_embeddings = tied
    base = model_of(config)
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **changes))
    with torch.no_grad():
        for parameter_name, value in model.named_parameters():
            if "modules_to_save" in parameter_name:
                value.add_(0.3 * torch.randn_like(value))
    return base, model.eval()


def log_probs_of(model: torch.nn.Module, ids: list[int], start: int) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return torch.stack([logits[place - 1, ids[place]] for place in range(start, len(ids))])


def answer(engine):
    sampling = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True)
    return serve(engine, [GenerationRequest("canary", PROMPT, sampling, seed=1)])["canary"]


@pytest.mark.parametrize("name", ["qwen3", "gemma"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("changes", ADAPTERS, ids=str)
def test_an_engine_with_a_copy_has_the_trained_log_probs(name, tied, changes):
    base, model = trained(name, tied, changes)
    assert parts_embeddings(model) == (tied and len(str(changes)) > len(str(ADAPTERS[-1])))
    if parts_embeddings(model):
        untie(base)
    engine = make_engine(base, shares_weights=False)
    asyncio.run(engine.load_weights(merged_weights(model), 1))
    found = answer(engine)
    right = log_probs_of(model, PROMPT + found.token_ids, len(PROMPT))
    torch.testing.assert_close(torch.tensor(found.log_probs), right, rtol=1e-4, atol=1e-4)


def test_an_adapted_embedding_is_no_obstacle_to_the_engine_that_shares_it():
    _, model = trained("qwen3", True, {"target_modules": ["q_proj", "embed_tokens"]})
    found = answer(make_engine(copy.deepcopy(model)))
    right = log_probs_of(model, PROMPT + found.token_ids, len(PROMPT))
    torch.testing.assert_close(torch.tensor(found.log_probs), right, rtol=1e-4, atol=1e-4)


def test_the_canary_notices_a_lost_head():
    """The first sync is exact, because a new adapter changes nothing; then the head's delta is lost."""
    base, model = trained("qwen3", True, {"target_modules": ["lm_head"]})
    engine = make_engine(copy.deepcopy(base), shares_weights=False)
    invariants = Invariants()
    for reference in (base, model):
        found = answer(engine)
        right = log_probs_of(reference, PROMPT + found.token_ids, len(PROMPT))
        columns = [Ragged.from_rows([values]) for values in (found.log_probs, right.tolist())]
        if reference is base:
            assert invariants.check_canary(*columns) < 1e-4
        else:
            with raises(InvariantError, "nats", code="D-sync"):
                invariants.check_canary(*columns)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj"], "all-linear"], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_that_ties_the_head_is_refused_at_the_start(tmp_path, targets, tied):
    config = tiny_config("qwen3")
    config.tie_word_embeddings = tied
    model_of(config).save_pretrained(tmp_path)

    def run(engine: str) -> RLConfig:
        words = ["model.path=" + str(tmp_path), "model.lora_rank=2", f"model.target_modules={targets}"]
        return load_config(RLConfig, [f"actor_rollout_ref.{word}" for word in (*words, f"rollout.name={engine}")])

    parts = tied and targets in (["lm_head"], ["embed_tokens"])
    assert needs_untied_head(run("native")) == parts
    for engine in ("vllm", "sglang", "trtllm"):
        found = findings_of(engine_takes_the_adapter, run(engine))
        assert [finding.error.where for finding in found] == ["actor_rollout_ref.model.target_modules"] * parts
