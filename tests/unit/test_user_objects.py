"""Objects of this process: names in a configuration, and the form in which another process receives them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from threading import Lock

import cloudpickle
import pytest

from hone.agents.tools.base import tool
from hone.errors import ConfigError
from hone.registry import Registry, imported
from hone.user_code import load_file
from hone.user_objects import UserObject, in_use, objects_in_use, receive_objects, register_object, user_object


def test_a_name_is_an_import_path_and_a_later_object_replaces_it() -> None:
    numbers: Registry[int] = Registry("number", adopt=lambda value, path: value)
    register_object("function:number", 1)
    assert imported("function:number") == numbers.get("function:number") == 1
    register_object("function:number", 2)
    assert numbers.get("function:number") == 2
    with pytest.raises(ConfigError, match="unknown_name"):
        user_object("function:unknown_name")


def test_objects_are_in_use_for_one_run() -> None:
    entry = register_object("function:number", 1)
    with in_use([entry]):
        assert objects_in_use() == (entry,)
    assert objects_in_use() == ()


@pytest.mark.parametrize("kind", ["function", "tool", "class"])
def test_another_process_needs_no_file_of_the_user(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine_alone.py").write_text(
        "FACTOR = 3\n\ndef triple(number: int) -> int:\n"
        '    """Triple.\n\n    Args:\n        number: any.\n    """\n    return FACTOR * number\n\n'
        "class Base:\n    factor = FACTOR\n\nclass Triples(Base):\n"
        "    def __call__(self, number):\n        return self.factor * number\n"
    )
    module = load_file(tmp_path / "mine_alone.py")
    value = {"function": module.triple, "tool": tool(module.triple), "class": module.Triples}[kind]
    sent = pickle.dumps(UserObject("function:it", value).sent())
    program = (
        "import pickle, sys; entry = pickle.loads(bytes.fromhex(sys.argv[1])); value = entry.value; "
        "value = value() if isinstance(value, type) else value; print(value(14), 'mine_alone' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program, sent.hex()], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["42", "False"]


def test_a_received_object_is_forwarded_unchanged() -> None:
    sent = UserObject("function:doubled", lambda number: 2 * number).sent()
    receive_objects([pickle.loads(pickle.dumps(sent))])
    received = user_object("function:doubled")
    assert received.code == sent.code and received.source_hash == sent.source_hash and received.value(4) == 8
    assert cloudpickle.loads(received.code)(5) == 10


def test_an_object_that_cannot_be_sent_is_named() -> None:
    lock = Lock()
    with pytest.raises(ConfigError) as caught:
        UserObject("function:locked", lambda: lock.locked()).sent()
    assert caught.value.where == "function:locked" and caught.value.fix
