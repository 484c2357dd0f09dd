"""The names of a solution's module, as the process that runs it describes them."""

import types

import pytest

from hone.rewards.scorers.assertion_program import _find


class Wrong(ValueError):
    """An exception of the solution's own."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [(types, "import"), (types.SimpleNamespace, "value"), (Wrong, "error"), (Wrong.__init__, "value"), (3, "value")],
)
def test_only_members_of_known_modules_are_imported_anew(value, kind):
    module = types.ModuleType("solution")
    module.name = value
    assert _find(module, ["name", "other"])["name"][0] == kind
