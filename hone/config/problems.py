"""One error for several mistakes, so that a user sees all of them in one run."""

from __future__ import annotations

from collections.abc import Sequence

from hone.errors import ConfigError, HoneError


class ConfigProblems(ConfigError):
    """All mistakes in a configuration; ``problems`` holds the single errors."""

    def __init__(self, problems: Sequence[HoneError]) -> None:
        self.problems = list(problems)
        super().__init__(f"{len(self.problems)} problems", code=self.problems[0].code)

    def render(self) -> str:
        """Return every problem in the form of :meth:`HoneError.render`, and their number at the end."""
        return "\n".join([*(problem.render() for problem in self.problems), f"({len(self.problems)} problems)"])


def raise_together(problems: Sequence[HoneError]) -> None:
    """Raise a single problem, or :class:`ConfigProblems` with several; do nothing without problems."""
    problems = list({problem.render(): problem for problem in problems}.values())  # two rules may meet the same mistake
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigProblems(problems)
