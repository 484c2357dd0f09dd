"""A trained model on a hub on loopback: what is uploaded, what its card says, and what it keeps to itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from safetensors.torch import load
from support.byte_level import byte_level_model
from support.hub import LoopbackHub, serve_hub, use_hub
from support.tiny_runs import offline_words
from typer.testing import CliRunner

import hone
from hone.cli.main import app
from hone.errors import HoneError

pytestmark = pytest.mark.application("hone/hub", "hone/apps/ops/push.py", "hone/training/export.py")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with serve_hub() as served:
        use_hub(served, tmp_path, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        served.writers = {"hf_writer"}
        yield served


@pytest.fixture(scope="module")
def trained(tiny: Path) -> Path:
    """A run of two steps from a base whose card names a licence."""
    (tiny / "model/README.md").write_text("---\nlicense: apache-2.0\n---\n")
    words = offline_words(
        "sft", tiny, tiny / "run", "model.lora_rank=4", "trainer.total_training_steps=2", "trainer.save_freq=2"
    )
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return tiny / "run"


def push(run: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", str(run), "--push", "me/sums", *words])
    return result.exit_code, f"{result.output}{result.exception!r}"


def test_a_run_is_uploaded_with_a_card_that_says_how_it_was_trained(
    hub: LoopbackHub, trained: Path, tiny: Path
) -> None:
    code, said = push(trained)
    assert code == 0 and f"pushed to {hub.url}/me/sums" in said and "proved" in said
    files = hub.repositories["models", "me/sums"].revisions["main"][1]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "curve.svg"} <= files.keys()
    assert hub.private == {"me/sums": True} and "model.embed_tokens.weight" in load(files["model.safetensors"])
    card = files["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head == {"library_name": "transformers", "license": "apache-2.0", "tags": ["hone"]}
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tiny.glob("*.jsonl")}
    assert any(f"- {name}: sha256 `{digest}`" in card for name, digest in digests.items())
    assert "`model.lora_rank`: 4" in card and "2 steps, seed" in card and "](curve.svg)" in card
    assert str(tiny) not in card and "/" not in card.split("## Data")[1]
    code, said = push(trained, "--no-merge")
    again = hub.repositories["models", "me/sums"].revisions["main"][1]
    assert code == 0 and "adapter_model.safetensors" in again and "library_name: peft" in again["README.md"].decode(), (
        said
    )


def test_one_file_for_another_program_is_uploaded(hub: LoopbackHub, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = byte_level_model(tmp_path / "model", "llama")
    address = hone.push(model, "me/sums", gguf="q8_0", private=False)
    files = hub.repositories["models", "me/sums"].revisions["main"][1]
    assert address == f"{hub.url}/me/sums" and hub.private == {"me/sums": False}
    assert files.keys() == {"README.md", "sums-q8_0.gguf"} and files["sums-q8_0.gguf"].startswith(b"GGUF")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--push", "me"], ["'me'", "USER/NAME"]),
        (["--push", "me/sums", "--gguf", "f16", "--no-merge"], ["--gguf", "--no-merge"]),
        (["--out", "x.gguf", "--gguf", "f16", "--dtype", "float32"], ["--gguf", "--dtype"]),
        (["--push", "me/sums", "--out", "x"], ["one place", "--out DIR"]),
        ([], ["one place", "--push"]),
    ],
)
def test_a_place_that_is_none_is_refused(trained: Path, words: list[str], names: list[str]) -> None:
    result = CliRunner().invoke(app, ["export", str(trained), *words])
    assert result.exit_code != 0
    assert all(name in str(result.exception) for name in names), result.exception


def test_a_hub_that_refuses_or_is_away_is_one_message(hub: LoopbackHub, trained: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    result = CliRunner().invoke(app, ["export", str(trained), "--push", "me/sums"])
    assert "403" in str(result.exception) and "HF_TOKEN" in str(result.exception)
    assert not hub.repositories
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(app, ["export", str(trained), "--push", "me/sums"])
    assert isinstance(result.exception, HoneError) and "me/sums" in str(result.exception)
