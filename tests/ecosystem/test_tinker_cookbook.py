"""Programs of tinker-cookbook, unchanged, against `hone serve --train`: reinforcement and supervised learning, games, preferences,
distillation, and the two programs that compare log-probs. Their data sets are replaced by local rows.
"""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.digits import make_digits
from support.environments import foreign_python, source_folder
from support.forked_python import Forks
from support.launch import hone
from support.once import made_once
from support.serve import serving
from support.world import curve

pytestmark = pytest.mark.long("hone/apps/tinker")
SCRIPT = Path(__file__).parents[1] / "support" / "foreign" / "cookbook.py"
COOKBOOK = "tinker-cookbook==0.6.1"
PACKAGES = (
    *(
        "--no-deps",
        COOKBOOK,
        "tml-renderers==0.2.1",
        "chz==0.4.0",
        "blobfile==3.3.0",
        "pycryptodomex==3.24.2",
        "lxml==6.1.3",
    ),
    *("datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0", "pandas==3.1.1", "pyrage==1.4.0"),
    *("termcolor==3.3.0", "tiktoken==0.14.0", "pylatexenc==2.11"),
)
NAME, TOKEN = "Qwen/Qwen3-4B-Instruct-2507", "tml-abc"
Row = dict[str, Any]


@dataclass
class Cookbook:
    """Runs programs in the cookbook's environment, each in a folder of its own."""

    programs: subprocess.Popen[str]  # see support/foreign/cookbook.py
    digits: Path  # the task, see support.digits
    weights: Path  # folder of the server's saved weights
    root: Path

    def run(self, program: str, *words: str, folder: str = "run") -> str:
        """Run a module below tinker_cookbook, or a file; return what it printed."""
        place = self.root / folder
        place.mkdir(exist_ok=True)
        module = program if program.endswith(".py") else f"tinker_cookbook.{program}"
        assert self.programs.stdin is not None and self.programs.stdout is not None
        self.programs.stdin.write(json.dumps([str(place), module, *words]) + "\n")
        self.programs.stdin.flush()
        code, printed = self.programs.stdout.readline(), (place / "output.txt").read_text()
        assert code == "0\n", printed[-6000:]
        return printed

    def train(self, program: str, steps: int, *words: str, folder: str = "run", key: str = "") -> list[Row]:
        """Train for some steps; return their metrics, which are finite, after a look at the last checkpoint.

        Args:
            key: of a metric that every step has.
        """
        model = () if program.endswith("_loop") else ("behavior_if_log_dir_exists=resume",)
        common = (f"model_name={NAME}", f"log_path={self.root / folder}", f"max_steps={steps}", *model)
        self.run(program, *common, *words, folder=folder)
        rows = [row for row in self.lines("metrics", folder) if key in row]
        assert [row["step"] for row in rows] == [*range(steps)]
        assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float)), rows
        last = self.lines("checkpoints", folder)[-1]
        assert last["name"] == "final" and self.saved(last["state_path"]) and self.saved(last["sampler_path"])
        return rows

    def lines(self, name: str, folder: str = "run") -> list[Row]:
        """The records of a file of a program."""
        return [json.loads(line) for line in (self.root / folder / f"{name}.jsonl").read_text().splitlines()]

    def saved(self, path: str) -> bool:
        """Whether the server has the weights of a path."""
        return (self.weights / path.removeprefix("tinker://") / "adapter_model.safetensors").is_file()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "digits", make_digits)


@pytest.fixture(scope="module")
def server(forks: Forks, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    out = tmp_path_factory.mktemp("cookbook") / "weights"
    options = ("--train", "--name", NAME, "--out", str(out), "--max-adapters", "64")
    with serving(forks, digits / "model", out.with_suffix(".log"), *options, token=TOKEN) as address:
        yield address, out


@pytest.fixture(scope="module")
def programs(digits: Path, server: tuple[str, Path]) -> Iterator[subprocess.Popen[str]]:
    python = foreign_python("tinker-cookbook", *PACKAGES, beside=True)
    environment = {**os.environ, "TINKER_API_KEY": TOKEN, "TINKER_BASE_URL": server[0], "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [python, str(SCRIPT), str(digits / "tokenizer"), NAME, str(digits / "data.json")]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def cookbook(programs: subprocess.Popen[str], digits: Path, server: tuple[str, Path], tmp_path: Path) -> Cookbook:
    return Cookbook(programs, digits, server[1], tmp_path)


RL = ("group_size=8", "max_tokens=8", "learning_rate=1.5e-3")
LOOP = (*RL, "batch_size=10", "lora_rank=16")
MATH = (*RL, "groups_per_batch=10", "lora_rank=16", "env=gsm8k", "eval_every=0")


def rewards(rows: list[Row], name: str = "reward/total") -> list[float]:
    return [row[name] for row in rows]


def rises(values: list[float], by: float = 0.15) -> bool:
    return statistics.mean(values[-3:]) > statistics.mean(values[:2]) + by


@pytest.mark.parametrize("loss", ["stable_reinforce", "importance_sampling", "cispo", "gspo"])
def test_rl_loop(cookbook: Cookbook, loss: str) -> None:
    rows = cookbook.train("recipes.rl_loop", 10, *LOOP, f"loss_fn={loss}", "save_every=4", key="reward/total")
    assert rises(rewards(rows)), rewards(rows)
    assert all(row["grad_norm"] > 0 and row["skipped"] == 0 for row in rows if "grad_norm" in row)
    assert [(found["name"], found["batch"]) for found in cookbook.lines("checkpoints")[:-1]] == [
        ("000004", 4),
        ("000008", 8),
    ]


def test_rl_loop_is_resumed(cookbook: Cookbook) -> None:
    words = (*LOOP, "save_every=2")
    cookbook.train("recipes.rl_loop", 3, *words, key="reward/total")
    kept = cookbook.root / "run" / "checkpoints.jsonl"
    kept.write_text(json.dumps(cookbook.lines("checkpoints")[0]) + "\n")  # as after a kill in the third step
    (kept.parent / "metrics.jsonl").unlink()
    cookbook.run("recipes.rl_loop", f"model_name={NAME}", f"log_path={kept.parent}", "max_steps=4", *words)
    assert [row["progress/batch"] for row in cookbook.lines("metrics")] == [2, 3]


def test_sl_loop(cookbook: Cookbook) -> None:
    rows = cookbook.train("recipes.sl_loop", 12, "batch_size=10", "learning_rate=3e-3", key="train_mean_nll")
    nll = rewards(rows, "train_mean_nll")
    assert statistics.mean(nll[-3:]) < 0.8 * nll[0], nll


@pytest.mark.parametrize(
    "words",
    [
        ("compute_post_kl=true", "loss_fn=importance_sampling"),
        ("max_steps_off_policy=2",),
        ("stream_minibatch_config.groups_per_batch=10", "stream_minibatch_config.num_minibatches=2", "loss_fn=ppo"),
    ],
    ids=["synchronous", "asynchronous", "minibatches"],
)
def test_math_rl(cookbook: Cookbook, words: tuple[str, ...]) -> None:
    rows = cookbook.train("recipes.math_rl.train", 8, *MATH, *words, "save_every=4", key="env/all/reward/total")
    assert rises(rewards(rows, "env/all/reward/total")), rewards(rows, "env/all/reward/total")
    gaps = rewards(rows, "optim/kl_sample_train_v2")
    assert gaps[0] < 1e-8, "the weights that sampled are those that are trained"
    if "compute_post_kl=true" in words:
        assert max(gaps) < 1e-8 and min(rewards(rows, "kl_pre_post_v2")) > 0
    assert "000004" in [found["name"] for found in cookbook.lines("checkpoints")]


def test_guess_number(cookbook: Cookbook) -> None:
    words = (
        "renderer_name=qwen3_instruct",
        "batch_size=4",
        "group_size=4",
        "max_tokens=12",
        "learning_rate=5e-3",
        "eval_every=0",
    )
    rows = cookbook.train("recipes.multiplayer_rl.guess_number.train", 4, *words, key="progress/batch")
    assert all(row["env/all/turns_per_episode"] > 1 and -10 <= row["env/all/reward/total"] <= 1 for row in rows)
    assert max(rewards(rows, "env/all/by_group/frac_mixed")) > 0


def test_shorter_answers_are_preferred(cookbook: Cookbook) -> None:
    words = (
        "renderer_name=qwen3_instruct",
        "batch_size=4",
        "group_size=8",
        "max_tokens=16",
        "learning_rate=5e-3",
        "eval_every=0",
    )
    rows = cookbook.train("recipes.preference.shorter.train", 6, *words, key="progress/batch")
    assert rows[-1]["env/all/ac_tokens_per_turn"] < rows[0]["env/all/ac_tokens_per_turn"]
    assert max(rewards(rows, "optim/kl_sample_train_v2")) < 1e-8


def test_dpo(cookbook: Cookbook) -> None:
    words = ("renderer_name=qwen3_instruct", "batch_size=10", "learning_rate=5e-3", "max_length=512")
    rows = cookbook.train("recipes.preference.dpo.train", 8, *words, key="dpo_loss")
    assert rows[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-5), "the reference is the model at the start"
    assert rows[-1]["dpo_loss"] < 0.5 and rows[-1]["accuracy"] > 0.8 and rows[-1]["margin"] > 0
    assert rows[0]["test/nll"] > 0 and rows[-1]["test/nll"] > 0


def test_on_policy_distillation(cookbook: Cookbook) -> None:
    """The teacher is what supervised learning made of the same model, by its path on the server."""
    cookbook.train("recipes.sl_loop", 8, "batch_size=10", "learning_rate=1e-2", folder="teacher", key="train_mean_nll")
    teacher = (
        f"teacher_model={NAME}",
        f"teacher_checkpoint={cookbook.lines('checkpoints', 'teacher')[-1]['sampler_path']}",
    )
    words = ("groups_per_batch=10", "group_size=4", "max_tokens=8", "learning_rate=5e-3", "lora_rank=16")
    rows = cookbook.train("recipes.distillation.on_policy_distillation", 8, *teacher, *words, key="teacher_kl")
    kl = rewards(rows, "teacher_kl")
    assert kl[0] > 0.02 and statistics.mean(kl[-2:]) < 0.8 * kl[0], kl


def test_log_probs_of_temperatures(cookbook: Cookbook) -> None:
    """The program compares log-probs sampled at six temperatures with those of 1, and of a whole answer with single tokens."""
    program = source_folder(COOKBOOK) / "tests" / "validate_temperature_logprobs.py"
    printed = cookbook.run(str(program), f"base_model={NAME}", "num_trials=40")
    rows = [line.split() for line in printed.splitlines()]
    tables = [[float(word) for word in row] for row in rows if len(row) == 5 and all(_is_number(word) for word in row)]
    assert [row[0] for row in tables] == [0.5, 0.7, 1.0, 1.2, 1.5, 1.8, 0.5]
    *temperatures, answer = tables
    assert all(tokens >= 2 and largest < 1e-3 for _, tokens, _, _, largest in temperatures), tables
    _, length, matches, _, largest = answer
    assert matches > 0 and length >= matches and largest < 1e-3


def _is_number(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()


def test_log_probs_of_sampling_and_training(cookbook: Cookbook) -> None:
    program = source_folder(COOKBOOK) / "tests" / "compare_sampling_training_logprobs.py"
    cookbook.run(str(program), f"model_names={NAME}")
    with (cookbook.root / "run" / "sampling_training_logprobs.csv").open() as file:
        (found,) = csv.DictReader(file)
    assert found["model_name"] == NAME and float(found["mse[sample, train]"]) < 1e-9, found


def test_the_loop_and_hone_train_reach_the_same_reward(cookbook: Cookbook) -> None:
    """The same model, task, batch, rank, rate and estimator: answers against the mean of their group, one on-policy update a step."""
    steps, digits = 24, cookbook.digits
    loop = rewards(
        cookbook.train(
            "recipes.rl_loop", steps, *LOOP, "loss_fn=importance_sampling", "save_every=0", key="reward/total"
        )
    )
    run = cookbook.root / "hone"
    actor = "actor_rollout_ref.actor"
    ended = hone(
        *(
            "train",
            "--preset=grpo",
            f"actor_rollout_ref.model.path={digits / 'model'}",
            f"data.train_files={digits}/train.jsonl",
        ),
        *(
            "actor_rollout_ref.model.lora_rank=16",
            "actor_rollout_ref.model.lora_alpha=32",
            "actor_rollout_ref.rollout.n=8",
        ),
        *("data.train_batch_size=10", "data.max_prompt_length=512", "data.max_response_length=8"),
        *(f"{actor}.ppo_mini_batch_size=10", f"{actor}.use_kl_loss=false", f"{actor}.loss_agg_mode=token-sum"),
        *(
            f"{actor}.optim.lr=1.5e-3",
            f"{actor}.optim.betas=[0.9,0.95]",
            f"{actor}.optim.eps=1e-8",
            f"{actor}.optim.weight_decay=0",
        ),
        *(f"{actor}.optim.clip_grad=1e9", "algorithm.norm_adv_by_std_in_grpo=false"),
        *(f"custom_reward_function.path={digits}/digits_reward.py", "custom_reward_function.name=boxed"),
        *(
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={run}",
            "trainer.num_threads=1",
            "trainer.device=cpu",
        ),
        log=cookbook.root / "hone.log",
    )
    assert ended.code == 0, ended.output
    own = curve(run)
    assert statistics.mean(loop[-3:]) > 0.7 and statistics.mean(own[-3:]) > 0.7, (loop, own)
    assert abs(statistics.mean(loop[:2]) - statistics.mean(own[:2])) < 0.15, "both begin with the same model"
