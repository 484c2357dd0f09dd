"""The Python API on the smallest world: the same runs as the commands, without files of one's own."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from nbclient import NotebookClient
from support.patience import LONG
from support.world import World
from transformers import AutoTokenizer
from typer.testing import CliRunner

import hone
from hone.cli.main import app
from hone.errors import HoneError

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/api", "hone/config", "hone/trainers")]
SHAPE = {"max_prompt_length": 32, "max_response_length": 8, "train_batch_size": 4}


def rows_of(world: World) -> list[dict[str, object]]:
    return [{"prompt": row["prompt"], "digits": 4} for row in pq.read_table(world.train).to_pylist()]


def test_a_function_trains_and_the_run_can_be_looked_into(world: World, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    seen: list[int] = []

    def length_reward(
        completions: list[list[dict[str, str]]], prompts: list[object], **columns: list[object]
    ) -> list[float]:
        assert len(prompts) == len(completions)
        return [float(len(completion[0]["content"]) == 4) for completion in completions]

    def stop_after_two(step: int, metrics: dict[str, float]) -> bool:
        seen.append(step)
        return step == 2

    run = hone.train(
        str(world.model), rows_of(world), reward=length_reward, steps=5, out=tmp_path / "run", on_step=stop_after_two, n=2,
        rollout_dump_freq=1, config={"trainer.logger": []}, **SHAPE,
    )  # fmt: skip
    assert seen == [1, 2] and run.status == "finished" and [row["step"] for row in run.metrics] == [1, 2]
    assert "function:length_reward" in run.record["rewards"]
    (best,) = run.samples(step=2, best=1)
    assert best["score"] == float(len(best["text"]) == 4)
    assert (Path(run.model_path) / "model.safetensors").is_file()
    assert run.plot("critic/rewards/mean").stat().st_size > 1000
    (answer,) = hone.generate(run.model_path, "copy 0110", max_tokens=4)
    assert len(answer.token_ids) == len(answer.log_probs) <= 4
    left = {child.pid for child in psutil.Process().children(recursive=True) if "reward" in " ".join(child.cmdline())}
    assert not left - before


def test_the_command_and_the_function_give_the_same_numbers(world: World, tmp_path: Path) -> None:
    run = hone.train(str(world.model), str(world.train), preset="grpo", steps=2, out=tmp_path / "api", n=2, **SHAPE)
    command = [
        sys.executable, "-m", "hone.cli.main", "train", "--preset", "grpo", f"actor_rollout_ref.model.path={world.model}",
        f"data.train_files={world.train}", "data.max_prompt_length=32", "data.max_response_length=8", "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path / 'command'}",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=LONG, capture_output=True)
    names = ("critic/rewards/mean", "actor/loss", "actor/grad_norm", "actor/entropy")
    ours, theirs = (
        [[row[name] for name in names] for row in run_.metrics] for run_ in (run, hone.Run(tmp_path / "command"))
    )
    assert ours == theirs and len(ours) == 2


def test_imitation_and_evaluation(world: World, tmp_path: Path) -> None:
    run = hone.sft(str(world.blank), world.conversations, steps=1, out=tmp_path / "sft", train_batch_size=8, lr=1e-3)
    assert "train/loss" in run.metrics[-1]
    metrics = hone.evaluate(run, world.val, max_prompt_length=32, max_response_length=8)
    assert 0 <= next(value for name, value in metrics.items() if "/acc/" in name) <= 1
    held = {"constraint": "regex=[ab]{3}", "temperature": 1.0}
    assert {answer.text for answer in hone.generate(run, "copy 0110", n=6, **held)} <= {
        "".join(letters) for letters in itertools.product("ab", repeat=3)
    }
    metrics = hone.evaluate(run, world.val, max_prompt_length=32, max_response_length=8, **held)
    assert next(value for name, value in metrics.items() if "/acc/" in name) == 0, "no answer is a number"


def test_a_chat_is_its_turns_rendered_and_generated(world: World) -> None:
    words = ["chat", str(world.model), "--temperature", "0", "--max-tokens", "6"]
    ended = CliRunner().invoke(app, words, input="copy 0110\n\ncopy 10\n/new\ncopy 0110\n")
    assert ended.exit_code == 0, ended.output
    first, second, again = ended.stdout.splitlines()[-3:]
    assert first == again == hone.generate(world.model, "copy 0110", max_tokens=6)[0].text
    said = zip(("user", "assistant", "user"), ("copy 0110", first, "copy 10"), strict=True)
    messages = [{"role": role, "content": content} for role, content in said]
    template = AutoTokenizer.from_pretrained(world.model).apply_chat_template
    prompt = template(messages, tokenize=False, add_generation_prompt=True)
    assert second == hone.generate(world.model, prompt, raw=True, max_tokens=6)[0].text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"no_such_key": 1}, "R09"),
        ({"dataset": []}, "E-data"),
        ({"dataset": 7}, "E-data"),
        ({"reward": "missing.py:f", "train_batch_size": 4}, "R50"),
        ({"train_batch_size": 0}, "R11"),
    ],
)
def test_mistakes_are_raised_as_user_errors(
    world: World, tmp_path: Path, arguments: dict[str, object], code: str
) -> None:
    given = {
        "model": str(world.model),
        "dataset": rows_of(world),
        "out": tmp_path / "run",
        "reward": "exact_match",
        **arguments,
    }
    with pytest.raises(HoneError) as caught:
        hone.train(**given)
    assert caught.value.code.startswith(code), caught.value


def test_a_reward_from_a_notebook_cell(world: World, tmp_path: Path) -> None:
    cells = [
        "import hone",
        "def digits(solution_str, **unused):\n    return float(solution_str.isdigit())",
        f"run = hone.train({str(world.model)!r}, {str(world.train)!r}, reward=digits, steps=1, out={str(tmp_path / 'run')!r}, "
        "max_prompt_length=32, max_response_length=8, train_batch_size=4, n=2)",
        "run.plot('critic/rewards/mean')\nprint(run.status, len(run.metrics))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=int(LONG), resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[-1]["outputs"]
    assert any("finished 1" in output.get("text", "") for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "function:digits" in hone.Run(tmp_path / "run").record["rewards"]


def test_own_columns_and_a_run_as_the_model(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table with a plain question and answer trains; its run is the model of the next runs, also with an adapter."""
    folder = tmp_path / "my data"
    folder.mkdir()
    (folder / "sätze.csv").write_text("frage,antwort,n\n" + "".join(f"copy {n:04b},{n:04b},{n}\n" for n in range(8)))
    keys = {"prompt_key": "frage", "answer_key": "antwort", "steps": 1, "n": 2, **SHAPE}

    def reward(completions: list[str], ground_truth: list[str], n: list[str], **columns: object) -> list[float]:
        assert [f"{int(number):04b}" for number in n] == ground_truth
        return [float(text == truth) for text, truth in zip(completions, ground_truth, strict=True)]

    first = hone.train(str(world.model), folder / "sätze.csv", reward=reward, out=tmp_path / "first", **keys)
    said = capsys.readouterr().err.splitlines()
    assert sum("8 prompts are plain strings" in line for line in said) == 1
    assert any(
        line.startswith("the first prompt (sätze:0,") and "<|im_start|>user\\ncopy 0000" in line for line in said
    )
    second = hone.train(
        first.path / "checkpoints" / "latest",
        folder / "sätze.csv",
        reward="exact",
        out=tmp_path / "second",
        lora_rank=4,
        **keys,
    )
    third = hone.sft(second, world.conversations, steps=1, out=tmp_path / "third", train_batch_size=8)
    block = yaml.safe_load((third.path / "config.yaml").read_text())["model"]
    assert Path(block["path"]) == Path(first.model_path) and Path(block["lora_adapter_path"]) == Path(second.model_path)
    metrics = hone.evaluate(
        third, folder / "sätze.csv", reward="exact", prompt_key="frage", answer_key="antwort", max_response_length=8
    )
    assert "val-core/default/acc/mean@1" in metrics
