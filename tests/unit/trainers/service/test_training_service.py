"""Adapters trained at the same time as each alone, losses by hand, the order of operations, turns of the sampler, files."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from starlette.routing import Route
from starlette.testclient import TestClient
from support.examples import examples
from support.families import Letters, tiny_model
from support.patience import LONG
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types import Datum as TinkerDatum
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest, ModelInput, TrainingRun

from hone.apps.tinker import app as service_app
from hone.apps.tinker import service as service_module
from hone.apps.tinker import service as tinker_service
from hone.apps.tinker import wire
from hone.apps.tinker.adapters import (
    LOSSES,
    AdamSettings,
    AdapterSet,
    AdapterShape,
    Datum,
    Passed,
    adam_settings,
    loss_named,
)
from hone.apps.tinker.app import TrainingEndpoint
from hone.apps.tinker.sampling import Sampler
from hone.apps.tinker.service import Failure, Result, ServiceLimits, TrainingService
from hone.errors import HoneError, RequestError
from hone.generation.native.engine import NativeEngine
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.models.routing import use_hone_attention
from hone.trainers.serving import call_on_loop, engine_loop

CPU = torch.device("cpu")
SHAPES = {"one": AdapterShape(4), "two": AdapterShape(2, attention=False, unembedding=False)}
RATES = {"one": AdamSettings(1e-2), "two": AdamSettings(3e-3, beta2=0.99, weight_decay=0.1, clip=0.5)}


def adapters() -> AdapterSet:
    model = tiny_model("qwen3")
    model.config.tie_word_embeddings = False
    use_hone_attention(model)
    return AdapterSet(model, device=CPU, dtype="float32", max_tokens=48)


def sequence(seed: int, length: int = 9) -> Datum:
    torch.manual_seed(seed)
    tokens = torch.randint(3, 61, (length + 1,)).tolist()
    inputs = {"weights": torch.rand(length), "logprobs": -torch.rand(length) * 4, "advantages": torch.randn(length)}
    inputs["sequence_ratio_mask"] = (torch.arange(length) > 1).float()
    return Datum(tokens[:-1], tokens[1:], inputs)


def data(name: str, update: int) -> list[Datum]:
    return [sequence(100 * update + 10 * len(name) + number, 5 + number) for number in range(4)]


def pass_through(held: AdapterSet, name: str, rows: list[Datum], loss: str = "ppo") -> Passed:
    chosen, settings = loss_named(loss, {})
    return held.forward_backward(name, rows, chosen, settings)


def weights(held: AdapterSet, name: str) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in held.parameters(name)]


def test_adapters_trained_together_are_those_trained_alone() -> None:
    """Operations of two adapters by turns, with sampling in between, give each bit for bit what it gets alone."""
    together = adapters()
    for name, shape in SHAPES.items():
        together.add(name, shape, seed=7)
    for update in range(3):
        for name in SHAPES:
            pass_through(together, name, data(name, update))
        together.forward(None, [sequence(5)])
        for name in reversed(SHAPES):
            pass_through(together, name, data(name, update + 50))  # gradients add up
            together.step(name, RATES[name])
    for name, shape in SHAPES.items():
        alone = adapters()
        alone.add(name, shape, seed=7)
        before = weights(alone, name)
        for update in range(3):
            pass_through(alone, name, data(name, update))
            pass_through(alone, name, data(name, update + 50))
            alone.step(name, RATES[name])
        assert all(torch.equal(*pair) for pair in zip(weights(together, name), weights(alone, name), strict=True))
        assert any(not torch.equal(*pair) for pair in zip(before, weights(alone, name), strict=True))


def test_the_base_model_is_not_changed() -> None:
    held = adapters()
    before = held.forward(None, [sequence(5)])[0]
    held.add("one", SHAPES["one"])
    assert torch.equal(held.forward("one", [sequence(5)])[0], before)
    pass_through(held, "one", data("one", 0))
    held.step("one", RATES["one"])
    assert not torch.allclose(held.forward("one", [sequence(5)])[0], before)
    assert torch.equal(held.forward(None, [sequence(5)])[0], before)
    held.remove("one")
    assert torch.equal(held.forward(None, [sequence(5)])[0], before)


@examples(20)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(LOSSES)))
def test_losses_are_those_by_hand(seed: int, name: str) -> None:
    held = adapters()
    held.add("one", SHAPES["one"])
    rows = [sequence(seed), sequence(seed + 1, 4)]
    passed = pass_through(held, "one", rows, name)
    total = 0.0
    for row, log_probs, losses in zip(rows, passed.log_probs, passed.losses, strict=True):
        gaps = [now - float(old) for now, old in zip(log_probs.tolist(), row.inputs["logprobs"], strict=True)]
        mean = math.exp(sum(gaps[2:]) / len(gaps[2:]))
        for token, log_prob in enumerate(log_probs.double().tolist()):
            weight, old, advantage = (float(row.inputs[key][token]) for key in ("weights", "logprobs", "advantages"))
            ratio = math.exp(log_prob - old)
            clipped = min(max(ratio, 0.8), 1.2)
            expected = {
                "cross_entropy": -log_prob,
                "importance_sampling": -ratio * advantage,
                "ppo": -min(ratio * advantage, clipped * advantage),
                "cispo": -clipped * log_prob * advantage,
                "stable_reinforce": -clipped * log_prob * advantage,
                "dro": -(log_prob * advantage - 0.5 * 0.05 * (log_prob - old) ** 2),
                "gspo": -min(mean * advantage, min(max(mean, 0.9997), 1.0004) * advantage),
            }[name]
            assert float(losses[token]) == pytest.approx(weight * expected, rel=1e-4, abs=1e-5)
            total += weight * expected
    assert passed.metrics["loss:sum"] == pytest.approx(total, rel=1e-4, abs=1e-4)
    assert ("stable_reinforce_is_cispo:max" in passed.metrics) == (name == "stable_reinforce")


def test_the_gradient_of_gspo_is_that_of_the_ratio_of_the_sequence() -> None:
    """With one advantage a sequence, GSPO-token has the gradient of GSPO: of the geometric mean of the ratios."""
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0], dtype=torch.float64, requires_grad=True)
    old = log_probs.detach() + torch.tensor([1e-4, -3e-4, 2e-4, -1e-4, 1e-4])
    row, advantages = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0])
    inputs = {"logprobs": old, "advantages": advantages, "row": row, "sequence_ratio_mask": torch.ones(5)}
    loss, settings = loss_named("gspo", {})
    (found,) = torch.autograd.grad(loss.compute(log_probs, inputs, settings).sum(), log_probs)
    gaps = log_probs - old
    right = -(3 * 2.0 * gaps[:3].mean().exp() - 2 * gaps[3:].mean().exp())
    assert torch.allclose(found, torch.autograd.grad(right, log_probs)[0], atol=1e-12)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce", "cross_entropy"])
def test_targets_that_change_nothing_may_be_padding(name: str) -> None:
    """Loops pad the targets of a prompt with 0, where advantages or weights are 0."""
    passes = []
    for pad in (False, True):
        held = adapters()
        held.add("one", SHAPES["one"])
        row = sequence(3)
        inputs: dict[str, Any] = {key: torch.as_tensor(value).clone() for key, value in row.inputs.items()}
        zeroed = "weights" if name == "cross_entropy" else "advantages"
        for key in (zeroed, "sequence_ratio_mask"):
            inputs[key][:4] = 0
        targets = [0] * 4 + list(row.targets[4:]) if pad else row.targets
        passed = pass_through(held, "one", [Datum(row.tokens, targets, inputs)], name)
        gradient = torch.cat(
            [parameter.grad.flatten() for parameter in held.parameters("one") if parameter.grad is not None]
        )
        passes.append((passed.losses[0], gradient))
        wrong = Datum(row.tokens, [*targets[:5], (targets[5] + 1) % 61, *targets[6:]], inputs)
        with pytest.raises(RequestError, match="target 5"):
            pass_through(held, "one", [wrong], name)
    assert passes[0][1].abs().sum() > 0
    assert all(torch.equal(*pair) for pair in zip(*passes, strict=True))


def test_saved_adapters_continue_bit_for_bit(tmp_path: Path) -> None:
    held = adapters()
    held.add("one", SHAPES["one"], seed=3)
    pass_through(held, "one", data("one", 0))
    held.step("one", RATES["one"])
    held.save("one", tmp_path / "saved", optimizer=True)
    other = adapters()
    other.add("again", SHAPES["one"], seed=9)
    other.load("again", tmp_path / "saved", optimizer=True)
    for place, name in ((held, "one"), (other, "again")):
        pass_through(place, name, data("one", 1))
        place.step(name, RATES["one"])
    assert all(torch.equal(*pair) for pair in zip(weights(held, "one"), weights(other, "again"), strict=True))
    with pytest.raises(RequestError):
        other.add("small", SHAPES["two"])
        other.load("small", tmp_path / "saved", optimizer=False)


@pytest.mark.parametrize(
    ("datum", "loss", "field"),
    [
        (Datum([], [], {}), "cross_entropy", "model_input"),
        (Datum([3, 4], [9, 5], {}), "cross_entropy", "loss_fn_inputs"),  # targets that do not follow
        (Datum([3, 4], [4, 5], {"weights": [1.0]}), "cross_entropy", "loss_fn_inputs"),
        (Datum([3, 4], [4, 5], {"logprobs": [0.0, 0.0]}), "ppo", "loss_fn_inputs"),
        (Datum([3, 4], [0, 5], {"logprobs": [0.0, 0.0], "advantages": [0.0, 1.0]}), "dro", "loss_fn_inputs"),
        (
            Datum(
                [3, 4],
                [4, 5],
                {
                    name: [value] * 2
                    for name, value in [("logprobs", -1.0), ("advantages", 1.0), ("sequence_ratio_mask", 0.0)]
                },
            ),
            "gspo",
            "loss_fn_inputs",
        ),
    ],
)
def test_data_that_cannot_be_trained_on(datum: Datum, loss: str, field: str) -> None:
    held = adapters()
    held.add("one", SHAPES["one"])
    with pytest.raises(RequestError) as refused:
        pass_through(held, "one", [datum], loss)
    assert refused.value.field == field


def test_unknown_losses_settings_and_optimizer_keys() -> None:
    for call in (
        lambda: loss_named("ppi", {}),
        lambda: loss_named("ppo", {"beta": 1.0}),
        lambda: adam_settings({"mu": 1}),
    ):
        with pytest.raises(RequestError):
            call()
    assert adam_settings({"learning_rate": 0.1, "grad_clip_norm": 2}) == AdamSettings(0.1, clip=2.0)
    with pytest.raises(RequestError):
        held = adapters()
        held.add("none", AdapterShape(2, attention=False, mlp=False, unembedding=False))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    held = adapters()
    held.add("one", SHAPES["one"])
    before = weights(held, "one")
    row = sequence(1)
    broken = Datum(row.tokens, row.targets, {**row.inputs, "advantages": torch.full((9,), math.inf)})
    pass_through(held, "one", [broken], "importance_sampling")
    metrics = held.step("one", RATES["one"])
    assert metrics["skipped"] == 1 and json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert all(torch.equal(*pair) for pair in zip(before, weights(held, "one"), strict=True))


@pytest.mark.parametrize("when", ["an id", "in the second micro-batch"])
def test_a_refused_pass_leaves_the_gradient_as_it_was(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, alone = adapters(), adapters()
    for place in (held, alone):
        place.add("one", SHAPES["one"], seed=7)
        pass_through(place, "one", data("one", 0))
    rows = [sequence(number, 30) for number in range(4)]
    with monkeypatch.context() as patch:
        if when == "an id":
            rows[-1] = Datum([3, 64], [64, 5], dict.fromkeys(rows[-1].inputs, torch.zeros(2)))
        else:
            calls, forward = iter([False, True]), held._forward
            patch.setattr(held._loop, "_forward", lambda *given: 1 / 0 if next(calls) else forward(*given))
        with pytest.raises(RequestError if when == "an id" else ZeroDivisionError):
            pass_through(held, "one", rows)
    for place in (held, alone):
        place.step("one", RATES["one"])
    assert all(torch.equal(*pair) for pair in zip(weights(held, "one"), weights(alone, "one"), strict=True))


@pytest.mark.parametrize(
    "settings",
    [{"learning_rate": 1e300}, {"learning_rate": -1}, {"learning_rate": math.nan}, {"beta1": 1.0}, {"eps": 0.0},
     {"learning_rate": 1.0, "weight_decay": 3.0}, {"grad_clip_norm": -1}],
)  # fmt: skip
def test_settings_that_make_weights_infinite_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(RequestError):
        adam_settings(settings)


def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    held = adapters()
    held.add("one", SHAPES["one"])
    held.save("one", tmp_path / "fine", optimizer=True)
    before = weights(held, "one")
    (tmp_path / "damaged").mkdir()
    for name in ("shape.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "fine" / name, tmp_path / "damaged" / name)
    with (tmp_path / "damaged" / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-64, 2)
        file.write(b"\xff" * 64)
    for folder, optimizer in (("damaged", False), ("damaged", True)):
        with pytest.raises(RequestError):
            held.load("one", tmp_path / folder, optimizer=optimizer)
    assert all(torch.equal(*pair) for pair in zip(before, weights(held, "one"), strict=True))
    held.parameters("one")[0].data.fill_(math.nan)
    with pytest.raises(RequestError):
        held.save("one", tmp_path / "nan", optimizer=False)
    assert not (tmp_path / "nan").exists()


# messages -------------------------------------------------------------------------------------------------------------


def test_messages_are_those_of_the_client() -> None:
    inputs = {"target_tokens": torch.tensor([4, 5]), "advantages": torch.tensor([0.5, -1.0])}
    datum = TinkerDatum(model_input=ModelInput.from_ints([3, 4]), loss_fn_inputs=inputs)
    request = ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(
            data=[datum], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.9}
        ),
        model_id="m",
        seq_id=4,
    )
    message = wire.parse_forward_backward(forward_backward_request_to_proto(request).SerializeToString())
    assert (message.model_id, message.seq_id, message.loss_fn) == ("m", 4, "ppo")
    assert wire.settings_of(message) == {"clip_low_threshold": 0.9}
    (row,) = wire.data_of(message)
    assert (row.tokens, row.targets, list(row.inputs["advantages"])) == ([3, 4], [4, 5], [0.5, -1.0])
    passed = Passed(
        [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])], [torch.zeros(2), torch.ones(1)], {"loss:sum": 1.0}
    )
    output = deserialize_forward_backward_output(wire.forward_backward_output(passed))
    assert [record["logprobs"].data for record in output.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]
    assert output.metrics == {"loss:sum": 1.0}
    sequence = {
        "tokens": [7, 8],
        "log_probs": [-1.0, -0.5],
        "stopped": False,
        "likeliest": [[(7, -1.0), (3, -2.0)]] * 2,
    }
    sample = deserialize_sample_response(wire.sample_response([sequence], [None, -0.25]))
    assert (list(sample.sequences[0].tokens), sample.sequences[0].stop_reason) == ([7, 8], "length")
    assert sample.prompt_logprobs == [None, -0.25]
    with pytest.raises(RequestError):
        wire.parse_forward_backward(b"\xff\xff\xff")


# service --------------------------------------------------------------------------------------------------------------


def service_in(folder: Path) -> TrainingService:
    held = adapters()
    engine = NativeEngine(
        held.model,
        Letters(),
        device=CPU,
        dtype="float32",
        max_num_seqs=8,
        max_cache_tokens=None,
        max_model_len=32,  # type: ignore[arg-type]
    )
    limits = ServiceLimits(32, max_rank=8, max_adapters=2)
    return TrainingService(
        "tiny", held, Sampler(engine, held), folder, stop_token_ids=[2], limits=limits, tokenizer="tiny"
    )


async def result(service: TrainingService, name: str) -> Result | Failure:
    outcome = await service.futures.wait(name, 60)
    assert outcome is not None
    return outcome


async def model_of(service: TrainingService, number: int = 0, shape: AdapterShape = SHAPES["one"]) -> str:
    name = service.create_model("s", number, "tiny", shape, 1)
    assert isinstance(await result(service, name), Result)
    return name


def test_operations_run_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    async def play(order: list[int]) -> list[float]:
        service = service_in(tmp_path / "-".join(map(str, order)))
        model = await model_of(service)
        names = {}
        for number in order:
            await asyncio.sleep(0)
            if number % 2:
                rows = data("one", number)
                names[number] = service.forward_backward(model, number, rows, "cross_entropy", {}, backward=True)
            else:
                names[number] = service.optim_step(model, number, RATES["one"])
        outcomes = {number: await result(service, name) for number, name in names.items()}
        again = service.optim_step(model, 2, RATES["one"])  # a repeated request is the same request
        assert await result(service, again) is outcomes[2]
        norms = [outcomes[number] for number in (2, 4)]
        return [
            outcome.json["metrics"]["grad_norm"] for outcome in norms if isinstance(outcome, Result) and outcome.json
        ]

    assert asyncio.run(play([1, 2, 3, 4])) == asyncio.run(play([2, 1, 4, 3]))


def test_a_failed_operation_does_not_hold_up_the_next(tmp_path: Path) -> None:
    async def play() -> None:
        service = service_in(tmp_path)
        model = await model_of(service)
        wrong = service.forward_backward(model, 1, data("one", 1), "no loss", {}, backward=True)
        right = service.optim_step(model, 2, RATES["one"])
        failed = await result(service, wrong)
        assert isinstance(failed, Failure) and failed.user
        assert isinstance(await result(service, right), Result)

    asyncio.run(play())


def test_limits_and_names(tmp_path: Path) -> None:
    async def play() -> None:
        service = service_in(tmp_path)
        model = await model_of(service)
        for number, (base, shape) in enumerate(
            [("other", SHAPES["one"]), ("tiny", AdapterShape(9)), ("tiny", AdapterShape(0))], 5
        ):
            outcome = await result(service, service.create_model("s", number, base, shape, None))
            assert isinstance(outcome, Failure) and outcome.user
        await model_of(service, 1)
        assert isinstance(await result(service, service.create_model("s", 2, "tiny", SHAPES["one"], None)), Failure)
        await result(service, service.unload("s:train:1"))
        await model_of(service, 3)
        for number, name in enumerate(("../up", "a/b", "..", "", "x" * 200), 1):
            outcome = await result(service, service.save(model, number, name, "weights"))
            assert isinstance(outcome, Failure) and outcome.user
        saved = await result(service, service.save(model, 6, "fine-1.0", "weights"))
        assert isinstance(saved, Result) and saved.json == {
            "path": f"tinker://{model}/weights/fine-1.0",
            "type": "save_weights",
        }
        assert isinstance(await result(service, service.save(model, 7, "fine-1.0", "weights")), Failure)
        assert isinstance(await result(service, service.save(model, 8, "fine-1.0", "weights", overwrite=True)), Result)
        assert [path.name for path in tmp_path.iterdir()] == [model]
        for path in ("tinker://../../etc/weights/x", f"tinker://{model}/other/fine-1.0", "file:///etc/passwd"):
            with pytest.raises(RequestError):
                service.create_sampling_session(None, path)
        long = service.forward_backward(model, 9, [sequence(1, 40)], "cross_entropy", {}, backward=True)
        assert isinstance(await result(service, long), Failure)

    asyncio.run(play())


NAMES = ["../up", "..", ".", "/etc", "a/b", "a\\b", "", "x" * 65, "a:b", "a\n", "a\0", "ａ", None, 3, ["s"]]


@pytest.mark.parametrize("number", [-1, 0.5, "../1", "1", True, None, 10**12])
def test_a_number_of_a_client_is_not_a_path(tmp_path: Path, number: Any) -> None:
    with pytest.raises(RequestError):
        service_in(tmp_path).create_model("s", number, "tiny", SHAPES["one"], 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_client_is_not_a_path(tmp_path: Path, name: Any) -> None:
    async def play() -> None:
        service = service_in(tmp_path / "out")
        with pytest.raises(RequestError):
            service.create_model(name, 0, "tiny", SHAPES["one"], 1)
        with pytest.raises(RequestError):
            service.create_from(name, 0, "tinker://s:train:0/weights/w", None, optimizer=False)
        for path in (
            f"tinker://{name}/weights/w",
            f"tinker://s:train:0/{name}/w",
            f"tinker://s:train:0/weights/{name}/x",
        ):
            with pytest.raises(RequestError):
                service.create_sampling_session(None, path)

    asyncio.run(play())
    assert not list(tmp_path.rglob("*"))


def test_links_below_the_service_s_folder_are_not_followed(tmp_path: Path) -> None:
    async def play() -> None:
        out, outside = tmp_path / "out", tmp_path / "outside"
        (outside / "weights" / "w").mkdir(parents=True)
        service = service_in(out)
        model = await model_of(service)
        out.mkdir(exist_ok=True)
        (out / model).symlink_to(outside)
        outcome = await result(service, service.save(model, 1, "w", "weights", overwrite=True))
        assert isinstance(outcome, Failure) and outcome.user and (outside / "weights" / "w").is_dir()

    asyncio.run(play())


def test_sampling_uses_the_weights_of_its_session(tmp_path: Path) -> None:
    """Requests to three sets of weights at once, while the adapter is trained further."""

    async def play() -> None:
        service = service_in(tmp_path)
        model = await model_of(service)
        sessions = [service.create_sampling_session("tiny", None)]
        expected = [service._adapters.forward(None, [sequence(5)])[0].tolist()]
        for number in (1, 4):
            service.forward_backward(model, number, data("one", number), "cross_entropy", {}, backward=True)
            service.optim_step(model, number + 1, AdamSettings(5e-2))
            saved = await result(service, service.save(model, number + 2, None, "sampler_weights"))
            assert isinstance(saved, Result) and saved.json is not None
            sessions.append(saved.json["sampling_session_id"])
            expected.append(service._adapters.forward("hone_training_1", [sequence(5)])[0].tolist())
        prompt = {"chunks": [{"tokens": [*sequence(5).tokens, sequence(5).targets[-1]]}]}
        names = []
        for number in range(9):
            params = {"max_tokens": 4, "seed": 3, "stop": []}
            body = {"prompt": prompt, "sampling_params": params, "prompt_logprobs": True, "num_samples": 2}
            names.append(service.sample({**body, "sampling_session_id": sessions[number % 3], "seq_id": number})[0])
            if number == 4:
                service.forward_backward(model, 7, data("one", 9), "cross_entropy", {}, backward=True)
                service.optim_step(model, 8, AdamSettings(5e-2))
        answers: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        for number, name in enumerate(names):
            outcome = await result(service, name)
            assert isinstance(outcome, Result) and outcome.protobuf is not None
            answer = deserialize_sample_response(outcome.protobuf)
            assert answer.prompt_logprobs is not None
            torch.testing.assert_close(answer.prompt_logprobs[1:], expected[number % 3], atol=1e-5, rtol=1e-5)
            answers[number % 3].append([list(one.tokens) for one in answer.sequences])
        for same in answers.values():
            assert same[0] == same[1] == same[2] and len(same[0]) == 2 and len(same[0][0]) == 4
        assert answers[0][0] != answers[2][0]

    asyncio.run(play())


def test_a_cancelled_request_gives_its_turn_on(tmp_path: Path) -> None:
    async def play() -> None:
        service = service_in(tmp_path)
        sampler = service._sampler
        model = await model_of(service)
        await result(service, service.save(model, 1, "a", "sampler_weights"))
        folder = service._saved.find(f"tinker://{model}/sampler_weights/a")
        request = GenerationRequest("r", [3, 4], SamplingParams(max_tokens=20, ignore_eos=True))
        first = asyncio.create_task(sampler.complete(None, request))
        await asyncio.sleep(0)
        second = asyncio.create_task(sampler.complete(folder, request))
        third = asyncio.create_task(sampler.complete(None, request))
        await asyncio.sleep(0)
        second.cancel()
        assert len((await first).token_ids) == len((await third).token_ids) == 20
        assert second.cancelled() and sampler._running == 0 and not sampler._waiting

    asyncio.run(play())


def test_replaced_and_broken_weights(tmp_path: Path) -> None:
    """Weights saved again under their name are those that are sampled; damaged ones are the error of their requests alone."""

    async def play() -> None:
        service = service_in(tmp_path)
        model = await model_of(service)
        body = {
            "prompt": {"chunks": [{"tokens": [*sequence(5).tokens, sequence(5).targets[-1]]}]},
            "sampling_params": {"max_tokens": 1, "stop": []},
            "prompt_logprobs": True,
        }
        scored = []
        for number in (1, 4):
            service.forward_backward(model, number, data("one", number), "cross_entropy", {}, backward=True)
            service.optim_step(model, number + 1, AdamSettings(5e-2))
            saved = await result(service, service.save(model, number + 2, "w", "weights", overwrite=True))
            assert isinstance(saved, Result) and saved.json is not None
            path = saved.json["path"]
            sampled = await result(service, service.sample({**body, "model_path": path})[0])
            assert isinstance(sampled, Result) and sampled.protobuf is not None
            scored.append(deserialize_sample_response(sampled.protobuf).prompt_logprobs)
            expected = service._adapters.forward("hone_training_1", [sequence(5)])[0].tolist()
            assert scored[-1] is not None
            torch.testing.assert_close(scored[-1][1:], expected, atol=1e-5, rtol=1e-5)
        assert scored[0] != scored[1]
        await result(service, service.save(model, 7, "broken", "weights"))
        broken = service._saved.find(f"tinker://{model}/weights/broken")
        (broken / "adapter_model.safetensors").write_bytes(b"")
        names = [
            service.sample({**body, **where})[0]
            for where in ({}, {"model_path": f"tinker://{model}/weights/broken"}, {})
        ]
        outcomes = [await result(service, name) for name in names]
        assert [type(outcome) for outcome in outcomes] == [Result, Failure, Result]
        assert isinstance(await result(service, service.optim_step(model, 8, AdamSettings())), Result)

    asyncio.run(play())


def test_operations_are_neither_cancelled_nor_run_again(tmp_path: Path) -> None:
    async def play() -> None:
        service = service_in(tmp_path)
        model = await model_of(service)
        later = service.optim_step(model, 2, RATES["one"])
        service.cancel(later)
        service.forward_backward(model, 1, data("one", 1), "cross_entropy", {}, backward=True)
        assert isinstance(await result(service, later), Result)
        service.futures._tasks.clear()  # as if their hour were over
        again = await result(service, service.optim_step(model, 1, RATES["one"]))
        assert isinstance(again, Failure) and again.user
        assert isinstance(await result(service, service.optim_step(model, 3, RATES["one"])), Result)

    asyncio.run(play())


def test_errors_of_samples(tmp_path: Path) -> None:
    async def play() -> None:
        service = service_in(tmp_path)
        good: dict[str, Any] = {"prompt": {"chunks": [{"tokens": [3, 4]}]}, "sampling_params": {"max_tokens": 3}}
        for wrong in (
            {"prompt": {"chunks": []}},
            {"prompt": {"chunks": [{"data": "image"}]}},
            {"sampling_params": {"max_tokens": 1000}},
            {"prompt": {"chunks": [{"tokens": [3] * 32}]}, "sampling_params": {}},  # no room for an answer
            {"sampling_params": {"temperature": -1}},
            {"topk_prompt_logprobs": 3},
            {"base_model": "other"},
            {"sampling_session_id": "none", "seq_id": 1},
        ):
            outcome = await result(service, service.sample({**good, **wrong})[0])
            assert isinstance(outcome, Failure) and outcome.user, wrong
        assert isinstance(await result(service, service.sample(good)[0]), Result)
        with pytest.raises(HoneError):
            service.info("none")

    asyncio.run(play())


def test_a_failed_load_keeps_no_adapter(tmp_path: Path) -> None:
    async def play() -> None:
        service = service_in(tmp_path)
        model = await model_of(service)
        await result(service, service.save(model, 1, "w", "sampler_weights"))
        (tmp_path / model / "sampler_weights" / "w" / "adapter_model.safetensors").write_bytes(b"damaged")
        path = f"tinker://{model}/sampler_weights/w"
        for number in (1, 2, 3):
            outcome = await result(service, service.create_from("s", number, path, "tiny", optimizer=False))
            assert isinstance(outcome, Failure) and outcome.user
        assert list(service._models) == [model] and set(service._adapters._shapes) == {"hone_training_1"}

    asyncio.run(play())


def test_adapters_of_dead_clients_are_saved_and_make_room(tmp_path: Path) -> None:
    async def play() -> None:
        service = service_in(tmp_path)
        dead, alive = await model_of(service), service.create_model("t", 0, "tiny", SHAPES["one"], 1)
        assert isinstance(await result(service, alive), Result)
        waiting = service.optim_step(dead, 9, RATES["one"])
        for model in service._models.values():
            model.used = time.monotonic() - 7200
        service.heard_of("t")
        new = service.create_model("u", 0, "tiny", SHAPES["one"], 1)
        assert isinstance(await result(service, new), Result)
        assert set(service._models) == {alive, new} and (tmp_path / dead / "weights" / "abandoned-1").is_dir()
        assert isinstance(await result(service, waiting), Failure)

    asyncio.run(play())


def test_a_sample_does_not_take_the_name_of_an_operation(tmp_path: Path) -> None:
    """It did: the operation of a neighbour was never run, and those after it waited for ever."""

    async def play() -> None:
        service = service_in(tmp_path)
        model = await model_of(service)
        sample = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 1}}
        outcome = await result(service, service.sample({**sample, "sampling_session_id": model, "seq_id": 1})[0])
        assert isinstance(outcome, Failure) and outcome.user
        assert isinstance(await result(service, service.optim_step(model, 1, RATES["one"])), Result)

    asyncio.run(play())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: os error 28")])
def test_a_full_disk_is_said_and_changes_nothing(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an error of the server with a traceback in its log."""

    def full(*_: object, **__: object) -> None:
        raise error

    async def play() -> None:
        service = service_in(tmp_path)
        model = await model_of(service)
        place = (Path, "touch") if isinstance(error, OSError) else (service._adapters, "save")
        with monkeypatch.context() as patch:
            patch.setattr(*place, full)
            outcomes = [
                await result(service, service.forward_backward(model, 1, data("one", 1), "ppo", {}, backward=True)),
                await result(service, service.save(model, 2, "w", "weights")),
            ]
        failed = outcomes[0 if isinstance(error, OSError) else 1]
        assert isinstance(failed, Failure) and failed.user and "free space" in failed.message
        saved = await result(service, service.save(model, 3, "v", "weights"))
        assert isinstance(saved, Result)

    asyncio.run(play())


def test_what_clients_leave_behind_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that nobody fetches, operations that wait for one that never comes, sampling sessions."""

    async def play() -> None:
        service = service_in(tmp_path)
        model = await model_of(service)
        first = service.create_sampling_session(None, None)
        for number in range(100):
            service.sampler(first)
            last = service.create_sampling_session(None, None)
            await result(service, service.sample({"prompt": {}, "sampling_params": {}})[0])
            service.optim_step(model, 2 + number, RATES["one"])
        assert len(service._sessions) == 8 and service.sampler(first) != service.sampler(last)
        assert service.futures._bytes <= 20_000
        refused = await result(service, service.optim_step(model, 200, RATES["one"]))
        assert isinstance(refused, Failure) and refused.user and "8 operations" in refused.message
        assert isinstance(await result(service, service.optim_step(model, 1, RATES["one"])), Result)
        assert isinstance(await result(service, f"{model}:9"), Result)

    monkeypatch.setattr(tinker_service, "KEPT_BYTES", 20_000)
    for name in ("_MOST_SESSIONS", "_MOST_WAITING"):
        monkeypatch.setattr(service_module, name, 8)
    asyncio.run(play())


def test_results_that_were_fetched_make_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        kept = tinker_service.Futures()

        async def large() -> Result:
            return Result(protobuf=b"x" * 10_000)

        for number in range(12):
            kept.start(str(number), large())
            await asyncio.sleep(0.01)
            if number % 2:
                await kept.wait(str(number), 60)
        assert [str(number) in kept for number in range(12)] == [
            number % 2 == 0 or number == 11 for number in range(12)
        ]

    monkeypatch.setattr(tinker_service, "KEPT_BYTES", 90_000)
    asyncio.run(play())


@pytest.mark.parametrize("rename", [1, 2])
def test_after_a_kill_the_service_has_what_was_saved(
    rename: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files at each rename of a replacement, as a kill leaves them."""

    async def play() -> str:
        service = service_in(tmp_path / "out")
        model = await model_of(service)
        await result(service, service.save(model, 1, "w", "weights"))
        service.forward_backward(model, 2, data("one", 1), "cross_entropy", {}, backward=True)
        await result(service, service.optim_step(model, 3, RATES["one"]))
        renames, original = iter(range(1, 9)), Path.rename

        def killed(path: Path, target: Path) -> Path:
            if next(renames) == rename:
                shutil.copytree(tmp_path / "out", tmp_path / "killed")
            return original(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killed)
            assert isinstance(await result(service, service.save(model, 4, "w", "weights", overwrite=True)), Result)
        return model

    async def resume(model: str) -> None:
        service = service_in(tmp_path / "killed")
        path = f"tinker://{model}/weights/w"
        assert isinstance(await result(service, service.create_from("s", 1, path, "tiny", optimizer=True)), Result)

    model = asyncio.run(play())
    with caplog.at_level(logging.WARNING, logger="hone.serve"):
        asyncio.run(resume(model))
    assert [record.args for record in caplog.records if record.name == "hone.serve"] == [(model,)]
    assert [path.name for path in (tmp_path / "killed" / model / "weights").iterdir()] == ["w"]
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != "unsaved"] == [model]
    assert not list((tmp_path / "out" / "unsaved").iterdir())


# addresses ------------------------------------------------------------------------------------------------------------


def test_bodies_are_bounded_and_wrong_ones_are_the_client_s_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_loop() as loop:
        service = call_on_loop(loop, lambda: service_in(tmp_path))
        endpoint = TrainingEndpoint(service, loop, token=None)
        client = TestClient(endpoint.app, raise_server_exceptions=False)
        bodies: list[Any] = [
            b"[]",
            b"3",
            b"null",
            b"{",
            b'{"request_id": []}',
            b"[" * 100_000,
            b'{"model_id": []}',
            b"{}",
        ]
        for route in endpoint.app.routes:
            assert isinstance(route, Route)
            for body in bodies if "POST" in (route.methods or ()) else ():
                status = client.post(route.path.replace("{session}", "s"), content=body).status_code
                assert status < 500, (route.path, body[:30], status)
        misaligned = wire._CLASSES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="ppo")
        misaligned.data.add().model_input.add().encoded_text.tokens = b"abc"
        assert client.post("/api/v1/forward_backward", content=misaligned.SerializeToString()).status_code == 422
        assert client.post("/api/v1/telemetry", content=b" " * (service_app.MAX_JSON + 1)).status_code == 422
        monkeypatch.setattr(service_app, "MAX_HELD", 100)
        assert client.post("/api/v1/telemetry", content=b" " * 101).status_code == 429
        assert client.post("/api/v1/telemetry", content=b"{}").status_code == 200 and endpoint._held == 0


def test_saved_weights_have_the_metadata_of_their_client_and_can_be_deleted(tmp_path: Path) -> None:
    """A loop deletes the checkpoint before its last, and a later one asks with what renderer a checkpoint was trained."""
    with engine_loop() as loop:
        service = call_on_loop(loop, lambda: service_in(tmp_path))
        client = TestClient(TrainingEndpoint(service, loop, token=None).app)
        shape = {"rank": 2, "train_attn": True, "train_mlp": True, "train_unembed": False, "seed": 1}
        creation = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": shape}
        begun = [client.post("/api/v1/create_model", json={**creation, "user_metadata": {"renderer_name": "plain"}})]
        names = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
        for number, route in enumerate(names.values(), 1):
            body = {"model_id": "s:train:0", "seq_id": number, "path": "w"}
            begun.append(client.post(f"/api/v1/{route}", json=body))
        for answer in begun:
            outcome = service.futures.wait(answer.json()["request_id"], LONG)
            assert isinstance(asyncio.run_coroutine_threadsafe(outcome, loop).result(), Result)
        run = TrainingRun.model_validate(client.get("/api/v1/training_runs/s:train:0").json())
        assert (run.training_run_id, run.user_metadata) == ("s:train:0", {"renderer_name": "plain"})
        for kind in names:
            addresses = [f"/api/v1/training_runs/s:train:0/checkpoints/{kind}/{name}" for name in ("w", "w", "a%20b")]
            assert [client.delete(address).status_code for address in addresses] == [200, 422, 422]
            assert not list((tmp_path / "s:train:0" / kind).iterdir())
        unknown = ("s:train:0", "s:train:1", "*:train:0")
        assert {client.get(f"/api/v1/training_runs/{name}").status_code for name in unknown} == {422}


OPERATION = {"model_id": "s:train:0", "seq_id": 1}
SAMPLE: dict[str, Any] = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 2}, "base_model": "tiny"}  # fmt: skip
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("save_weights", {**OPERATION, "path": 3}, "path"),
    ("save_weights_for_sampler", {**OPERATION, "path": {"a": 1}}, "path"),
    ("save_weights", {**OPERATION, "overwrite": [True]}, "overwrite"),
    ("load_weights", {**OPERATION, "path": None}, "path"),
    ("optim_step", {**OPERATION, "seq_id": "1"}, "seq_id"),
    ("optim_step", {**OPERATION, "seq_id": 1.5}, "seq_id"),
    ("optim_step", {**OPERATION, "model_id": ["s"]}, "model_id"),
    ("create_model", {"session_id": "s", "model_seq_id": 1, "base_model": 5, "lora_config": {"rank": 1}}, "base_model"),
    ("create_sampling_session", {"base_model": ["tiny"]}, "base_model"),
    ("weights_info", {"tinker_path": 5}, "tinker_path"),
    *(
        ("asample", {**SAMPLE, "sampling_params": params}, "sampling_params")
        for params in (3, {"max_tokens": "5"}, {"max_tokens": -1}, {"top_k": 2**70}, {"top_p": math.nan}, {"seed": 2**70}, {"stop": {"a": 1}})
    ),
    ("asample", {**SAMPLE, "prompt": "text"}, "prompt"),
    ("asample", {**SAMPLE, "prompt": {"chunks": [{"tokens": "abc"}]}}, "prompt.chunks.0.tokens"),
    ("asample", {**SAMPLE, "topk_sample_logprobs": 10**9}, "topk_sample_logprobs"),
    ("asample", {**SAMPLE, "num_samples": True}, "num_samples"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "field"), WRONG)
def test_a_wrong_type_is_refused_before_anything_begins(
    tmp_path: Path, route: str, body: dict[str, Any], field: str
) -> None:
    """They were accepted, took the number of an operation, and ended as errors of the server with a traceback in its log."""
    with engine_loop() as loop:
        service = call_on_loop(loop, lambda: service_in(tmp_path))
        client = TestClient(TrainingEndpoint(service, loop, token=None).app)
        answer = client.post(f"/api/v1/{route}", content=json.dumps(body))
        assert answer.status_code == 422 and field in answer.json()["detail"], answer.text
        assert not service.futures._tasks


@pytest.mark.parametrize("wrong", [{"adam_params": {"learning_rate": 2.0}}, {"adam_params": 3}], ids=["bounds", "type"])
def test_a_refused_request_holds_up_no_later_operation(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """The client uses up the number of a refused request; it may also repeat it, before or after the next has arrived."""
    with engine_loop() as loop:
        service = call_on_loop(loop, lambda: service_in(tmp_path))
        client = TestClient(TrainingEndpoint(service, loop, token=None).app)
        model = asyncio.run_coroutine_threadsafe(model_of(service), loop).result(LONG)

        def step(number: int, **fields: Any) -> int:
            return client.post("/api/v1/optim_step", json={"model_id": model, "seq_id": number} | fields).status_code

        def ended(number: int) -> bool:
            outcome = service.futures.wait(f"{model}:{number}", LONG)
            return asyncio.run_coroutine_threadsafe(outcome, loop).result() is not None

        assert [step(1, **wrong), step(2)] == [422, 200] and ended(2)
        assert [step(3, **wrong), step(3), step(4)] == [422, 200, 200] and ended(3) and ended(4)
        assert [step(6), step(7, **wrong), step(8), step(5, **wrong)] == [200, 422, 200, 422] and ended(6) and ended(8)
