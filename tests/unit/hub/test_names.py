"""Names of the hub, and the files of a dataset's splits."""

from pathlib import Path

import pytest

from hone.errors import HoneError
from hone.hub.download import HubName, parse_hub_name
from hone.hub.get import KNOWN_MODELS, get_model
from hone.hub.resolve import find_splits


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("openai/gsm8k:main", HubName("openai/gsm8k", "main")),
        ("openai/gsm8k:main:train@abc123", HubName("openai/gsm8k", "main", "train", "abc123")),
        ("openai/gsm8k::test", HubName("openai/gsm8k", None, "test")),
        ("a/b@refs/convert/parquet", HubName("a/b", revision="refs/convert/parquet")),
    ],
)
def test_a_name_is_parsed_and_printed_back(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    ["model", "./a/b", "/a/b", "a/b/c", "a/train.parquet", "a/b.jsonl", "s3://bucket/model", "", "~/a/b", "../b"],
)
def test_a_path_is_not_a_name(text: str) -> None:
    assert parse_hub_name(text) is None


def test_a_path_whose_folder_exists_is_not_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_hub_name("runs/model") is not None
    (tmp_path / "runs").mkdir()
    assert parse_hub_name("runs/model") is None


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (
            [
                "README.md",
                "main/train-00000-of-00002.parquet",
                "main/train-00001-of-00002.parquet",
                "socratic/test.parquet",
            ],
            {("main", "train"): 2, ("socratic", "test"): 1},
        ),
        (
            ["data/train-00000-of-00001.parquet", "data/test_prefs-00000-of-00001.parquet"],
            {("default", "train"): 1, ("default", "test_prefs"): 1},
        ),
        (["default/train/0000.parquet", "default/train/0001.parquet"], {("default", "train"): 2}),
        (["train.jsonl", "script.py"], {("default", "train"): 1}),
    ],
)
def test_splits_follow_from_paths(files: list[str], splits: dict[tuple[str, str], int]) -> None:
    assert {part: len(chosen) for part, chosen in find_splits(files, []).items()} == splits


def test_the_card_says_the_splits() -> None:
    files = ["x/one.parquet", "x/two.parquet", "y/held.parquet"]
    card = [
        {"config_name": "all", "data_files": [{"split": "train", "path": "x/*"}, {"split": "test", "path": ["y/*"]}]}
    ]
    assert find_splits(files, card) == {("all", "train"): files[:2], ("all", "test"): files[2:]}


def test_an_unknown_short_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(HoneError) as caught:
        get_model("smollm2-135", tmp_path / "model")
    assert caught.value.code == "E-model" and "smollm2-135m" in caught.value.fix


def test_a_directory_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(HoneError):
        get_model("smollm2-135m", tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"


def test_every_known_model_has_a_licence_and_a_repository() -> None:
    for name, model in KNOWN_MODELS.items():
        assert name == model.name and model.licence and parse_hub_name(model.repository)
