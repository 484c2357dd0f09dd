"""What a served engine says of its arguments reaches the user whole."""

from __future__ import annotations

import pydantic
import pytest

from hone.generation.server.arguments import MAX_CHARACTERS, one_line


class Arguments(pydantic.BaseModel):
    block_size: int = 16
    max_num_seqs: int = pydantic.Field(1, ge=1)
    scheduling: list[int] = []

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Arguments:
        if self.block_size == 7:
            raise ValueError("seven is not a size")
        return self


def test_a_validation_error_names_every_refused_argument() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Arguments.model_validate({"block_size": "x" * 500, "max_num_seqs": -1, "scheduling": ["a", 1]})
    line = one_line(caught.value)
    assert "\n" not in line and len(line) < 400
    assert all(name in line for name in ("block_size=", "max_num_seqs=-1", "scheduling.0='a'"))


def test_an_error_of_the_whole_has_its_message() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Arguments(block_size=7)
    assert one_line(caught.value).endswith("seven is not a size")


def test_a_printed_validation_error_keeps_all_its_lines() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Arguments.model_validate({"block_size": "x", "max_num_seqs": -1})
    line = one_line(RuntimeError(f"the engine cannot start:\n{caught.value}"))
    assert "block_size" in line and "max_num_seqs" in line and "https" not in line
    assert len(one_line(RuntimeError("x" * 10 * MAX_CHARACTERS))) == MAX_CHARACTERS
