"""Rules about engines in separate environments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.messages import check_message, raises
from support.preflight import change, findings_of

from hone.cluster.plan import model_roles
from hone.config import RLConfig
from hone.config.derived import RunSpec, check_judge
from hone.errors import ConfigError
from hone.models import registry
from hone.models.attention.cache import KVLayerCache
from hone.preflight import Stage, engines, findings
from hone.preflight.evidence import Evidence

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HONE_ENGINES", str(tmp_path))
    return tmp_path


def missing(config: RLConfig) -> list[str]:
    return [finding.error.render() for finding in findings_of(engines.engine_is_installed, config)]


def test_an_engine_that_is_not_installed_is_a_warning_with_its_install_command(rl: RLConfig, nothing_installed: Path):
    assert missing(rl) == []
    change(rl, {f"{ROLLOUT}.name": "vllm"})
    assert len(missing(rl)) == 1 and "hone engines install vllm" in missing(rl)[0]
    change(rl, {f"{ROLLOUT}.engine_url": "tcp://127.0.0.1:1"})
    assert missing(rl) == []


def test_an_installed_engine_is_found(rl: RLConfig, nothing_installed: Path):
    python = nothing_installed / "vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    change(rl, {f"{ROLLOUT}.name": "vllm"})
    assert missing(rl) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.7}, "gpu_memory_utilization"),
        ({f"{ROLLOUT}.enable_prefix_caching": False}, "enable_prefix_caching"),
        ({f"{ROLLOUT}.engine_url": "tcp://127.0.0.1:1"}, "engine_url"),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "file"}, "checkpoint_engine.backend"),
        ({f"{ROLLOUT}.checkpoint_engine.delta": True}, "checkpoint_engine.delta"),
        ({f"{ROLLOUT}.checkpoint_engine.between_workers": "broadcast"}, "checkpoint_engine.between_workers"),
        (
            {"trainer.runtime": "ray", f"{ROLLOUT}.checkpoint_engine.between_workers": "object_store"},
            "checkpoint_engine.between_workers",
        ),
        (
            {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.engine_url": "tcp://127.0.0.1:1", f"{ROLLOUT}.enforce_eager": True},
            "enforce_eager",
        ),
    ],
)
def test_keys_of_an_engine_that_is_not_started_have_no_effect(rl: RLConfig, changes: dict[str, Any], key: str):
    change(rl, changes)
    idle = [f.error for f in findings(rl, (Stage.ARITHMETIC,)) if f.error.code == "R23"]
    assert [error.where for error in idle] == [f"{ROLLOUT}.{key}"]


def test_a_native_engine_on_a_gpu_has_its_share_of_the_memory(rl: RLConfig):
    change(rl, {"trainer.device": "cuda", f"{ROLLOUT}.gpu_memory_utilization": 0.7})
    assert [f.error for f in findings(rl, (Stage.ARITHMETIC,)) if f.error.code == "R23"] == []


@pytest.mark.parametrize("key", ["engine_env", "gpu_memory_utilization"])
def test_a_native_engine_with_replicas_has_no_environment_and_no_share_of_a_gpu(rl: RLConfig, key: str):
    keys = {"num_replicas": 2, "engine_start_seconds": 30.0, "server_pool.request_timeout": 5.0}
    change(rl, {f"{ROLLOUT}.{name}": value for name, value in keys.items()})
    assert [f.error for f in findings(rl, (Stage.ARITHMETIC,)) if f.error.code == "R23"] == []
    change(rl, {f"{ROLLOUT}.{key}": {"engine_env": "/somewhere", "gpu_memory_utilization": 0.7}[key]})
    (idle,) = [f.error for f in findings(rl, (Stage.ARITHMETIC,)) if f.error.code == "R23"]
    assert idle.where == f"{ROLLOUT}.{key}"


def test_workers_with_devices_of_their_own_get_weights_by_either_way(rl: RLConfig):
    change(rl, {"trainer.runtime": "ray", f"{ROLLOUT}.enable_resource_pool": True})
    for way in ("broadcast", "object_store"):
        change(rl, {f"{ROLLOUT}.checkpoint_engine.between_workers": way})
        assert [f.error for f in findings(rl, (Stage.ARITHMETIC,)) if f.error.code == "R23"] == []


def test_keys_of_absent_replicas_have_no_effect(rl: RLConfig):
    change(rl, {f"{ROLLOUT}.server_pool.max_attempts": 7})
    (idle,) = [f.error for f in findings(rl, (Stage.ARITHMETIC,)) if f.error.code == "R23"]
    assert idle.where == f"{ROLLOUT}.server_pool.max_attempts" and f"{ROLLOUT}.num_replicas=1" in idle.fix


def test_an_engine_in_the_trainer_has_no_replicas(rl: RLConfig):
    change(rl, {f"{ROLLOUT}.num_replicas": 2})
    assert findings_of(engines.engine_has_replicas, rl) == []
    change(rl, {f"{ROLLOUT}.name": "hf"})
    (finding,) = findings_of(engines.engine_has_replicas, rl)
    assert finding.stops and "rollout.num_replicas=2" in finding.error.what


def test_keys_of_the_engine_that_is_started_are_fine(rl: RLConfig):
    change(rl, {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.gpu_memory_utilization": 0.7, f"{ROLLOUT}.enforce_eager": True})
    assert [f.error for f in findings(rl, (Stage.ARITHMETIC,)) if f.error.code == "R23"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{ROLLOUT}.name": "vllm", "actor_rollout_ref.model.lora_rank": 4}, None),
        ({f"{ROLLOUT}.name": "sglang", "actor_rollout_ref.model.lora_rank": 4}, "'sglang'"),
        ({"actor_rollout_ref.model.lora_rank": 4}, "'native'"),
        ({f"{ROLLOUT}.name": "vllm"}, "rollout.merge_lora=false"),
        ({f"{ROLLOUT}.name": "vllm", "actor_rollout_ref.model.lora_adapter_path": "/not/there"}, "/not/there"),
    ],
)
def test_a_separate_adapter_needs_an_engine_that_computes_with_it(
    rl: RLConfig, changes: dict[str, Any], message: str | None
):
    change(rl, {f"{ROLLOUT}.merge_lora": False, **changes})
    finding = [finding.error.render() for finding in findings_of(engines.engine_takes_the_adapter, rl)]
    assert len(finding) == (message is not None) and (message is None or message in finding[0])


@pytest.mark.parametrize(
    ("changes", "key", "mentions"),
    [
        (
            {"speculative.method": "ngram", "speculative.prompt_lookup_min": 6},
            "speculative.prompt_lookup_min",
            ("6", "4"),
        ),
        ({"speculative.method": "draft_model"}, "speculative.model", ("draft_model",)),
        ({"name": "vllm", "min_p": 0.1, "speculative.method": "ngram"}, "min_p", ("0.1",)),
        ({"name": "vllm", "speculative.method": "draft_model"}, "speculative.method", ("vllm", "native")),
    ],
)
def test_keys_of_speculative_decoding_fit_each_other(
    rl: RLConfig, changes: dict[str, Any], key: str, mentions: tuple[str, ...]
):
    change(rl, {f"{ROLLOUT}.{name}": value for name, value in changes.items()})
    (finding,) = findings_of(engines.engine_drafts_as_configured, rl)
    assert finding.stops and finding.error.where == f"{ROLLOUT}.{key}"
    check_message(finding.error, *mentions)


@pytest.mark.parametrize(
    ("changes", "idle"),
    [
        ({"speculative.num_speculative_tokens": 7}, {"num_speculative_tokens"}),
        ({"speculative.method": "ngram", "speculative.draft_lr": 1e-4}, {"draft_lr"}),
        (
            {"speculative.method": "draft_model", "speculative.model": "m", "speculative.prompt_lookup_max": 5},
            {"prompt_lookup_max"},
        ),
        (
            {"name": "vllm", "speculative.method": "ngram", "speculative.disable_by_batch_size": 8},
            {"disable_by_batch_size"},
        ),
        (
            {"speculative.method": "ngram", "speculative.disable_by_batch_size": 8, "speculative.prompt_lookup_max": 5},
            set(),
        ),
    ],
)
def test_keys_of_another_method_have_no_effect(rl: RLConfig, changes: dict[str, Any], idle: set[str]):
    change(rl, {f"{ROLLOUT}.{name}": value for name, value in changes.items()})
    effectless = {f.error.where for f in findings(rl, (Stage.ARITHMETIC,)) if f.error.code == "R23"}
    assert effectless == {f"{ROLLOUT}.speculative.{key}" for key in idle}


class StateCache(KVLayerCache):
    """A cache of one state a sequence."""

    per_token = False


def test_a_model_with_one_state_a_sequence_has_no_drafts(rl: RLConfig, monkeypatch: pytest.MonkeyPatch):
    change(rl, {f"{ROLLOUT}.speculative.method": "ngram"})
    evidence = Evidence(rl)
    evidence.model_settings = {"model_type": "qwen3", "num_hidden_layers": 2}
    assert findings_of(engines.draft_model_shares_the_tokenizer, rl, evidence) == []
    family = dataclasses.replace(registry.family_of("qwen3"), layer_cache=lambda config, layer: StateCache())
    monkeypatch.setattr(registry, "family_of", lambda model_type: family)
    (finding,) = findings_of(engines.draft_model_shares_the_tokenizer, rl, evidence)
    assert finding.stops and finding.error.where == f"{ROLLOUT}.speculative.method"


JUDGE = "reward.reward_model"


@pytest.fixture
def judged(rl: RLConfig, tmp_path: Path) -> RLConfig:
    """A run whose answers vLLM judges."""
    change(rl, {f"{JUDGE}.enable": True, f"{JUDGE}.kind": "generative", f"{JUDGE}.path": str(tmp_path)})
    change(rl, {f"{JUDGE}.rollout.name": "vllm", f"{JUDGE}.rollout.tensor_model_parallel_size": 2})
    return rl


def test_the_engine_of_a_judge_is_built_from_its_own_keys(judged: RLConfig):
    change(judged, {f"{ROLLOUT}.name": "hf", f"{ROLLOUT}.max_num_seqs": 3, f"{JUDGE}.n_gpus_per_node": 4})
    judge = RunSpec(judged).judge
    assert judge is not None
    shared = judge.actor_rollout_ref
    assert (shared.rollout.name, shared.rollout.n_gpus_per_node, shared.rollout.max_num_seqs) == ("vllm", 4, 256)
    assert shared.model.path == judged.reward.reward_model.path and not RunSpec(judge).follows_engine_experts
    change(judged, {f"{JUDGE}.enable": False})
    assert RunSpec(judged).judge is None


def test_a_judge_over_several_devices_has_workers_of_its_own(judged: RLConfig):
    change(judged, {"trainer.runtime": "ray", "trainer.n_gpus_per_node": 2})
    with raises(ConfigError, "2 workers", f"{JUDGE}.n_gpus_per_node=2", where=f"{JUDGE}.enable_resource_pool"):
        check_judge(judged)
    change(judged, {f"{JUDGE}.enable_resource_pool": True, f"{JUDGE}.n_gpus_per_node": 3})
    with raises(ConfigError, f"{JUDGE}.n_gpus_per_node=", where=f"{JUDGE}.rollout.tensor_model_parallel_size"):
        check_judge(judged)
    change(judged, {f"{JUDGE}.n_gpus_per_node": 4})
    check_judge(judged)
    groups = {role.name: role.group for role in model_roles(judged)}
    assert groups["reward_model"] == 2 and groups["rollout"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "discriminative", "rollout.name": "sglang"}, ("sglang", f"{JUDGE}.rollout.name=vllm")),
        ({"rollout.expert_parallel_size": 3}, (f"{JUDGE}.rollout.expert_parallel_size=2",)),
        ({"rollout.engine_kwargs": {"sglang": {}}}, (f"{JUDGE}.rollout.engine_kwargs",)),
        (
            {"rollout.tensor_model_parallel_size": 1, "rollout.engine_kwargs": {"vllm": {"tp_size": 2}}},
            (f"{JUDGE}.rollout.engine_kwargs",),
        ),
    ],
)
def test_an_engine_that_cannot_judge_is_refused_with_its_own_keys(judged: RLConfig, changes, words):
    change(judged, {f"{JUDGE}.{key}": value for key, value in changes.items()})
    found = [finding.error.render() for finding in findings(judged, [Stage.ARITHMETIC]) if finding.error.code == "R76"]
    assert len(found) == 1, found
    for text in found:
        assert "actor_rollout_ref" not in text and all(word in text for word in words), text


def test_keys_of_an_engine_that_does_not_judge_have_no_effect(judged: RLConfig):
    def effectless() -> list[str]:
        return [f.error.where for f in findings(judged, [Stage.ARITHMETIC]) if f.error.code == "R23"]

    change(judged, {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096})
    assert not [key for key in effectless() if JUDGE in key]
    change(judged, {f"{JUDGE}.rollout.name": "native"})
    assert f"{JUDGE}.rollout.tensor_model_parallel_size" in effectless()
    change(judged, {f"{JUDGE}.kind": "discriminative", f"{JUDGE}.rollout.max_num_seqs": 2})
    assert f"{JUDGE}.rollout.max_num_seqs" in effectless()
