"""Cache of tokenized datasets, in ``$HONE_CACHE`` or ``~/.cache/hone``, in the folder ``tokens``; it may be deleted at any time.

An entry is named by the hash of everything that determines its tokens: chats, tools, tokenizer, template, arguments and versions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hone import __version__

log = logging.getLogger(__name__)

_FORM = 4
_PACKAGES = ("transformers", "tokenizers", "jinja2")


def cache_folder() -> Path:
    """Return the folder of tokenized datasets."""
    set_by_user = os.environ.get("HONE_CACHE")
    return (Path(set_by_user) if set_by_user else Path.home() / ".cache" / "hone") / "tokens"


class TokenCache:
    """One entry of the cache.

    Args:
        path: its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def entry(
        cls, tokenizer: PreTrainedTokenizerBase, kind: str, kwargs: dict[str, Any], chats: Iterable[tuple[Any, Any]]
    ) -> TokenCache | None:
        """Return the entry of chats with their tools; None where tokens may differ between two calls."""
        template = tokenizer.chat_template
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or "strftime_now" in json.dumps(template):
            return None
        digest = hashlib.sha256()
        settings = [_FORM, kind, kwargs, template, tokenizer.special_tokens_map]
        settings += [__version__, *map(version, _PACKAGES)]
        try:
            digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
            digest.update(tokenizer.backend_tokenizer.to_str().encode())
            for chat in chats:
                digest.update(json.dumps(chat, sort_keys=False).encode() + b"\n")
        except TypeError:  # content that is not JSON, such as images
            return None
        return cls(cache_folder() / f"{digest.hexdigest()}.npz")

    def read(self, count: int) -> list[tuple[list[int], list[int]]] | None:
        """Return the tokens and masks of ``count`` chats; None if they are not in the cache, or the entry is damaged."""
        if not self.path.is_file():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                ids, mask, ends = file["ids"].tolist(), file["mask"].tolist(), file["ends"].tolist()
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            log.warning("%s cannot be read (%s); the dataset is tokenized again", self.path, error)
            return None
        if len(ends) != count or len(ids) != (ends[-1] if ends else 0) or len(mask) not in (0, len(ids)):
            log.warning("%s has other rows than its name says; the dataset is tokenized again", self.path)
            return None
        starts = [0, *ends[:-1]]
        return [(ids[start:end], mask[start:end]) for start, end in zip(starts, ends, strict=True)]

    def write(self, tokens: list[tuple[list[int], list[int]]]) -> None:
        """Write the tokens at once, and log the size; a full disk is only logged."""
        ids = np.fromiter((token for row, _ in tokens for token in row), np.int32)
        mask = np.fromiter((bit for _, row in tokens for bit in row), np.uint8)
        ends = np.cumsum([len(row) for row, _ in tokens], dtype=np.int64)
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
                np.savez(file, ids=ids, mask=mask, ends=ends)
            Path(file.name).replace(self.path)
            whole = sum(entry.stat().st_size for entry in folder.glob("*.npz"))
        except OSError as error:
            log.warning("the tokens of the dataset could not be kept in %s: %s", folder, error.strerror or error)
            return
        log.info(
            "tokens of %d rows are kept in %s: %.1f MB, %.1f MB with those of other datasets; delete it at any time",
            len(tokens),
            folder,
            self.path.stat().st_size / 1e6,
            whole / 1e6,
        )
