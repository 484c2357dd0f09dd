"""Layers, precedence, interpolation, and one message for every mistake."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises

from hone.config import TREES, RLConfig, SFTConfig, documentation, load_config, load_with_provenance, to_yaml
from hone.config.keys import ConfigProblems, check_values, raise_together
from hone.config.load import PRESET_KINDS, PRESETS, preset_names
from hone.errors import ConfigError, did_you_mean


def write(folder: Path, name: str, text: str) -> dict[str, Any]:
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return {"config_path": folder, "config_name": name}


def failure(*overrides: str, cls: type = RLConfig, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(cls, list(overrides), **options)
    return caught.value


def problems(error: ConfigError) -> list[Any]:
    return error.problems if isinstance(error, ConfigProblems) else [error]


@pytest.mark.parametrize("cls", TREES.values())
def test_without_arguments_the_tree_is_its_defaults(cls: type) -> None:
    expected = cls()
    expected.trainer.default_local_dir = f"runs/hone/{expected.trainer.experiment_name}"
    assert load_config(cls) == expected


def test_precedence_is_defaults_preset_file_command_line(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "mine",
        "data: {train_batch_size: 48}\nactor_rollout_ref: {rollout: {n: 6, temperature: 0.7}}\n",
    )
    config, provenance = load_with_provenance(RLConfig, ["actor_rollout_ref.rollout.n=5"], preset="grpo", **file)
    assert RLConfig().data.train_batch_size != 32 and load_config(RLConfig, preset="grpo").data.train_batch_size == 32
    assert config.data.train_batch_size == 48
    assert config.actor_rollout_ref.rollout.temperature == 0.7
    assert config.actor_rollout_ref.rollout.n == 5
    assert config.actor_rollout_ref.actor.use_kl_loss is True
    assert provenance["actor_rollout_ref.rollout.n"] == "command line"
    assert provenance["data.train_batch_size"] == f"file {tmp_path / 'mine.yaml'}"
    assert provenance["actor_rollout_ref.actor.use_kl_loss"] == "preset grpo"
    assert "data.shuffle" not in provenance


def test_result_is_plain_python() -> None:
    config = load_config(
        RLConfig, ["data.train_files=[a.parquet,b.parquet]", "reward.scorer_kwargs={method: flexible}"]
    )
    assert type(config.data.train_files) is list and config.data.train_files == ["a.parquet", "b.parquet"]
    assert type(config.reward.scorer_kwargs) is dict and config.reward.scorer_kwargs == {"method": "flexible"}
    assert type(config.actor_rollout_ref.actor) is type(RLConfig().actor_rollout_ref.actor)


def test_interpolations_are_resolved_at_the_end() -> None:
    config = load_config(
        RLConfig,
        ["data.max_response_length=${data.max_prompt_length}", "data.max_prompt_length=77", "trainer.project_name=p"],
    )
    assert config.data.max_response_length == 77
    assert config.trainer.default_local_dir == "runs/p/default"


def test_whole_blocks_can_be_given_and_referred_to() -> None:
    config = load_config(
        RLConfig, ["algorithm={adv_estimator: gae, lam: 0.9}", "critic.optim=${actor_rollout_ref.actor.optim}"]
    )
    assert (config.algorithm.adv_estimator, config.algorithm.lam, config.algorithm.gamma) == ("gae", 0.9, 1.0)
    assert config.critic.optim == config.actor_rollout_ref.actor.optim != RLConfig().critic.optim
    assert "algorithm.lamda" in failure("algorithm={lamda: 0.9}").render()


def test_hydra_grammar_in_mappings() -> None:
    config = load_config(
        RLConfig,
        [
            "reward.scorer_kwargs.method=strict",
            "+reward.scorer_kwargs.a=1",
            "++reward.scorer_kwargs.b=2",
            "~reward.scorer_kwargs.a",
            "trainer.experiment_name='a, b: [c]'",
        ],
    )
    assert config.reward.scorer_kwargs == {"method": "strict", "b": 2}
    assert config.trainer.experiment_name == "a, b: [c]"


@pytest.mark.parametrize(
    ("overrides", "what", "fix"),
    [
        (
            ["+reward.scorer_kwargs.a=1", "+reward.scorer_kwargs.a=2"],
            "scorer_kwargs.a already exists: 1",
            "reward.scorer_kwargs.a=2",
        ),
        (["reward.scorer_kwargs.a=1", "~reward.scorer_kwargs.a=2"], "scorer_kwargs.a is 1", "~reward.scorer_kwargs.a"),
        (["~reward.scorer_kwargs.z"], "reward.scorer_kwargs.z", "~reward.scorer_kwargs.z"),
        (["data.seed@data=3"], "'data.seed'", "data.seed=..."),
    ],
)
def test_what_cannot_be_added_removed_or_chosen(overrides: list[str], what: str, fix: str) -> None:
    error = failure(*overrides)
    assert error.where == overrides[-1] and what in error.what and fix in (error.fix or "")


ABOUT = pytest.mark.application("hone/config")


@pytest.mark.parametrize(
    "name",
    [name if name in ("grpo", "opd", "ppo") else pytest.param(name, marks=ABOUT) for name in preset_names("rl")],
)
def test_the_tree_is_what_hydra_composes_of_all_layers_at_once(name: str, tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "small", "{train_batch_size: 4, train_files: [x, y]}\n")
    block = "{temperature: 0.7, top_p: '${actor_rollout_ref.rollout.temperature}', n: 3}"
    file = write(tmp_path, "mine", f"defaults: [data: small, _self_]\nactor_rollout_ref: {{rollout: {block}}}\n")
    overrides = [
        "critic.optim=${actor_rollout_ref.actor.optim}",
        "+reward.scorer_kwargs.a={b: [1, 'c d']}",
        "data.seed=9",
    ]
    store = ConfigStore.instance()
    store.store(name="oracle_schema", node=RLConfig)
    layers = ["oracle_schema", f"presets/rl/{name}@_global_", "mine@_global_", "_self_"]
    store.store(name="oracle", node={"hydra": {"searchpath": [f"file://{PRESETS.parent}"]}, "defaults": layers})
    with initialize_config_dir(config_dir=str(tmp_path), version_base="1.3"):
        whole = compose(config_name="oracle", overrides=overrides)
    assert load_config(RLConfig, overrides, preset=name, **file) == OmegaConf.to_object(whole)


def test_file_may_have_a_defaults_list_and_groups(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "small", "train_batch_size: 4\n")
    write(tmp_path / "data", "large", "train_batch_size: 400\n")
    file = write(
        tmp_path,
        "exp",
        "defaults: [/presets/rl/grpo@_global_, data: small, _self_]\nactor_rollout_ref: {rollout: {n: 3}}\n",
    )
    small = load_config(RLConfig, **file)
    assert (small.data.train_batch_size, small.actor_rollout_ref.rollout.n) == (4, 3)
    assert small.actor_rollout_ref.actor.use_kl_loss is True
    assert load_config(RLConfig, ["data=large"], **file).data.train_batch_size == 400


def test_an_interpolation_that_leads_nowhere_can_be_replaced(tmp_path: Path) -> None:
    file = write(tmp_path, "mine", "data: {max_prompt_length: '${data.nowhere}'}\n")
    assert load_config(RLConfig, ["data.max_prompt_length=7"], **file).data.max_prompt_length == 7


def test_file_named_with_suffix_and_default_name(tmp_path: Path) -> None:
    write(tmp_path, "config", "trainer: {seed: 9}\n")
    assert load_config(RLConfig, config_path=tmp_path).trainer.seed == 9
    assert load_config(RLConfig, config_path=tmp_path, config_name="config.yaml").trainer.seed == 9


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, name) for cls, kind in PRESET_KINDS.items() for name in preset_names(kind)]
)
def test_every_preset_loads_and_survives_as_a_file(cls: Any, name: str, tmp_path: Path) -> None:
    config = load_config(cls, ["data.train_files=[a,b]", "trainer.experiment_name=1e-6"], preset=name)
    assert load_config(cls, **write(tmp_path, "config", to_yaml(config))) == config


def test_presets_differ_from_the_defaults_in_every_key_they_state_first() -> None:
    for name in ("grpo", "ppo", "grpo_lora"):
        assert load_config(RLConfig, preset=name) != load_config(RLConfig)
    lora = load_config(RLConfig, preset="grpo_lora")
    assert lora.actor_rollout_ref.model.lora_rank > 0
    assert lora.actor_rollout_ref.rollout.n == load_config(RLConfig, preset="grpo").actor_rollout_ref.rollout.n


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        (
            "algorithm.group_size=8",
            "R09",
            ["unknown key algorithm.group_size", "actor_rollout_ref.rollout.n ", "group size"],
        ),
        ("actor_rolout_ref.rollout.n=3", "R09", ["actor_rollout_ref.rollout.n "]),
        ("data.train_batch_siz=3", "R09", ["data.train_batch_size"]),
        ("algorthm={}", "R09", ["block algorithm"]),
        ("data.shuffle.x=1", "R09", ["data.shuffle is a value"]),
        ("data.qqq=1", "R09", ["train_files"]),
        ("+data.qqq=1", "R09", ["data.qqq"]),
        ("~data.qqq", "R09", ["data.qqq"]),
        ("hydra2.run.dir=x", "R09", ["hydra2.run.dir"]),
        ("algorithm.kl_penalty=0.001", "R11", ["KL estimator", "0.001", "algorithm.kl_ctrl.kl_coef=0.001"]),
        ("actor_rollout_ref.rollout.n=abc", "R11", ["an integer (>= 1)", "the string 'abc'"]),
        ("data.max_prompt_length=2.5", "R11", ["an integer", "the number 2.5"]),
        ("data.shuffle=perhaps", "R11", ["true or false", "'perhaps'"]),
        ("data.train_files=3", "R11", ["a path or a list of paths"]),
        ("data.train_files=[1,2]", "R11", ["a path or a list of paths"]),
        ("reward.overlong_buffer=1", "R11", ["reward.overlong_buffer", "reward.overlong_buffer.len"]),
        ("actor_rollout_ref.rollout.stop=x", "R11", ["a list of strings"]),
        ("algorithm=grpo", "R11", ["algorithm.adv_estimator"]),
        ("data.truncation=trunc", "R11", ["'trunc'", "truncate"]),
        ("actor_rollout_ref.rollout.temperature=-1", "R11", [">= 0", "-1"]),
        ("algorithm.gamma=1.01", "R11", [">= 0 and <= 1", "1.01"]),
        ("actor_rollout_ref.actor.optim.lr=nan", "R11", ["nan"]),
        ("actor_rollout_ref.actor.optim.lr=inf", "R11", ["inf"]),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "R11", ["2 numbers", "1"]),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1.5]", "R11", ["1.5"]),
        ("data.train_files=a,b", "E-config", ["data.train_files=[...]"]),
        ("foo", "E-config", ["'foo'", "key=value"]),
        ("=3", "E-config", ["'=3'"]),
        ("data.train_files=[a", "E-config", ["data.train_files=[a"]),
        ("trainer.experiment_name=a[b", "E-config", ["trainer.experiment_name=a[b"]),
        ("~data.shuffle", "E-config", ["data.shuffle", "data.shuffle=..."]),
        ("data.max_response_length=${data.nope}", "E-config", ["data.nope", "${data.max_prompt_length}"]),
        ("data.max_response_length=${data.prompt_key}", "E-config", ["data.max_response_length"]),
        ("data.max_response_length=${oc.env:HONE_UNSET_VARIABLE}", "E-config", ["HONE_UNSET_VARIABLE"]),
        ("data.max_response_length=???", "E-config", ["data.max_response_length=..."]),
    ],
)
def test_wrong_override(override: str, code: str, words: list[str]) -> None:
    error = failure(override)
    (problem,) = problems(error)
    assert problem.code == code
    for word in words:
        assert word in error.render()


def test_all_mistakes_are_in_one_message(tmp_path: Path) -> None:
    file = write(tmp_path, "bad", "data: {train_batch_siz: 3, truncation: top}\nreward: {timeout: x}\n")
    error = failure("algorithm.kl_penalty=0.1", "nonsense", "trainer.seed=-1", preset="grpo", **file)
    text = error.render()
    for part in ("train_batch_siz", "truncation=top", "reward.timeout=x", "kl_penalty=0.1", "nonsense", "seed=-1"):
        assert part in text
    assert len(problems(error)) == 6 and "(6 " in text
    assert str(tmp_path / "bad.yaml") in text and "(command line)" in text


def test_a_wrong_value_overridden_by_a_later_layer_is_no_mistake(tmp_path: Path) -> None:
    file = write(tmp_path, "bad", "data: {truncation: top}\n")
    assert load_config(RLConfig, ["data.truncation=drop"], **file).data.truncation == "drop"
    assert len(problems(failure("data.truncation=drop", "nonsense", **file))) == 1


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("data: [1,\n x", "YAML"),
        ("data: {a: 1, a: 2}", "duplicate"),
        ("- a\n", "bad.yaml"),
        ("data: 3", "data.train_files"),
        ("defaults: [nothere, _self_]", "nothere"),
    ],
)
def test_wrong_file(text: str, word: str, tmp_path: Path) -> None:
    assert word in failure(**write(tmp_path, "bad", text)).render()


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe")
    assert "bad.yaml" in failure(config_path=tmp_path, config_name="bad").render()


def test_missing_file_directory_preset(tmp_path: Path) -> None:
    write(tmp_path, "typo", "")
    assert "typo" in failure(config_path=tmp_path, config_name="tipo").render()
    assert str(tmp_path / "nope") in failure(config_path=tmp_path / "nope").render()
    assert "--config-name typo" in failure(config_path=tmp_path / "typo.yaml").render()
    assert "grpo" in failure(preset="gpro").render()
    assert "lora" in failure(preset="grpo", cls=SFTConfig).render()


def test_loading_leaves_no_state_behind(tmp_path: Path) -> None:
    from hydra.core.global_hydra import GlobalHydra

    load_config(RLConfig, preset="ppo", **write(tmp_path, "a", "trainer: {seed: 3}\n"))
    failure("nonsense")
    assert not GlobalHydra.instance().is_initialized()
    assert load_config(SFTConfig).trainer.seed == SFTConfig().trainer.seed
    assert load_config(RLConfig).algorithm.adv_estimator == RLConfig().algorithm.adv_estimator


@examples(60)
@given(data=st.data())
def test_bounds_hold_exactly_where_the_tree_states_them(data: st.DataObject) -> None:
    bounded = [key for key in documentation(RLConfig) if "length" not in key.metadata and "low" in key.metadata]
    key = data.draw(st.sampled_from(bounded))
    value = data.draw(st.integers(-3, 3) | st.floats(-3, 3))
    config: Any = RLConfig()
    *blocks, last = key.path.split(".")
    owner = config
    for block in blocks:
        owner = getattr(owner, block)
    setattr(owner, last, value)
    low, high, above = (key.metadata.get(name) for name in ("low", "high", "above"))
    allowed = (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)
    assert (check_values(config, {}) == []) == allowed


def test_config_can_be_replaced_like_any_dataclass() -> None:
    config = load_config(SFTConfig)
    assert dataclasses.replace(config, dtype="bfloat16").dtype == "bfloat16"


def test_a_mistake_that_two_rules_meet_is_said_once():
    same, other = ConfigError("3 is wrong", where="a.key"), ConfigError("4 is wrong", where="a.key")
    with pytest.raises(ConfigError) as caught:
        raise_together([same, ConfigError("3 is wrong", where="a.key")])
    assert caught.value.render() == same.render()
    with pytest.raises(ConfigProblems) as several:
        raise_together([same, other, same])
    assert [problem.what for problem in several.value.problems] == ["3 is wrong", "4 is wrong"]


def test_a_folder_or_file_given_alone_is_told_its_key(tmp_path: Path) -> None:
    (tmp_path / "mein modell").mkdir()
    for name, key in (("mein modell", "model.path="), ("test.csv", "data.train_files=")):
        (tmp_path / "test.csv").touch()
        with pytest.raises(ConfigError) as caught:
            load_config(RLConfig, [f"{tmp_path}/{name}"])
        assert f"{key}{tmp_path}/{name}" in str(caught.value)


def test_a_batch_of_none_is_refused_unless_training_is_asynchronous() -> None:
    with pytest.raises(ConfigError, match="train_batch_size=0"):
        load_config(RLConfig, ["data.train_batch_size=0"], by_method=True)
    words = ["data.train_batch_size=0", "async_training.require_batches=2"]
    assert load_config(RLConfig, words).data.train_batch_size == 512


def test_files_are_not_near_by_their_ends() -> None:
    assert did_you_mean("tools.yaml", ["imp.yaml", "bad.yaml"]) == "Known: bad.yaml, imp.yaml"
    assert did_you_mean("tool.yaml", ["imp.yaml", "tools.yaml"]) == "Did you mean tools.yaml?"


def test_rows_of_a_refused_run_leave_no_folder(tmp_path: Path) -> None:
    from hone.api.training import _unless_refused

    (tmp_path / "runs").mkdir()
    folder = tmp_path / "runs/ü b/default/inputs"
    with pytest.raises(ConfigError), _unless_refused(folder):
        folder.mkdir(parents=True)
        (folder / "train.parquet").touch()
        raise ConfigError("no")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_misspelt_key_is_not_taken_for_a_block() -> None:
    with raises(ConfigError, "actor_rollout_ref.rollout.temperature", code="R09"):
        load_config(RLConfig, ["actor_rollout_ref.rollout.temprature=0.7"])
    with raises(ConfigError, "the block actor_rollout_ref.rollout.agent", code="R09"):
        load_config(RLConfig, ["actor_rollout_ref.rollout.agnt=1"])
