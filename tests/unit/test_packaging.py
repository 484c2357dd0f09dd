"""What is released besides the package: images, devcontainer, citation, and what the check of a release compares."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import hone
from hone.installer import UV

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def lines(image: Path, instruction: str) -> list[str]:
    """Arguments of the instruction wherever the file has it, with continued lines joined."""
    text = image.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(f"{instruction} ")]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_are_clean(image: Path) -> None:
    done = subprocess.run([Path(sys.executable).parent / "hadolint", image], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_has_pinned_bases_the_projects_versions_and_no_root(image: Path) -> None:
    for base in lines(image, "FROM"):
        assert re.match(r"\S+:\d+\.\d+\.\d+\S*( |$)", base), f"{base}: no whole version"
    assert lines(image, "USER")[-1] == "1000"
    run = " ".join(lines(image, "RUN"))
    assert f" {UV} " in f"{run} " and "-c constraints.txt" in run
    extras = re.search(r"whl\)\[([\w,]+)\]", run)
    project = (ROOT / "pyproject.toml").read_text()
    assert extras and all(f"\n{extra} = [" in project for extra in extras[1].split(","))


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_what_an_image_copies_exists_and_is_sent_to_the_builder(image: Path) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [line.split()[:-1] for line in lines(image, "COPY") if not line.startswith("--from=")]
    names = {name.removeprefix("./") for words in copied for name in words}
    assert names == sent and all((ROOT / name).exists() for name in names)
    packaged = re.search(r"^readme = \"(.+)\"", (ROOT / "pyproject.toml").read_text(), re.M)
    assert packaged and {packaged[1], "LICENSE", "pyproject.toml"} <= names, "the build reads them"


def test_the_devcontainer_installs_what_the_scripts_install() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert re.fullmatch(r"\S+:1-3\.11-\w+", container["image"])
    script = re.search(r"source (\S+) && (\w+) (\w+)", container["postCreateCommand"])
    assert script and f"\n{script[2]}()" in (ROOT / script[1]).read_text()
    assert f"\n{script[3]} = [" in (ROOT / "pyproject.toml").read_text()


def test_the_citation_has_the_version_and_what_the_format_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == hone.__version__ and citation["license"] == "Apache-2.0"


@pytest.fixture(scope="module")
def release_check() -> ModuleType:
    loader = SourceFileLoader("release_check", str(ROOT / "scripts" / "release_check"))
    spec = spec_from_loader(loader.name, loader)
    assert spec
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def archives(folder: Path, wheel: dict[str, str], sdist: dict[str, str]) -> tuple[Path, Path]:
    """A wheel and an sdist with these files."""
    paths = folder / "hone_rl-1-py3-none-any.whl", folder / "hone_rl-1.tar.gz"
    with zipfile.ZipFile(paths[0], "w") as archive:
        for name, text in {**wheel, "hone_rl-1.dist-info/METADATA": "m"}.items():
            archive.writestr(name, text)
    with tarfile.open(paths[1], "w:gz") as archive:
        for name, text in {**sdist, "PKG-INFO": "m"}.items():
            (folder / "member").write_text(text)
            archive.add(folder / "member", f"hone_rl-1/{name}")
    return paths


def test_a_missing_file_of_either_archive_is_named(release_check: ModuleType, tmp_path: Path) -> None:
    tracked = {"hone/__init__.py", "hone/apps/lab/viewer/page.html", "README.md"}
    everything = dict.fromkeys(tracked, "x")
    package = {name: "x" for name in tracked if name.startswith("hone/")}
    whole = archives(tmp_path, package, everything)
    assert release_check.differences(*whole, tracked) == []
    lacking = archives(tmp_path, {"hone/__init__.py": "x"}, {**everything, "secret.env": "x"})
    assert release_check.differences(*lacking, tracked) == [
        "the wheel lacks hone/apps/lab/viewer/page.html",
        "the sdist has secret.env, which is not in the repository",
    ]
    torch = release_check.pinned("torch")
    assert re.fullmatch(r"torch==[\d.]+", torch), torch


def test_the_extra_all_has_every_extra_but_those_that_choose_a_service_a_device_or_a_developer() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    others = {
        "wandb",
        "mlflow",
        "trackio",
        "swanlab",
        "otel",
        "remote",
        "modelscope",
        "megatron",
        "kernels",
        "docs",
        "dev",
    }

    def inside(extra: str) -> set[str]:
        named = re.findall(r"hone-rl\[([\w,]+)\]", " ".join(extras[extra]))
        return {extra}.union(*(inside(name) for names in named for name in names.split(",")))

    assert inside("all") == extras.keys() - others
    assert inside("dev") >= inside("all")
