#!/usr/bin/env python3
"""Check the words of the project: the field's terms in code and prose, and the form of commit subjects.

``scripts/lint`` runs it. Without arguments it checks hone/, docs/, README.md and CONTRIBUTING.md; paths as arguments check
those alone. ``--commits`` checks the commits since the form of subjects was agreed. docs/glossary.md explains the terms.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("hone", "docs", "README.md", "CONTRIBUTING.md")
GENERATED = {"docs/glossary.md"}  # the page that explains the words
TRANSLATED = re.compile(r"\.[a-z]{2}\.md$")

WORDS: dict[str, str] = {
    r"\bhouses?\b": "project",
    r"\brooms?\b": "package, or space, capacity",
    r"\bkey-value caches?\b": "KV cache",
    r"\bslabs?\b": "KV tensor",
    r"\bparcels?\b": "chunk",
    r"\bportions?\b": "chunk, share",
    r"\bpublications?\b": "weight sync",
    r"\bparked\b": "session KV cache",
    r"\bcasebook\b": "case table",
    r"\bgolden path\b": "reference implementation",
    r"\bproducts?\b(?! of)": "matmul",
    r"\bparted\b": "split",
    r"\bput together\b": "concatenated, assembled",
    r"\bapart\b(?! from)": "remote, separate",
    r"\bbeside\b": "colocated with, next to, besides",
    r"\bbehind\b(?! (?:one|a|an) (?:queue|endpoint|proxy|server)s?)": "after",
    r"\bstands?\b(?! for\b|-)": "is, are",
    r"\blies?\b": "is, are",
    r"(?<![Tt]here )\bis no (?!longer\b|more\b|less\b)": "is not a",
    r"\bso (?:many|few|long|much)\b(?! (?:as|that)\b)": "this many, N",
    r"\bas far as\b": "where, as long as",
    r"\bwhoever\b": "a caller that",
    r"\bnobody\b": "no process, no code",
    r"\btold\b": "reported, configured, given",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bspoil(?:s|ed|t|ing)?\b": "break",
    r"\btarr(?:y|ies|ied)\b": "delay",
    r"\banew\b": "again",
    r"\bcomes? of\b": "results",
    r"\bgo(?:es)? on\b": "continue, resume",
    r"\bare asked\b|\bis asked\b": "receives the request",
}
"""Home-made wording, as a pattern, and the standard words to use in its place."""

NAMES: dict[str, str] = {
    "found": "what the value is",
    "own": "local_rows, defaults, ...",
    "told": "server_info, reported",
    "asked": "requested, wanted",
    "of": "from_config, parse, count, ...",
    "parcel": "chunk",
    "slab": "kv",
    "casebook": "cases",
}
"""Identifiers that do not say what the value is, and what to name instead."""

OPENERS = re.compile(r"(?:What|Whether|Where|Which|Who|How|That)\b")
FIRST_CHECKED = "e06cf19a05e04abc4c512552b945a572ac3d8be7"
"""Commits after this one are checked; the history before it stays as it is."""
SUBJECT = re.compile(r"[a-z]+(?:\([^)]*\))?!?: \S")
LONGEST_SUBJECT = 72
LONGEST_SENTENCE = 25

Hit = tuple[str, int, str]


def main() -> int:
    """Print every finding; the exit code is 1 when there is one."""
    arguments = sys.argv[1:]
    if arguments == ["--commits"]:
        problems = list(check_commits())
    else:
        files = [file for name in arguments or CHECKED for file in files_below(ROOT / name)]
        problems = [f"{file.relative_to(ROOT)}:{line}: {what}" for file in files for _, line, what in check_file(file)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return bool(problems)


def files_below(path: Path) -> list[Path]:
    """Return the Python files and the English Markdown files at or below a path."""
    files = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
    english = [file for file in files if not TRANSLATED.search(file.name)]
    return [file for file in english if str(file.relative_to(ROOT)) not in GENERATED]


def check_file(file: Path) -> Iterator[Hit]:
    """Yield the findings of one file as (kind, line, message)."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        yield from check_markdown(text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            yield from check_prose(token.string, token.start[0])
    yield from check_tree(ast.parse(text))


def check_prose(text: str, line: int) -> Iterator[Hit]:
    """Yield home-made wording in a piece of prose that begins at ``line``."""
    for number, row in enumerate(text.splitlines(), line):
        for pattern, standard in WORDS.items():
            for match in re.finditer(pattern, row):
                yield "word", number, f"'{match.group(0).strip()}' -> {standard}"


def check_markdown(text: str) -> Iterator[Hit]:
    """Yield home-made wording outside of code blocks."""
    code = False
    for number, row in enumerate(text.splitlines(), 1):
        if row.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield from check_prose(re.sub(r"`[^`]*`", "", row), number)


def check_tree(tree: ast.Module) -> Iterator[Hit]:
    """Yield names that say nothing, and docstrings that open with a fragment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield from _name(node.id, node.lineno)
        elif isinstance(node, ast.arg):
            yield from _name(node.arg, node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _name(node.name, node.lineno)
            yield from _docstring(node, node.name, node.lineno)
        elif isinstance(node, ast.Module):
            yield from _docstring(node, "the module", 1)


def _docstring(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module, name: str, line: int
) -> Iterator[Hit]:
    doc = ast.get_docstring(node) or ""
    if OPENERS.match(doc):
        yield "opener", line, f"docstring of {name}: begin with an imperative or a noun phrase"
    words = len(re.split(r"(?<=[.:])\s|\n\n", doc, maxsplit=1)[0].split())
    if words > LONGEST_SENTENCE:
        yield "sentence", line, f"docstring of {name}: first sentence has {words} words, at most {LONGEST_SENTENCE}"


def _name(name: str, line: int) -> Iterator[Hit]:
    if name.strip("_") in NAMES:
        yield "name", line, f"name '{name}' -> {NAMES[name.strip('_')]}"


def check_commits() -> Iterator[str]:
    """Yield the commits whose subject is too long or has no ``type(scope): what``, and ``perf`` commits without figures.

    A clone without the history (shallow, or an archive) has nothing to check.
    """
    known = subprocess.run(["git", "cat-file", "-e", FIRST_CHECKED], cwd=ROOT, capture_output=True)
    if known.returncode != 0:
        return
    command = ["git", "log", "--no-merges", "--format=%h%x1f%s%x1f%b%x1e", f"{FIRST_CHECKED}..HEAD"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for entry in filter(None, (part.strip("\n") for part in log.split("\x1e"))):
        commit, subject, body = entry.split("\x1f")
        if len(subject) > LONGEST_SUBJECT or not SUBJECT.match(subject):
            yield f"{commit}: subject of {len(subject)} characters, at most {LONGEST_SUBJECT} as type(scope): what: {subject}"
        elif subject.startswith("perf") and not re.search(r"\d", body):
            yield f"{commit}: a perf commit names its figures in the body: {subject}"


if __name__ == "__main__":
    sys.exit(main())
