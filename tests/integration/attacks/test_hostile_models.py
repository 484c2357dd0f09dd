"""Model directories whose config.json is nonsense: one message of a user's mistake, before anything of that size is built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import tiny_config
from support.launch import hone
from support.messages import raises
from support.tiny_runs import make_model
from transformers import AutoConfig, PreTrainedModel

from hone.config.model import ModelConfig
from hone.data.model_settings import read_settings
from hone.data.tokenizer import load_tokenizer
from hone.errors import ModelError
from hone.models.loading import load_policy, saved_settings
from hone.models.registry import ARCHITECTURES
from hone.preflight.files import weights

pytestmark = pytest.mark.application("hone/models", "hone/data", "hone/preflight")

HUGE = 10**12
ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "a negative width": ({"hidden_size": -32}, "hidden_size=-32"),
    "a width of text": ({"hidden_size": "32"}, "hidden_size='32'"),
    "half a number": ({"hidden_size": 32.5}, "hidden_size=32.5"),
    "a width without end": ({"hidden_size": float("inf")}, "hidden_size=inf"),
    "a switch": ({"hidden_size": True}, "hidden_size=True"),
    "a huge width": ({"intermediate_size": HUGE}, f"intermediate_size={HUGE}"),
    "one huge layer": ({"intermediate_size": [48, HUGE]}, f"intermediate_size={HUGE}"),
    "layers without end": ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers=1000000000"),
    "labels without end": ({"num_labels": HUGE}, f"num_labels={HUGE}"),
    "a huge vocabulary": ({"vocab_size": HUGE}, f"vocab_size={HUGE}"),
    "experts without end": ({"num_experts": HUGE}, f"num_experts={HUGE}"),
    "positions of text": ({"max_position_embeddings": "x"}, "max_position_embeddings='x'"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads=0"),
    "no key-value heads": ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
    "heads that share unevenly": ({"num_key_value_heads": 3}, "num_attention_heads=4"),
    "an empty head": ({"head_dim": 0}, "head_dim=0"),
    "an odd head": ({"head_dim": 7}, "head_dim=7"),
    "no name": ({"model_type": ["qwen3"]}, "model_type=['qwen3']"),
    "a part of text": ({"text_config": "x"}, "text_config='x'"),
    "a quantization of text": ({"quantization_config": "x"}, "quantization_config='x'"),
    "a huge part": ({"vision_config": {"hidden_size": HUGE}}, f"vision_config.hidden_size={HUGE}"),
    "a huge part of a part": (
        {"talker_config": {"text_config": {"vocab_size": HUGE}}},
        f"talker_config.text_config.vocab_size={HUGE}",
    ),
}
"""What a config.json says, and how the message names it."""
UNREADABLE = {
    "a list": "[1]",
    "nothing": "",
    "half an object": '{"model_type": "qwen3", ',
    "nested without end": '{"a":' * 100_000,
    "a number without end": '{"hidden_size":' + "9" * 5000 + "}",
    "bytes": b"\xff\xfe\x00{",
    "a large file": '{"a": "' + "x" * 5_000_000 + '"}',
}
REFUSED_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "null heads": {"num_attention_heads": None},
    "a list of widths": {"hidden_size": [32]},
    "no tokens": {"vocab_size": 0},
    "other sizes than the weights": {"hidden_size": 64},
    "a dtype that is none": {"dtype": "float7"},
    "a dtype that is a module": {"dtype": "nn"},
    "an epsilon of text": {"rms_norm_eps": "tiny"},
    "an activation that is none": {"hidden_act": "evil"},
    "rotation by text": {"rope_parameters": "x"},
    "rotation that is none": {"rope_parameters": {"rope_type": "zzz"}},
    "layers of another number": {"layer_types": ["full_attention"]},
    "a padding token far away": {"pad_token_id": 10**9},
    "an end of text": {"eos_token_id": "x"},
    "labels of text": {"id2label": "x"},
    "a method": {"get_text_config": 5},
    "a part that the model lacks": {"text_config": {"hidden_size": 32}},
}
UNUSUAL = [
    "gemma3n_text",
    "lxmert",
    "clap_audio_model",
    "mamba2",
    "qwen2_vl",
    "deepseek_v3",
    "decision_transformer",
    "deberta",
    "xlnet",
    "gpt2",
    "mpt",
]
"""Architectures whose sizes are lists, objects, Infinity, parts, or have names of their own."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def change(model: Path, changes: dict[str, Any]) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load(model: Path, **options: Any) -> None:
    load_policy(ModelConfig(str(model), **options), device=torch.device("cpu"), seed=0)


def check_doors(model: Path, *words: str) -> None:
    """The tokenizer, the model's settings, the model and preflight refuse it alike."""
    for door in (load_tokenizer, load, lambda folder: saved_settings(ModelConfig(str(folder)))):
        with raises(ModelError, "config.json", *words):
            door(model)
    finding = next(weights("model.path", str(model)))
    assert all(word in finding.error.what for word in ("config.json", *words))


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_size_is_one_message_at_every_door(model: Path, name: str) -> None:
    changes, words = ABSURD[name]
    change(model, changes)
    check_doors(model, words)


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_file_is_one_message_at_every_door(model: Path, name: str) -> None:
    content = UNREADABLE[name]
    (model / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    check_doors(model)


@pytest.mark.parametrize("name", REFUSED_BY_TRANSFORMERS)
def test_what_transformers_refuses_is_one_message(model: Path, name: str) -> None:
    change(model, REFUSED_BY_TRANSFORMERS[name])
    with raises(ModelError, str(model)):
        load(model)
    try:
        load_tokenizer(model)
    except ModelError as error:
        assert "config.json" in error.what  # noqa: PT017 - some files are refused with the weights only


@pytest.mark.parametrize("size", ["vocab_size", "hidden_size", "intermediate_size"])
def test_a_size_that_the_weights_do_not_have_allocates_nothing(model: Path, size: str, monkeypatch) -> None:
    change(model, {size: 10**6})
    monkeypatch.setattr(PreTrainedModel, "_initialize_missing_keys", None)  # what gives such tensors storage
    with raises(ModelError, str(model / "model.safetensors"), "1000000"):
        load(model)


def test_an_absurd_size_among_the_overrides_is_refused(model: Path) -> None:
    with raises(ModelError, "num_hidden_layers=1000000000"):
        load(model, override_config={"num_hidden_layers": 10**9})


@pytest.mark.parametrize("kind", [*ARCHITECTURES, "mistral", "gemma2", "gpt_oss", *UNUSUAL])
def test_settings_of_real_architectures_are_accepted(tmp_path: Path, kind: str) -> None:
    settings = AutoConfig.for_model(kind) if kind in UNUSUAL else tiny_config(kind)
    settings.save_pretrained(tmp_path)
    assert read_settings(tmp_path)["model_type"] == settings.model_type


@pytest.mark.parametrize("command", ["plan", "generate"])
def test_commands_end_with_the_message(model: Path, tmp_path: Path, command: str) -> None:
    change(model, {"num_hidden_layers": 10**9, "layer_types": None})
    words = [f"actor_rollout_ref.model.path={model}"] if command == "plan" else [model, "hi", "--max-tokens", 2]
    ended = hone(command, *words, log=tmp_path / "log")
    assert (ended.code, "Traceback" in ended.output) == (2, False), ended.output
    assert "num_hidden_layers=1000000000" in ended.output and "Fix:" in ended.output
