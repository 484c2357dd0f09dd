"""What methods add to a run, in short real runs: dynamic sampling that resumes exactly, corrections, filtration, one's own files."""

from pathlib import Path

import pytest
from support.world import World, curve, metrics, rl_command

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/algorithms", "hone/trainers", "hone/training")]

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
SHORT = (
    *("data.train_batch_size=6", "trainer.total_training_steps=3", "trainer.val_before_train=false"),
    *(f"{ACTOR}.optim.lr=2e-3", f"{ACTOR}.ppo_mini_batch_size=3", "trainer.rollout_dump_freq=0"),
)
DAPO = ("reward.overlong_buffer.len=2", "algorithm.filter_groups.metric=acc")


@pytest.fixture
def train(world: World, run, tmp_path: Path):
    """Train for three steps and return the run directory."""

    def start(*overrides: str, preset: str = "grpo", name: str = "", code: int = 0):
        directory = tmp_path / (name or f"run{len(list(tmp_path.iterdir()))}")
        ended = run(*rl_command(world, directory, preset, *SHORT, *overrides))
        assert ended.code == code, ended.output
        return directory if code == 0 else ended.message

    return start


def test_dynamic_sampling_resumes_exactly(train):
    easy = ("algorithm.filter_groups.metric=null", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=4")
    whole = train(*DAPO[:1], *easy, preset="dapo", name="whole")
    cut = train(*DAPO[:1], *easy, "trainer.total_training_steps=2", preset="dapo", name="cut")
    train(*DAPO[:1], *easy, preset="dapo", name="cut")
    assert max(curve(whole, "training/filter_groups/evicted_ratio")) > 0, "something had to be replaced"
    assert metrics(cut) == metrics(whole)
    assert max(curve(whole, "reward/zero_std_group_ratio")) < 1


def test_dynamic_sampling_that_finds_nothing_says_so(train):
    hopeless = ("actor_rollout_ref.rollout.n=2", "algorithm.filter_groups.max_num_gen_batches=2")
    message = train(*DAPO, *hopeless, preset="dapo", code=2)
    for words in ("dynamic sampling", "a step needs 6", "'acc'", "all 0", "max_num_gen_batches=4"):
        assert words in message


@pytest.mark.parametrize(
    ("preset", "metric"),
    [
        ("decoupled_seq_is", "rollout_corr/rollout_is_seq_mean"),
        ("decoupled_k3_rs_token_tis", "rollout_corr/rollout_rs_seq_mean_k3_mean"),
        ("decoupled_token_kpop", "rollout_corr/rollout_rs_token_kpop_mean"),
        ("bypass_pg_is", "actor/rollout_is_weight"),
        ("bypass_ppo_clip_k3_rs", "actor/rollout_rejected"),
    ],
)
def test_correction_of_engine_against_trainer(train, preset, metric):
    corrected = train(f"{CORRECTION}.preset={preset}")
    assert metric in metrics(corrected)[-1]
    if preset.startswith("decoupled"):  # in float32 the engine is the trainer: the correction must not change the run
        assert curve(corrected, "rollout_corr/kl") == pytest.approx([0, 0, 0], abs=1e-5)
        assert curve(corrected, "actor/grad_norm") == pytest.approx(curve(train(), "actor/grad_norm"), rel=1e-3)


def test_policy_filtration(train):
    filtered = train("algorithm.use_pf_ppo=true", "critic.optim.lr=1e-3", preset="ppo")
    plain = train("critic.optim.lr=1e-3", preset="ppo")
    assert curve(filtered)[0] == curve(plain)[0], "what is reported is the batch as sampled"
    assert curve(filtered, "actor/grad_norm")[0] != curve(plain, "actor/grad_norm")[0]


def test_turns(train):
    assert curve(train("algorithm.adv_estimator=gigpo"), "actor/grad_norm")[0] > 0


OWN = '''
from hone.algorithms import TokenLoss, masked_sum
from hone.algorithms.advantages import Groups


def centred(token_level_rewards, response_mask, *, group_ids, scale=1.0):
    """scale (s - mean of the group)"""
    groups = Groups.from_ids(group_ids, response_mask)
    scores = masked_sum(token_level_rewards, response_mask, dim=-1).double()
    advantages = (scale * (scores - groups.mean(scores)))[:, None] * response_mask
    return advantages.float(), advantages.float()


def plain(old_log_probs, log_probs, advantages, response_mask):
    """-A r"""
    ratio = (log_probs - old_log_probs).exp()
    return TokenLoss(-advantages * ratio, ratio, {"advantage_size": advantages.abs()})
'''


def test_methods_of_ones_own_train_like_the_built_in_ones(train, tmp_path: Path):
    (tmp_path / "my_methods.py").write_text(OWN)
    own = train(
        *("algorithm.adv_estimator=my_methods:centred", "algorithm.adv_kwargs.scale=2.0", f"{ACTOR}.use_kl_loss=false"),
        *(f"{ACTOR}.policy_loss.loss_mode=my_methods:plain", f"{ACTOR}.ppo_mini_batch_size=6"),
        *(f"{ACTOR}.kl_loss_coef=0.001", f"{ACTOR}.kl_loss_type=low_var_kl"),
    )
    same = train(
        *("algorithm.norm_adv_by_std_in_grpo=false", f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.ppo_mini_batch_size=6"),
        *(f"{ACTOR}.policy_loss.loss_mode=gpg", f"{ACTOR}.kl_loss_coef=0.001"),
    )
    assert curve(own)[0] == curve(same)[0]
    assert curve(own, "critic/advantages/max")[0] == pytest.approx(
        2 * curve(same, "critic/advantages/max")[0], rel=1e-5
    )
    assert curve(own, "actor/grad_norm")[0] == pytest.approx(2 * curve(same, "actor/grad_norm")[0], rel=1e-4)
    assert curve(own, "actor/advantage_size")[0] > 0


def test_a_missing_file_of_ones_own(train):
    message = train("algorithm.adv_estimator=my_method:centred", code=2)
    assert "'my_method'" in message and "R11" in message
