"""`hone serve --train` in a process of its own, with loops as the official client's users write them: SFT, RL, resume, sampling."""

from __future__ import annotations

import contextlib
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from support.launch import hone
from support.serve import listening
from support.world import World
from tinker import types
from tinker.types.loss_fn_type import LossFnType
from transformers import AutoModelForCausalLM

from hone.apps.tinker.adapters import LOSSES

TOKEN = "tml-a-token"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.application("hone/apps/tinker", "hone/agents/serving", "hone/generation/native"),
]


@contextlib.contextmanager
def serving(model: Path, out: Path) -> Iterator[str]:
    words = ["serve", model, "--name", "digits", "--train", "--port", "0", "--out", out]
    with listening([sys.executable, "-m", "hone.cli.main", *words], out.with_suffix(".log"), TOKEN) as url:
        yield url


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service") / "weights"


@pytest.fixture(scope="module")
def model(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose output layer is its own, so that an adapter can change it."""
    path = tmp_path_factory.mktemp("untied") / "model"
    ended = hone(
        "init",
        "--arch",
        "mistral",
        "--size",
        "200k",
        "--tokenizer",
        world.tokenizer,
        "--out",
        path,
        log=path.with_suffix(".log"),
    )
    assert ended.code == 0, ended.output
    return path


@pytest.fixture(scope="module")
def address(model: Path, out: Path) -> Iterator[str]:
    with serving(model, out) as url:
        yield url


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=address, api_key=TOKEN) as service:  # the exit ends its heartbeat
        yield service


def supervised(tokens: list[int], first: int) -> types.Datum:
    weights = np.array([float(place + 1 >= first) for place in range(len(tokens) - 1)], np.float32)
    inputs: dict[str, Any] = {"target_tokens": np.array(tokens[1:]), "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_the_server_says_what_it_has(client: tinker.ServiceClient, address: str) -> None:
    (model,) = client.get_server_capabilities().supported_models
    assert (model.model_name, model.trainable, model.sampleable) == ("digits", True, True)
    json_body = {"Content-Type": "application/json"}
    for path, headers in (("create_session", json_body), ("telemetry", {"X-API-Key": "tml-other"})):
        request = urllib.request.Request(f"{address}/api/v1/{path}", b"{}", headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == 401
    with pytest.raises(Exception, match="no model 'other'"):
        client.create_lora_training_client(base_model="other").result()


def test_a_loss_that_the_client_computes(client: tinker.ServiceClient) -> None:
    """Its gradient reaches the server as weights of log-probs; that of the negative log-likelihood is the cross-entropy's."""
    norms = []
    for custom in (False, True):
        trained = client.create_lora_training_client(base_model="digits", rank=4, seed=5).result()
        rows = [supervised([5, 9, 14, 3, 8, 30], 1)]
        if custom:
            trained.forward_backward_custom(
                rows, lambda data, log_probs: (-sum(row.sum() for row in log_probs), {})
            ).result()
        else:
            trained.forward_backward(rows, "cross_entropy").result()
        norms.append(trained.optim_step(types.AdamParams()).result().metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_supervised_learning_is_resumed_with_its_optimizer(client: tinker.ServiceClient) -> None:
    trained = client.create_lora_training_client(base_model="digits", rank=8, seed=1).result()
    tokenizer = trained.get_tokenizer()
    rows = []
    for digits in ("0101", "1100", "0011", "1010"):
        messages = [{"role": "user", "content": f"copy {digits}"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = tokenizer.encode(digits, add_special_tokens=False) + [tokenizer.eos_token_id]
        rows.append(supervised([*prompt, *answer], len(prompt)))
    losses = []
    for _ in range(25):
        passed, step = (
            trained.forward_backward(rows, "cross_entropy"),
            trained.optim_step(types.AdamParams(learning_rate=1e-2)),
        )
        losses.append(passed.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses[-1] < losses[0] / 4
    path = trained.save_state("after").result().path
    again = client.create_training_client_from_state_with_optimizer(path).result()
    for _ in range(2):
        pair = [one.forward_backward(rows, "cross_entropy").result().metrics["loss:sum"] for one in (trained, again)]
        assert pair[0] == pair[1]
        for one in (trained, again):
            one.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def test_reinforcement_learning_as_a_user_writes_it(client: tinker.ServiceClient, out: Path, model: Path) -> None:
    """Answers of a group against their mean; the reward is the share of tokens below 100. Engine's and trainer's log-probs agree."""
    trained = client.create_lora_training_client(base_model="digits", rank=8, seed=2).result()
    tokenizer = trained.get_tokenizer()
    messages = [{"role": "user", "content": "copy 0110"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    rewards = []
    for step in range(12):
        sampler = trained.save_weights_and_get_sampling_client(record_stability_info=True)
        sampler = sampler.result() if hasattr(sampler, "result") else sampler
        params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step, stop=[])
        answer = sampler.sample(
            prompt=types.ModelInput.from_ints(prompt), num_samples=16, sampling_params=params
        ).result()
        scores = [float(np.mean(np.array(one.tokens) < 100)) for one in answer.sequences]
        rewards.append(float(np.mean(scores)))
        rows = []
        for one, score in zip(answer.sequences, scores, strict=True):
            tokens, count = [*prompt, *one.tokens], len(one.tokens)
            before = len(tokens) - 1 - count
            inputs: dict[str, Any] = {
                "target_tokens": np.array([0] * before + tokens[-count:]),  # as the cookbook's loop pads the prompt
                "logprobs": np.array([0.0] * before + list(one.logprobs), np.float32),
                "advantages": np.array([0.0] * before + [score - rewards[-1]] * count, np.float32),
                "sequence_ratio_mask": np.array([0.0] * before + [1.0] * count, np.float32),
            }
            datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
            spans = [
                types.PromptProvenanceSpan(sequence_id=one.sequence_id, offset=1, length=before),
                types.SampledProvenanceSpan(sequence_id=one.sequence_id, length=count),
            ]
            rows.append(datum.with_provenance(model_input=spans, loss_fn_inputs=spans))
        passed = trained.forward_backward(rows, "importance_sampling")
        trained.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        for row, record in zip(rows, passed.result().loss_fn_outputs, strict=True):
            old, new = (np.array(values.data) for values in (row.loss_fn_inputs["logprobs"], record["logprobs"]))
            np.testing.assert_allclose(new[old != 0], old[old != 0], atol=2e-4)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3, rewards
    padded = [name for name, loss in LOSSES.items() if loss.factor]
    metrics = {name: trained.forward(rows, name).result().metrics for name in padded}
    assert {*get_args(LossFnType)} == {*LOSSES, "custom"}, "every loss of the client, of which it computes one itself"
    assert [name for name, found in metrics.items() if "stable_reinforce_is_cispo:max" in found] == ["stable_reinforce"]

    path = trained.save_weights_for_sampler("last").result().path
    served = client.create_sampling_client(model_path=path).result()
    scored = served.compute_logprobs(types.ModelInput.from_ints([*prompt, 50])).result()
    folder = next(out.glob("*/sampler_weights/last"))  # a PEFT directory, for any other program
    plain = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(plain, str(folder))(torch.tensor([prompt])).logits[0, -1]
    assert float(logits.log_softmax(-1)[50]) == pytest.approx(scored[-1], abs=1e-3)
    assert float(logits.softmax(-1)[:100].sum()) > 0.6
