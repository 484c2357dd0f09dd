"""Programs that a launch script runs on the way: what they print, and the scripts that they are given."""

from __future__ import annotations

import datetime
import posixpath
import re

from hone.apps.verl.launch.words import mark

_SHELLS = ("bash", "sh", "zsh")


def output_of(words: list[str], folder: str) -> str | None:
    """Return the output of a command if its words alone determine it, else None.

    Args:
        words: words of the command.
        folder: working directory after the script's changes.
    """
    match words:
        case ["date", *arguments]:
            pattern = next((a[1:] for a in arguments if a.startswith("+")), "%c")
            return datetime.datetime.now().strftime(pattern.replace("%s", "%Y%m%d%H%M%S"))
        case ["pwd"]:
            return folder
        case ["dirname", *_, path]:
            return posixpath.dirname(path) or "."
        case ["basename", path, *suffix]:
            return posixpath.basename(path).removesuffix(suffix[0] if suffix else "")
        case ["realpath" | "readlink" | "echo", *rest]:
            return " ".join(word for word in rest if not re.fullmatch(r"-[a-z]+", word))
        case ["printf", text] if "%" not in text and "\\" not in text:
            return text
        case ["printf", *_]:
            return mark("OUTPUT")
    return None


def inner_script(words: list[str]) -> int | None:
    """Return the index of a script that is given as text (``bash -c 'script'``), or None."""
    for at, word in enumerate(words[:-1]):
        if word.rpartition("/")[2] in _SHELLS:
            option = next((i for i in range(at + 1, len(words) - 1) if re.fullmatch(r"-[a-z]*c", words[i])), None)
            return option + 1 if option is not None else None
    return None
