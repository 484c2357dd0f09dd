"""Training works: every algorithm reaches a higher reward, and what it leaves loads in other programs with equal numbers."""

import json
import math
from pathlib import Path

import pytest
import torch
from support import archives
from support.world import World, curve, mean, metrics, rl_command, sft_command, steps_saved

from hone.training.checkpoints.shards import read_index
from hone.training.checkpoints.storage import Storage

pytestmark = pytest.mark.slow

LEARN = ("data.train_batch_size=12", "actor_rollout_ref.rollout.n=8", "trainer.val_before_train=false")
LORA = ("actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.lora_alpha=32")
LONG = pytest.mark.long("hone/algorithms", "hone/training", "hone/models/loading.py", "hone/trainers/algorithm.py")
CASES = {
    "grpo": ("grpo", "actor_rollout_ref.actor.optim.lr=2e-3", "trainer.total_training_steps=25"),
    "grpo-megatron": (
        *("grpo", "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.use_kl_loss=true"),
        *("actor_rollout_ref.actor.optim.lr=2e-3", "trainer.total_training_steps=25"),
    ),
    "grpo-lora": (
        *("grpo", *LORA, "actor_rollout_ref.actor.optim.lr=3e-3", "trainer.total_training_steps=30"),
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ),
    "ppo": (
        *("ppo", "actor_rollout_ref.actor.optim.lr=2e-3", "critic.optim.lr=3e-3", "trainer.total_training_steps=20"),
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
    ),
    "ppo-lora": (
        *("ppo", *LORA, "actor_rollout_ref.actor.optim.lr=2e-3", "critic.optim.lr=3e-3"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=12", "trainer.total_training_steps=25"),
    ),
}


@pytest.mark.parametrize("case", ["grpo", *(pytest.param(name, marks=LONG) for name in CASES if name != "grpo")])
def test_reward_rises(world: World, run, tmp_path: Path, case: str):
    preset, *overrides = CASES[case]
    ended = run(*rl_command(world, tmp_path / "run", preset, *LEARN, *overrides))
    assert ended.code == 0, ended.output
    rewards = curve(tmp_path / "run")
    first, last = mean(rewards[:5]), mean(rewards[-5:])
    assert last > first + 0.03 and last > 1.3 * first, rewards
    assert max(curve(tmp_path / "run", "actor/first_ratio_max_abs_log")) < 1e-5
    assert ("critic/vf_loss" in metrics(tmp_path / "run")[-1]) == (preset == "ppo")
    assert all(value == 0 for row in metrics(tmp_path / "run") for name, value in row.items() if name.startswith("inv"))


@LONG
def test_reward_rises_in_float16(world: World, run, tmp_path: Path):
    """Generation, scoring and updates in float16; the scale of the loss is in the checkpoint."""
    directory, steps = tmp_path / "run", 20
    ended = run(
        *rl_command(world, directory, "grpo", *LEARN, "actor_rollout_ref.actor.optim.lr=2e-3"),
        *("actor_rollout_ref.actor.dtype=float16", f"trainer.total_training_steps={steps}"),
    )
    assert ended.code == 0, ended.output
    rewards, scales = curve(directory), curve(directory, "actor/loss_scale")
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.03, rewards
    assert len(scales) == steps and all(math.log2(scale).is_integer() for scale in scales)
    assert max(curve(directory, "actor/first_ratio_max_abs_log")) < 0.01
    assert all(math.isfinite(value) for row in metrics(directory) for value in row.values() if isinstance(value, float))
    index = Storage(str(directory / "checkpoints" / f"step_{steps_saved(directory)[-1]}")) / "actor_optimizer"
    assert read_index(index).values["loss_scale"]["value"] in (scales[-1], scales[-1] / 2)


def log_probs(model: torch.nn.Module, record: dict) -> torch.Tensor:
    """Of the response tokens, by the model's ordinary forward pass."""
    prompt, response = record["prompt_ids"], record["response_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def asked(run, model: Path) -> list[dict]:
    """What `hone generate` samples from a model, with its log-probs."""
    ended = run("generate", model, "copy 0110", "copy 1", "--n", 3, "--temperature", 1, "--max-tokens", 8, "--json")
    assert ended.code == 0, ended.output
    return [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    "lora",
    [pytest.param(False, marks=pytest.mark.application("hone/training", "hone/models")), True],
    ids=["full", "lora"],
)
def test_checkpoint_and_exports_load_elsewhere_with_equal_numbers(world, run, tmp_path, lora):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path / "run"
    overrides = ["actor_rollout_ref.actor.optim.lr=1e-2", "trainer.total_training_steps=2", *(LORA if lora else ())]
    ended = run(*rl_command(world, directory, "grpo", *overrides))
    assert ended.code == 0, ended.output
    # the answers of one more step, with learning rate 0: sampled by, and scored under, the weights of the checkpoint
    again = [o for o in overrides if "lr=" not in o and "steps" not in o]
    again += ["actor_rollout_ref.actor.optim.lr=0", "trainer.total_training_steps=3", "trainer.rollout_dump_freq=3"]
    ended = run(*rl_command(world, directory, "grpo", *again))
    assert ended.code == 0, ended.output
    records = archives.records(directory, 3)
    assert len(records) == 48
    actor = directory / "checkpoints/step_2/actor"

    if lora:
        base = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
        before = log_probs(base, records[0])
        loaded = PeftModel.from_pretrained(base, actor)
    else:
        before = log_probs(AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32), records[0])
        loaded = AutoModelForCausalLM.from_pretrained(actor, dtype=torch.float32)
    assert (log_probs(loaded.eval(), records[0]) - before).abs().max() > 1e-2, "it has learned something"

    assert run("export", directory / "checkpoints/step_2", "--out", tmp_path / "merged").code == 0
    assert run("export", directory, "--out", tmp_path / "unmerged", "--no-merge").code == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    if lora:
        assert (tmp_path / "unmerged/adapter_config.json").is_file()
        base = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
        unmerged = PeftModel.from_pretrained(base, tmp_path / "unmerged")
    else:
        unmerged = AutoModelForCausalLM.from_pretrained(tmp_path / "unmerged", dtype=torch.float32)
    for record in records[::8]:
        trained_on = torch.tensor(record["rollout_log_probs"])
        for model in (loaded, merged, unmerged):
            torch.testing.assert_close(log_probs(model.eval(), record), trained_on, atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.decode(records[0]["response_ids"], skip_special_tokens=True) == records[0]["text"]
    assert tokenizer.chat_template

    answers = asked(run, tmp_path / "merged")
    assert len(answers) == 6
    assert [a["token_ids"] for a in answers] == [a["token_ids"] for a in asked(run, directory)]
    assert run("export", directory, "--out", tmp_path / "merged").code == 2, "it never writes over something"


def test_eval_of_a_run_agrees_with_its_validation(world, run, tmp_path):
    directory = tmp_path / "run"
    overrides = [
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=2",
        f"data.val_files={world.val}",
    ]
    ended = run(*rl_command(world, directory, "grpo", *overrides))
    assert ended.code == 0, ended.output
    name = "val-aux/digit_sequence/reward/mean@1"
    out = tmp_path / "answers.jsonl"
    ended = run(
        *("eval", directory, "--data", world.val, "--max-prompt-length", 32, "--max-response-length", 8),
        *("--json", "--output", out),
    )
    assert ended.code == 0, ended.output
    found = json.loads(ended.output[ended.output.index("{") :])
    assert found[name] == pytest.approx(metrics(directory)[-1][name], abs=1e-9)
    scores = [json.loads(line)["score"] for line in out.read_text().splitlines()]
    assert mean(scores) == pytest.approx(found[name], abs=1e-9)


def test_sft_learns_and_its_checkpoint_can_be_asked(world, run, tmp_path):
    ended = run(
        *sft_command(world, tmp_path / "run", "optim.lr=4e-3", "data.train_batch_size=64", f"data.val_files={world.conversations}"),
        *("trainer.total_training_steps=30", "data.val_max_samples=64"),
    )  # fmt: skip
    assert ended.code == 0, ended.output
    losses = curve(tmp_path / "run", "val/loss")
    assert losses[0] == pytest.approx(curve(tmp_path / "run", "train/loss")[0], abs=0.2)
    assert losses[-1] < losses[0] - 2
    assert steps_saved(tmp_path / "run") == [30]
    assert all(set(a["text"]) <= set("0123456789") for a in asked(run, tmp_path / "run")[:3])
