"""Loading a tokenizer, and training a small one from nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hone.errors import ModelError

PAD, END, TURN_START, TURN_END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The chat template of tokenizers made here: ChatML, as Qwen has it."""


def load_tokenizer(
    path: str | None, *, trust_remote_code: bool = False, custom_chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face directory.

    Args:
        path: the directory.
        trust_remote_code: run tokenizer code that ships with it.
        custom_chat_template: Jinja text, or the path of a file that holds it, in place of the directory's own.

    Raises:
        ModelError: no such directory, or no tokenizer in it.
    """
    if not path or not Path(path).is_dir():
        raise ModelError(
            f"'{path}' is not a directory", where="model.path", fix="give a Hugging Face directory with a tokenizer"
        )
    if not any(
        (Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        raise ModelError(
            f"'{path}' holds no tokenizer (no tokenizer.json)",
            where="model.tokenizer_path",
            fix="model.tokenizer_path=<directory with tokenizer.json>, or `hone data tokenizer` to make one",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"cannot load the tokenizer in '{path}': {str(error).splitlines()[0]}",
            where="model.tokenizer_path",
            fix="give a directory with tokenizer.json and tokenizer_config.json",
        ) from error
    if custom_chat_template:
        file = Path(custom_chat_template)
        is_path = "{" not in custom_chat_template
        if is_path and not file.is_file():
            raise ModelError(
                f"no such chat template file '{file}'",
                where="model.custom_chat_template",
                fix="give Jinja text or a file",
            )
        tokenizer.chat_template = file.read_text() if is_path else custom_chat_template
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE whose digits are single tokens (numbers of any length look alike to the model).

    Words keep the space before them, so the same word has few forms. Deterministic for the same texts in the same order.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r"\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
