"""Load a Hugging Face tokenizer directory, and decode token ids with those of images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hone.data.chat_formats import needed_tokens, read_template
from hone.data.images import IMAGE_MARK, image_runs
from hone.data.model_settings import read_settings, reason_of
from hone.errors import ModelError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def load_tokenizer(
    path: str | Path | None, *, trust_remote_code: bool = False, custom_chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local Hugging Face directory without downloads.

    A missing chat template is not an error here; rendering messages raises it.

    Args:
        trust_remote_code: run Python code that ships inside the directory.
        custom_chat_template: a Jinja template, the path of a file with one, or the name of one of
            :data:`~hone.data.chat_formats.CHAT_FORMATS`; it replaces the tokenizer's template.

    Raises:
        ModelError: the directory is missing or has no tokenizer, the tokenizer cannot be loaded, or the template file does
            not exist.
    """
    if path is None:
        raise ModelError("no model or tokenizer directory is given", fix="actor_rollout_ref.model.path=DIR")
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"tokenizer directory '{path}' does not exist", fix="name a local Hugging Face directory")
    if not any((directory / name).is_file() for name in _FILES):
        entries = ", ".join(sorted(entry.name for entry in directory.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"'{path}' has no tokenizer; it has {entries}",
            why="text cannot be tokenized",
            fix="copy the tokenizer files into it, or name another directory with model.tokenizer_path=DIR",
        )
    read_settings(directory)  # transformers builds the model's config, too
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever transformers meets in the files
        try:
            if (directory / "config.json").is_file():
                AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
        except Exception as wrong:  # of the same kinds
            raise ModelError(
                f"'{directory / 'config.json'}' cannot be read: {reason_of(wrong)}",
                where=str(path),
                fix="restore config.json from where the model was published",
            ) from wrong
        raise ModelError(
            f"the tokenizer cannot be loaded: {reason_of(error)}", where=str(path), fix="check the tokenizer files"
        ) from error
    if custom_chat_template is not None:
        set_template(tokenizer, custom_chat_template)
    return tokenizer


def set_template(tokenizer: PreTrainedTokenizerBase, named: str) -> None:
    """Replace the chat template, see :func:`~hone.data.chat_formats.read_template`.

    Raises ModelError: there is no such template, or the vocabulary lacks its tokens.
    """
    tokenizer.chat_template = read_template(named)
    lacking = [token for token in needed_tokens(named) if token not in tokenizer.get_vocab()]
    if lacking:
        raise ModelError(
            f"the chat template '{named}' needs the tokens {', '.join(lacking)}",
            where=str(tokenizer.name_or_path),
            why="the model would spell them in pieces, and no turn would end",
            fix="model.custom_chat_template=PATH of a template for this model",
        )


def stop_tokens(tokenizer: PreTrainedTokenizerBase, *model_dirs: str | Path | None) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's end-of-sequence token and those of the generation configs.

    Chat models often end a turn with another token than a document (Llama 3 has three).
    """
    named: list[Any] = [tokenizer.eos_token_id]
    for model_dir in model_dirs:
        if model_dir and (Path(model_dir) / "generation_config.json").is_file():
            ends = GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id
            named += ends if isinstance(ends, list) else [ends]
    return tuple(dict.fromkeys(int(end) for end in named if end is not None))


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Decode token ids; consecutive tokens of an image are one :data:`IMAGE_MARK`."""
    if min(ids, default=0) >= 0:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
    pieces: list[str] = []
    for image, run in itertools.groupby(ids, key=lambda token: token < 0):
        tokens = list(run)
        if image:
            pieces.append(IMAGE_MARK * image_runs(tokens))
        else:
            pieces.append(str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)))
    return "".join(pieces)


_SPACE = "\u2581"  # mark of a space in the tokens of SentencePiece, which a tokenizer drops in front of the first token


def outside_tokenizer(tokenizer: Any, vocabulary: int) -> Tensor:
    """Return which ids below ``vocabulary`` no token of the tokenizer has, ``[vocabulary]`` bool.

    Embeddings are often padded to a round number. Such an id decodes to nothing.
    """
    outside = torch.ones(vocabulary, dtype=torch.bool)
    outside[[token for token in tokenizer.get_vocab().values() if token < vocabulary]] = False
    return outside


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of every token id from 0; a part of a character is the replacement character, an unused id is empty."""
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    ids = [[number] for number in range(size)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        texts = [str(tokenizer.decode(one)) for one in ids]
    else:
        texts = backend.decode_batch(ids, skip_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    return [
        f" {text}" if token is not None and token.startswith(_SPACE) and not text.startswith(" ") else text
        for token, text in zip(tokens, texts, strict=True)
    ]
