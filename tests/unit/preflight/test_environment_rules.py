"""Rules about the machine, on simulated machines, and about settings that are usually mistakes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.preflight import SOUND_MACHINE, change, rows, safetensors_head, write_rows

from hone.config import RLConfig, SFTConfig
from hone.preflight import Evidence, environment, examine, findings, machine
from hone.preflight.machine import GIB, Gpu, GpuUser, cpu_quota, look
from hone.preflight.plan.memory import checkpoint_bytes
from hone.preflight.plan.model import count_parameters

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Return a function that simulates facts about the machine."""

    def put(**changes: Any) -> None:
        monkeypatch.setattr(machine, "look", lambda: replace(SOUND_MACHINE, **changes))

    return put


@pytest.mark.parametrize(
    ("facts", "changes", "code", "stops", "words"),
    [
        ({"quota": 2.0}, {}, "R03", False, ["8 threads", "2 of 8 CPUs", "quota of 2", "trainer.num_threads=2"]),
        ({}, {"trainer.num_threads": 9}, "R03", False, ["9 threads", "trainer.num_threads=8"]),
        ({"shared_memory": GIB // 16}, {"trainer.runtime": "ray"}, "R04", False, ["0.062 GiB", "--shm-size=8g"]),
        ({"open_files": 1024}, {"trainer.runtime": "ray"}, "R04", False, ["1024 files", "ulimit -n 65535"]),
        (
            {"gpus": (Gpu(0, "H100", 80, 41),), "gpu_users": (GpuUser(0, 4711, "VLLM::EngineCore", 41),)},
            *({"trainer.device": "auto"}, "R05", False, ["41.0 of 80 GiB", "PID 4711 (VLLM::EngineCore)", "kill 4711"]),
        ),
        ({"memory": 4 * GIB // 5}, {}, "R06", False, ["process 832 MiB", "activations", "KV cache", "0.8 GiB"]),
        (
            {"gpus": (Gpu(0, "tiny", 0.001, 0),)},
            *({"trainer.device": "auto"}, "R31", True, ["0.0 GiB", "smaller model"]),
        ),
    ],
)
def test_machine_rules(
    rl: RLConfig, on: Any, facts: dict[str, Any], changes: dict[str, Any], code: str, stops: bool, words: list[str]
) -> None:
    change(rl, changes)
    on(**facts)
    finding = [f for f in findings(rl) if f.error.code == code]
    assert [f.stops for f in finding] == [stops]
    assert finding[0].error.fix and finding[0].error.why
    for word in words:
        assert word in finding[0].error.render()


@pytest.mark.parametrize(
    "facts",
    [
        {"quota": 8.0},
        {"shared_memory": 1},
        {"open_files": 20},
        {"gpus": (Gpu(0, "H100", 80, 41),)},
        {"memory": 2 * GIB},
    ],
)
def test_machine_rules_have_no_findings(rl: RLConfig, on: Any, facts: dict[str, Any]) -> None:
    on(**facts)
    assert [f.error.render() for f in findings(rl)] == [], "one CPU process needs none of it"


def test_disk(rl: RLConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").write_bytes(safetensors_head({"w": [1000, 1000, 1000]}))
    monkeypatch.setattr(environment, "free_disk", lambda path: (tmp_path, 20 * GIB))
    change(rl, {"trainer.save_freq": 10, "trainer.max_ckpt_to_keep": 2})
    finding = [f for f in findings(rl) if f.error.code == "R57"]
    assert len(finding) == 1 and not finding[0].stops
    assert all(words in finding[0].error.what for words in ("3 checkpoints", "11.2 GiB", "34 GiB", "20 GiB free"))
    change(rl, {"trainer.save_freq": -1})
    assert not [f for f in findings(rl) if f.error.code == "R57"]
    monkeypatch.setattr(environment, "free_disk", lambda path: (tmp_path, GIB // 10))
    change(rl, {"trainer.save_freq": 0})
    assert [f.error.what for f in findings(rl) if f.error.code == "R57"] == [f"{tmp_path} has 0.1 GiB free"]


def test_wandb_without_a_key(rl: RLConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    rl.trainer.logger = ["wandb"]
    (finding,) = findings(rl)
    assert finding.error.code == "R56" and finding.stops and "WANDB_MODE=offline" in finding.error.fix
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert list(findings(rl)) == []
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert list(findings(rl)) == []


def test_a_package_that_does_not_load(rl: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    load = environment.importlib.import_module

    def broken(name: str) -> Any:
        if name == "peft":
            raise OSError("libcudart.so.12: undefined symbol: cudaMalloc")
        return load(name)

    monkeypatch.setattr(environment.importlib, "import_module", broken)
    assert list(findings(rl)) == [], "not needed"
    change(rl, {f"{MODEL}.lora_rank": 8, f"{ACTOR}.optim.lr": 1e-4})
    (finding,) = findings(rl)
    assert finding.error.code == "R01" and "'peft'" in finding.error.what and "libcudart.so.12" in finding.error.what


# ----------------------------------------------------------------------------------------------------- what is counted


def test_parameters_are_counted_from_headers_and_from_configurations(rl: RLConfig, model: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    assert count_parameters(rl.actor_rollout_ref.model) == 100
    (model / "model.safetensors").write_bytes(b"damaged")
    real = AutoModelForCausalLM.from_config(Qwen3Config(**json.loads((model / "config.json").read_text())))
    assert count_parameters(rl.actor_rollout_ref.model) == real.num_parameters()
    (model / "config.json").write_text("{")
    assert count_parameters(rl.actor_rollout_ref.model) is None


def test_a_checkpoint_has_weights_and_optimizer_state(rl: RLConfig) -> None:
    work = Evidence(rl).work(on_cpu=True)
    assert work is not None and checkpoint_bytes(work) == 1200
    change(rl, {"algorithm.adv_estimator": "gae"})
    work = Evidence(rl).work(on_cpu=True)
    assert work is not None and checkpoint_bytes(work) == 2 * 1200


def test_quota_of_either_version(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(tmp_path) == 0.5


def test_gpus_reported_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in\n*index,name*) echo "0, NVIDIA H100, 81920, 42000";;\n*uuid*,pid*) '
        'echo "GPU-x, 4711, VLLM::EngineCore, 41984";;\n*index,uuid*) echo "0, GPU-x";;\nesac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine._gpus() == [Gpu(0, "NVIDIA H100", 80.0, 42000 / 1024)]
    assert machine._gpu_users() == [GpuUser(0, 4711, "VLLM::EngineCore", 41.0)]


# -------------------------------------------------------------------------------------------------------- advised against


def test_reference_of_an_adapter(rl: RLConfig, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/x/other"}))
    change(rl, {f"{MODEL}.lora_adapter_path": str(tmp_path / "adapter"), f"{ACTOR}.optim.lr": 1e-4})
    (finding,) = findings(rl)
    assert finding.error.code == "R24" and "'/x/other'" in finding.error.what and not finding.stops
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/x/model"}))
    assert list(findings(rl)) == []
    change(rl, {f"{ACTOR}.use_kl_loss": True})
    assert list(findings(rl)) == [], "the reference keeps the adapter of the start"
    change(rl, {"actor_rollout_ref.ref.enable_resource_pool": True})
    (finding,) = [finding for finding in findings(rl) if finding.error.code == "R24"]
    assert finding.stops and str(tmp_path / "adapter") in finding.error.what
    change(rl, {"actor_rollout_ref.ref.adapter": "off"})
    assert "R24" not in {finding.error.code for finding in findings(rl)}


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"algorithm.use_kl_in_reward": True}, "R25", ["grpo", "use_kl_in_reward=true", f"{ACTOR}.use_kl_loss=true"]),
        (
            {"algorithm.adv_estimator": "reinforce_plus_plus", f"{ACTOR}.use_kl_loss": True},
            *("R25", ["reinforce_plus_plus", "use_kl_loss=true", "algorithm.use_kl_in_reward=true"]),
        ),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 2047}, "R29", ["=2047", "two sequences of 1024", "=2048"]),
        ({f"{MODEL}.lora_rank": 8}, "R60", ["lr=1e-06", f"{ACTOR}.optim.lr=1e-05"]),
        (
            {f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 2048},
            *("R63", ["=2048", "8 forward passes", "log_prob_max_token_len_per_gpu=16384"]),
        ),
        (
            {f"{ACTOR}.dtype": "bfloat16", "algorithm.rollout_correction.bypass_mode": True},
            *(
                "R27",
                [
                    f"{ACTOR}.dtype=bfloat16",
                    "16384 tokens",
                    "bypass_mode=false",
                    f"{ACTOR}.dtype=float32",
                ],
            ),
        ),
        (
            {"actor_rollout_ref.rollout.dtype": "bfloat16", "algorithm.rollout_correction.bypass_mode": True},
            *("R27", ["rollout.dtype=bfloat16", "actor_rollout_ref.rollout.dtype=float32"]),
        ),
        (
            {
                f"{ACTOR}.dtype": "bfloat16",
                f"{ACTOR}.use_kl_loss": True,
                f"{ACTOR}.ppo_max_token_len_per_gpu": 4096,
                "trainer.device": "cuda",
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 2048,
            },
            *("R27", ["2048 tokens", "4096", "log_prob_max_token_len_per_gpu=null"]),
        ),
        ({"trainer.total_training_steps": 500}, "R56", ["500 steps", "trainer.save_freq=25"]),
        (
            {
                "reward.custom_reward_function.path": "x.py",
                "reward.custom_reward_function.reward_kwargs": {"api_key": "a1"},
            },
            *("R61", ["reward_kwargs", "(api_key)", "os.environ"]),
        ),
    ],
)
def test_advice(rl: RLConfig, changes: dict[str, Any], code: str, words: list[str]) -> None:
    assert code not in [f.error.code for f in findings(rl)]
    change(rl, changes)
    finding = [f for f in findings(rl) if f.error.code == code]
    assert [f.stops for f in finding] == [False]
    for word in words:
        assert word in finding[0].error.render()
    assert "a1" not in finding[0].error.render()


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.rollout_correction.bypass_mode": True},
        {f"{ACTOR}.dtype": "bfloat16"},
        {
            f"{ACTOR}.dtype": "bfloat16",
            f"{ACTOR}.ppo_mini_batch_size": 4,
            "algorithm.rollout_correction.bypass_mode": True,
        },
        # the shape of a micro-batch changes nothing on a CPU
        {
            f"{ACTOR}.dtype": "bfloat16",
            f"{ACTOR}.use_kl_loss": True,
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 2048,
        },
        {f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 8192},
    ],
)
def test_log_probs_that_agree_have_no_finding(rl: RLConfig, changes: dict[str, Any]) -> None:
    assert "R27" not in [f.error.code for f in findings(change(rl, changes))]


def test_advice_for_sft(sft: SFTConfig, data: Path) -> None:
    change(sft, {"model.lora_rank": 8, "optim.lr": 1e-6})
    assert [f.error.code for f in findings(sft)] == ["R60"]


# ------------------------------------------------------------------------------------------------------------ the report


def test_errors_come_first_and_codes_can_be_silenced(rl: RLConfig, data: Path) -> None:
    write_rows(data, rows()[:1] * 10)
    change(rl, {"actor_rollout_ref.rollout.n": 1, "trainer.save_freq": 0})
    report = examine(rl)
    assert [f.error.code for f in report.findings] == ["R19", "R56", "R47"] and report.stops
    assert report.render().startswith("error R19 ") and "warning R47" in report.render()
    assert [row["severity"] for row in report.as_json()["findings"]] == ["error", "warning", "warning"]
    change(rl, {"preflight.allow": ["R19", "R47"]})
    report = examine(rl)
    assert [f.error.code for f in report.findings] == ["R56"] and not report.stops
    assert report.silenced == {"R19": 1, "R47": 1} and "preflight.allow: R19 (1), R47 (1)" in report.render()
    change(rl, {"preflight.allow": ["R191"]})
    assert "'R191'" in examine(rl).findings[0].error.what


def test_facts_of_this_machine() -> None:
    here = look()
    assert 1 <= here.usable_cpus <= here.cpus and here.memory > GIB and here.open_files > 0
