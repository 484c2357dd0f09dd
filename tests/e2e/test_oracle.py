"""`hone train` saves a micro-batch, and `hone oracle` recomputes it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.world import World, metrics, rl_command

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/training", "hone/cli/stored.py")]

SHORT = ("trainer.total_training_steps=2", "trainer.save_freq=0", "data.train_batch_size=6")


def json_of(output: str) -> dict:
    return json.loads(output[output.index("{") :])


def test_a_saved_step_agrees_until_a_number_is_changed(world: World, run, tmp_path: Path):
    plain, saving = tmp_path / "plain", tmp_path / "saving"
    for directory, keys in ((plain, ()), (saving, ("trainer.save_microbatch_steps=[2]",))):
        ended = run(*rl_command(world, directory, "grpo", *SHORT, *keys))
        assert ended.code == 0, ended.output
    assert metrics(plain) == metrics(saving), "saving changes no number"

    ended = run("oracle", saving, "--step", 2, "--json")
    assert ended.code == 0, ended.output
    report = json_of(ended.output)
    assert report["agrees"] and report["about"]["step"] == 2 and len(report["checks"]) > 8
    ended = run("oracle", saving, "--step", 1)
    assert ended.code == 2 and "--step 2" in ended.output

    file = saving / "microbatches/step_2/computed.safetensors"
    computed = load_file(file)
    computed["hidden.1"][3] *= 1.01
    save_file(computed, file)
    ended = run("oracle", saving, "--step", 2, "--json")
    assert ended.code == 1, ended.output
    first = json_of(ended.output)["first"]
    assert (first["kind"], first["layer"], first["place"]["token"]) == ("hidden", 1, 3)
    assert run("oracle", saving, "--step", 2).code == 1


@pytest.mark.parametrize(
    "keys",
    [
        ("actor_rollout_ref.actor.recompute_old_log_probs=false",),
        ("actor_rollout_ref.model.lora_rank=4",),
        ("trainer.async.stream=true", "actor_rollout_ref.actor.ppo_mini_batch_size=6"),
    ],
    ids=["old log-probs of the pass", "lora", "streamed"],
)
def test_other_updates(world: World, run, tmp_path: Path, keys: tuple[str, ...]):
    ended = run(*rl_command(world, tmp_path / "run", "grpo", *SHORT, "trainer.save_microbatch_steps=[1]", *keys))
    assert ended.code == 0, ended.output
    ended = run("oracle", tmp_path / "run", "--step", 1, "--json")
    assert ended.code == 0, ended.output
