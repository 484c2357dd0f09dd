"""TensorRT-LLM's back end, held against the interface that TensorRT-LLM publishes. The engine itself starts on GPUs alone, and was never run.

``support/trtllm_interface.json`` has what is published; ``support/trtllm_stand_in.py`` takes exactly that.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import trtllm_stand_in as stand_in
from support.engine_cases import (
    EOS,
    MAX_MODEL_LEN,
    assert_greedy,
    byte_tokenizer,
    expected_log_probs,
    make_model,
    requests,
    save,
)
from support.examples import examples
from support.messages import check_message, raises
from typer.testing import CliRunner

from hone.cli.engines import app
from hone.config.rollout import RolloutConfig
from hone.data.types import StopReason
from hone.errors import ConfigError, GenerationError, RequestError
from hone.generation import environments
from hone.generation.options import engine_options
from hone.generation.protocol import Completion, Constraint, ConstraintKind, GenerationRequest, SamplingParams
from hone.generation.remote.transports import SharedMemorySender
from hone.generation.server.backend import BackendSettings
from hone.generation.server.serve import open_backend
from hone.generation.server.trtllm_backend import EXTENSION, TrtllmBackend, sampling_arguments

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two policies of one architecture, and where the first is written."""
    return (
        make_model("untied"),
        make_model("untied", seed=1),
        save(make_model("untied"), tmp_path_factory.mktemp("model")),
    )


@pytest.fixture(autouse=True)
def engine_in_place() -> Iterator[None]:
    with stand_in.in_place():
        yield


def settings_of(models: Any, **options: Any) -> BackendSettings:
    return BackendSettings("trtllm", str(models[2]), str(models[2]), "float32", 8, MAX_MODEL_LEN, 4096, options)


def playing(models: Any, play: Any, **options: Any) -> Any:
    """Open the backend as its server does, and call ``play`` with it."""

    async def run() -> Any:
        backend: Any = await open_backend(settings_of(models, **options))
        try:
            return await play(backend)
        finally:
            backend.close()

    return asyncio.run(run())


async def all_of(backend: TrtllmBackend, asked: list[GenerationRequest]) -> dict[str, Completion]:
    return {done.request_id: done for done in await asyncio.gather(*map(backend.generate, asked))}


async def publish(backend: TrtllmBackend, model: Any, *, without: str = "", chunks: int = 3) -> None:
    """Send a policy's weights in some chunks, through the memory that both processes share."""
    named = [(name, tensor) for name, tensor in model.named_parameters() if name != without]
    sender = SharedMemorySender()
    await backend.begin_weights(1)
    size = -(-len(named) // chunks)
    for start in range(0, len(named), size):
        await backend.load_weights(sender.pack(named[start : start + size]))
    await backend.finish_weights()
    sender.close()


# what is started -----------------------------------------------------------------------------------------------------


def test_the_engine_is_started_with_arguments_that_it_publishes(models, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "the trainer's own:1")
    monkeypatch.setenv("TLLM_DISABLE_MPI", "0")
    rollout = RolloutConfig(
        name="trtllm", tensor_model_parallel_size=2, gpu_memory_utilization=0.4, max_num_batched_tokens=99, enforce_eager=True,
        enable_prefix_caching=False, engine_kwargs={"trtllm": {"kv_cache_config": {"tokens_per_block": 16}}},
    )  # fmt: skip

    async def play(backend):
        return backend._engine.args, dict(os.environ)

    args, environment = playing(models, play, **engine_options(rollout))
    assert (args.model, args.tokenizer, args.dtype) == (str(models[2]), str(models[2]), "float32")
    assert (args.backend, args.max_seq_len, args.max_input_len) == ("pytorch", MAX_MODEL_LEN, MAX_MODEL_LEN)
    assert (args.max_batch_size, args.max_num_tokens, args.tensor_parallel_size) == (8, 99, 2)
    assert "cuda_graph_config" in args.model_fields_set and args.cuda_graph_config is None
    cache = args.kv_cache_config
    assert (cache.max_tokens, cache.free_gpu_memory_fraction, cache.enable_block_reuse) == (4096, 0.4, False)
    assert cache.tokens_per_block == 16, "the user's part of a group leaves the rest of it as it is"
    assert args.ray_worker_extension_cls == EXTENSION
    assert "RAY_ADDRESS" not in environment and environment["TLLM_RAY_FORCE_LOCAL_CLUSTER"] == "1"
    assert environment["TLLM_DISABLE_MPI"] == "0", "what the user has set stays"


def test_without_a_word_of_the_user_graphs_stay_and_a_prompt_of_full_length_fits_into_a_step(models):
    async def play(backend):
        return backend._engine.args

    args = playing(models, play, **engine_options(RolloutConfig(name="trtllm")))
    assert "cuda_graph_config" not in args.model_fields_set and args.max_num_tokens == 8192
    longer = settings_of(models)
    longer = BackendSettings(**{**vars(longer), "max_model_len": 20000})
    backend = TrtllmBackend.__new__(TrtllmBackend)
    assert backend._options(longer)["max_num_tokens"] == 20000


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ({"max_seq_length": 3}, ("max_seq_length", "max_seq_len")),
        ({"kv_cache_config": {"free_gpu_fraction": 0.5}}, ("kv_cache_config", "free_gpu_fraction")),
        ({"tensor_parallel_size": "two"}, ("tensor_parallel_size",)),
        ({"speculative_config": {"decoding_type": "NGram"}}, ("speculative_config",)),
        ({"orchestrator_type": "rpc"}, ("orchestrator_type",)),
        ({"ray_worker_extension_cls": "mine.Worker"}, ("ray_worker_extension_cls",)),
    ],
)
def test_unknown_arguments_and_those_that_hone_sets_are_refused(models, options, mentions):
    with raises(ConfigError, *mentions, where="actor_rollout_ref.rollout.engine_kwargs.trtllm"):
        playing(models, lambda backend: None, **options)


def test_nothing_is_used_that_is_not_published():
    published = stand_in.INTERFACE["AsyncLLM"]["methods"]
    for name, arguments in published.items():
        assert list(inspect.signature(getattr(stand_in.AsyncLLM, name)).parameters)[1:] == arguments
    public = {name for name in vars(stand_in.AsyncLLM) if not name.startswith("_") and name != "finds_strings"}
    assert public == set(published)
    extension = {name for name in vars(stand_in.WorkerExtension) if not name.startswith("_")}
    assert extension == set(stand_in.INTERFACE["WorkerExtension"]) - {"handle"}
    assert {name for name in vars(stand_in.Answer) if not name.startswith("_")} == set(
        stand_in.INTERFACE["RequestOutput"]["methods"]
    )


# requests ------------------------------------------------------------------------------------------------------------

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 4096),
    temperature=st.floats(0, 2),
    stop_token_ids=st.lists(st.integers(0, 2**17), max_size=4).map(tuple),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)


@examples(100)
@given(SAMPLING, st.integers(0, 2**70), st.integers(0, 50))
def test_every_request_is_one_that_it_publishes(sampling, seed, made):
    arguments = sampling_arguments(GenerationRequest("r", [1], sampling, seed=seed), made)
    fields = stand_in.INTERFACE["SamplingParams"]
    kinds = {"int": int, "float": (int, float), "bool": bool, "list": list, "LogprobMode": str}
    for name, value in arguments.items():
        kind, default = fields[name]
        assert (value is None and default is None) or isinstance(value, kinds[kind]), name
    assert arguments["logprobs_mode"] in stand_in.INTERFACE["LogprobMode"]
    assert 0 <= arguments["seed"] < 2**63 and arguments["max_tokens"] == sampling.max_tokens - made
    assert bool(arguments["stop_token_ids"]) == bool(sampling.stop_token_ids and not sampling.ignore_eos)
    stand_in.SamplingParams(**arguments)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_come_with_the_log_probs_of_the_policy(models, temperature):
    asked = requests(SamplingParams(max_tokens=8, temperature=temperature), 4)
    done = playing(models, lambda backend: all_of(backend, asked))
    for one in asked:
        got = done[one.request_id]
        assert got.stop_reason is StopReason.LENGTH and len(got.token_ids) == 8
        raw, drawn = expected_log_probs(models[0], one, got.token_ids)
        torch.testing.assert_close(torch.tensor(got.log_probs), raw, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(got.sampling_log_probs), drawn, atol=1e-4, rtol=0)
        if temperature == 0:
            assert_greedy(models[0], one, got)


@pytest.mark.parametrize("given_", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2}])
def test_sampling_that_separates_the_two_log_probs_is_refused(models, given_):
    ((name, value),) = given_.items()
    asked = requests(SamplingParams(max_tokens=4, **given_), 1)
    with raises(GenerationError, f"{name}={value}", f"actor_rollout_ref.rollout.{name}="):
        playing(models, lambda backend: all_of(backend, asked))


def test_sampling_that_changes_logits_is_refused(models):
    changes = {"logit_bias": ((3, 1.0),), "constraint": Constraint(ConstraintKind.JSON_OBJECT), "presence_penalty": 1.0}
    for name, value in changes.items():
        asked = requests(SamplingParams(max_tokens=4, **{name: value}), 1)
        with pytest.raises(RequestError) as error:
            playing(models, lambda backend, asked=asked: all_of(backend, asked))
        assert error.value.field == name


def test_greedy_ignores_top_k_and_top_p(models):
    asked = requests(SamplingParams(max_tokens=4, temperature=0.0, top_k=5, top_p=0.5), 1)
    assert_greedy(models[0], asked[0], playing(models, lambda backend: all_of(backend, asked))["0"])


def test_stop_tokens_end_an_answer_and_stay_in_it(models):
    async def play(backend):
        free = (await all_of(backend, requests(GREEDY, 1)))["0"].token_ids
        stops = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(free[4], EOS))
        ignoring = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(free[4], EOS), ignore_eos=True)
        return (
            free,
            (await all_of(backend, requests(stops, 1)))["0"],
            (await all_of(backend, requests(ignoring, 1)))["0"],
        )

    free, stopped, whole = playing(models, play)
    assert stopped.token_ids == free[: free.index(free[4]) + 1] and stopped.stop_reason is StopReason.STOP
    assert (whole.token_ids, whole.stop_reason) == (free, StopReason.LENGTH)


@pytest.mark.parametrize("finds", [True, False])
def test_a_stop_string_ends_an_answer_in_whatever_tokens_it_is_written(models, monkeypatch, finds):
    """TensorRT-LLM compares tokens: where an answer writes the string in others, it is cut afterwards."""
    monkeypatch.setattr(stand_in.AsyncLLM, "finds_strings", finds)
    sampling = SamplingParams(max_tokens=20, temperature=1.0)

    async def play(backend):
        free = (await all_of(backend, [GenerationRequest("s", [70, 71], sampling, seed=3)]))["s"].token_ids
        stop = str(byte_tokenizer().decode([next(token for token in free[3:] if 33 <= token < 127)]))
        stopping = SamplingParams(max_tokens=20, temperature=1.0, stop=(stop, "never said"))
        return free, stop, (await all_of(backend, [GenerationRequest("s", [70, 71], stopping, seed=3)]))["s"]

    free, stop, got = playing(models, play)
    end = next(n for n in range(1, len(free) + 1) if stop in byte_tokenizer().decode(free[:n]))
    assert (got.token_ids, got.stop_reason) == (free[:end], StopReason.STOP)
    assert len(got.log_probs) == len(got.sampling_log_probs) == end


def test_a_refused_request_does_not_affect_the_others(models):
    async def play(backend):
        long = GenerationRequest("long", [5] * 250, SamplingParams(max_tokens=20))
        return await asyncio.gather(*map(backend.generate, [long, *requests(GREEDY, 2)]), return_exceptions=True)

    refused, *fine = playing(models, play)
    assert isinstance(refused, GenerationError)
    check_message(refused, "TensorRT-LLM")
    for one, got in zip(requests(GREEDY, 2), fine, strict=True):
        assert_greedy(models[0], one, got)


# control -------------------------------------------------------------------------------------------------------------

LONG = SamplingParams(max_tokens=60, temperature=0.0)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_an_aborted_request_keeps_its_tokens(models):
    async def play(backend):
        task = asyncio.create_task(all_of(backend, requests(LONG, 2)))
        await turns(12)
        await backend.abort(["0", "unknown"])
        cut = await task
        return cut, await all_of(backend, requests(LONG, 2))

    cut, free = playing(models, play)
    got = cut["0"]
    assert got.stop_reason is StopReason.ABORTED and 0 < len(got.token_ids) < 60
    assert got.token_ids == free["0"].token_ids[: len(got.token_ids)] and len(got.log_probs) == len(got.token_ids)
    assert cut["1"].token_ids == free["1"].token_ids and cut["1"].stop_reason is StopReason.LENGTH


def test_nothing_is_computed_during_a_pause_and_greedy_answers_are_the_same(models):
    async def play(backend):
        free = await all_of(backend, requests(LONG, 3))
        task = asyncio.create_task(all_of(backend, requests(LONG, 3)))
        await turns(15)
        await backend.pause()
        steps = backend._engine.steps
        late = asyncio.create_task(all_of(backend, [GenerationRequest("late", [3], GREEDY)]))
        ended = asyncio.create_task(all_of(backend, [GenerationRequest("ended", [4], GREEDY)]))
        await turns(20)
        assert backend._engine.steps == steps and not task.done()
        await backend.abort(["ended"])
        assert (await ended)["ended"].stop_reason is StopReason.ABORTED
        await backend.resume()
        return free, await task, await late

    free, done, late = playing(models, play)
    assert {key: got.token_ids for key, got in done.items()} == {key: got.token_ids for key, got in free.items()}
    assert all(got.stop_reason is StopReason.LENGTH for got in done.values()) and len(late["late"].token_ids) == 12
    for one in requests(LONG, 3):
        assert_greedy(models[0], one, done[one.request_id])


# weights -------------------------------------------------------------------------------------------------------------


def test_new_weights_answer_as_the_new_policy(models):
    async def play(backend):
        before = await all_of(backend, requests(GREEDY, 3))
        await publish(backend, models[1])
        return before, await all_of(backend, requests(GREEDY, 3)), backend._engine.calls

    before, after, calls = playing(models, play)
    for one in requests(GREEDY, 3):
        assert_greedy(models[0], one, before[one.request_id])
        assert_greedy(models[1], one, after[one.request_id])
    assert calls == ["abort", "weights", "weights", "weights", "finalize", "shutdown"]


def test_requests_under_way_are_gone_on_with_by_the_new_policy(models):
    async def play(backend):
        task = asyncio.create_task(all_of(backend, requests(LONG, 2)))
        await turns(15)
        await publish(backend, models[1])
        return await task

    done = playing(models, play)
    for one in requests(LONG, 2):
        tokens = done[one.request_id].token_ids
        assert len(tokens) == 60
        likeliest = [greedy_after(model, one.prompt_ids, tokens) for model in models[:2]]
        changed = next(at for at in range(60) if tokens[at] != likeliest[0][at])
        assert changed > 0 and tokens[changed:] == likeliest[1][changed:]


def greedy_after(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


def test_an_incomplete_weight_sync_serves_no_request_until_a_whole_one_arrives(models):
    missing = "model.layers.1.mlp.up_proj.weight"

    async def play(backend):
        with raises(GenerationError, 1, 21, missing):
            await publish(backend, models[1], without=missing)
        task = asyncio.create_task(all_of(backend, requests(GREEDY, 1)))
        await turns(10)
        assert not task.done()
        await publish(backend, models[1])
        return await task

    assert_greedy(models[1], requests(GREEDY, 1)[0], playing(models, play)["0"])


def test_a_lost_worker_ends_the_server(models, monkeypatch):
    """Ray raises when an actor that is gone is asked; nothing else would tell those who wait for an answer."""
    ended: list[str] = []

    def give_up() -> None:
        ended.append("code 70")
        raise asyncio.CancelledError

    monkeypatch.setattr("hone.generation.server.trtllm_backend.give_up", give_up)
    monkeypatch.setattr("hone.generation.server.trtllm_backend._PROBE_SECONDS", 0.001)

    async def play(backend):
        await asyncio.sleep(0.02)
        assert not ended

        async def lost(*arguments: Any) -> None:
            raise RuntimeError("the actor died")

        backend._engine.collective_rpc = lost
        await asyncio.sleep(0.05)
        return ended

    assert playing(models, play) == ["code 70"]


# installation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "gpu"),
    [
        ([], False),
        (["--cpu"], True),
    ],
)
def test_it_is_not_installed_where_it_cannot_run(tmp_path, monkeypatch, words, gpu):
    monkeypatch.setattr(environments, "_has_gpu", lambda: gpu)
    ended = CliRunner().invoke(app, ["install", "trtllm", "--env", str(tmp_path / "engine"), *words])
    assert isinstance(ended.exception, ConfigError)
    check_message(ended.exception, "trtllm", "hone engines install vllm")
    assert not (tmp_path / "engine").exists()


def test_it_is_installed_with_a_separate_python_from_nvidias_index(tmp_path, monkeypatch):
    """The installer gets NVIDIA's index: PyPI's package would download the wheel while it is built."""
    ran: list[list[str]] = []
    monkeypatch.setattr(environments, "_has_gpu", lambda: True)
    monkeypatch.setattr(environments, "_check_disk", lambda recipe, place: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    place = tmp_path / "engine"

    def run(command: list[str], **options: Any) -> Any:
        ran.append(command)
        place.mkdir(exist_ok=True)
        return __import__("subprocess").CompletedProcess(command, 0, "1.4.0rc1\n", "")

    monkeypatch.setattr("subprocess.run", run)
    record = environments.install("trtllm", cpu=False, environment=place, say=lambda line: None)
    assert record["version"] == "1.4.0rc1" and ran[0][0].endswith(("python3.12", "python"))
    told = [command[3:] for command in ran if command[2].endswith("installer.py")]
    assert told[0] == ["torch==2.12.0", "--index-url", "https://download.pytorch.org/whl/cu130"]
    assert told[1] == ["tensorrt-llm[ray]==1.4.0rc1", "torch==2.12.0", "--extra-index-url", "https://pypi.nvidia.com"]
    assert stand_in.INTERFACE["version"] == "1.4.0rc1", "what is installed is what was recorded"


def test_the_list_says_that_it_was_never_run():
    row = next(row for row in environments.engine_table() if row.name == "trtllm")
    assert row.verified.startswith("never run") and "1.4.0rc1" in row.verified
