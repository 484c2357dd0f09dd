"""The padding token of an exported reward model."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from hone.config.model import ModelConfig
from hone.models.loading import padding_token, set_model_padding, set_tokenizer_padding

VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "<pad>": 5}


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>")), **special
    )


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ({"eos_token": "</s>", "pad_token": "<pad>"}, 5),
        ({"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}, 0),
        ({"eos_token": "</s>", "unk_token": "<unk>"}, 0),
        ({"eos_token": "</s>", "pad_token": "</s>", "bos_token": "<s>"}, None),
    ],
)
def test_the_padding_token_is_not_the_end_of_a_row(special: dict[str, str], expected: int | None) -> None:
    assert padding_token(tokenizer(**special)) == expected


def test_a_padded_batch_scores_like_single_rows(tmp_path: Path) -> None:
    words = tokenizer(eos_token="</s>", pad_token="</s>", unk_token="<unk>", bos_token="<s>")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=6, num_labels=1, eos_token_id=2, **shape)).eval()
    words.save_pretrained(tmp_path)
    set_model_padding(model, ModelConfig(path=str(tmp_path)))
    set_tokenizer_padding(words)
    rows = [[3, 4, 3, 2], [4, 2]]
    padded = words.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        together = model(**{name: padded[name] for name in ("input_ids", "attention_mask")}).logits
        alone = torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows])
    torch.testing.assert_close(together, alone)
