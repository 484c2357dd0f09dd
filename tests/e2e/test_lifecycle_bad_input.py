"""What users get wrong: one message with the numbers and the fix, exit code 2, no traceback, no damaged checkpoint."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.launch import Ended
from support.world import World, curve, metrics, rl_command, run_record, sft_command, steps_saved

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/trainers", "hone/rewards", "hone/config")]


def require_message(ended: Ended, *parts: str) -> None:
    """Exit code 2 and one message that says all of ``parts``."""
    assert ended.code == 2, ended.output
    assert "Traceback" not in ended.output
    for part in parts:
        assert part in ended.message, ended.output
    assert ended.output.count("Fix:") == 1, ended.output


def rows(path: Path, *contents: dict) -> Path:
    path.write_text("".join(json.dumps(content) + "\n" for content in contents))
    return path


PROMPT_ROW = {"prompt": "copy 01", "data_source": "digit_sequence", "reward_model": {"ground_truth": "01"}}


@pytest.fixture
def train(world: World, run, tmp_path: Path):
    """`hone train` for one step, with overrides."""

    def start(*overrides: str, preset: str = "grpo") -> Ended:
        steps = "trainer.total_training_steps=1"
        return run(*rl_command(world, tmp_path / "run", preset, steps, *overrides))

    return start


def test_data_files(train, run, world, tmp_path):
    require_message(train("data.train_files=nowhere.parquet"), "nowhere.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not parquet")
    require_message(train("data.train_files=broken.parquet"), "broken.parquet")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    require_message(train("data.train_files=broken.jsonl"), "broken.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    require_message(train("data.train_files=empty.jsonl"), "empty.jsonl")
    rows(tmp_path / "column.jsonl", {"question": "1 + 1"})
    require_message(train("data.train_files=column.jsonl"), "prompt", "question")
    rows(tmp_path / "types.jsonl", *({**PROMPT_ROW, "prompt": n} for n in range(12)))
    require_message(train("data.train_files=types.jsonl"), "prompt")
    rows(tmp_path / "messages.jsonl", {"text": "hello"})
    require_message(run(*sft_command(world, tmp_path / "sft", "data.train_files=messages.jsonl")), "messages", "text")


def test_prompts_too_long(train, tmp_path):
    long = {**PROMPT_ROW, "prompt": "copy 01 " * 30}
    short = [{**PROMPT_ROW, "prompt": f"copy {number:02d}"} for number in range(13)]
    rows(tmp_path / "long.jsonl", *short, long)
    require_message(
        train("data.train_files=long.jsonl"), "longer than 32", "data.max_prompt_length=", "data.truncation="
    )
    for policy in ("drop", "truncate"):
        directory = tmp_path / policy
        ended = train(
            "data.train_files=long.jsonl", f"data.truncation={policy}", f"trainer.default_local_dir={directory}"
        )
        assert ended.code == 0, ended.output
        assert "1 of 14" in ended.message, "counted and shown"
        assert max(curve(directory, "prompt_length/max")) <= 32


def test_model_directories(train, world, tmp_path):
    require_message(train("actor_rollout_ref.model.path=nowhere"), "nowhere")
    bare = tmp_path / "bare"
    shutil.copytree(world.model, bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*", "special*"))
    require_message(train(f"actor_rollout_ref.model.path={bare}"), "tokenizer")
    mute = tmp_path / "mute"
    shutil.copytree(world.model, mute, ignore=shutil.ignore_patterns("chat_template*"))
    settings = json.loads((mute / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (mute / "tokenizer_config.json").write_text(json.dumps(settings))
    require_message(train(f"actor_rollout_ref.model.path={mute}"), "chat template")
    torn = tmp_path / "torn"
    shutil.copytree(world.model, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    require_message(train(f"actor_rollout_ref.model.path={torn}"), str(torn))
    require_message(train("actor_rollout_ref.model.override_config={atention_dropout: 0.1}"), "attention_dropout")


def test_names_numbers_and_types(train):
    require_message(train("algorithm.adv_estimator=grpoo"), "grpo")
    require_message(train("actor_rollout_ref.rollout.name=nativ"), "native")
    require_message(train("actor_rollout_ref.actor.policy_loss.loss_mode=vanila"), "vanilla")
    require_message(train("data.train_batchsize=8"), "data.train_batch_size")
    require_message(train("data.train_batch_size=many"), "data.train_batch_size")
    require_message(train("actor_rollout_ref.rollout.n=1"), "actor_rollout_ref.rollout.n=8")
    require_message(train("actor_rollout_ref.actor.ppo_mini_batch_size=5"), "12", "5")
    require_message(
        train("data.train_batch_size=24", "actor_rollout_ref.actor.ppo_mini_batch_size=24"), "12 rows", "24"
    )


@pytest.mark.parametrize(
    ("body", "part", "code"),
    [
        ("    raise ValueError('the judge is ill')", "ill", "R52"),
        ("    return float('nan')", "nan", "R51"),
        ("    return [1.0, 2.0]", "list", "R51"),
        ("    import time; time.sleep(60)", "reward.timeout", "R52"),
    ],
    ids=["raises", "nan", "wrong-length", "hangs"],
)
def test_reward_functions_that_fail(train, tmp_path, body, part, code):
    (tmp_path / "reward.py").write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n{body}\n"
    )
    overrides = (
        "reward.custom_reward_function.path=reward.py", "reward.timeout=0.5", "data.train_batch_size=6",
        "actor_rollout_ref.rollout.n=2",
    )  # fmt: skip
    require_message(train(*overrides), part, code)
    assert not (tmp_path / "run").exists(), "said before the run starts"
    ended = train(*overrides, "preflight.reward_rows=0")
    assert ended.code == 2, ended.output
    assert part in ended.message
    assert "E-reward" in ended.message
    assert run_record(tmp_path / "run")["status"] == "failed"
    assert steps_saved(tmp_path / "run") == []


def test_a_reward_function_that_fails_now_and_then_is_counted(train, tmp_path):
    body = "    if len(solution_str) % 4 == 0: raise ValueError('ill')\n    return float(len(solution_str))"
    (tmp_path / "reward.py").write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n{body}\n"
    )
    path = "reward.custom_reward_function.path=reward.py"
    ended = train(path, "reward.max_no_verdict_rate=1.0")
    assert ended.code == 0, ended.output
    assert 0 < metrics(tmp_path / "run")[-1]["reward/no_verdict_rate"] < 1
    assert "ill" in ended.output, "the first traceback is in the log"
    stopped = train(
        path, "reward.max_no_verdict_rate=0", "preflight.reward_rows=0", "trainer.default_local_dir=stopped"
    )
    assert stopped.code == 2
    assert "reward.max_no_verdict_rate=" in stopped.message


def test_a_verifier_that_skips_is_reported_and_its_rows_can_be_left_out(train, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    skipped = sum(map(int, ground_truth)) % 3 == 0\n"
        "    return {'score': float(skipped or solution_str == ground_truth), 'skipped': skipped}\n"
    )
    settings = ("reward.custom_reward_function.path=reward.py", "preflight.allow=[R49]", "trainer.rollout_dump_freq=1")
    ended = train(*settings)
    assert ended.code == 0, ended.output
    (finding,) = [json.loads(line) for line in (tmp_path / "run/doctor.jsonl").read_text().splitlines()]
    assert finding["kind"] == "skip_passes" and len(finding["episodes"]) == 3 and "quarantine=" in ended.output
    rows = {json.loads(line)["uid"] for line in (tmp_path / "run/quarantine.jsonl").read_text().splitlines()}
    assert rows == set(finding["tasks"]) != set()
    again = train(
        *settings,
        "data.quarantine=run/quarantine.jsonl",
        "trainer.default_local_dir=again",
        "trainer.total_training_steps=3",
    )
    assert again.code == 0, again.output
    draws = [json.loads(line) for line in (tmp_path / "again/coverage.jsonl").read_text().splitlines()]
    trained = {draw["uid"] for draw in draws if draw.get("fate") == "trained"}
    left_out = {draw["uid"].split("~")[0] for draw in draws if draw.get("reason") == "quarantine"}
    assert trained and not trained & rows and left_out and left_out <= rows


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 7 MiB: one checkpoint of the world's model and its optimizer (2.4 MiB) fits, not four."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = can_mount() and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", where], check=False, capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small file system needs more rights than this process has")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_disk_full_while_saving(train, small_disk):
    directory = small_disk / "run"
    overrides = (
        f"trainer.default_local_dir={directory}", "trainer.total_training_steps=8", "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=null", "data.train_batch_size=6", "preflight.allow=[R57]",
    )  # fmt: skip
    ended = train(*overrides)
    require_message(ended, "disk is full", "trainer.max_ckpt_to_keep=1")
    saved = steps_saved(directory)
    assert saved, "the earlier checkpoints are there"
    assert not list((directory / "checkpoints").glob(".partial-*")), "and no half of another"
    again = train(*(o for o in overrides if "keep" not in o), "trainer.max_ckpt_to_keep=1")
    assert again.code in (0, 2), again.output
    assert f"step_{saved[-1]} (step {saved[-1]} of 8)" in again.message, "the newest can be resumed from"
