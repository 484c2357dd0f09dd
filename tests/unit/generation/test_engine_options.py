"""Arguments of engines in processes of their own: Hone's keys by their names, and what is refused before they start."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises
from support.tiny_runs import make_model

from hone.config import RLConfig, load_config
from hone.config.rollout import RolloutConfig, SpeculativeConfig
from hone.errors import ConfigError
from hone.generation.build import engine_start
from hone.generation.options import check_speculation, engine_options
from hone.generation.remote import ServedEngine
from hone.generation.server import native_backend
from hone.generation.server.arguments import check_names
from hone.generation.server.backend import BackendSettings
from hone.generation.server.processes import binding
from hone.generation.server.sglang_backend import SglangBackend
from hone.generation.server.vllm_backend import VllmBackend

BACKENDS = {"vllm": VllmBackend, "sglang": SglangBackend}


@pytest.mark.parametrize(
    ("keys", "vllm", "sglang"),
    [
        ({"tensor_model_parallel_size": 2}, {"tensor_parallel_size": 2}, {"tp_size": 2}),
        (
            {"tensor_model_parallel_size": 2, "expert_parallel_size": 2},
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            {"tp_size": 2, "ep_size": 2},
        ),
        ({"gpu_memory_utilization": 0.7}, {"gpu_memory_utilization": 0.7}, {"mem_fraction_static": 0.7}),
        ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}, {"disable_radix_cache": True}),
        ({"enforce_eager": True}, {"enforce_eager": True}, {"disable_cuda_graph": True}),
        (
            {"max_num_batched_tokens": 512},
            {"max_num_batched_tokens": 512},
            {"max_prefill_tokens": 512, "chunked_prefill_size": 512},
        ),
        (
            {"max_num_batched_tokens": 512, "enable_chunked_prefill": False},
            {"max_num_batched_tokens": 512, "enable_chunked_prefill": False},
            {"max_prefill_tokens": 512, "chunked_prefill_size": -1},
        ),
    ],
)
def test_keys_have_the_names_of_each_engine(keys, vllm, sglang):
    for name, wanted in (("vllm", vllm), ("sglang", sglang)):
        default = engine_options(RolloutConfig(name=name))
        options = engine_options(RolloutConfig(name=name, **keys))
        assert {key: value for key, value in options.items() if default.get(key) != value} == wanted
        assert None not in options.values()


def test_keys_of_speculative_decoding_reach_each_engine():
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=5)
    vllm = engine_options(RolloutConfig(name="vllm", speculative=ngram))["speculative_config"]
    assert vllm == {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 5}
    native = engine_options(RolloutConfig(name="native", speculative=ngram))["speculative"]
    assert SpeculativeConfig(**native) == ngram
    for name in ("vllm", "native"):
        assert not {"speculative", "speculative_config"} & engine_options(RolloutConfig(name=name)).keys()


@pytest.mark.parametrize(
    ("engine", "method"),
    [("hf", "ngram"), ("sglang", "ngram"), ("trtllm", "ngram"), ("vllm", "draft_model")],
)
def test_an_engine_without_the_method_is_refused(engine, method):
    rollout = RolloutConfig(name=engine, speculative=SpeculativeConfig(method=method))
    with raises(ConfigError, engine, method, where="actor_rollout_ref.rollout.speculative.method"):
        check_speculation(rollout)


@pytest.mark.parametrize(("engine", "name"), [("vllm", "speculative_config"), ("native", "speculative")])
def test_speculative_decoding_has_one_set_of_keys(engine, name):
    where = f"actor_rollout_ref.rollout.engine_kwargs.{engine}.{name}"
    with raises(ConfigError, "actor_rollout_ref.rollout.speculative", where=where):
        engine_options(RolloutConfig(name=engine, engine_kwargs={engine: {name: {"method": "ngram"}}}))


def test_the_native_engine_gets_its_share_of_a_gpu(monkeypatch, tmp_path):
    """In a process of its own as in the trainer's: the share reaches the limits of its cache."""
    model, given = str(make_model(tmp_path / "model")), {}
    monkeypatch.setattr(native_backend, "NativeEngine", lambda *_, **arguments: given.update(arguments))
    monkeypatch.setattr(native_backend, "compute_here", lambda _: None)
    options = engine_options(RolloutConfig(name="native", gpu_memory_utilization=0.3))
    native_backend.NativeBackend(BackendSettings("native", model, model, "float32", 4, 64, None, options))
    assert given["gpu_memory_utilization"] == 0.3 and given["shares_weights"] is False
    options = engine_options(RolloutConfig(name="native", engine_kwargs={"native": {"gpu_memory_utilisation": 0.3}}))
    with raises(ConfigError, where="actor_rollout_ref.rollout.engine_kwargs.native"):
        native_backend.NativeBackend(BackendSettings("native", model, model, "float32", 4, 64, None, options))


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("vllm", "logprobs_mode"),
        ("vllm", "enable_sleep_mode"),
        ("sglang", "speculative_algorithm"),
        ("sglang", "sampling_backend"),
        ("sglang", "enable_lora"),
    ],
)
def test_options_that_hone_sets_are_refused_by_name(engine, name):
    options = engine_options(RolloutConfig(name=engine, engine_kwargs={engine: {name: 2}}))
    backend = BACKENDS[engine].__new__(BACKENDS[engine])  # it is refused before there is an engine
    with raises(ConfigError, name, where=f"actor_rollout_ref.rollout.engine_kwargs.{engine}.{name}"):
        backend._options(BackendSettings(engine, "model", "model", "float32", 4, 64, None, options))


@pytest.mark.parametrize(
    ("speculative_config", "what"),
    [
        ({"method": "draft_model", "model": "small"}, "method=draft_model"),
        ({"model": "small"}, "method=None"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "rejection_sample_method=synthetic"),
    ],
)
def test_unverified_speculative_decoding_is_refused(speculative_config, what):
    settings = BackendSettings(
        "vllm", "model", "model", "float32", 4, 64, None, {"speculative_config": speculative_config}
    )
    with raises(ConfigError, what, where="actor_rollout_ref.rollout.engine_kwargs.vllm"):
        VllmBackend.__new__(VllmBackend)._options(settings)


@pytest.mark.parametrize(
    ("engine", "name", "key"),
    [
        ("vllm", "tensor_parallel_size", "tensor_model_parallel_size"),
        ("vllm", "data_parallel_size", "data_parallel_size"),
        ("sglang", "dp_size", "data_parallel_size"),
        ("trtllm", "moe_expert_parallel_size", "expert_parallel_size"),
    ],
)
def test_sizes_are_set_where_devices_are_counted(engine, name, key):
    where = f"actor_rollout_ref.rollout.engine_kwargs.{engine}.{name}"
    with raises(ConfigError, f"actor_rollout_ref.rollout.{key}=2", where=where):
        engine_options(RolloutConfig(name=engine, engine_kwargs={engine: {name: 2}}))


def test_copies_of_the_model_in_one_engine():
    vllm = engine_options(RolloutConfig(name="vllm", tensor_model_parallel_size=2, data_parallel_size=4))
    assert (vllm["tensor_parallel_size"], vllm["data_parallel_size"]) == (2, 4)
    dense = engine_options(RolloutConfig(name="sglang", tensor_model_parallel_size=2, data_parallel_size=4))
    assert (dense["tp_size"], dense["dp_size"]) == (2, 4) and "enable_dp_attention" not in dense
    experts = {"tensor_model_parallel_size": 2, "data_parallel_size": 4, "expert_parallel_size": 8}
    shared = engine_options(RolloutConfig(name="sglang", **experts))
    assert (shared["tp_size"], shared["dp_size"], shared["ep_size"], shared["enable_dp_attention"]) == (8, 4, 8, True)
    with raises(ConfigError, where="actor_rollout_ref.rollout.data_parallel_size"):
        engine_options(RolloutConfig(name="trtllm", data_parallel_size=2))


def test_experts_are_divided_over_the_processes_of_the_model():
    with raises(ConfigError, "expert_parallel_size=4", "actor_rollout_ref.rollout.expert_parallel_size=2"):
        engine_options(RolloutConfig(name="vllm", tensor_model_parallel_size=2, expert_parallel_size=4))


def test_vllm_does_not_divide_experts_on_a_cpu():
    """Its kernel ends the worker with a segmentation fault (seen with a Qwen3 of four experts on two processes, 0.32.0)."""
    backend = VllmBackend.__new__(VllmBackend)
    backend._on_cpu = True
    options = engine_options(RolloutConfig(name="vllm", tensor_model_parallel_size=2, expert_parallel_size=2))
    with raises(ConfigError, "actor_rollout_ref.rollout.expert_parallel_size=1"):
        backend._options(BackendSettings("vllm", "model", "model", "float32", 4, 64, None, options))


def test_a_misspelt_argument_shows_the_likely_one():
    check_names("vllm", {"block_size": 1}, ["block_size"], title="vLLM")
    with raises(ConfigError, "vLLM", "blok_size", "block_size"):
        check_names("vllm", {"blok_size": 1}, ["block_size", "seed"], title="vLLM")


@examples(60)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True), st.integers(1, 50))
def test_workers_get_disjoint_cores_if_there_are_enough(cores, workers):
    given_out = [[int(core) for core in part.split(",")] for part in binding(cores, workers).split("|")]
    assert len(given_out) == workers and all(given_out) and {core for part in given_out for core in part} <= set(cores)
    if workers <= len(cores):
        flat = [core for part in given_out for core in part]
        assert len(flat) == len(set(flat)) and max(map(len, given_out)) == min(map(len, given_out))
    assert binding((), 1) == ",".join(map(str, sorted(os.sched_getaffinity(0))))


@pytest.mark.parametrize(
    ("cores", "threads", "replicas", "expected"),
    [
        (2, 2, 1, [(0, 1)]),
        (2, 2, 2, [(0,), (1,)]),
        (2, 1, 3, [(0,), (1,), (0,)]),
        (8, 8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (8, 2, 2, [(0, 1), (2, 3)]),
        (7, 8, 3, [(0, 1), (2, 3), (4, 5)]),
    ],
)
def test_replicas_share_the_cores(monkeypatch, tmp_path, cores, threads, replicas, expected):
    """Each with all threads of the trainer, they would wait for one another in every operation."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    config = load_config(
        RLConfig,
        [
            f"actor_rollout_ref.rollout.num_replicas={replicas}",
            f"actor_rollout_ref.model.path={tmp_path}",
            f"trainer.default_local_dir={tmp_path}",
        ],
    )
    monkeypatch.setattr(ServedEngine, "start", lambda plan, **_: plan)
    start, count = engine_start(config)
    assert [start(index).cpus for index in range(count)] == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "visible", "expected"),
    [
        ({}, None, [("3",), ("2",)]),  # the first GPU trains: it is taken last
        ({"tensor_model_parallel_size": 2}, None, [("3", "2"), ("1", "0")]),
        ({"tensor_model_parallel_size": 2, "data_parallel_size": 2}, None, [("3", "2", "1", "0")] * 2),
        ({"devices": [0]}, None, [("0",), ("0",)]),
        ({"devices": [1, 2]}, "7,5,GPU-3,4", [("5",), ("GPU-3",)]),
    ],
)
def test_local_replicas_take_the_next_devices(monkeypatch, tmp_path, keys, visible, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(ServedEngine, "start", lambda plan, **_: plan)
    words = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in {"num_replicas": 2, **keys}.items()]
    start, count = engine_start(local_config(tmp_path, *words))
    assert [start(index).devices for index in range(count)] == expected  # type: ignore[attr-defined]


def test_an_engine_without_enough_devices_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for words in (["tensor_model_parallel_size=4"], ["devices=[2]"]):
        start, _ = engine_start(local_config(tmp_path, *(f"actor_rollout_ref.rollout.{word}" for word in words)))
        with raises(ConfigError, "R79", where="actor_rollout_ref.rollout.devices"):
            start(0)


def local_config(folder, *words):
    folders = (f"actor_rollout_ref.model.path={folder}", f"trainer.default_local_dir={folder}")
    return load_config(RLConfig, ["actor_rollout_ref.rollout.name=native", *folders, *words])
