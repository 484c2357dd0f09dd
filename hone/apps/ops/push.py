"""Upload of a trained model to the hub, with a model card that says how it was trained."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hone import __version__
from hone.apps.ops.gguf_export import export_gguf
from hone.config.overrides import one_line
from hone.errors import ConfigError, HoneError
from hone.hub.download import parse_hub_name
from hone.hub.get import KNOWN_MODELS
from hone.insight.curves import points, svg_curve
from hone.insight.run_directory import data_hashes
from hone.insight.run_files import CONFIG, containing_run, read_metrics, read_run
from hone.training.export import base_of_adapter, export, find_actor

CARD, CURVE = "README.md", "curve.svg"
_KEYS = (
    "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.rollout.n", "data.train_batch_size", "actor_rollout_ref.model.lora_rank", "loss.type", "optim.lr",
    "model.lora_rank",
)  # fmt: skip
"""Keys that a card shows, of whatever program trained the model."""


def push_model(
    source: str | Path,
    repository: str,
    *,
    merge: bool = True,
    dtype: str = "auto",
    gguf: str | None = None,
    private: bool = True,
    report: Callable[[str], None],
) -> str:
    """Export a model and upload it with its card; return the address of the repository.

    Args:
        source, merge, dtype, report: as in :func:`hone.training.export.export`.
        repository: USER/NAME on the hub; it is made if it does not exist.
        gguf: upload one GGUF file of this type instead of a model directory.
        private: whether a new repository is private.

    Raises:
        ConfigError: ``repository`` is not such a name.
        HoneError: the hub refuses the upload, or cannot be reached.
    """
    name = parse_hub_name(repository)
    if name is None or str(name) != name.repository:
        raise ConfigError(f"'{repository}' is not a repository of the hub", fix="--push USER/NAME")
    if gguf is not None and (not merge or dtype != "auto"):
        raise ConfigError("--gguf writes merged weights of its own type", fix="leave out --no-merge and --dtype")
    with tempfile.TemporaryDirectory(prefix="hone-push-") as scratch:
        folder = Path(scratch) / "model"
        if gguf is None:
            export(source, folder, merge=merge, dtype=dtype, report=report)
        else:
            export_gguf(source, folder / f"{name.repository.rpartition('/')[2]}-{gguf}.gguf", gguf, report=report)
        for file, text in card_files(find_actor(source), name.repository, adapter=not merge).items():
            (folder / file).write_text(text, encoding="utf-8")
        return _upload(folder, name.repository, private)


def _upload(folder: Path, repository: str, private: bool) -> str:
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        address = str(api.create_repo(repository, private=private, exist_ok=True))
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"Model trained with Hone {__version__}"
        )
    except (HfHubHTTPError, httpx2.TransportError, OSError, RuntimeError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        answered = f"cannot be written to ({one_line(error)[:200]})" if status is None else f"answered {status}"
        raise HoneError(
            f"the hub {answered}: '{repository}' was not uploaded",
            why="nothing of the model is on the hub, or a part of it",
            fix="set HF_TOKEN to a token that may write there (or `hf auth login`), and run the command again"
            if status in (401, 403, 404)
            else f"try again later; `hone export` without --push writes a directory for `hf upload {repository} DIR`",
            code="E-hub",
        ) from error
    return address


def card_files(actor: Path, repository: str, *, adapter: bool) -> dict[str, str]:
    """Return the card of a model, and the curve that it shows, by file name.

    It names files of data by their last part and hash, and no path of this machine.

    Args:
        actor: directory of the model; the run that contains it says how it was trained.
        repository: name for the title.
        adapter: whether the upload is an adapter alone.
    """
    base = base_of_adapter(actor)
    run = containing_run(actor)
    config = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8")) if run and (run / CONFIG).is_file() else {}
    name, licence = _base(base, run, config)
    head: dict[str, Any] = {"library_name": "peft" if adapter and base else "transformers", "tags": ["hone"]}
    head |= {"base_model": name} if name and "/" in name else {}
    head |= {"license": licence} if licence else {}
    lines = [
        f"# {repository.rpartition('/')[2]}",
        "",
        f"Trained with Hone {__version__}" + (f" from {name}." if name else "."),
    ]
    if not licence:
        lines.append("The licence of the base model applies; its files do not name one.")
    files: dict[str, str] = {}
    if run is not None:
        curve = _curve(run)
        if curve:
            files[CURVE] = curve[1]
        lines += ["", *_method(config), *_results(run, curve), *_data(run)]
    front = yaml.safe_dump(head, sort_keys=True, allow_unicode=True)
    return {CARD: f"---\n{front}---\n\n" + "\n".join(lines) + "\n", **files}


def _base(base: Path | None, run: Path | None, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return name and licence of the model that training began with, where they are known."""
    block = config.get("actor_rollout_ref", config).get("model", {}) if config else {}
    folder = Path(base or block.get("path") or "no such folder")
    downloads = read_run(run).get("downloads", {}) if run else {}
    named = next(
        (one["name"] for key, models in downloads.items() if key.endswith("model.path") for one in models), None
    )
    known = next((model for model in KNOWN_MODELS.values() if named == model.repository), None)
    readme = folder / CARD
    head = re.match(r"---\n(.*?)\n---", readme.read_text(encoding="utf-8"), re.S) if readme.is_file() else None
    card = yaml.safe_load(head[1]) if head else {}
    licence = known.licence.lower() if known else card.get("license") if isinstance(card, dict) else None
    if named is None and (folder / "config.json").is_file():
        named = (containing_run(folder) or folder).name
    return named, licence


def _method(config: Mapping[str, Any]) -> Iterator[str]:
    yield "## Method"
    yield ""
    for key in _KEYS:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value not in (None, 0, ""):
            yield f"- `{key}`: {value}"
    yield ""


def _curve(run: Path) -> tuple[str, str] | None:
    """Return the name of the main metric and its picture."""
    rows = read_metrics(run)
    names = sorted({name for row in rows for name in row if name.startswith("val-core/")})
    shown = next(
        (name for name in [*names, "critic/score/mean", "train/loss"] if any(name in row for row in rows)), None
    )
    picture = svg_curve(points(rows, shown), title=shown) if shown else ""
    return (shown, picture) if shown and picture else None


def _results(run: Path, curve: tuple[str, str] | None) -> Iterator[str]:
    record = read_run(run)
    yield "## Results"
    yield ""
    yield f"{record.get('last_step', 0)} steps, seed {record.get('seed')}, status {record.get('status')}."
    if curve:
        values = points(read_metrics(run), curve[0])
        yield f"`{curve[0]}` went from {values[0][1]:.4g} (step {values[0][0]:g}) to {values[-1][1]:.4g} (step {values[-1][0]:g})."
        yield ""
        yield f"![{curve[0]}]({CURVE})"
    yield ""


def _data(run: Path) -> Iterator[str]:
    record = read_run(run)
    yield "## Data and versions"
    yield ""
    for path, digest in record.get("data", {}).items():
        unchanged = data_hashes({"data": {"train_files": path}}).get(path) == digest
        yield f"- {Path(path).name}: " + (
            f"sha256 `{_sha256(Path(path))}`" if unchanged else "changed since, or not here"
        )
    for path, digest in record.get("rewards", {}).items():
        yield f"- {Path(path).name}: hash of its code `{str(digest).removeprefix('sha256:')}`"
    versions = record.get("versions", {})
    yield "- " + ", ".join(f"{name} {version}" for name, version in versions.items())


def _sha256(path: Path) -> str:
    with path.expanduser().open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
