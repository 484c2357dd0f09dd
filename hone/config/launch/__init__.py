"""Launch scripts: what a shell script would start a training run with, found out without executing it."""

from hone.config.launch.commands import Launch, launches
from hone.config.launch.expansion import ALWAYS_SET, UNDECIDED, open_names, opened, shown
from hone.config.launch.script import Argument, Trouble, follow

__all__ = [
    "ALWAYS_SET",
    "UNDECIDED",
    "Argument",
    "Launch",
    "Trouble",
    "follow",
    "launches",
    "open_names",
    "opened",
    "shown",
]
