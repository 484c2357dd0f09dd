"""Names of renderers and parsers are checked before `hone serve` loads a model, and messages name its options."""

import json
from pathlib import Path

import pytest
from support.templates import tokenizer
from support.tool_model import NAME

from hone.agents.serving.errors import OPTIONS, named_by_options
from hone.errors import ConfigError, DataError, HoneError
from hone.trainers.served_model import MAX_DEFAULT_LENGTH, ServeRequest, context_length
from hone.trainers.serving import check_names


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("named") / "model"
    tokenizer(NAME).save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (("auto", "auto"), None),
        (("text_tools", "auto"), None),
        (("auto", "hermes"), None),
        (("generic", "llama3_json"), None),
        (("generics", "llama3_json"), "--renderer"),
        (("generic", "text_tools"), "--parser"),
    ],
)
def test_only_unknown_names_are_refused(model: str, names: tuple[str, str], option: str | None) -> None:
    refused = None
    try:
        check_names(ServeRequest(model, renderer=names[0], parser=names[1]))
    except HoneError as error:
        refused = error.where
    assert refused == option


@pytest.mark.parametrize(
    ("names", "option", "known"),
    [(("nonsense", "auto"), "--renderer", "text_tools"), (("auto", "nonsense"), "--parser", "hermes")],
)
def test_an_unknown_name_is_refused_with_all_valid_ones(
    model: str, names: tuple[str, str], option: str, known: str
) -> None:
    with pytest.raises(HoneError) as caught:
        check_names(ServeRequest(model, renderer=names[0], parser=names[1]))
    assert caught.value.where == option and known in caught.value.fix and caught.value.exit_code == 2


def test_a_key_with_its_value_becomes_an_option() -> None:
    key = next(iter(OPTIONS))
    named = named_by_options(DataError("no", fix=f"{key}=text_tools, or another", where=key, code="R35"))
    assert (named.fix, named.where, named.code) == ("--renderer text_tools, or another", "--renderer", "R35")


def test_a_chat_template_that_is_no_file_names_the_option(model: str) -> None:
    with pytest.raises(HoneError) as caught:
        check_names(ServeRequest(model, chat_template="nowhere.jinja"))
    assert "--chat-template" in caught.value.fix and "custom_chat_template" not in caught.value.fix


def configured(folder: Path, positions: int | None) -> str:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions} if positions else {}))
    return str(folder)


@pytest.mark.parametrize(
    ("positions", "wanted", "length"),
    [(1024, None, 1024), (1024, 512, 512), (1024, 1024, 1024), (10**6, None, MAX_DEFAULT_LENGTH), (None, 4096, 4096)],
)
def test_the_context_length_is_within_the_models_positions(
    tmp_path: Path, positions: int | None, wanted: int | None, length: int
) -> None:
    assert context_length(configured(tmp_path, positions), wanted) == length


def test_more_positions_than_the_model_has_must_be_allowed(tmp_path: Path) -> None:
    model = configured(tmp_path, 1024)
    with pytest.raises(ConfigError) as caught:
        context_length(model, 100_000)
    assert "100000" in caught.value.what and "--max-model-len 1024" in caught.value.fix
    assert context_length(model, 100_000, may_exceed=True) == 100_000
    with pytest.raises(ConfigError) as caught:
        context_length(configured(tmp_path, None))
    assert "--max-model-len" in caught.value.fix
