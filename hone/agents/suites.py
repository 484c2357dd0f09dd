"""Suites of other packages (lm-eval, inspect-ai), in the Python environments where they are installed, against an endpoint of the model.

A suite that fails has no score: its error says why.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hone.agents.program.process import MODEL, ProgramFailed, run_to_end, versions_in
from hone.errors import ConfigError, HoneError, did_you_mean
from hone.insight.run_files import write_atomically

ENVIRONMENTS = Path("~/.cache/hone/environments")
"""Folder of the environments that are used where none is given, by the name of the package."""


class SuiteError(HoneError):
    """A suite failed, or measured nothing."""

    code = "E-suite"


@dataclass(frozen=True)
class Suite:
    """Tasks of a package that has suites, with further options of its own command."""

    package: str
    tasks: tuple[str, ...]
    options: tuple[str, ...]
    python: str
    version: str  # of the package there


@dataclass(frozen=True)
class TaskScore:
    """Metrics of one task of a suite."""

    suite: str
    version: str  # of the package
    task: str
    task_version: str
    samples: int
    metrics: dict[str, float]  # by their names in metrics of a run


Words = tuple[list[str], dict[str, str]]
Read = tuple[str, str, int, dict[str, Any]]


def _ask_lm_eval(suite: Suite, url: str, max_model_len: int, folder: Path) -> Words:
    model = f"model={MODEL},max_length={max_model_len},num_concurrent=16,base_url={url}/v1"
    if "--apply_chat_template" in suite.options:  # lm-eval cannot tokenize chats by the server
        words = ["local-chat-completions", "--model_args", f"{model}/chat/completions"]
    else:
        words = ["local-completions", "--model_args", f"{model}/completions,tokenizer_backend=remote"]
    words = ["lm_eval", "run", "--model", *words]
    # a key, so that none of the user's is sent
    return [*words, "--output_path", str(folder), "--tasks", ",".join(suite.tasks)], {"OPENAI_API_KEY": "none"}


def _read_lm_eval(folder: Path) -> Iterator[Read]:
    for file in folder.rglob("results_*.json"):
        record = json.loads(file.read_text(encoding="utf-8"))

        def samples(task: str, record: dict[str, Any] = record) -> int:
            count = record["n-samples"].get(task)
            return count["effective"] if count else sum(map(samples, record["group_subtasks"].get(task, ())))

        for task, values in record["results"].items():
            metrics = {name.removesuffix(",none").replace(",", "/"): value for name, value in values.items()}
            metrics.pop("sample_len", None)
            yield task, str(record["versions"].get(task, "")), samples(task), metrics


def _ask_inspect(suite: Suite, url: str, max_model_len: int, folder: Path) -> Words:
    del max_model_len
    words = ["inspect_ai", "eval", *suite.tasks, "--model", f"openai-api/hone/{MODEL}", "--max-retries", "3"]
    words += ["--log-format", "json", "--log-dir", str(folder), "--display", "plain"]
    return words, {"HONE_API_KEY": "none", "HONE_BASE_URL": f"{url}/v1"}


def _read_inspect(folder: Path) -> Iterator[Read]:
    for file in sorted(folder.glob("*.json")):
        log = json.loads(file.read_text(encoding="utf-8"))
        if log["status"] != "success":
            raise SuiteError(f"'{log['eval']['task']}' ended with status {log['status']}", where=str(file))
        samples, metrics = list[int](), dict[str, Any]()
        for score in log["results"]["scores"]:
            done, scored = log["results"]["completed_samples"], score.get("scored_samples")
            samples.append(done if scored is None else min(done, scored))
            name = "/".join(
                filter(None, (score["name"], score.get("reducer")))
            )  # a reducer if there are several epochs
            metrics |= {f"{name}/{metric}": about["value"] for metric, about in score["metrics"].items()}
        yield log["eval"]["task"], str(log["eval"]["task_version"]), min(samples, default=0), metrics


@dataclass(frozen=True)
class _Package:
    install: tuple[str, ...]  # requirements for pip; the first is the package itself
    # returns module, arguments and variables of the command for a suite, URL, context length and folder of results
    ask: Callable[[Suite, str, int, Path], Words]
    read: Callable[[Path], Iterator[Read]]  # yields task, its version, samples and metrics


PACKAGES = {
    "lm-eval": _Package(("lm-eval[api]",), _ask_lm_eval, _read_lm_eval),
    "inspect": _Package(("inspect-ai", "openai"), _ask_inspect, _read_inspect),
}


def read_suites(texts: Sequence[str], pythons: Mapping[str, str], where: str) -> list[Suite]:
    """Read suites as ``lm-eval:TASK,TASK --option``, and find their packages in ``pythons``, by name, or in :data:`ENVIRONMENTS`.

    Raises:
        ConfigError: a text names no suite, or its package is not installed; ``where`` names the key or option.
    """
    suites = []
    for text in texts:
        try:
            words = shlex.split(text)
        except ValueError:
            words = []
        name, _, tasks = words[0].partition(":") if words else ("", "", "")
        names = tuple(filter(None, tasks.split(",")))
        if name not in PACKAGES or not names:
            raise ConfigError(
                f"'{text}' is not a suite with tasks",
                fix=f"PACKAGE:TASK[,TASK], such as lm-eval:gsm8k or inspect:tasks.py@mine. {did_you_mean(name, PACKAGES)}",
                where=where,
            )
        suites.append(Suite(name, names, tuple(words[1:]), *_installed(PACKAGES[name], pythons.get(name), where)))
    return suites


def _installed(package: _Package, given: str | None, where: str) -> tuple[str, str]:
    """Return the interpreter of a package's environment, and the version there."""
    names = [requirement.partition("[")[0] for requirement in package.install]
    folder = ENVIRONMENTS / names[0]
    default = folder.expanduser() / "bin" / "python"
    python = str(Path(given).expanduser()) if given else str(default) if default.is_file() else sys.executable
    versions = versions_in(python, names, where)
    version = versions[names[0]]
    if version is None or None in versions.values():
        install = shlex.join(["install", *package.install])
        place = f"python -m venv {folder} && {folder}/bin/pip {install}"
        raise ConfigError(
            f"{' and '.join(name for name in names if versions[name] is None)} is not installed in {python}",
            why="a suite is run by its package, which may have a Python environment of its own",
            fix=f"{shlex.quote(python)} -m pip {install}" if given else place,
            where=where,
        )
    return python, version


async def measure(
    suite: Suite, url: str, max_model_len: int, folder: Path, *, limit: int = -1, shown: bool = False
) -> list[TaskScore]:
    """Run a suite against an endpoint.

    Args:
        url: address of the endpoint, without ``/v1``.
        folder: gets a folder with the package's own files.
        limit: most samples of a task; -1 means all.
        shown: write what the package prints to standard error.

    Raises:
        SuiteError: it failed, or measured nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    package, results = PACKAGES[suite.package], Path(tempfile.mkdtemp(prefix=f"{suite.package}-", dir=folder))
    words, variables = package.ask(suite, url, max_model_len, results.absolute())
    words += ["--limit", str(limit)] if limit >= 0 else []
    variables["PYTHONSAFEPATH"] = "1"  # no module of the current folder takes the place of one of the package
    name = f"{suite.package}:{','.join(suite.tasks)}"
    try:
        await run_to_end([suite.python, "-m", *words, *suite.options], variables, shown=shown)
    except (ProgramFailed, OSError) as failed:
        raise SuiteError(f"{name} failed: {failed}", where=suite.python) from None
    scores = [_score(suite, *read) for read in package.read(results)]
    if not scores or not all(score.samples for score in scores):
        raise SuiteError(f"{name} measured nothing", where=str(results))
    return scores


def all_metrics(scores: Sequence[TaskScore]) -> dict[str, float]:
    return {name: value for score in scores for name, value in score.metrics.items()}


def write_scores(folder: Path, scores: Sequence[TaskScore]) -> None:
    """Write what suites measured to ``scores.json`` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "scores.json", json.dumps([asdict(score) for score in scores], indent=2) + "\n")


def _score(suite: Suite, task: str, task_version: str, samples: int, values: Mapping[str, Any]) -> TaskScore:
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    metrics = {
        re.sub(r"[^\w./@+-]+", "_", f"val-suite/{suite.package}/{task}/{name}"): float(value)
        for name, value in {**numbers, "samples": samples}.items()
    }
    return TaskScore(suite.package, suite.version, task, task_version, samples, metrics)
