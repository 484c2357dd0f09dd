"""Launch scripts: the settings with which a shell script starts a training run, read without executing it."""

from hone.apps.verl.launch.commands import Launch, launches, other_programs
from hone.apps.verl.launch.grammar import End
from hone.apps.verl.launch.script import Trace, follow
from hone.apps.verl.launch.words import ALWAYS_SET, UNDECIDED, Argument, Trouble, open_names, opened, shown

__all__ = [
    "ALWAYS_SET",
    "UNDECIDED",
    "Argument",
    "End",
    "Launch",
    "Trace",
    "Trouble",
    "follow",
    "launches",
    "open_names",
    "opened",
    "other_programs",
    "shown",
]
