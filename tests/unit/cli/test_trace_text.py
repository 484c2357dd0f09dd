"""What `hone trace` prints: texts of datasets and models cannot move the terminal."""

from hone.cli.stored import _aligned, _visible


def test_control_characters_are_shown_as_text() -> None:
    assert _visible("\x1b[31mred\x1b[0m\n\x00\x07 \u202egnp.exe") == "\\x1b[31mred\\x1b[0m\n\\x00\\x07 \\u202egnp.exe"
    assert _visible("77 \u00e9 \u4e2d [bold]") == "77 \u00e9 \u4e2d [bold]"


def test_columns_are_aligned() -> None:
    assert _aligned([("a", "bb", "text"), ("100", "2", "x y")]) == "  a  bb  text\n100   2  x y"
