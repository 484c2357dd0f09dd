"""Addresses of the page's data: one function each, from parameters to JSON values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.apps.lab.viewer import (
    comparison,
    episodes,
    labels,
    overview,
    prompts,
    questions,
    selections,
    tokens,
)
from hone.apps.lab.viewer.queries import NUMBERS, WORDS
from hone.apps.lab.viewer.run import Archived, ViewedRun
from hone.errors import HoneError
from hone.rewards.scorers import SCORERS


class Workspace:
    """The runs of one viewer, by name; ``rewards`` are functions that score stored answers again, as ``FILE:NAME``."""

    def __init__(self, runs: Mapping[str, Path], rewards: Sequence[str] = ()) -> None:
        self.rewards = {name: overview.reward_config(name) for name in rewards}
        self.runs = {name: ViewedRun(path, name) for name, path in runs.items()}

    def run(self, parameters: Mapping[str, Any]) -> ViewedRun:
        """Return the run that the parameters name; the first without a name."""
        name = str(parameters.get("run") or next(iter(self.runs)))
        if name not in self.runs:
            raise HoneError(f"no run '{name}'", fix=f"one of {', '.join(self.runs)}", code="E-view-address")
        return self.runs[name]

    def archived(self, parameters: Mapping[str, Any]) -> Archived:
        """Return the archive that the parameters name (``run`` and ``kind``)."""
        return self.run(parameters).archived(str(parameters.get("kind") or "rollouts"))


def integer(parameters: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = parameters.get(name)
    try:
        return default if value in (None, "") else int(value)  # type: ignore[arg-type]
    except ValueError:
        raise HoneError(f"{name}={value} is not a whole number", code="E-view-address") from None


def _runs(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return {
        "runs": [run.state() for run in workspace.runs.values()],
        "rewards": [*workspace.rewards, *SCORERS],
        "columns": {"numbers": NUMBERS, "words": WORDS},
    }


def _summaries(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return [overview.summary(run) for run in workspace.runs.values()]


def _state(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return workspace.run(parameters).state()


def _page(parameters: Mapping[str, str]) -> tuple[str, str, int, int]:
    offset, limit = max(0, integer(parameters, "offset")), max(1, integer(parameters, "limit", 100))
    return parameters.get("q", ""), parameters.get("sort", ""), offset, limit


def _groups(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return prompts.group_list(workspace.archived(parameters), *_page(parameters))


def _answers(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return prompts.answer_list(workspace.archived(parameters), *_page(parameters))


def _group(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    tokens.prepare()  # a reader of a group's answers looks at their tokens next
    archived, uid = workspace.archived(parameters), parameters.get("uid", "")
    group = prompts.one_group(archived, integer(parameters, "step"), uid)
    expected = group["ground_truth"] in (None, "")
    return group | {"columns": overview.row_columns(workspace.run(parameters), archived.kind, uid) if expected else {}}


def _overview(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return overview.overview(workspace.run(parameters))


def _config(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return overview.config(workspace.run(parameters))


def _alerts(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return [vars(alert) for alert in overview.alerts(workspace.run(parameters))]


def _metrics(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return overview.metrics(workspace.run(parameters))


def _timeline(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return overview.step_timeline(workspace.run(parameters).path, integer(parameters, "step", -1))


def _image(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return episodes.picture(workspace.archived(parameters), parameters.get("name", ""))


def _tokens(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return tokens.token_list(workspace.run(parameters), workspace.archived(parameters), *_sequence(parameters))


def _factors(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return tokens.factor_list(workspace.run(parameters), workspace.archived(parameters), *_sequence(parameters))


def _sequence(parameters: Mapping[str, str]) -> tuple[int, str, int, int]:
    """Return step, uid, index and part."""
    numbers = integer(parameters, "index"), integer(parameters, "part")
    return integer(parameters, "step"), parameters.get("uid", ""), *numbers


def _episode(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return episodes.one_episode(
        workspace.archived(parameters),
        integer(parameters, "step"),
        parameters.get("uid", ""),
        integer(parameters, "index"),
    )


def _prompts(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    query, sort, offset, limit = _page(parameters)
    return prompts.prompt_list(workspace.archived(parameters), query, parameters.get("course", ""), sort, offset, limit)


def _prompt(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    archived = workspace.archived(parameters)
    return prompts.one_prompt(
        archived, parameters.get("source", ""), integer(parameters, "row", -1), parameters.get("uid", "")
    )


def _questions(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return [vars(question) for question in questions.QUESTIONS]


def _count(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return questions.count(workspace.archived(parameters), parameters.get("question", ""))


def _compare(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    kind = parameters.get("kind") or "rollouts"
    sides = []
    for side in ("a", "b"):
        archived = workspace.archived({"run": parameters.get(f"run_{side}"), "kind": kind})
        sides += [archived, parameters.get(f"q_{side}", "")]
    return comparison.compare(*sides)


def _labels(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return labels.label_list(workspace.run(parameters), parameters.get("kind") or "rollouts")


def _selection(workspace: Workspace, parameters: Mapping[str, str]) -> Any:
    return selections.selection(workspace.archived(parameters), parameters.get("q", ""), parameters.get("form", "sft"))


def _label(workspace: Workspace, body: Any) -> Any:
    return labels.add_label(workspace.run(body), body.get("kind") or "rollouts", body)


def _rescore(workspace: Workspace, body: Any) -> Any:
    return overview.rescore(workspace.run(body), str(body.get("reward") or ""), workspace.rewards)


READS: dict[str, Callable[[Workspace, Mapping[str, str]], Any]] = {
    "runs": _runs,
    "summaries": _summaries,
    "state": _state,
    "groups": _groups,
    "answers": _answers,
    "group": _group,
    "overview": _overview,
    "alerts": _alerts,
    "config": _config,
    "compare": _compare,
    "labels": _labels,
    "selection": _selection,
    "metrics": _metrics,
    "timeline": _timeline,
    "image": _image,
    "tokens": _tokens,
    "factors": _factors,
    "episode": _episode,
    "prompts": _prompts,
    "prompt": _prompt,
    "questions": _questions,
    "count": _count,
}
"""Answers to GET; a :class:`~hone.apps.lab.viewer.selections.Download` is saved as a file, a :class:`~hone.apps.lab.viewer.episodes.Picture` shown."""
WRITES: dict[str, Callable[[Workspace, Any], Any]] = {"label": _label, "rescore": _rescore}
"""Answers to POST."""
