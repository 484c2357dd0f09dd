"""Tiny runs read every key of their trees, and a key that a run does not read ends it (R10)."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hone.cli import data as data_command
from hone.cli import init as init_command
from hone.config import PreferenceConfig, RewardModelConfig, RLConfig, SFTConfig, documentation, load_config
from hone.config.engines import EngineConfig
from hone.config.reads import BEFORE, ReadLog, unrecorded, watch
from hone.errors import ConfigError, HoneError
from hone.generation.build import engine_starts, served_pool
from hone.generation.remote import ServedEngine
from hone.preflight import examine

OTHER_PROCESSES = (
    *("ray.", "trainer.max_restarts", "trainer.balance_batch"),
    *("actor_rollout_ref.actor.fsdp_config.", "actor_rollout_ref.actor.tensor_model_parallel_size"),
    *("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "actor_rollout_ref.actor.expert_parallel_size"),
)
"""Keys that act on runs of several processes; tests/integration/test_ray*.py and test_sharded*.py are about them."""
SERVICES = ("reward.sandbox.", "reward.sandbox_fusion.", "reward.judge.")
"""Keys of what rewards ask outside; see :func:`test_services_read_their_keys`."""
ENGINE_KEYS = tuple(f"actor_rollout_ref.rollout.{name}" for name in EngineConfig.__annotations__)
"""Keys of an engine in a process of its own; see :func:`test_a_served_engine_reads_its_keys`."""
EPISODES = ("actor_rollout_ref.rollout.multi_turn.", "actor_rollout_ref.rollout.agent.")
"""Keys of episodes of several turns; see :func:`test_episodes_read_their_keys`."""
POOLS = (".nnodes", ".n_gpus_per_node")

RL_RUNS: dict[str, tuple[str, list[str]]] = {
    "grpo": (
        "grpo",
        [
            "reward.custom_reward_function.path=score.py",
            "reward.overlong_buffer={enable: true, len: 2, log: true}",
            "algorithm.filter_groups={enable: true, max_num_gen_batches: 1000}",
            "actor_rollout_ref.model.lora_rank=2",
        ],
    ),
    "ppo": (
        "ppo",
        [
            "actor_rollout_ref.rollout.n=1",
            "algorithm.kl_ctrl={type: adaptive}",
            "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
            "critic.optim.lr_scheduler_type=cosine",
            "actor_rollout_ref.model.tiled_mlp.enabled=true",
            "algorithm.use_pf_ppo=true",
            "reward.reward_model={enable: true, path: blank}",
        ],
    ),
    "online_dpo": ("online_dpo", ["trainer.total_training_steps=null", "data.train_batch_size=12"]),
}
RL_BASE = [
    "actor_rollout_ref.model.path=blank",
    "data.train_files=data/train.parquet",
    "data.val_files=data/val.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=32",
    "data.max_response_length=6",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]
RUN = ["trainer.num_threads=1", "trainer.device=cpu", "trainer.total_training_steps=1", "trainer.watchdog_seconds=0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with prompts, conversations, pairs, a tokenizer and a model."""
    folder = tmp_path_factory.mktemp("reads")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rows = [[{"role": "user", "content": f"copy {n}"}, {"role": "assistant", "content": str(n)}] for n in range(8)]
        Path("chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        pairs = [{"prompt": f"copy {n}", "chosen": str(n), "rejected": "no"} for n in range(8)]
        Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        Path("score.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                    "    return float(len(solution_str) % 3)\n")  # fmt: skip
        make = ["make", "digit_sequence", "length=4", "digits=2", "--out", "data", "--size", "12", "--val-size", "4"]
        tokenizer = ["tokenizer", "--files", "chats.jsonl", "--out", "tokenizer", "--vocab-size", "270"]
        init = ["--arch", "qwen3", "--size", "200k", "--tokenizer", "tokenizer", "--out", "blank"]
        for app, arguments in ((data_command.app, make), (data_command.app, tokenizer), (init_command.app, init)):
            result = CliRunner().invoke(app, arguments, catch_exceptions=False)
            assert result.exit_code == 0, result.output
        yield folder


@pytest.fixture
def never_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch the whole run, not its first step only."""
    monkeypatch.setattr(ReadLog, "finish", lambda self, *_: None)


def keys_read(cls: type, overrides: list[str], preset: str | None, directory: Path) -> set[str]:
    """What a run reads; the run itself must succeed."""
    config: Any = load_config(cls, [*overrides, f"trainer.default_local_dir={directory}"], preset=preset)
    log = watch(config)
    try:
        assert run(config) == 0
    finally:
        log.stop()
    return log.read


def run(config: Any) -> int:
    from hone.trainers import preference, rl, sft

    if isinstance(config, RLConfig):
        return rl.train(config)
    return sft.train(config) if isinstance(config, SFTConfig) else preference.train(config)


def unread_of(cls: type, read: set[str]) -> list[str]:
    return [
        key.path
        for key in documentation(cls)
        if key.path not in read and not key.path.startswith(BEFORE) and not key.path.startswith((*OTHER_PROCESSES, *SERVICES, *ENGINE_KEYS, *EPISODES))
        and not key.path.endswith(POOLS)
    ]  # fmt: skip


def test_runs_read_every_key_of_rl(place: Path, tmp_path: Path, never_finish: None) -> None:
    read: set[str] = set()
    for name, (preset, overrides) in RL_RUNS.items():
        read |= keys_read(RLConfig, [*RL_BASE, *RUN, *overrides], preset, tmp_path / name)
    assert unread_of(RLConfig, read) == []


def test_services_read_their_keys() -> None:
    from support.services import serve

    from hone.rewards.services import Services

    reply = {"choices": [{"message": {"content": "Score: 7"}}]}
    read: set[str] = set()
    with serve(lambda path, body: (200, reply)) as (url, _):
        config = load_config(RLConfig, [f"reward.judge={{base_url: '{url}', model: m}}"])
        for server in (None, url):
            config.reward.sandbox_fusion.url = server
            log, services = watch(config), Services(config.reward)
            assert services.sandbox and asyncio.run(services.judge.judge("q", "a", "t")).score == 0.7
            services.close()
            log.stop()
            read |= log.read
    keys = [key.path for key in documentation(RLConfig) if key.path.startswith(SERVICES)]
    assert len(keys) > 10 and set(keys) <= read


def test_a_served_engine_reads_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(plan: Any, **options: Any) -> Any:
        started.append((plan, options))
        return SimpleNamespace(describe=lambda: None, close=lambda: None)

    monkeypatch.setattr(ServedEngine, "start", start)
    environment = Path(sys.executable).parents[1]
    given = ["actor_rollout_ref.rollout={name: vllm, num_replicas: 2}", "actor_rollout_ref.model.path=blank"]
    config = load_config(RLConfig, given)
    config.actor_rollout_ref.rollout.engine_env = str(environment)
    log = watch(config)
    served_pool(config, number=3).close()
    log.stop()
    keys = [key.path for key in documentation(RLConfig) if key.path.startswith(ENGINE_KEYS)]
    assert len(keys) > 10 and set(keys) <= log.read
    assert {plan.python for plan, _ in started} == {str(environment / "bin/python")}
    assert sorted(plan.log.name.split("-")[-1] for plan, _ in started) == ["6.log", "7.log"], (
        "numbered through all workers"
    )
    assert all(options == {"backend": "auto", "bucket_bytes": 512 * 2**20, "delta": False} for _, options in started)


def test_every_server_that_is_attached_to_is_a_replica() -> None:
    urls = "[tcp://127.0.0.1:1, tcp://127.0.0.1:2]"
    config = load_config(RLConfig, [f"actor_rollout_ref.rollout={{name: vllm, engine_url: {urls}}}"])
    assert len(engine_starts(config)) == 2
    shares = [engine_starts(config, number=number, world=2) for number in range(2)]
    assert [start.args[0] for share in shares for start in share] == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    with pytest.raises(ConfigError, match="names 2 servers, and 3 workers"):
        engine_starts(config, world=3)
    config.actor_rollout_ref.rollout.num_replicas = 3
    with pytest.raises(ConfigError, match="num_replicas=3, and rollout.engine_url names 2 servers"):
        engine_starts(config)


@pytest.mark.parametrize(
    ("cls", "overrides"),
    [
        (SFTConfig, ["data.train_files=chats.jsonl", "data.val_files=chats.jsonl", "optim.lr_scheduler_type=cosine"]),
        (
            PreferenceConfig,
            ["data.train_files=pairs.jsonl", "data.val_files=pairs.jsonl", "optim.lr_scheduler_type=cosine"],
        ),
        (
            RewardModelConfig,
            ["data.train_files=pairs.jsonl", "data.val_files=pairs.jsonl", "optim.lr_scheduler_type=cosine"],
        ),
    ],
)
def test_runs_read_every_key_of_other_trees(
    cls: type, overrides: list[str], place: Path, tmp_path: Path, never_finish: None
) -> None:
    common = [*RUN, "model.path=blank", "data.train_batch_size=4", "model.tiled_mlp.enabled=true", "model.lora_rank=2"]
    read = keys_read(cls, [*common, *overrides], None, tmp_path / "run")
    labelled = ("data.completion_key", "data.label_key")  # rows with a label instead of a pair
    refused = [found.error.where for found in examine(load_config(cls, [*common, *overrides])).errors]
    assert [key for key in unread_of(cls, read) if key not in labelled and not _refused(key, refused)] == []


def _refused(key: str, refused: list[str]) -> bool:
    """LoRA is refused as a whole where it is not there."""
    return key in refused or (key.startswith(("model.lora_", "model.target_")) and "model.lora_rank" in refused)


def test_an_unread_key_ends_the_run(place: Path, tmp_path: Path) -> None:
    config = load_config(
        RLConfig,
        [*RL_BASE, *RUN, "trainer.total_training_steps=3", f"trainer.default_local_dir={tmp_path / 'run'}"]
        + ["ray.num_cpus=3", "data.val_files=null", "actor_rollout_ref.rollout.val_kwargs.n=2", "data.seed=1"],
        preset="grpo",
    )
    with pytest.raises(ConfigError) as caught:
        run(config)
    text = caught.value.render()
    assert "R10 ray.num_cpus=3 (command line)" in text and "val_kwargs.n=2" in text and "data.seed" not in text
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]


def test_silenced_it_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(RLConfig, ["ray.num_cpus=3", "preflight.allow=[R10]"])
    import logging

    logging.getLogger("hone").propagate = True
    watch(config).finish()
    assert any("R10 ray.num_cpus=3" in record.message for record in caplog.records)


def test_what_counts_as_set_and_as_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("reward: {timeout: 5}\ncritic: {cliprange_value: 0.5}\n")
    config = load_config(RLConfig, ["ray.num_cpus=3"], preset="ppo", config_path=tmp_path)
    log = watch(config)
    assert watch(config) is log
    assert sorted(log.unread()) == [
        "ray.num_cpus",
        "reward.timeout",
    ]  # not the preset's, not what is the default anyway
    assert log.unread(elsewhere=["ray.num_cpus"]) == ["reward.timeout"]
    with unrecorded():
        assert config.reward.timeout == 5
    assert "reward.timeout" in log.unread()
    vars(config.reward)
    assert log.unread() == ["ray.num_cpus"]
    with pytest.raises(HoneError, match="R10"):
        log.finish()
    log.finish()  # once is enough
    assert type(config) is RLConfig and type(config.reward).__mro__[0] is type(RLConfig().reward)


def test_a_watched_configuration_is_the_same_configuration() -> None:
    config = load_config(RLConfig, ["data.seed=3"])
    plain = load_config(RLConfig, ["data.seed=3"])
    log = watch(config)
    copy = pickle.loads(pickle.dumps(config))  # noqa: S301
    assert copy == plain and type(copy.data) is type(plain.data)
    assert isinstance(config, RLConfig) and isinstance(config.data, type(plain.data))
    log.stop()
    assert config == plain


def test_validation_and_saving_come_later() -> None:
    keys = ["actor_rollout_ref.rollout.val_kwargs.n=2", "trainer.async_save=false", "data.train_files=x"]
    with_files = load_config(RLConfig, [*keys, "data.val_files=y"])
    assert watch(with_files).unread() == ["data.train_files", "data.val_files"]
    warm = load_config(RLConfig, ["trainer.critic_warmup=2", "actor_rollout_ref.actor.entropy_coeff=0.1"])
    assert watch(warm).unread() == ["trainer.critic_warmup"]  # the policy is first updated after the warm-up
    without = load_config(RLConfig, [*keys, "trainer.save_freq=0"])
    assert set(watch(without).unread()) >= {"actor_rollout_ref.rollout.val_kwargs.n", "trainer.async_save"}


def test_episodes_read_their_keys(tmp_path: Path) -> None:
    from support.agents import ScriptedEngine, call, sample
    from support.templates import tokenizer

    from hone.agents.player import Player
    from hone.agents.setting import Setting
    from hone.generation.protocol import SamplingParams

    (tmp_path / "tools.yaml").write_text("tools: [{name: calculator}]\n")
    (tmp_path / "users.yaml").write_text("interaction: [{name: teacher}]\n")
    several = "actor_rollout_ref.rollout.multi_turn"
    files = [
        f"{several}.tool_config_path={tmp_path}/tools.yaml",
        f"{several}.interaction_config_path={tmp_path}/users.yaml",
    ]
    config = load_config(RLConfig, [f"{several}.enable=true", f"{several}.max_assistant_turns=3", *files])
    log = watch(config)
    try:
        words = tokenizer("qwen2_5")
        engine = ScriptedEngine(
            words, lambda name, turn: call("calculator", expression="1") if turn == 0 else "#### 42"
        )
        player = Player(engine, Setting.of(config, words))  # type: ignore[arg-type]
        (played,) = asyncio.run(player.play([sample()], SamplingParams(max_tokens=300), n=1, seed_of=lambda *_: 0))
        assert played.episode is not None and len(played.episode.calls) == 1
    finally:
        log.stop()
    agent = "actor_rollout_ref.rollout.agent"
    beyond = {
        f"{agent}.on_error",
        f"{agent}.max_error_rate",
        f"{agent}.program.timeout",
        f"{agent}.verifiers.python",
        f"{agent}.verifiers.timeout",
    }  # where episodes break; of programs and of verifiers' environments
    keys = {key.path for key in documentation(RLConfig) if key.path.startswith(EPISODES)}
    assert keys - log.read == beyond
