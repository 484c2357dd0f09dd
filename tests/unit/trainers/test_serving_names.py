"""Names of renderers and parsers are checked before `hone serve` loads a model, and messages name its options."""

from pathlib import Path

import pytest
from support.templates import tokenizer
from support.tool_model import NAME

from hone.agents.serving.options import OPTIONS, named_by_options
from hone.errors import DataError, HoneError
from hone.trainers.serving import ServeRequest, check_names


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("named") / "model"
    tokenizer(NAME).save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize(
    "names", [("auto", "auto"), ("text_tools", "auto"), ("auto", "hermes"), ("generic", "llama3_json")]
)
def test_known_names_pass(model: str, names: tuple[str, str]) -> None:
    check_names(ServeRequest(model, renderer=names[0], parser=names[1]))


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
