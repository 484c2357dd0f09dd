"""What follows from a configuration: roles, pools, old log-probs, and the limits that code and plan share."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hone.algorithms import advantage_estimators, policy_losses, preference_losses
from hone.cli.main import app
from hone.config import TREES, PreferenceConfig, RLConfig, SFTConfig, load_config
from hone.config.derived import OldLogProbs, RunSpec, dtype_line
from hone.config.dtypes import dtype_keys
from hone.config.pools import MAIN_POOL
from hone.config.specs import OfflineSpec, spec_of
from hone.errors import UnknownMethod
from hone.methods import COMPARES_ACROSS_MINI_BATCH, ESTIMATOR_INPUTS, PREFERENCE_LOSS_NEEDS

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ONE_UPDATE = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8")


def spec(*overrides: str, preset: str | None = None) -> RunSpec:
    return RunSpec(load_config(RLConfig, [*ONE_UPDATE, *overrides], preset=preset))


def source(*overrides: str) -> OldLogProbs:
    return spec(*overrides).old_log_probs.value


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm.adv_estimator=gae",),
        (f"{ACTOR}.use_kl_loss=true",),
        (f"{ACTOR}.entropy_coeff=0.01",),
        (f"{ACTOR}.policy_loss.loss_mode=gspo",),
        ("algorithm.filter_groups.enable=true",),
    ],
)
def test_nothing_needs_them_before_the_one_update(overrides):
    assert source(*overrides) is OldLogProbs.UPDATE_PASS
    assert source(*overrides, f"{ACTOR}.recompute_old_log_probs=true") is OldLogProbs.OWN_PASS


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{ACTOR}.ppo_mini_batch_size=4",),
        (f"{ACTOR}.ppo_epochs=2",),
        ("algorithm.use_kl_in_reward=true",),
        ("algorithm.use_pf_ppo=true",),
        ("algorithm.adv_estimator=optimal_token_baseline",),
        (f"{ACTOR}.calculate_sum_pi_squared=true",),
        (f"{CORRECTION}.rollout_is=token",),
        (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.1"),
        (f"{CORRECTION}.rollout_token_veto_threshold=0.001",),
        (f"{ACTOR}.policy_loss.loss_mode=clip_cov",),
        (f"{ACTOR}.preference_loss.loss_mode=dpo",),
    ],
)
def test_something_needs_them_before(overrides):
    assert source(*overrides) is OldLogProbs.OWN_PASS


def test_bypass_mode_takes_the_engines_log_probs():
    assert source(f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.ppo_epochs=2") is OldLogProbs.ENGINE
    assert source(f"{CORRECTION}.preset=bypass_pg_is") is OldLogProbs.ENGINE


def test_supports_are_kept_where_the_engine_reports_them():
    top_p, rollout = "actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout"
    assert spec(top_p).keeps_support.value and spec(top_p, f"{rollout}.name=hf").keeps_support.value
    for obstacle in ("name=vllm", "repetition_penalty=1.2", "temperature=0", "keep_support=false"):
        assert not spec(top_p, f"{rollout}.{obstacle}").keeps_support.value, obstacle
    assert not spec(f"{rollout}.keep_support=true").keeps_support.value


def test_tables_of_methods_are_those_of_the_registries():
    where = "hone/methods.py has a line for every built-in method"
    assert set(ESTIMATOR_INPUTS) == set(advantage_estimators.names()), where
    assert set(COMPARES_ACROSS_MINI_BATCH) == set(policy_losses.names()), where
    assert set(PREFERENCE_LOSS_NEEDS) == set(preference_losses.names()), where
    for name, inputs in ESTIMATOR_INPUTS.items():
        entry = advantage_estimators.get(name)
        assert (entry.needs, entry.uses) == (inputs.needs, inputs.uses)


def test_a_method_of_the_users_own_is_asked_for_its_needs(tmp_path, monkeypatch):
    (tmp_path / "methods_of_derived.py").write_text(
        "def with_values(rewards, mask, *, values):\n    return values, values\n"
        "def loss(old_log_probs, log_probs, advantages, response_mask):\n    return None\n"
    )
    monkeypatch.chdir(tmp_path)
    found = spec(
        "algorithm.adv_estimator=methods_of_derived:with_values",
        f"{ACTOR}.policy_loss.loss_mode=methods_of_derived:loss",
    )
    assert found.critic.value and not found.loss_compares_mini_batch
    with pytest.raises(UnknownMethod):
        _ = spec("algorithm.adv_estimator=gea").critic


def test_roles_and_pools():
    assert [role.name for role in spec().roles] == ["actor", "rollout"]
    everything = spec(
        "algorithm.adv_estimator=gae",
        f"{ACTOR}.use_kl_loss=true",
        "reward.reward_model.enable=true",
        "trainer.n_gpus_per_node=4",
        f"{ACTOR}.tensor_model_parallel_size=2",
        "critic.enable_resource_pool=true",
        "critic.n_gpus_per_node=2",
        "reward.reward_model.enable_resource_pool=true",
        "actor_rollout_ref.ref.enable_resource_pool=true",
        "actor_rollout_ref.ref.n_gpus_per_node=2",
    )
    assert [role.name for role in everything.roles] == ["actor", "rollout", "reference", "critic", "reward_model"]
    main, reference, critic, reward_model = everything.pools
    assert main.name == MAIN_POOL and main.roles == ("actor", "rollout") and main.divided
    assert (main.layout.dp_size, main.layout.tensor) == (2, 2) and critic.layout.tensor == 2
    assert reference.block == "actor_rollout_ref.ref" and reference.world == 2
    assert reward_model.replicated and not reward_model.divided


@pytest.mark.parametrize(
    ("overrides", "copied", "adapter", "precomputed"),
    [
        ((), True, False, False),
        (("model.lora_rank=4",), False, True, False),
        (("model.lora_rank=4", "ref.mode=copy"), True, False, False),
        (("model.lora_rank=4", "ref.model_path=/m"), True, False, False),
        (("ref.mode=precompute",), False, False, True),
        (("loss.name=simpo",), False, False, False),
    ],
)
def test_the_reference_of_an_offline_run(
    overrides: tuple[str, ...], copied: bool, adapter: bool, precomputed: bool
) -> None:
    facts = OfflineSpec(load_config(PreferenceConfig, [*overrides, "trainer.n_gpus_per_node=4"]))
    assert (facts.holds_reference, facts.adapter_is_reference, facts.precomputes_reference) == (
        copied,
        adapter,
        precomputed,
    )
    compared = "loss.name=simpo" not in overrides
    (pool,) = facts.pools
    assert pool.roles == (("actor", "reference") if compared else ("actor",)) and pool.layout.dp_size == 4
    assert ("reference copy", "yes" if copied else "none") in [(line.name, line.value) for line in facts.lines()]


def test_sft_has_one_role():
    facts = spec_of(load_config(SFTConfig, ["trainer.n_gpus_per_node=4", "ulysses_sequence_parallel_size=2"]))
    (pool,) = facts.pools
    assert pool.roles == ("actor",) and (pool.layout.dp_size, pool.layout.sequence) == (2, 2)


def test_a_pool_of_a_role_that_the_run_does_not_have_is_not_made():
    without = spec("critic.enable_resource_pool=true", "critic.n_gpus_per_node=2")
    assert [pool.name for pool in without.pools] == [MAIN_POOL]


def test_the_reference_is_sharded_as_the_actor_with_offloading_of_its_own():
    key = "actor_rollout_ref.ref.fsdp_config.param_offload"
    own = spec(f"{key}=true", f"{ACTOR}.fsdp_config.fsdp_size=2").reference_parallel.fsdp_config
    assert own.param_offload and own.fsdp_size == 2
    assert spec(f"{ACTOR}.fsdp_config.param_offload=true").reference_parallel.fsdp_config.param_offload
    kept = spec(f"{ACTOR}.fsdp_config.param_offload=true", f"{key}=false")
    assert not kept.reference_parallel.fsdp_config.param_offload
    assert kept.config.actor_rollout_ref.actor.fsdp_config.param_offload


def test_updates_and_micro_batches_are_counted():
    assert spec(f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=3").updates_per_batch == 12
    assert spec().micro_batch_tokens(on_cpu=True) == 4608 and spec().micro_batch_tokens(on_cpu=False) == 16384
    assert spec(f"{ACTOR}.ppo_max_token_len_per_gpu=100").micro_batch_tokens(on_cpu=True) == 100


ENGINE = "actor_rollout_ref.rollout"
APART = ("trainer.runtime=ray", f"{ENGINE}.enable_resource_pool=true")


@pytest.mark.parametrize(
    ("overrides", "on_gpus", "on_cpus"),
    [
        ((), None, None),
        (("trainer.runtime=ray",), None, None),
        ((f"{ENGINE}.checkpoint_engine.between_workers=broadcast",), None, None),
        (APART, "broadcast", "object_store"),
        ((*APART, "ray.device_fraction=0.6"), "broadcast", "object_store"),
        ((*APART, "ray.device_fraction=0.5"), "object_store", "object_store"),
        ((*APART, f"{ENGINE}.checkpoint_engine.between_workers=broadcast"), "broadcast", "broadcast"),
        ((*APART, f"{ENGINE}.checkpoint_engine.between_workers=object_store"), "object_store", "object_store"),
    ],
)
def test_weights_are_broadcast_between_gpus_of_their_own(overrides, on_gpus, on_cpus):
    derived = spec(*overrides)
    assert derived.between_workers(on_cpu=False).value == on_gpus
    assert derived.between_workers(on_cpu=True).value == on_cpus
    shown = {line.name: line.value for line in derived.lines()}
    if on_gpus is None:
        assert "weights to rollout workers" not in shown
    else:
        assert on_gpus in shown["weights to rollout workers"] and on_cpus in shown["weights to rollout workers"]


def test_derived_facts_are_shown_with_their_reasons():
    off = "algorithm.use_kl_in_reward=false"
    words = ["config", "show", "--derived", "--json", *ONE_UPDATE, "algorithm.adv_estimator=gae", off]
    answer = CliRunner().invoke(app, words)
    facts = json.loads(answer.stdout)
    assert answer.exit_code == 0
    assert facts["old log-probs"]["value"] == "update_pass"
    assert "critic.enable=true" in facts["role critic"]["because"]
    assert CliRunner().invoke(app, ["config", "show", "--derived", "--of", "sft"]).exit_code == 0


def test_torch_is_not_imported():
    code = "import sys; import hone.config.derived; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("tree", TREES.values())
def test_the_compute_dtype_follows_the_device_by_default(tree):
    config = load_config(tree)
    key = dtype_keys(config)[0]
    assert key.value == "auto" and dtype_line(config).reason == f"{key.key}=auto"
    assert {key.resolved(bfloat16=present) for present in (False, True)} == {"float32", "bfloat16"}
    on_cpu = dtype_line(load_config(tree, ["trainer.device=cpu"]))
    assert on_cpu.value == "float32" and dtype_line(config).value != on_cpu.value
    assert dtype_line(load_config(tree, [f"{key.key}=bfloat16", "trainer.device=cpu"])).value == "bfloat16"


def test_dtype_keys_leave_out_those_that_follow_the_actor():
    words = [f"{ACTOR}.dtype=float32", "actor_rollout_ref.rollout.dtype=bfloat16", "critic.dtype=auto"]
    assert [entry.value for entry in dtype_keys(load_config(RLConfig, words))] == ["float32", "bfloat16", "auto"]
    assert [entry.key for entry in dtype_keys(load_config(RLConfig))] == [f"{ACTOR}.dtype"]
