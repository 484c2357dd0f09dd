"""The list of fast tests that take more than a second of processor."""

from pathlib import Path

from support.budget import reasons, unlisted

ROOT = Path(__file__).resolve().parents[2]


def test_listed_tests_exist() -> None:
    for test, why in reasons().items():
        file, *_, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test
        assert why, test


def test_a_test_over_the_budget_is_named_unless_it_is_listed() -> None:
    listed = next(iter(reasons()))
    assert unlisted({"a.py::quick": 1.9, "a.py::slow[1]": 2.1, "a.py::slower": 3.0, f"{listed}[x]": 9.0}) == [
        "3.0 s  a.py::slower",
        "2.1 s  a.py::slow[1]",
    ]
