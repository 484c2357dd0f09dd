"""From a run to preferences, from preferences to better models, and back into a run: every command a user would type."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from support.archives import records
from support.judges import write_judge
from support.launch import hone
from support.once import made_once
from support.world import World, curve, mean, metrics, rl_command, run_record, sft_command, steps_saved

pytestmark = pytest.mark.long(
    "hone/trainers/preference.py", "hone/algorithms/preference_losses", "hone/data/preferences.py"
)


@dataclass
class Mined:
    """A model of a million parameters, and the pairs mined from a run that it learned in."""

    world: World
    model: Path
    prompts: Path
    run: Path
    pairs: Path


@pytest.fixture(scope="module")
def mined(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mined:
    def there(root: Path) -> Mined:
        model, prompts = root / "sft/checkpoints/step_60/actor", root / "data/train.parquet"
        return Mined(world, model, prompts, root / "run", root / "pairs")

    return there(made_once(tmp_path_factory, "mined", lambda root: mine(there(root), root)))


def mine(found: Mined, root: Path) -> None:
    """Make the model, let it learn, and mine the pairs."""
    world = found.world
    start = World(root, found.prompts, found.prompts, world.conversations, world.tokenizer, root / "blank", found.model)
    for number, arguments in enumerate(
        [
            ("init", "--arch", "qwen3", "--size", "1m", "--tokenizer", world.tokenizer, "--out", start.blank),
            sft_command(start, root / "sft", "trainer.total_training_steps=60", "optim.lr=2e-3", "data.train_batch_size=64",
                        "optim.lr_scheduler_type=cosine"),
            ("data", "make", "digit_sequence", "length=6", "digits=2", "--out", root / "data", "--size", 60, "--val-size", 4),
            rl_command(start, found.run, "grpo", "data.train_batch_size=60", "actor_rollout_ref.actor.ppo_mini_batch_size=60",
                       "actor_rollout_ref.rollout.n=16", "actor_rollout_ref.actor.optim.lr=5e-4",
                       "trainer.total_training_steps=6", "trainer.rollout_dump_freq=1", "trainer.save_freq=0"),
            ("data", "pairs", found.run, "--out", found.pairs, "--margin", 0.2, "--val-share", 0.2, "--per-prompt", 40),
        ]
    ):  # fmt: skip
        ended = hone(*arguments, log=root / f"make{number}.log")
        assert ended.code == 0, ended.output


def command(mined: Mined, program: str, run: Path, *overrides: str) -> list[str]:
    return [
        *program.split(),
        f"model.path={mined.model}",
        f"data.train_files={mined.pairs}/train.parquet",
        f"data.val_files={mined.pairs}/val.parquet",
        "data.max_length=64",
        "data.train_batch_size=64",
        f"trainer.default_local_dir={run}",
        "trainer.num_threads=1",
        "trainer.device=cpu",
        *overrides,
    ]


def test_pairs_are_of_other_prompts_and_in_the_right_order(mined: Mined):
    train, val = (pq.read_table(mined.pairs / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    assert len(train) > 300 and len(val) > 60
    assert not {row["uid"] for row in train} & {row["uid"] for row in val}
    for row in (*train, *val):
        assert row["margin"] == row["score_chosen"] - row["score_rejected"] >= 0.2
        (question,), (answer,) = row["prompt"], row["chosen"]
        wanted, given = question["content"].split()[-1], "".join(c for c in answer["content"] if c in "0123456789")
        right = sum(a == b for a, b in zip(wanted, given, strict=False))
        assert row["score_chosen"] == pytest.approx(right / max(len(wanted), len(given)))


LEARN = {
    "dpo": ("prefer --preset dpo", "optim.lr=5e-4", "loss.beta=0.5"),
    "kto": ("prefer --preset kto", "optim.lr=5e-4", "loss.beta=0.3"),
    "orpo": ("prefer --preset orpo", "optim.lr=1e-3"),
    "dpo-lora": ("prefer --preset dpo_lora", "optim.lr=3e-3", "loss.beta=0.5"),
    "ipo": ("prefer --preset ipo", "optim.lr=5e-4", "loss.beta=0.5"),
    "simpo": ("prefer --preset simpo", "optim.lr=5e-4"),
    "reward-model": ("reward-model --preset bradley_terry", "optim.lr=1e-3", "data.train_batch_size=64"),
}


@pytest.mark.parametrize("case", LEARN)
def test_held_out_preference_accuracy(mined: Mined, run, tmp_path: Path, case: str):
    program, *overrides = LEARN[case]
    steps = ("trainer.total_training_steps=50", "trainer.test_freq=25", "data.train_batch_size=32")
    ended = run(*command(mined, program, tmp_path / "run", *steps, *overrides))
    assert ended.code == 0, ended.output
    accuracies, losses = curve(tmp_path / "run", "val/rewards/accuracies"), curve(tmp_path / "run", "val/loss")
    assert accuracies[0] < 0.6 and accuracies[-1] > 0.8, accuracies
    assert losses[-1] < losses[0]
    row = metrics(tmp_path / "run")[-1]
    assert row["rewards/margins"] > 0 and row["rewards/margins"] == pytest.approx(
        row["rewards/chosen"] - row["rewards/rejected"], abs=1e-5
    )
    assert steps_saved(tmp_path / "run") == [50]


def test_cpo_raises_likelihood_and_margin(mined: Mined, run, tmp_path: Path):
    """Its reward is a sum of log-probs, so that long answers lose; accuracy is no measure of it."""
    ended = run(
        *command(mined, "prefer --preset cpo", tmp_path / "run", "optim.lr=1e-3", "trainer.total_training_steps=40")
    )
    assert ended.code == 0, ended.output
    for name, direction in (("val/rewards/margins", 1), ("val/preference/nll", -1), ("val/loss", -1)):
        values = curve(tmp_path / "run", name)
        assert direction * (values[-1] - values[0]) > 0, (name, values)


def test_a_precomputed_reference_changes_nothing(mined: Mined, run, tmp_path: Path):
    found = {}
    for mode in ("copy", "precompute"):
        ended = run(
            *command(mined, "prefer --preset dpo", tmp_path / mode, f"ref.mode={mode}", "optim.lr=5e-4"),
            *("trainer.total_training_steps=5", "data.max_token_len_per_gpu=700"),
        )
        assert ended.code == 0, ended.output
        found[mode] = metrics(tmp_path / mode)
    for a, b in zip(found["copy"], found["precompute"], strict=True):
        assert a.keys() == b.keys()
        assert a == {name: pytest.approx(value, abs=1e-4, rel=1e-4) for name, value in b.items()}


RESUMED = {
    "dpo": ("prefer --preset dpo", "optim.lr=5e-4"),
    "kto-lora": ("prefer --preset kto", "optim.lr=3e-3", "model.lora_rank=8"),
    "precomputed": ("prefer --preset ipo", "optim.lr=5e-4", "ref.mode=precompute"),
    "reward-model": ("reward-model", "optim.lr=1e-3"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_repeats_bit_for_bit(mined: Mined, run, tmp_path: Path, case: str):
    program, *overrides = RESUMED[case]
    common = (*overrides, "trainer.test_freq=2", "trainer.save_freq=3", "data.train_batch_size=32")
    constant = (
        "optim.lr_scheduler_type=constant",
        "optim.lr_warmup_steps_ratio=0",
    )  # the schedule must not know the last step
    for directory, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
        ended = run(
            *command(mined, program, tmp_path / directory, *common, *constant, f"trainer.total_training_steps={steps}")
        )
        assert ended.code == 0, ended.output
    assert "resuming from" in ended.output
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    # step 3 was the last of the first part, and validates once more for that
    assert [{k: v for k, v in row.items() if not k.startswith("val/")} for row in parts] == [
        {k: v for k, v in row.items() if not k.startswith("val/")} for row in whole
    ]
    assert [row for row in parts if row["step"] != 3] == [row for row in whole if row["step"] != 3]


def test_labelled_answers(mined: Mined, run, tmp_path: Path):
    for name in ("train", "val"):
        rows = pq.read_table(mined.pairs / f"{name}.parquet").to_pylist()
        lines = [
            json.dumps({"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"})
            for row in rows
            for side in ("chosen", "rejected")
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = (f"data.train_files={tmp_path}/train.jsonl", f"data.val_files={tmp_path}/val.jsonl")
    ended = run(
        *command(mined, "prefer --preset kto", tmp_path / "run", *files, "optim.lr=5e-4", "loss.beta=0.3"),
        *("data.train_batch_size=64", "trainer.total_training_steps=50"),
    )
    assert ended.code == 0, ended.output
    accuracies = curve(tmp_path / "run", "val/rewards/accuracies")
    assert accuracies[-1] > 0.62 and "val/rewards/margins" not in metrics(tmp_path / "run")[-1]
    refused = run(*command(mined, "prefer --preset dpo", tmp_path / "other", *files))
    assert refused.code == 2 and "loss.name=kto" in refused.message


def check_scores_elsewhere(mined: Mined, judge: Path) -> float:
    """transformers reads the same scores from the exported directory, padded rows included; returns the share of pairs ranked right."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    rows = pq.read_table(mined.pairs / "val.parquet").to_pylist()[:80]
    texts = [
        tokenizer.apply_chat_template(r["prompt"] + r[side], tokenize=False)
        for r in rows
        for side in ("chosen", "rejected")
    ]
    texts = [text.rstrip("\n") for text in texts]  # a score is read at the end of the turn, not behind it
    with torch.no_grad():
        together = model(**tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)).logits[:, 0]
        alone = torch.cat(
            [model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[:, 0] for text in texts]
        )
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
    return (together[0::2] > together[1::2]).float().mean().item()


def test_a_reward_model_closes_the_circle(mined: Mined, run, tmp_path: Path):
    """Trained on pairs, it trains a policy whose answers a rule then finds better."""
    trained = run(
        *command(mined, "reward-model", tmp_path / "rm", "optim.lr=1e-3", "trainer.total_training_steps=50"),
    )
    assert trained.code == 0, trained.output
    judge = tmp_path / "judge"
    assert run("export", tmp_path / "rm", "--out", judge).code == 0
    assert check_scores_elsewhere(mined, judge) > 0.6
    overrides = (
        *(f"data.train_files={mined.prompts}", "data.train_batch_size=30", "actor_rollout_ref.rollout.n=8"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=30", "actor_rollout_ref.actor.optim.lr=2e-3"),
        *("trainer.total_training_steps=12", f"data.val_files={mined.prompts}", "data.val_max_samples=16"),
        *("reward.reward_model.enable=true", f"reward.reward_model.path={judge}"),
    )
    ended = run(*rl_command(mined.world, tmp_path / "run", "grpo", *overrides))
    assert ended.code == 0, ended.output
    for name in ("critic/score/mean", "reward/rm/mean", "reward/rule/mean"):
        values = curve(tmp_path / "run", name)
        assert mean(values[-3:]) > mean(values[:3]) + 0.05, (name, values)
    rows = metrics(tmp_path / "run")
    assert rows[-1]["critic/score/mean"] == pytest.approx(rows[-1]["reward/rm/mean"])
    assert "val-aux/digit_sequence/rm/mean@1" in rows[-1]

    added = (
        *overrides,
        "reward.reward_model.combine=add",
        "reward.reward_model.coef=0.5",
        "trainer.total_training_steps=1",
    )
    ended = run(*rl_command(mined.world, tmp_path / "both", "grpo", *added))
    assert ended.code == 0, ended.output
    row = metrics(tmp_path / "both")[-1]
    assert row["critic/score/mean"] == pytest.approx(0.5 * row["reward/rm/mean"] + row["reward/rule/mean"], abs=1e-5)


def test_a_reward_model_with_lora(mined: Mined, run, tmp_path: Path):
    """A resumed run repeats an uninterrupted one, and the exported adapter scores as the merged model does."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    lora = ("model.lora_rank=8", "model.lora_alpha=16", "optim.lr=1e-2", "trainer.save_freq=12")
    for name, steps in (("whole", 24), ("parts", 12), ("parts", 24)):
        ended = run(*command(mined, "reward-model", tmp_path / name, *lora, f"trainer.total_training_steps={steps}"))
        assert ended.code == 0, ended.output
    assert metrics(tmp_path / "parts")[13:] == metrics(tmp_path / "whole")[13:]
    assert run("export", tmp_path / "parts", "--out", tmp_path / "merged").code == 0
    assert run("export", tmp_path / "parts", "--no-merge", "--out", tmp_path / "adapter").code == 0
    check_scores_elsewhere(mined, tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    inputs = tokenizer("1 2 3", return_tensors="pt", add_special_tokens=False)
    base = AutoModelForSequenceClassification.from_pretrained(mined.model, num_labels=1, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert all(value.any() for name, value in adapted.named_parameters() if "lora_B" in name)  # zero before training
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(**inputs).logits, merged(**inputs).logits, atol=1e-5, rtol=1e-4)
    overrides = ("reward.reward_model.enable=true", f"reward.reward_model.path={tmp_path / 'adapter'}")
    refused = run(*rl_command(mined.world, tmp_path / "run", "grpo", *overrides))
    assert refused.code == 2 and "hone export" in refused.output


def test_a_language_model_judges_in_words(world: World, run, tmp_path: Path):
    """Beside the policy, with weights and a vocabulary of its own; what it says stands in the rollouts."""
    draw = random.Random(0)
    answers = ["".join(draw.choice("0123456789") for _ in range(draw.randint(1, 7))) for _ in range(24)]
    judge = write_judge(tmp_path / "judge", "copy", dict.fromkeys(answers, "Score: 7"))
    (judge / "rubric.txt").write_text("copy: {response}?")
    ended = run(
        *rl_command(world, tmp_path / "run", "grpo", "trainer.total_training_steps=1", "trainer.rollout_dump_freq=1"),
        *(
            "reward.reward_model.enable=true",
            f"reward.reward_model.path={judge}",
            "reward.reward_model.kind=generative",
        ),
        *(f"reward.judge.prompt={judge / 'rubric.txt'}", "reward.judge.max_tokens=8", "reward.reward_model.coef=2"),
    )
    assert ended.code == 0, ended.output
    (row,) = (row for row in metrics(tmp_path / "run") if "reward/rm/mean" in row)
    assert row["reward/rm/mean"] == pytest.approx(0.7) and row["critic/score/mean"] == pytest.approx(1.4)
    assert row["reward/no_verdict_rate"] == 0 and "reward/rule/mean" in row
    assert all("Score: 7" in json.dumps(record) for record in records(tmp_path / "run", 1))


def test_online_dpo_raises_the_reward(world: World, run, tmp_path: Path):
    overrides = (
        *("actor_rollout_ref.rollout.n=16", "actor_rollout_ref.actor.ppo_mini_batch_size=12"),
        *("actor_rollout_ref.actor.optim.lr=1e-3", "trainer.total_training_steps=15", "trainer.val_before_train=false"),
    )
    ended = run(*rl_command(world, tmp_path / "run", "online_dpo", *overrides))
    assert ended.code == 0, ended.output
    rewards = curve(tmp_path / "run")
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.05, rewards
    rows = metrics(tmp_path / "run")
    assert rows[0]["rewards/accuracies"] == 0.5 and rows[0]["actor/pg_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert all(0 < row["actor/preference_pairs"] <= 12 for row in rows)
    assert max(row["actor/first_ratio_max_abs_log"] for row in rows) < 1e-5
    assert run_record(tmp_path / "run")["status"] == "finished"


def test_online_pairs_that_never_differ_leave_the_policy_alone(world: World, run, tmp_path: Path):
    ended = run(
        *rl_command(world, tmp_path / "run", "online_dpo", "trainer.total_training_steps=2"),
        *("actor_rollout_ref.actor.preference_loss.margin=5", "actor_rollout_ref.actor.optim.lr=1e-2"),
    )
    assert ended.code == 0, ended.output
    rows = metrics(tmp_path / "run")
    assert [row["actor/preference_pairs"] for row in rows if "actor/preference_pairs" in row] == [0, 0]
    assert "actor/grad_norm" not in rows[-1]
