"""Task makers: datasets from nothing, each with held-out rows, worked solutions and a rule that scores answers."""

from hone.data.tasks import arithmetic, countdown, digit_sequence
from hone.data.tasks.base import TASKS, Problem, TaskMaker, make_files, make_rows, task_maker

__all__ = [
    "TASKS",
    "Problem",
    "TaskMaker",
    "arithmetic",
    "countdown",
    "digit_sequence",
    "make_files",
    "make_rows",
    "task_maker",
]
