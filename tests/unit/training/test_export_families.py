"""An exported directory of every architecture, loaded by plain transformers, has the trained model's logits."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import image_models
from support.families import model_of, tiny_config
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from hone.data.tokenizer import load_tokenizer
from hone.models.registry import ARCHITECTURES
from hone.training.export import export

pytestmark = pytest.mark.application("hone/training", "hone/models")

WAYS = {
    "full": None,
    "lora": {"target_modules": ["o_proj", "down_proj"]},
    "head": {"target_modules": ["o_proj", "lm_head"]},
    "saved": {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]},
}


NAMES = {("lfm2", "o_proj"): "out_proj", ("lfm2", "down_proj"): "w2"}
"""Layers that a family names otherwise."""


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", sorted({*ARCHITECTURES, "gpt_oss"}))
def test_an_export_has_the_logits_of_the_trained_model(tmp_path, name, tied, way):
    config = tiny_config(name)
    config.tie_word_embeddings = tied
    model = model_of(config)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0")
    for folder in ("base", "actor"):
        tokenizer.save_pretrained(tmp_path / folder)
    model.save_pretrained(tmp_path / ("actor" if WAYS[way] is None else "base"))
    if WAYS[way] is not None:
        torch.manual_seed(1)
        keys = {key: [NAMES.get((name, one), one) for one in names] for key, names in WAYS[way].items()}
        settings = LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", **keys)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(0.1 * value.requires_grad * torch.randn_like(value))
        model.save_pretrained(str(tmp_path / "actor"))
    export(tmp_path / "actor", tmp_path / "out")
    ids = torch.arange(3, 21).reshape(2, 9)
    with torch.no_grad():
        written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()(ids).logits
        torch.testing.assert_close(written, model.eval()(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arch", image_models.ARCHITECTURES)
def test_an_export_of_a_model_that_reads_images_has_the_trained_logits(tmp_path, arch):
    directory = image_models.image_model(tmp_path, arch)
    torch.manual_seed(1)
    base = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=7, target_modules="all-linear"))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * value.requires_grad * torch.randn_like(value))
    load_tokenizer(directory).save_pretrained(tmp_path / "actor")
    model.save_pretrained(str(tmp_path / "actor"))
    export(tmp_path / "actor", tmp_path / "out")
    written = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens, _, images = image_models.rows_of(directory)[0]
    with torch.no_grad():
        logits = [image_models.plain_logits(one, directory, tokens, images) for one in (written, model.eval())]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
