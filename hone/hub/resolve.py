"""Replace names of the hub by local paths, in a configuration or for one model."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.data.convert import Conversion, convert
from hone.data.files import cache_directory
from hone.errors import DataError, did_you_mean
from hone.hub.download import (
    DATA_ENDINGS,
    METADATA_FILES,
    MODEL_FILES,
    Download,
    HubName,
    download,
    list_files,
    parse_hub_name,
)

log = logging.getLogger("hone")


def resolve_names(config: Any, *, weights: bool = True) -> dict[str, list[dict[str, Any]]]:
    """Download what the configuration names on the hub, and put the local paths in its place.

    Args:
        config: a tree; its fields with ``hub`` metadata are read and changed.
        weights: download a model's weights, too; False downloads only what a check needs.

    Returns:
        For every key with hub names, and each of them: name, commit, and hash of every file (see :meth:`Download.record`).

    Raises:
        HoneError: a repository does not exist, or cannot be reached.
    """
    records: dict[str, list[dict[str, Any]]] = {}
    for key, block, item in _hub_fields(config, ""):
        value = getattr(block, item.name)
        listed = value if isinstance(value, list) else [value]
        resolved: list[Any] = []
        for entry in listed:
            name = parse_hub_name(entry) if isinstance(entry, str) else None
            if name is None:
                resolved.append(entry)
                continue
            if item.metadata["hub"] == "model":
                downloaded = _model(str(name), weights)
                resolved.append(str(downloaded.path))
            else:
                files, downloaded = dataset_files(name, "val" if item.name.startswith("val") else "train")
                resolved += [str(file) for file in files]
            records.setdefault(key, []).append(downloaded.record())
        if key in records:
            setattr(block, item.name, resolved if isinstance(value, list) or len(resolved) > 1 else resolved[0])
    return records


def named_runs(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield key, block and name of each field of a model that holds the path of a run or checkpoint."""
    for key, block, item in _hub_fields(config, ""):
        value = getattr(block, item.name)
        if item.metadata["hub"] == "model" and isinstance(value, str):
            folder = Path(value).expanduser()
            model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
            run = any((folder / name).is_file() for name in ("run.json", "checkpoint.json"))
            if not model and (run or "checkpoints" in folder.parts[-3:]):
                yield key, block, item.name


def local_model(path: str | Path) -> str:
    """Return the local directory of a model: the path itself, or the downloaded repository of a hub name."""
    name = parse_hub_name(str(path))
    return str(path) if name is None else str(_model(str(path), weights=True).path)


def local_files(files: Sequence[str], purpose: str) -> list[str]:
    """Return local dataset files: paths unchanged, and the downloaded files of hub names. ``purpose``: "train" or
    "val"; it chooses the split of a name without one.
    """
    local: list[str] = []
    for file in files:
        name = parse_hub_name(file)
        local += [file] if name is None else [str(path) for path in dataset_files(name, purpose)[0]]
    return local


def _model(text: str, weights: bool) -> Download:
    name = parse_hub_name(text)
    assert name is not None
    downloaded = download(name, "model", MODEL_FILES if weights else METADATA_FILES)
    log.info("%s: %s", name, downloaded.path)
    return downloaded


def _hub_fields(tree: Any, prefix: str) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Yield (key, block, field) of every field that may hold a name of the hub."""
    for item in dataclasses.fields(tree):
        value = getattr(tree, item.name)
        if "hub" in item.metadata:
            yield prefix + item.name, tree, item
        elif dataclasses.is_dataclass(value):
            yield from _hub_fields(value, f"{prefix}{item.name}.")


CARD = "README.md"
CONVERTED_REVISION = "refs/convert/parquet"  # branch on which the hub keeps every dataset as parquet
DEFAULT_SPLITS = {"train": ("train",), "val": ("validation", "val", "test", "dev")}
"""Splits that a training or validation key uses when its value names none, in this order."""

_SHARD = re.compile(r"[-_.]?\d+(?:-of-\d+)?$")


@dataclass(frozen=True)
class KnownDataset:
    """Columns and splits of a dataset that are not Hone's."""

    conversion: Conversion | None = None  # how its rows become Hone's; None if they are already
    subset: str | None = None  # subset used when the name has none
    splits: dict[str, tuple[str, ...]] = field(default_factory=dict)  # names of the splits for training and validation


def _questions(data_source: str, question: str, answer: str, ground_truth: str) -> Conversion:
    return Conversion("csv", "chat", data_source, question, answer, ground_truth=ground_truth)


_PREFERENCES = KnownDataset(splits={"train": ("train_prefs",), "val": ("test_prefs",)})

KNOWN_DATASETS: dict[str, KnownDataset] = {
    "openai/gsm8k": KnownDataset(_questions("openai/gsm8k", "question", "answer", "####"), subset="main"),
    "DigitalLearningGmbH/MATH-lighteval": KnownDataset(
        _questions("DigitalLearningGmbH/MATH-lighteval", "problem", "solution", "boxed")
    ),
    "HuggingFaceH4/MATH-500": KnownDataset(_questions("HuggingFaceH4/MATH-500", "problem", "solution", "boxed")),
    "BytedTsinghua-SIA/DAPO-Math-17k": KnownDataset(),
    "HuggingFaceH4/ultrafeedback_binarized": _PREFERENCES,
    "tatsu-lab/alpaca": KnownDataset(Conversion("alpaca", "messages")),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": KnownDataset(Conversion("sharegpt", "messages")),
}
"""Well-known datasets by repository. Rows of other datasets are used as they are."""


def dataset_files(name: HubName, purpose: str) -> tuple[list[Path], Download]:
    """Download the files of a dataset's split, and convert their columns where the dataset is known.

    Args:
        purpose: "train" or "val"; it chooses the split when the name has none.

    Raises:
        DataError: the dataset has no such subset or split, or no file in a readable format.
        HoneError: as :func:`hone.hub.download.download`.
    """
    known = KNOWN_DATASETS.get(name.repository, KnownDataset())
    files = list_files(name)
    revision = name.revision
    if not any(file.endswith(DATA_ENDINGS) for file in files):
        revision = CONVERTED_REVISION
        files = list_files(HubName(name.repository, revision=revision))
    at = HubName(name.repository, revision=revision)
    splits = find_splits(files, _card_configs(at) if CARD in files else [])
    subset = _choose("subset", name.subset or known.subset, sorted({part for part, _ in splits}), name)
    available = sorted({split for part, split in splits if part == subset})
    wanted = (name.split,) if name.split else (*known.splits.get(purpose, ()), *DEFAULT_SPLITS[purpose])
    split = next((candidate for candidate in wanted if candidate in available), None)
    if split is None and name.split is None and purpose == "train" and len(available) == 1:
        split = available[0]
    if split is None:
        split = _choose("split", wanted[0], available, name)
    chosen = splits[subset, split]
    downloaded = download(at, "dataset", [*chosen, CARD])
    exact = HubName(name.repository, subset if subset != DEFAULT_SUBSET else None, split, revision)
    downloaded = Download(exact, "dataset", downloaded.path, downloaded.commit)
    paths = [downloaded.path / file for file in chosen]
    if known.conversion is None:
        return paths, downloaded
    return [_converted(paths, known.conversion, downloaded)], downloaded


DEFAULT_SUBSET = "default"


def find_splits(files: Sequence[str], configs: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[str]]:
    """Return the data files of a repository by (subset, split). ``configs``: the ``configs`` of its card; they take
    precedence over the paths.
    """
    data = sorted(file for file in files if file.endswith(DATA_ENDINGS))
    splits: dict[tuple[str, str], list[str]] = {}
    for config in configs:
        subset = str(config.get("config_name") or DEFAULT_SUBSET)
        entries = config.get("data_files") or []
        entries = [{"split": "train", "path": entries}] if isinstance(entries, str) else entries
        for entry in entries:
            entry = {"split": "train", "path": entry} if isinstance(entry, str) else entry
            patterns = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
            matching = [file for file in data if any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)]
            if matching:
                splits[subset, str(entry.get("split") or "train")] = matching
    if splits:
        return splits
    for file in data:
        splits.setdefault(_by_path(file), []).append(file)
    return splits


def _by_path(file: str) -> tuple[str, str]:
    """Return (subset, split) of a file by its path: [SUBSET/]SPLIT-00000-of-00001.parquet or SUBSET/SPLIT/0000.parquet."""
    *folders, name = file.split("/")
    stem = _SHARD.sub("", name.rpartition(".")[0])
    if not stem and folders:
        stem = folders.pop()
    folders = [folder for folder in folders if folder not in ("data", DEFAULT_SUBSET)]
    return (folders[-1] if folders else DEFAULT_SUBSET), stem


def _card_configs(name: HubName) -> list[dict[str, Any]]:
    from huggingface_hub import DatasetCard

    card = download(name, "dataset", [CARD]).path / CARD
    data = DatasetCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.to_dict()
    configs = data.get("configs")
    return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _choose(what: str, wanted: str | None, available: list[str], name: HubName) -> str:
    if wanted in available:
        return str(wanted)
    if wanted is None and len(available) == 1:
        return available[0]
    if wanted is None and DEFAULT_SUBSET in available:
        return DEFAULT_SUBSET
    if not available:
        raise DataError(
            f"the dataset '{name.repository}' has no file in {', '.join(DATA_ENDINGS)}",
            fix="download and convert it: hone data convert",
            code="E-hub",
        )
    pattern = f"{name.repository}:SUBSET" if what == "subset" else f"{name.repository}:{name.subset or ''}:SPLIT"
    raise DataError(
        f"the dataset '{name.repository}' has no {what} '{wanted}'"
        if wanted
        else f"the dataset '{name.repository}' has {len(available)} {what}s, and the name has none",
        fix=f"{pattern} with {did_you_mean(wanted or '', available)}",
        code="E-hub",
    )


def _converted(paths: Sequence[Path], conversion: Conversion, source: Download) -> Path:
    """Return one parquet file with the converted rows; the cache keeps it by commit and conversion."""
    label = re.sub(r"[^\w.-]+", "--", f"{source.name.repository}-{source.name.subset or ''}-{source.name.split}")
    columns = hashlib.sha256(repr(conversion).encode()).hexdigest()[:8]
    file = cache_directory() / "datasets" / f"{source.commit[:12]}-{columns}" / f"{label}.parquet"
    if not file.exists():
        scratch = file.with_name(f".{os.getpid()}-{file.name}")
        count, left_out = convert(paths, scratch, conversion)
        scratch.replace(file)
        reasons = "".join(f", {number} left out ({reason})" for reason, number in left_out.items())
        log.info("%s: %d rows converted%s", source.name, count, reasons)
    return file
