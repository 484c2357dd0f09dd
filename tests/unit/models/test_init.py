"""Models from nothing: ordinary Hugging Face directories of the size asked for."""

import json

import pytest
import torch
from support.messages import raises
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.apps.lab.data.inspection import train_tokenizer
from hone.errors import ConfigError, ModelError
from hone.models.init import IMAGE_MODELS, find_config, init_model, parse_size
from hone.models.registry import ARCHITECTURES


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.jsonl").write_text(json.dumps({"text": "seven apples and twelve pears make nineteen " * 3}))
    train_tokenizer([folder / "text.jsonl"], folder / "made", vocab_size=300)
    return folder / "made"


@pytest.mark.parametrize("arch", [name for name in ARCHITECTURES.names() if name not in IMAGE_MODELS])
def test_every_architecture_of_text_loads_and_runs(arch, tokenizer, tmp_path):
    count, _ = init_model(arch, "1m", tokenizer, tmp_path)
    assert abs(count - 1e6) < 0.1e6
    model, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == count
    assert all(p.dtype == torch.float32 for p in model.parameters())
    chat = [{"role": "user", "content": "seven apples"}]
    ids = words.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], len(words)) and bool(logits.isfinite().all())
    for holder in (model.config, model.generation_config):
        assert (holder.eos_token_id, holder.pad_token_id) == (words.eos_token_id, words.pad_token_id)
        assert holder.bos_token_id is None
    assert model.config.vocab_size == len(words) and model.config.max_position_embeddings == 1024


@pytest.mark.parametrize("size", ["300k", "1m", "5m", "20m", "150m"])
def test_sizes_are_met(size, tokenizer):
    words = AutoTokenizer.from_pretrained(tokenizer)
    for arch in ("qwen3", "gpt_oss"):
        config = find_config(ARCHITECTURES.get(arch), parse_size(size), words, 1024)
        with torch.device("meta"):
            count = AutoModelForCausalLM.from_config(config).num_parameters()
        assert abs(count / parse_size(size) - 1) < 0.10


def test_the_seed_decides_the_weights(tokenizer, tmp_path):
    state = torch.random.get_rng_state()
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        init_model("qwen3", "300k", tokenizer, tmp_path / folder, seed=seed)
    a, b, c = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in "abc")
    assert a == b != c
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random stream must not move"


@pytest.mark.parametrize("arch", ["qwen3", "gpt_oss"])
def test_attention_tells_tokens_apart_from_the_beginning(arch, tokenizer, tmp_path):
    """Scores of random states are spread by about 1; spread by a tenth they are all alike, and copying takes long to learn."""
    init_model(arch, "1m", tokenizer, tmp_path)
    attention = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[0].self_attn
    states = torch.randn(256, attention.q_proj.in_features, generator=torch.Generator().manual_seed(0))
    query, key = (
        projection(states).unflatten(-1, (-1, attention.head_dim))[:, 0]
        for projection in (attention.q_proj, attention.k_proj)
    )
    if arch == "qwen3":
        query, key = attention.q_norm(query), attention.k_norm(key)
    spread = (query @ key.T * attention.scaling).std().item()
    assert 0.5 < spread < 2


def test_the_context_length_is_kept(tokenizer, tmp_path):
    _, config = init_model("gemma", "300k", tokenizer, tmp_path, context=64)
    assert (config.max_position_embeddings, config.sliding_window) == (64, 64)


@pytest.mark.parametrize(("text", "count"), [("1m", 10**6), ("900K", 900_000), (" 1.5M", 1_500_000), ("2b", 2 * 10**9)])
def test_sizes_are_read(text, count):
    assert parse_size(text) == count


def test_mistakes_of_the_user_are_refused(tokenizer, tmp_path):
    for arguments, error, mentions in (
        (("qwen33", "1m", tokenizer, tmp_path / "out"), ConfigError, ("qwen33", "qwen3")),
        (("qwen3", "1g", tokenizer, tmp_path / "out"), ModelError, ("'1g'",)),
        (("qwen3", "0m", tokenizer, tmp_path / "out"), ModelError, ("'0m'",)),
        (("qwen3", "1m", tmp_path / "no", tmp_path / "out"), ModelError, (tmp_path / "no",)),
        (("qwen3", "10k", tokenizer, tmp_path / "out"), ModelError, ("10,000", "--size")),
    ):
        with raises(error, *mentions):
            init_model(*arguments)
    with raises(ModelError, "--context 0"):
        init_model("qwen3", "1m", tokenizer, tmp_path / "out", context=0)
    (tmp_path / "file").write_text("")
    with raises(ModelError, tmp_path / "file" / "below"):
        init_model("qwen3", "300k", tokenizer, tmp_path / "file" / "below")
    assert not (tmp_path / "out").exists()
