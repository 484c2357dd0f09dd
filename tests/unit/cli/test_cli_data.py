"""`hone data` and `hone init`: the way from nothing to a model, as typed."""

import subprocess
import sys

from support.messages import raises
from typer.testing import CliRunner

from hone.cli.main import app
from hone.errors import ConfigError, DataError


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def test_from_nothing_to_a_model(tmp_path):
    from transformers import AutoModelForCausalLM

    made = run(
        "data", "make", "arithmetic", "max_number=9", "--out", tmp_path, "--size", 300, "--val-size", 20, "--seed", 3
    )
    assert made.exit_code == 0 and "300 problems" in made.output and "val.parquet: 20 problems" in made.output
    trained = run("data", "tokenizer", "--files", tmp_path / "train.parquet", "--files", tmp_path / "val.parquet", "--out", tmp_path / "t", "--vocab-size", 300)  # fmt: skip
    assert trained.exit_code == 0 and "300 tokens" in trained.output
    made = run("init", "--arch", "qwen3", "--size", "300k", "--tokenizer", tmp_path / "t", "--out", tmp_path / "m")
    count = AutoModelForCausalLM.from_pretrained(tmp_path / "m").num_parameters()
    assert made.exit_code == 0 and f"{count:,} parameters" in made.output


def test_mistakes_reach_the_command_line(tmp_path):
    with raises(ConfigError, "aritmetic", "arithmetic"):
        run("data", "make", "aritmetic", "--out", tmp_path)
    with raises(ConfigError, "'max'"):
        run("data", "make", "arithmetic", "max=3", "--out", tmp_path)
    with raises(DataError, "no.parquet"):
        run("data", "tokenizer", "--files", tmp_path / "no.parquet", "--out", tmp_path / "t")
    assert run("data", "make", "arithmetic").exit_code == 2  # no --out
    assert list(tmp_path.iterdir()) == []


def test_the_commands_are_cheap_to_import():
    heavy = ["torch", "transformers", "pyarrow", "tokenizers", "reasoning_gym"]
    code = f"import hone.cli.data, hone.cli.models, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
