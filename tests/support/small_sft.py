"""The smallest fine-tuning run: a tiny random model whose vocabulary is words, and 32 conversations."""

import json
from pathlib import Path

from support.models import VOCABULARY, tiny_model

PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' ' + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' ' }}{% endif %}{% endfor %}"
)


def make_small_sft(root: Path) -> Path:
    """Write ``model`` and ``rows.jsonl`` below a directory, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tiny_model().save_pretrained(root / "model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(root / "model")
    rows = [
        {"messages": [{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": f"w{i + 1} w{i + 2}"}]}
        for i in range(3, 35)
    ]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def small_sft_settings(root: Path, run: Path, *overrides: str) -> list[str]:
    """Settings of a run over these rows that validates and saves after each of its steps."""
    return [
        f"model.path={root}/model",
        f"data.train_files={root}/rows.jsonl",
        f"data.val_files={root}/rows.jsonl",
        "data.train_batch_size=8",
        "data.max_length=64",
        "optim.lr=1e-2",
        f"trainer.default_local_dir={run}",
        "trainer.logger=[]",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.watchdog_seconds=0",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        *overrides,
    ]
