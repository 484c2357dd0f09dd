"""Rules about processes and about sharding a model over them: numbers and fix of each mistake."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.preflight import SMALL_MODEL, change
from support.services import refusing_port

from hone.config import RLConfig
from hone.config.parallel import Layout
from hone.errors import ConfigError
from hone.extras import install_command
from hone.preflight import findings
from hone.preflight import machine as machine_module
from hone.preflight.rules import Finding

ACTOR = "actor_rollout_ref.actor"
RAY = {"trainer.runtime": "ray"}
TWO = {**RAY, "trainer.n_gpus_per_node": 2}
FOUR = {**RAY, "trainer.n_gpus_per_node": 4}
PLENTY = {"ray.address": None}


@pytest.fixture
def rl(rl: RLConfig) -> RLConfig:
    """A configuration with more rows than the ranks of any layout below."""
    return change(rl, {"data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 4})


def only_finding(config: RLConfig) -> Finding:
    finding = list(findings(config))
    assert len(finding) == 1, [f.error.render() for f in finding]
    return finding[0]


def write_model(config: RLConfig, **settings: Any) -> None:
    directory = Path(str(config.actor_rollout_ref.model.path))
    (directory / "config.json").write_text(json.dumps({**SMALL_MODEL, **settings}))


@pytest.mark.parametrize(
    "changes",
    [
        RAY,
        FOUR,
        {**TWO, f"{ACTOR}.tensor_model_parallel_size": 2},
        {**TWO, f"{ACTOR}.ulysses_sequence_parallel_size": 2},
        {**FOUR, f"{ACTOR}.fsdp_config.fsdp_size": 2},
        {**TWO, "actor_rollout_ref.rollout.enable_resource_pool": True},
    ],
)
def test_valid_layouts_have_no_findings(rl: RLConfig, changes: dict[str, Any]) -> None:
    assert [f.error.render() for f in findings(change(rl, changes))] == []


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"trainer.n_gpus_per_node": 4}, "R02", ["runtime=local", "4", "trainer.runtime=ray"]),
        ({"trainer.nnodes": 2}, "R02", ["2", "trainer.runtime=ray"]),
        ({"actor_rollout_ref.rollout.enable_resource_pool": True}, "R02", ["rollout", "trainer.runtime=ray"]),
        ({**RAY, "trainer.nnodes": 3}, "R02", ["trainer.nnodes=3", "1 node", "2 more", "ray.address=HOST:PORT"]),
        (
            {
                **RAY,
                "actor_rollout_ref.rollout.enable_resource_pool": True,
                "actor_rollout_ref.rollout.nnodes": 2,
            },
            "R02",
            ["actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.nnodes=1"],
        ),
        ({f"{ACTOR}.tensor_model_parallel_size": 2}, "R70", ["1 processes", "2 tensor", "n_gpus_per_node"]),
        (
            {**FOUR, "trainer.n_gpus_per_node": 6, f"{ACTOR}.ulysses_sequence_parallel_size": 4},
            "R70",
            ["6 processes", "4 sequence"],
        ),
        ({**FOUR, f"{ACTOR}.fsdp_config.fsdp_size": 3}, "R70", ["3 of 4 ranks", "fsdp_size=<one of 1, 2, 4"]),
        ({**FOUR, f"{ACTOR}.strategy": "local"}, "R70", ["'local'", "4", f"{ACTOR}.strategy=fsdp2"]),
        ({**FOUR, f"{ACTOR}.strategy": "torchtitan"}, "R70", ["'torchtitan'", "strategy=fsdp2"]),
        (
            {
                **TWO,
                f"{ACTOR}.tensor_model_parallel_size": 2,
                "actor_rollout_ref.ref.enable_resource_pool": True,
                f"{ACTOR}.use_kl_loss": True,
            },
            "R70",
            ["actor_rollout_ref.ref: 1 processes", "2 tensor"],
        ),
        (
            {**FOUR, f"{ACTOR}.tensor_model_parallel_size": 4},
            "R71",
            ["=4", "4 attention heads", "2 key-value heads", "size=<one of 1, 2>"],
        ),
        (
            {**RAY, "trainer.n_gpus_per_node": 3, f"{ACTOR}.ulysses_sequence_parallel_size": 3},
            "R72",
            ["4 attention heads", "2 key-value heads", "3"],
        ),
        ({**TWO, f"{ACTOR}.expert_parallel_size": 2}, "R73", ["=2", "qwen3", "expert_parallel_size=1"]),
        (
            {**FOUR, f"{ACTOR}.ppo_mini_batch_size": 1, "trainer.n_gpus_per_node": 8},
            "R12",
            ["1 prompts x 4 = 4 sequences", "8 data-parallel ranks", "4 ranks", f"{ACTOR}.ppo_mini_batch_size=2"],
        ),
        (
            {**FOUR, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 9},
            "R15",
            ["=9", "32", "4 ranks = 8", "8,"],
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_one_message(
    rl: RLConfig, changes: dict[str, Any], code: str, words: list[str]
) -> None:
    finding = only_finding(change(rl, changes))
    assert finding.error.code == code and finding.error.fix
    assert finding.stops == (code != "R15")
    for word in words:
        assert word in finding.error.render(), finding.error.render()


def test_rows_that_do_not_divide_are_a_warning_when_ranks_are_idle(rl: RLConfig) -> None:
    change(rl, {**RAY, "trainer.n_gpus_per_node": 7, f"{ACTOR}.ppo_mini_batch_size": 2})
    finding = only_finding(rl)  # 8 sequences over 7 ranks: one has two
    assert finding.error.code == "R12" and not finding.stops
    assert "43%" in finding.error.render() and f"{ACTOR}.ppo_mini_batch_size=7" in finding.error.fix


def test_experts_that_do_not_divide(rl: RLConfig) -> None:
    write_model(rl, model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16)
    change(rl, {**FOUR, f"{ACTOR}.expert_parallel_size": 4})
    finding = only_finding(rl)
    assert finding.error.code == "R73" and "6 experts" in finding.error.what
    assert "<one of 1, 2, 3, 6>" in finding.error.fix


@pytest.mark.parametrize(
    ("changes", "word", "fix"),
    [
        ({"trainer.save_microbatch_steps": [1]}, "hone oracle", "trainer.save_microbatch_steps=[]"),
        ({"trainer.async_training.stream": True}, "token-mean", "trainer.async_training.stream=false"),
        ({**TWO, f"{ACTOR}.pipeline_model_parallel_size": 2}, "stage", f"{ACTOR}.pipeline_model_parallel_size=1"),
        ({"actor_rollout_ref.model.lora_rank": 4}, "adapter", "actor_rollout_ref.model.lora_rank=0"),
    ],
)
def test_a_balance_loss_that_cannot_be_trained(rl: RLConfig, changes: dict[str, Any], word: str, fix: str) -> None:
    write_model(rl, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    change(rl, {f"{ACTOR}.router_aux_loss_coef": 0.01})
    assert not [finding for finding in findings(rl) if finding.error.code == "R87"]
    (found,) = [finding for finding in findings(change(rl, changes)) if finding.error.code == "R87"]
    assert found.stops == (word != "adapter") and word in found.error.what and fix in found.error.fix
    change(rl, {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"})
    still = [finding for finding in findings(rl) if finding.error.code == "R87"]
    assert bool(still) == (word != "token-mean")


def test_a_model_without_a_tensor_plan_is_not_sharded(rl: RLConfig) -> None:
    write_model(rl, model_type="gpt2", num_key_value_heads=None)
    finding = only_finding(change(rl, {**TWO, f"{ACTOR}.tensor_model_parallel_size": 2}))
    assert finding.error.code == "R71" and "gpt2" in finding.error.what


@given(
    world=st.integers(1, 16),
    tensor=st.integers(1, 4),
    sequence=st.integers(1, 4),
    expert=st.integers(1, 4),
    shard=st.sampled_from([-1, 1, 2, 4]),
)
def test_sizes_are_refused_exactly_when_no_layout_can_be_made(world, tensor, sequence, expert, shard):
    config = change(
        RLConfig(),
        {
            **RAY,
            "trainer.n_gpus_per_node": world,
            f"{ACTOR}.tensor_model_parallel_size": tensor,
            f"{ACTOR}.ulysses_sequence_parallel_size": sequence,
            f"{ACTOR}.expert_parallel_size": expert,
            f"{ACTOR}.fsdp_config.fsdp_size": shard,
        },
    )
    from hone.preflight.layouts import sizes_multiply

    ranks = world // tensor
    one_copy = ranks if shard == -1 else shard
    fits = (
        world % (tensor * sequence) == 0
        and ranks % one_copy == 0
        and one_copy % sequence == 0
        and one_copy % expert == 0
    )
    assert (list(sizes_multiply(config)) == []) == fits
    if fits:
        layout = Layout.plan(world, config.actor_rollout_ref.actor)
        assert layout.dp_size * layout.ranks_a_shard == world


# -------------------------------------------------------------------------------------------------------------- devices


def test_more_gpus_than_present(rl: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    change(rl, {**FOUR, "trainer.device": "auto"})
    finding = only_finding(rl)
    assert finding.error.code == "R02" and finding.stops
    assert "trainer.n_gpus_per_node=4 workers" in finding.error.what and "4 GPUs" in finding.error.what
    assert "trainer.n_gpus_per_node=2" in finding.error.fix
    assert "ray.device_fraction" not in finding.error.fix, "ranks of a sharded model need a GPU each"
    finding = only_finding(change(rl, {"ray.device_fraction": 0.5}))
    assert finding.error.where == "ray.device_fraction" and "ray.device_fraction=1" in finding.error.fix


def test_a_separate_pool_counts(rl: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    rollout = {"actor_rollout_ref.rollout.enable_resource_pool": True, "actor_rollout_ref.rollout.n_gpus_per_node": 1}
    finding = only_finding(change(rl, {**TWO, **rollout, "trainer.device": "auto"}))
    assert "3 GPUs" in finding.error.what and "trainer.n_gpus_per_node=1" in finding.error.fix


def test_more_processes_than_cores_is_a_warning(rl: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    small = machine_module.Machine(2, 2, None, 64 << 30, 8 << 30, 1 << 20)
    monkeypatch.setattr(machine_module, "look", lambda: small)
    finding = only_finding(change(rl, FOUR))
    assert finding.error.code == "R02" and not finding.stops
    assert "4 processes on 2 cores" in finding.error.what and "n_gpus_per_node=2" in finding.error.fix


# ------------------------------------------------------------------------------------------------------------- clusters


def test_ray_that_is_not_installed(rl: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    finding = only_finding(change(rl, RAY))
    assert finding.error.code == "R74" and install_command("ray") in finding.error.fix


def test_a_cluster_that_does_not_answer(rl: RLConfig) -> None:
    with refusing_port() as port:
        finding = only_finding(change(rl, {**RAY, "ray.address": f"127.0.0.1:{port}"}))
    assert finding.error.code == "R74" and finding.stops
    assert f"127.0.0.1:{port}: " in finding.error.what and "ray start --head" in finding.error.fix


def test_a_cluster_that_answers(rl: RLConfig) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        change(rl, {**RAY, "trainer.nnodes": 2, "ray.address": f"127.0.0.1:{server.getsockname()[1]}"})
        assert list(findings(rl)) == []


@pytest.mark.parametrize("address", ["head", "head:port", ":6379"])
def test_an_invalid_address(rl: RLConfig, address: str) -> None:
    finding = only_finding(change(rl, {**RAY, "ray.address": address}))
    assert finding.error.code == "R74" and address in finding.error.what and "HOST:6379" in finding.error.fix


def test_auto_without_a_cluster(rl: RLConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    finding = only_finding(change(rl, {**RAY, "ray.address": "auto"}))
    assert finding.error.code == "R74" and "ray.address=auto" in finding.error.what
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert list(findings(rl)) == []
        monkeypatch.setenv("RAY_ADDRESS", "nowhere")
        assert "nowhere" in only_finding(rl).error.what or "HOST:PORT" in only_finding(rl).error.what


def test_an_invalid_layout_has_one_finding(rl: RLConfig) -> None:
    """R12 and R15 have no finding when R70 has one."""
    change(rl, {**FOUR, f"{ACTOR}.tensor_model_parallel_size": 3, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 9})
    codes = [finding.error.code for finding in findings(rl)]
    assert "R70" in codes and "R12" not in codes
    with pytest.raises(ConfigError):
        Layout.plan(4, rl.actor_rollout_ref.actor)
