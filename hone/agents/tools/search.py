"""Search tool over local documents: BM25 (Robertson and Zaragoza 2009) by the library bm25s."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.agents.tools.base import Tool, text_schema
from hone.data.files import read_rows
from hone.errors import ConfigError, DataError
from hone.extras import install_command

SCHEMA = text_schema("search", "Search documents.", "query", "words to look for")


class Index:
    """Index of documents, ranked by the words that they share with a query, those of the language ``stopwords`` left out."""

    def __init__(self, documents: Sequence[str], *, k: int, stopwords: str | None = "en") -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ConfigError(
                "the tool 'search' needs the package bm25s, which is not installed", fix=install_command("search")
            ) from error
        self.documents, self.k = list(documents), min(k, len(documents))
        self._stopwords, self._bm25s = stopwords, bm25s
        self._index = bm25s.BM25()
        self._index.index(self._words(self.documents), show_progress=False)

    def find(self, query: str) -> str:
        """Return the best documents, one per paragraph; omit those that share no word with the query."""
        words = self._words([query])
        if not any(len(ids) for ids in words.ids):
            return "nothing found"
        positions, scores = self._index.retrieve(words, k=self.k, show_progress=False)
        matches = [self.documents[place] for place, score in zip(positions[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(matches, 1)) or "nothing found"

    def _words(self, texts: list[str]) -> Any:
        return self._bm25s.tokenize(texts, stopwords=self._stopwords, show_progress=False)


class Search(Tool):
    """Tool that returns the documents with the best BM25 score for a query."""

    def __init__(
        self,
        files: str | Sequence[str],  # parquet, json or jsonl files of documents
        *,
        text_key: str = "text",
        title_key: str = "title",  # column of the title; optional
        k: int = 3,  # documents per query
        stopwords: str | None = "en",  # language of the ignored words (``en``), or None
    ) -> None:
        super().__init__(SCHEMA)
        paths: list[str | Path] = [files] if isinstance(files, str) else list(files)
        rows = read_rows(paths, required=(text_key,), optional=(title_key,))
        if not rows:
            raise DataError(
                "the files have 0 documents to search", where=str(files), fix="give a file with at least one row"
            )
        titles = [str(row.values.get(title_key) or "") for row in rows]
        texts = [str(row.values[text_key]) for row in rows]
        documents = [f"{title}: {text}" if title else text for title, text in zip(titles, texts, strict=True)]
        self.index = Index(documents, k=k, stopwords=stopwords)

    async def execute(self, state: Any, arguments: Mapping[str, Any], **kwargs: Any) -> str:
        return await asyncio.to_thread(self.index.find, arguments["query"])
