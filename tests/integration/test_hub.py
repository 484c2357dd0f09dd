"""Models and datasets by name, from a hub on loopback that speaks the public protocol."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pyarrow.parquet as pq
import pytest
from support.hub import LoopbackHub, parquet, serve_hub, use_hub

from hone.config import RLConfig, load_config
from hone.errors import HoneError
from hone.hub import resolve as hub_resolve
from hone.hub.get import get_model

pytestmark = pytest.mark.application("hone/hub")

MODEL, DATASET = "tiny-org/copier", "openai/gsm8k"
QUESTIONS = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(8)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """An empty hub that this process and those it starts use; caches are in the test's folder."""
    with serve_hub() as served:
        use_hub(served, tmp_path, monkeypatch)
        yield served


@pytest.fixture(scope="module")
def model(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model directory with a tokenizer."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    shutil.copytree(tiny_models["tied"], folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def offline(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def settings(*overrides: str) -> RLConfig:
    return load_config(RLConfig, list(overrides))


def test_a_model_is_downloaded_once_without_code_or_pickles(hub: LoopbackHub, model: Path) -> None:
    more = {"modeling_evil.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}
    repository = hub.add_folder("models", MODEL, model, **more)
    config = settings(f"actor_rollout_ref.model.path={MODEL}")
    records = hub_resolve.resolve_names(config)
    path = Path(config.actor_rollout_ref.model.path or "")
    names = {file.name for file in path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & set(more)
    (record,) = records["actor_rollout_ref.model.path"]
    assert record["name"] == MODEL and record["commit"] == repository.revisions["main"][0] == path.name
    assert record["files"]["model.safetensors"]["bytes"] == (path / "model.safetensors").stat().st_size
    assert len(record["files"]["model.safetensors"]["sha256"]) == 64
    count = len(hub.downloads())
    assert hub_resolve.local_model(MODEL) == str(path)
    assert len(hub.downloads()) == count


def test_weights_stay_on_the_hub_when_a_plan_needs_none(hub: LoopbackHub, model: Path) -> None:
    hub.add_folder("models", MODEL, model)
    config = settings(f"actor_rollout_ref.model.path={MODEL}")
    hub_resolve.resolve_names(config, weights=False)
    assert config.actor_rollout_ref.model.path
    assert not [path for path in hub.downloads() if path.endswith(".safetensors")]


def test_a_revision_is_used_and_recorded(hub: LoopbackHub, model: Path) -> None:
    repository = hub.add_folder("models", MODEL, model)
    files = dict(repository.revisions["main"][1])
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | {"marker": 7}).encode()
    repository.commit(files, "v2")
    path = Path(hub_resolve.local_model(f"{MODEL}@v2"))
    assert json.loads((path / "config.json").read_text())["marker"] == 7
    assert path.name == repository.revisions["v2"][0]


def test_a_known_dataset_gets_the_columns_of_training(hub: LoopbackHub) -> None:
    files = {
        "main/train-00000-of-00001.parquet": parquet(QUESTIONS),
        "main/test-00000-of-00001.parquet": parquet(QUESTIONS[:2]),
    }
    hub.add(
        "datasets",
        DATASET,
        {**files, "socratic/train-00000-of-00001.parquet": parquet(QUESTIONS[:1]), "README.md": b"# GSM8K"},
    )
    config = settings(f"data.train_files={DATASET}", f"data.val_files=[{DATASET}::test]")
    records = hub_resolve.resolve_names(config)
    rows = pq.read_table(config.data.train_files).to_pylist()
    assert len(rows) == 8 and rows[3]["reward_model"]["ground_truth"] == "4" and rows[3]["data_source"] == DATASET
    assert rows[3]["prompt"][0] == {"role": "user", "content": "What is 3 + 1?"}
    assert len(pq.read_table(config.data.val_files[0]).to_pylist()) == 2
    assert records["data.train_files"][0]["name"] == f"{DATASET}:main:train"
    assert not [path for path in hub.downloads() if "socratic" in path]


def test_other_datasets_are_read_as_they_are(hub: LoopbackHub) -> None:
    rows = [{"prompt": "p", "data_source": "d"}]
    card = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: files/*\n---\n"
    hub.add(
        "datasets", "me/mine", {"files/a.parquet": parquet(rows), "files/b.parquet": parquet(rows), "README.md": card}
    )
    config = settings("data.train_files=me/mine")
    hub_resolve.resolve_names(config)
    assert [Path(file).name for file in config.data.train_files] == ["a.parquet", "b.parquet"]


def test_a_dataset_without_data_files_is_taken_from_the_converted_branch(hub: LoopbackHub) -> None:
    hub.add("datasets", "me/scripted", {"scripted.py": b"raise SystemExit"})
    hub.add(
        "datasets", "me/scripted", {"default/train/0000.parquet": parquet([{"prompt": "p"}])}, "refs/convert/parquet"
    )
    (file,) = hub_resolve.local_files(["me/scripted"], "train")
    assert pq.read_table(file).to_pylist() == [{"prompt": "p"}]


@pytest.mark.parametrize(("name", "part"), [("me/mine:nope", "subset"), ("me/mine:default:nope", "split")])
def test_a_missing_subset_or_split_names_those_that_exist(hub: LoopbackHub, name: str, part: str) -> None:
    hub.add("datasets", "me/mine", {"data/train-00000-of-00001.parquet": parquet(QUESTIONS)})
    with pytest.raises(HoneError) as caught:
        hub_resolve.local_files([name], "train")
    assert caught.value.code == "E-hub" and part in caught.value.what
    assert {"subset": "default", "split": "train"}[part] in caught.value.fix


def test_a_private_repository_needs_the_token(hub: LoopbackHub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_folder("models", MODEL, model).token = "hf_secret"
    with pytest.raises(HoneError) as caught:
        hub_resolve.local_model(MODEL)
    assert caught.value.code == "E-hub" and "HF_TOKEN" in caught.value.fix
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (Path(hub_resolve.local_model(MODEL)) / "config.json").is_file()
    assert hub.tokens == {"hf_secret"}


def test_a_gated_repository_and_a_missing_revision_are_named(hub: LoopbackHub, model: Path) -> None:
    hub.add_folder("models", "meta/gated", model).gated = True
    hub.add_folder("models", MODEL, model)
    for name, word in (("meta/gated", "gated"), (f"{MODEL}@v9", "v9"), ("nobody/nothing", "nobody/nothing")):
        with pytest.raises(HoneError) as caught:
            hub_resolve.local_model(name)
        assert caught.value.code == "E-hub" and word in caught.value.what


@pytest.mark.usefixtures("offline")
def test_without_a_network_nothing_is_asked_and_the_command_is_named(hub: LoopbackHub) -> None:
    for fetch in (hub_resolve.local_model, lambda name: hub_resolve.local_files([name], "train")):
        with pytest.raises(HoneError) as caught:
            fetch("Qwen/Qwen3-0.6B")
        assert caught.value.code == "E-hub-offline" and "hf download Qwen/Qwen3-0.6B" in caught.value.fix
    assert hub.requests == []


def test_offline_uses_what_was_downloaded(hub: LoopbackHub, model: Path, request: pytest.FixtureRequest) -> None:
    hub.add_folder("models", MODEL, model)
    hub.add("datasets", DATASET, {"main/train-00000-of-00001.parquet": parquet(QUESTIONS), "README.md": b"# GSM8K"})
    online = hub_resolve.local_model(MODEL), hub_resolve.local_files([DATASET], "train")
    request.getfixturevalue("offline")
    hub.requests.clear()
    assert (hub_resolve.local_model(MODEL), hub_resolve.local_files([DATASET], "train")) == online
    assert hub.requests == []


def test_get_writes_an_ordinary_directory(hub: LoopbackHub, model: Path, tmp_path: Path) -> None:
    hub.add_folder("models", MODEL, model)
    brought = get_model(MODEL, tmp_path / "out/model")
    assert MODEL in brought.source and not (tmp_path / "out/model/config.json").is_symlink()
    assert (tmp_path / "out/model/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("problem", "code"), [(httpx2.ConnectError("refused"), "E-hub-offline"), (OSError(28, "full"), "E-hub")]
)
def test_a_dead_network_and_a_full_disk_are_told_apart(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, problem: Exception, code: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise problem

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", fail)
    with pytest.raises(HoneError) as caught:
        hub_resolve.local_files(["me/mine"], "train")
    assert caught.value.code == code
