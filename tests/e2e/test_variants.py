"""Settings that must work, or must change nothing: each in a short real run."""

import math
import re
from pathlib import Path

import pytest
from support import forked_engines
from support.archives import records
from support.launch import Command
from support.world import World, curve, metrics, rl_command

from hone.generation.remote import transports

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/algorithms", "hone/trainers", "hone/training")]

SHORT = (
    "data.train_batch_size=6",
    "trainer.total_training_steps=3",
    "trainer.save_freq=0",
    "trainer.val_before_train=false",
)
RATE = "actor_rollout_ref.actor.optim.lr=2e-3"
LORA = "actor_rollout_ref.model.lora_rank=4"


@pytest.fixture
def train(world: World, run, tmp_path: Path):
    """Train for three steps and return the run directory."""

    def start(*overrides: str, preset: str = "grpo") -> Path:
        directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        ended = run(*rl_command(world, directory, preset, *SHORT, RATE, *overrides))
        assert ended.code == 0, ended.output
        return directory

    return start


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("extra", [(), (LORA,)], ids=["full", "lora"])
def test_ratio_is_one_on_the_first_update_of_every_step(train, engine, extra):
    directory = train(
        f"actor_rollout_ref.rollout.name={engine}",
        "actor_rollout_ref.rollout.temperature=0.8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        *extra,
    )
    ratios = curve(directory, "actor/first_ratio_max_abs_log")
    assert len(ratios) == 3
    assert max(ratios) < 1e-5
    assert max(curve(directory, "training/rollout_log_probs_diff_max")) < 1e-4, "engine and trainer agree"
    assert max(curve(directory, "actor/ratio/max")) > 1, "the second update of a step has moved"


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_responses_follow_a_constraint_with_the_log_probs_of_the_policy(train, engine):
    block = "actor_rollout_ref.rollout.constraint"
    directory = train(
        f"actor_rollout_ref.rollout.name={engine}",
        f"{block}.kind=regex",
        f"{block}.text='[01]{{2,4}}'",
        "trainer.rollout_dump_freq=1",
    )
    answers = [row for step in (1, 2, 3) for row in records(directory, step)]
    ended = [row["text"] for row in answers if row["stop_reason"] == "stop"]
    assert ended and all(re.fullmatch("[01]{2,4}", text) for text in ended)
    assert max(curve(directory, "training/rollout_log_probs_diff_max")) < 1e-4, "engine and trainer agree"


def test_bypass_takes_the_engines_log_probs(train):
    directory = train("algorithm.rollout_correction.bypass_mode=true")
    assert 0 < max(curve(directory, "actor/first_ratio_max_abs_log")) < 1e-4
    assert max(curve(directory, "training/rollout_log_probs_diff_max")) == 0


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_the_pass_of_the_one_update_gives_the_old_log_probs(train, preset):
    """A batch that gives one update: with a pass of their own and without, a run reports the same of the same weights."""
    rate = (
        "actor_rollout_ref.actor.entropy_coeff=0.003",
        "trainer.rollout_dump_freq=1",
        "algorithm.use_kl_in_reward=false",
    )
    apart, once = (
        train(*rate, f"actor_rollout_ref.actor.recompute_old_log_probs={own}", preset=preset)
        for own in ("true", "false")
    )
    assert max(curve(apart, "actor/first_ratio_max_abs_log")) < 1e-5
    assert max(curve(once, "actor/first_ratio_max_abs_log")) == 0, "it is the same pass"
    for row in metrics(once, timing=True):
        assert "timing_s/old_log_prob" not in row and row["timing_s/rollout_corr"] > 0
    assert all(row["timing_s/old_log_prob"] > 0 for row in metrics(apart, timing=True))
    for a, b in zip(metrics(apart), metrics(once), strict=True):
        assert a.keys() == b.keys() and {"actor/entropy", "rollout_corr/kl"} <= a.keys()
        assert b == pytest.approx(a, rel=1e-5, abs=1e-5)
    for a, b in zip(records(apart, 3), records(once, 3), strict=True):
        assert a["response_ids"] == b["response_ids"] and a["score"] == b["score"]


def test_a_policy_that_waits_for_its_critic_is_compared_with_the_engine_all_the_same(train):
    directory = train("trainer.critic_warmup=2", "algorithm.use_kl_in_reward=false", preset="ppo")
    rows = metrics(directory, timing=True)
    assert ["timing_s/old_log_prob" in row for row in rows] == [True, True, False]
    assert ["timing_s/update_actor" in row for row in rows] == [False, False, True]
    assert all(0 < row["training/rollout_log_probs_diff_max"] < 1e-4 for row in rows)


def test_bfloat16(train):
    directory = train("actor_rollout_ref.actor.dtype=bfloat16", "actor_rollout_ref.actor.recompute_old_log_probs=true")
    assert max(curve(directory, "actor/first_ratio_max_abs_log")) <= 0.05
    assert "invariant/D-ratio" not in metrics(directory)[-1]
    assert max(curve(directory, "training/rollout_log_probs_diff_max")) > 1e-5, "bfloat16 it was"


def test_gradient_checkpointing_changes_nothing(train):
    off = metrics(train(preset="ppo"))
    on = metrics(
        train(
            *(
                "actor_rollout_ref.model.enable_gradient_checkpointing=true",
                "critic.model.enable_gradient_checkpointing=true",
            ),
            preset="ppo",
        )
    )
    for a, b in zip(off, on, strict=True):
        assert a.keys() == b.keys()
        # engine against trainer, squares of sequences, tails and extremes of tokens: what float32 rounds off
        room = dict.fromkeys(("rollout_corr/log_ratio_q01", "rollout_corr/log_ratio_q99"), 2e-6)
        room |= dict.fromkeys(("rollout_corr/chi2_seq", "rollout_corr/log_ratio_abs_max"), 5e-6)
        for run in (a, b):  # the same number under two names
            assert run.pop("training/rollout_log_probs_diff_max") == run["rollout_corr/log_ratio_abs_max"]
        for name in room:
            assert b.pop(name) == pytest.approx(a.pop(name), abs=room[name])
        assert b == pytest.approx(a, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
)
def test_every_aggregation_with_an_entropy_bonus(train, mode):
    directory = train(
        f"actor_rollout_ref.actor.loss_agg_mode={mode}",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
    )
    last = metrics(directory)[-1]
    parts = last["actor/pg_loss"] - 0.01 * last["actor/entropy_loss"] + 0.001 * last["actor/kl_loss"]
    assert last["actor/loss"] == pytest.approx(parts, abs=1e-5 * max(1, abs(last["actor/entropy_loss"])))
    assert last["actor/entropy_loss"] > 0
    assert last["actor/grad_norm"] > 0
    if mode == "token-mean":
        assert last["actor/entropy_loss"] == pytest.approx(last["actor/entropy"], rel=1e-5)


@pytest.mark.parametrize("minis", [6, 3])
def test_the_entropy_bonus_follows_its_target(train, minis):
    target = curve(train(f"actor_rollout_ref.actor.ppo_mini_batch_size={minis}"), "actor/entropy")[1]
    directory = train(
        f"actor_rollout_ref.actor.entropy_target={target}",
        "actor_rollout_ref.actor.entropy_coeff_delta=0.3",
        "actor_rollout_ref.actor.entropy_coeff_max=0.5",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={minis}",
    )
    rows, value, last = metrics(directory), 0.0, math.inf
    for row in rows:
        assert row["actor/entropy_coeff"] == pytest.approx(value if last <= target else 0.0)
        last = row["actor/updated_entropy"]
        value = min(value + 0.3, 0.5) if last <= target else max(value - 0.3, 0.0)
        parts = row["actor/pg_loss"] - row["actor/entropy_coeff"] * row["actor/entropy_loss"]
        assert row["actor/loss"] == pytest.approx(parts + 0.001 * row["actor/kl_loss"], abs=1e-5)
        assert row["actor/entropy_loss"] == pytest.approx(row["actor/updated_entropy"], rel=1e-5)


def test_only_tokens_with_much_entropy_teach(train):
    directory = train("algorithm.top_entropy_share=0.25", "trainer.rollout_dump_freq=1")
    least = curve(directory, "actor/least_learnt_entropy")
    for step, bound in enumerate(least, start=1):
        rows = records(directory, step)
        tokens = [
            (entropy, advantage)
            for row in rows
            for entropy, advantage, sampled in zip(row["entropy"], row["advantages"], row["response_mask"], strict=True)
            if sampled
        ]
        assert all(advantage == 0 for entropy, advantage in tokens if entropy < bound)
        rank = math.ceil(0.75 * (len(tokens) - 1))
        assert bound == pytest.approx(
            sorted(entropy for entropy, _ in tokens)[rank]
        )  # two tokens may be equal to the bound
        assert any(advantage != 0 for _, advantage in tokens)


@pytest.mark.parametrize("extra", [(), (LORA,)], ids=["full", "lora"])
def test_kl_in_the_loss_is_against_the_starting_weights(train, extra):
    kl = curve(train("actor_rollout_ref.actor.ppo_mini_batch_size=6", *extra), "actor/kl_loss")
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert all(value > 1e-6 for value in kl[1:])
    assert kl[2] > kl[1]


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_kl_in_the_reward_is_against_the_starting_weights(train, kind):
    sequences, horizon, target, first = 24, 100, 0.01, 0.05
    adaptive = (f"algorithm.kl_ctrl.target_kl={target}", f"algorithm.kl_ctrl.horizon={horizon}")
    directory = train(
        *("actor_rollout_ref.actor.ppo_mini_batch_size=6", f"algorithm.kl_ctrl.kl_coef={first}"),
        *(f"algorithm.kl_ctrl.type={kind}", *(adaptive if kind == "adaptive" else ())),
        preset="ppo",
    )
    kl, coefficient = curve(directory, "actor/reward_kl_penalty"), curve(directory, "actor/reward_kl_penalty_coeff")
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert max(abs(value) for value in kl[1:]) > 1e-6
    expected = [first]
    for seen in kl[:-1]:
        error = min(max(seen / target - 1, -0.2), 0.2)  # Ziegler et al. 2019, section 2.2
        expected.append(expected[-1] * (1 + error * sequences / horizon) if kind == "adaptive" else first)
    assert coefficient == pytest.approx(expected, rel=1e-6)
    scores, rewards = curve(directory), curve(directory, "critic/rewards/mean")
    assert rewards[0] == pytest.approx(scores[0])
    assert rewards[-1] != scores[-1]


def without_copies() -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were copied on their way")

    forked_engines.install()
    transports.copy = refuse


def test_weights_reach_an_engine_in_a_process_of_its_own_without_a_copy(world: World, tmp_path: Path):
    words = rl_command(world, tmp_path / "run", "grpo", *SHORT, RATE, "actor_rollout_ref.rollout.num_replicas=1")
    ended = Command(words, tmp_path / "log", tmp_path, prepare=without_copies).wait()
    assert ended.code == 0, ended.output
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3 and max(row["rollout/canary_gap"] for row in rows) < 1e-5
