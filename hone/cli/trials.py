"""`hone twins` and `hone sweep`: training runs, each in a process of its own, that are compared."""

from __future__ import annotations

import itertools
import math
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import ConfigName, ConfigPath, Json, Kind, Of, Overrides, Preset
from hone.cli.output import new_console, new_table, number, print_json
from hone.config.environment import written_leaves
from hone.config.load import load_config
from hone.config.trees import TREES
from hone.errors import ConfigError, HoneError
from hone.insight.run_files import RUN

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MOST_TRIALS = 10_000
_MOST_REPEATS = 100_000  # draws in a row that repeat a trial, after which all values of narrow intervals count as drawn


@dataclass(frozen=True)
class SweepAxis:
    """Key with several values."""

    key: str
    values: tuple[str, ...] = ()  # its values as override texts; empty for an interval
    low: float = 0.0  # lower end of an interval
    high: float = 0.0  # upper end of an interval
    logarithmic: bool = False  # True for draws that are uniform in the logarithm
    whole: bool = False  # True for an interval of whole numbers

    @property
    def size(self) -> float:
        """Number of different values; infinite for an interval of real numbers."""
        if self.values:
            return len(self.values)
        return int(self.high) - int(self.low) + 1 if self.whole else math.inf

    def draw(self, generator: random.Random) -> str:
        if self.values:
            return generator.choice(self.values)
        if self.whole and not self.logarithmic:
            return str(generator.randint(int(self.low), int(self.high)))
        share = generator.random()
        if self.logarithmic:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        return str(round(value)) if self.whole else f"{value:.6g}"


def parse_sweep(words: Sequence[str]) -> tuple[list[str], list[SweepAxis]]:
    """Separate the overrides that sweep a key from those that set one value.

    Returns the overrides with one value, unchanged; and an axis for each of the others.

    Raises ConfigError: an override is malformed, or its values cannot be listed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    from hone.config.overrides import one_line

    parser, fixed, axes = OverridesParser.create(), [], []
    for word in words:
        try:
            (override,) = parser.parse_overrides([word])
        except OverrideParseException as error:
            raise ConfigError(
                f"'{word}' cannot be read: {one_line(error)}",
                fix="key=1,2,3, key=range(1,10,3), key=choice(a,b) or key=interval(0.1,1)",
                where="command line",
            ) from None
        if override.is_sweep_override():
            axes.append(_axis(override, word))
        else:
            fixed.append(word)
    keys = [axis.key for axis in axes]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        raise ConfigError("is swept twice", fix=f"write all values in one list: {repeated}=1,2,3", where=repeated)
    return fixed, axes


def _axis(override: Override, word: str) -> SweepAxis:
    from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, RangeSweep, Transformer

    key, sweep = override.get_key_element(), override.value()
    if isinstance(sweep, ChoiceSweep | RangeSweep):
        listed = (str(value) for value in override.sweep_iterator(transformer=Transformer.encode))
        values = tuple(dict.fromkeys(listed))  # a value that is written twice is one trial
        if not values:
            raise ConfigError("has no values", fix=f"{key}=1,2,3", where=word)
        return SweepAxis(key, values)
    if not isinstance(sweep, IntervalSweep) or sweep.start is None or sweep.end is None:
        raise ConfigError(
            "names values that only Hydra's config groups have", fix=f"list them: {key}=choice(a,b)", where=word
        )
    low, high, logarithmic = float(sweep.start), float(sweep.end), "log" in sweep.tags
    if low >= high or (logarithmic and low <= 0):
        raise ConfigError(
            f"the interval from {low:g} to {high:g} is empty"
            if low >= high
            else "a logarithmic interval begins above 0",
            fix=f"{key}=interval(0.1,1)",
            where=word,
        )
    whole = isinstance(sweep.start, int) and isinstance(sweep.end, int)
    return SweepAxis(key, low=low, high=high, logarithmic=logarithmic, whole=whole)


def grid(axes: Sequence[SweepAxis]) -> list[dict[str, str]]:
    """Return all combinations, the last axis fastest.

    Raises ConfigError: an axis is an interval, or there are too many combinations.
    """
    interval = next((axis for axis in axes if not axis.values), None)
    if interval is not None:
        raise ConfigError(
            "an interval has no grid", fix="--random N draws N trials from it, or list values", where=interval.key
        )
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_TRIALS:
        raise ConfigError(f"the grid has {count:,} trials", fix="--random N draws N of them", where="command line")
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def draw_trials(axes: Sequence[SweepAxis], count: int, seed: int) -> list[dict[str, str]]:
    """Return ``count`` different random combinations, or all if there are fewer.

    The first trials of a larger draw are those of a smaller one.
    """
    generator, repeats = random.Random(seed), 0
    trials: dict[tuple[str, ...], None] = {}
    while len(trials) < min(count, math.prod(axis.size for axis in axes)) and repeats < _MOST_REPEATS:
        values = tuple(axis.draw(generator) for axis in axes)
        repeats = repeats + 1 if values in trials else 0
        trials[values] = None
    return [dict(zip((axis.key for axis in axes), values, strict=True)) for values in trials]


if TYPE_CHECKING:
    from hone.apps.lab.sweeps import SweepResult
    from hone.apps.lab.twins import TwinPair


LOG = "output.log"
_ALL = 1_000_000
_SHOWN = 12  # last lines of a failed run's output in the error


@dataclass(frozen=True)
class Trial:
    words: tuple[str, ...]  # arguments of the `hone` command
    directory: Path
    cwd: Path | None = None  # directory in which the command runs; None means the current one

    @property
    def finished(self) -> bool:
        """True if the run has ended with all its steps."""
        from hone.insight.run_directory import RunStatus, read_run

        return (self.directory / RUN).exists() and read_run(self.directory).get("status") == RunStatus.FINISHED.value


def settings_of(program: str, directory: Path, overrides: Mapping[str, Any]) -> list[str]:
    """Return overrides of a trial: its directory, resuming, all validation answers, and the given keys."""
    from hone.config.overrides import hydra_value

    keys: dict[str, Any] = {"trainer.default_local_dir": str(directory), "trainer.resume_mode": "auto"}
    if program == "train":
        keys["trainer.log_val_generations"] = _ALL
    return [f"{key}={hydra_value(value)}" for key, value in (keys | dict(overrides)).items()]


def run_trial(trial: Trial) -> None:
    """Train a run to its end, its output in ``output.log`` of the run directory; a run that was cut off is resumed."""
    trial.directory.mkdir(parents=True, exist_ok=True)
    log = trial.directory / LOG
    with log.open("ab") as output:
        command = [sys.executable, "-m", "hone.cli.main", *trial.words]
        with _Forwarding() as forwarding:
            process = subprocess.Popen(
                command,
                cwd=trial.cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = forwarding.wait(process)
    if forwarding.interrupted or code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN:]
        raise HoneError(
            f"the run ended with exit code {code}:\n    " + "\n    ".join(lines),
            where=str(trial.directory),
            why="a comparison needs all its runs",
            fix="correct what the message above names and run the same command: finished runs are not repeated",
            code="E-runs",
        )


class _Forwarding:
    """Pass SIGINT and SIGTERM on to a run, which saves and ends; a second one ends it at once."""

    def __init__(self) -> None:
        self.interrupted = False  # True after the first signal
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Forwarding:
        for code in (signal.SIGINT, signal.SIGTERM):
            self._previous[code] = signal.signal(code, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for code, handler in self._previous.items():
            signal.signal(code, handler)

    def _forward(self, number: int, frame: object) -> None:
        self.interrupted = True
        if self._process is None:
            self._waiting.append(number)
        else:
            self._process.send_signal(number)

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Return the exit code of the run when it has ended."""
        self._process = process
        for code in self._waiting:
            process.send_signal(code)
        return process.wait()


def file_words(file: Path, preset: str | None, overrides: Sequence[str]) -> list[str]:
    """Return the arguments by which a training command reads a configuration file."""
    chosen = ["--preset", preset] if preset else []
    return ["--config-path", str(file.parent), "--config-name", file.name, *chosen, *overrides]


def twins(
    first: Annotated[Path, typer.Argument(metavar="A.yaml", help="first configuration")],
    second: Annotated[Path, typer.Argument(metavar="B.yaml", help="second configuration")],
    overrides: Overrides = None,
    program: Of = Kind.train,
    preset: Preset = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="score of a pair; default: validation score, else training reward, else loss"),
    ] = None,
    margin: Annotated[
        float, typer.Option("--margin", help="smallest difference that matters, in units of the score")
    ] = 0.02,
    confidence: Annotated[
        float, typer.Option("--confidence", help="1 minus the error rate of each outcome", min=0.5, max=0.999)
    ] = 0.95,
    max_pairs: Annotated[
        int, typer.Option("--max-pairs", help="end without a decision after this many pairs", min=1)
    ] = 20,
    first_seed: Annotated[
        int, typer.Option("--first-seed", help="seed of the first pair; the next has one more", min=0)
    ] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="folder of the runs; default runs/twins/A-B")] = None,
    as_json: Json = False,
) -> None:
    """Train A and B with the same seeds, one pair after another, and stop as soon as the outcome is certain.

    Both runs of a pair draw the same prompts and random numbers, and are compared prompt by prompt. The test may be looked at
    after every pair. The same command continues after an interruption; finished runs are not repeated.
    """
    from hone.apps.lab import twins
    from hone.apps.lab.paired import Outcome

    for file in (first, second):
        if not file.is_file():
            raise HoneError(f"no file '{file}'", fix="hone twins A.yaml B.yaml, two configuration files", code="E-runs")
    if margin <= 0:
        raise HoneError(f"--margin {margin:g} is not positive", fix="--margin 0.02", code="E-runs")
    out, given = out or Path("runs/twins") / f"{first.stem}-{second.stem}", list(overrides or ())
    configs = [_config(program, file, preset, given) for file in (first, second)]
    twins.open_record(out, configs)
    settings = twins.TwinsSettings(margin, confidence, max_pairs, metric)
    equal, pairs = twins.equal_configs(configs), []
    decision = twins.twins_decision(pairs, settings, equal)
    for seed in range(first_seed, first_seed + max_pairs):
        for arm, file in zip(twins.ARMS, (first, second), strict=True):
            _train(program, file, preset, given, seed, twins.pair_directory(out, seed, arm))
        pairs.append(twins.read_pair(out, seed, metric))
        decision = twins.twins_decision(pairs, settings, equal)
        if not as_json:
            typer.echo(_shown(pairs[-1]))
        if decision.outcome is not Outcome.STILL_NOISE:
            break
    verdict = twins.verdict_text(decision, pairs, settings)
    result = twins.write_outcome(out, pairs, decision, settings, verdict)
    if as_json:
        print_json(result)
    else:
        typer.echo(verdict)


def _config(program: Kind, file: Path, preset: str | None, overrides: list[str]) -> dict[str, Any]:
    tree = TREES[program.value]
    config = load_config(tree, overrides, preset=preset, config_path=file.parent, config_name=file.name)
    return dict(written_leaves(config))


def _train(program: Kind, file: Path, preset: str | None, overrides: list[str], seed: int, directory: Path) -> None:
    keys = settings_of(program.value, directory, {"trainer.seed": seed})
    trial = Trial((program.value, *file_words(file, preset, [*overrides, *keys])), directory)
    if not trial.finished:
        typer.echo(f"training {directory}", err=True)
        run_trial(trial)


def _shown(pair: TwinPair) -> str:
    measured = f"A {pair.first:.4g}, B {pair.second:.4g}, difference {pair.difference:+.4g}"
    return f"seed {pair.seed}: {measured} ({pair.score}, {pair.prompts} prompts)"


def sweep(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="key=values",
            help="overrides; several values are swept: key=1,2,3, key=range(1,10,3), key=choice(a,b), key=interval(0.1,1)",
        ),
    ] = None,
    program: Of = Kind.train,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    draws: Annotated[
        int | None, typer.Option("--random", help="train this many random draws instead of the grid", min=1)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="seed of the random draws")] = 0,
    metric: Annotated[str | None, typer.Option("--metric", help="score of a trial; default as in hone twins")] = None,
    out: Annotated[Path, typer.Option("--out", help="folder of the runs")] = Path("runs/sweep"),
    on_ray: Annotated[bool, typer.Option("--ray", help="trials are tasks of a Ray cluster")] = False,
    address: Annotated[str | None, typer.Option("--address", help="Ray cluster; default: one on this machine")] = None,
    cpus: Annotated[float, typer.Option("--cpus", help="cores of a trial on Ray", min=0)] = 1,
    gpus: Annotated[float, typer.Option("--gpus", help="GPUs of a trial on Ray", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Train every combination of the given values, or random ones, and rank them.

    The grammar is that of Hydra's multirun; tag(log,interval(1e-6,1e-3)) draws on a logarithmic scale. The same command continues
    after an interruption, and with more values it trains only the new ones. The plot is sweep.png in the folder.
    """
    from hone.apps.lab.sweeps import draw_sweep, open_sweep, read_sweep

    fixed, axes = parse_sweep(overrides or [])
    if not axes:
        raise ConfigError(
            "no key has several values", fix="list them: actor_rollout_ref.actor.optim.lr=1e-5,1e-4", where="hone sweep"
        )
    trials = grid(axes) if draws is None else draw_trials(axes, draws, seed)
    options = {"preset": preset, "config_path": config_path, "config_name": config_name}
    source = {name: value for name, value in options.items() if value is not None}
    lines = [[*fixed, *(f"{key}={value}" for key, value in values.items())] for values in trials]
    hashes = [_checked(program, line, source) for line in lines]
    directories = open_sweep(out, {"command": program.value, "overrides": fixed, **source}, trials, hashes)
    jobs = [_job(program, *pair, source, on_ray) for pair in zip(lines, directories, strict=True)]
    left = [job for job in jobs if not job.finished]
    ended = _on_ray(left, address, cpus, gpus) if on_ray else _here(left)
    failures = [message for message in ended if message]
    result = read_sweep(out, metric)
    if result.score:
        draw_sweep(out / "sweep.png", result)
    _show(result, as_json)
    if failures:
        raise HoneError(
            f"{len(failures)} of {len(trials)} trials failed; the first: {failures[0]}",
            fix="correct it and run the same command: finished trials are not repeated",
            where=str(out),
            code="E-runs",
        )


def _checked(program: Kind, line: Sequence[str], source: Mapping[str, str]) -> str:
    from hone.apps.lab.sweeps import config_hash

    config = load_config(
        TREES[program.value],
        list(line),
        preset=source.get("preset"),
        config_path=source.get("config_path"),
        config_name=source.get("config_name"),
        by_method=True,
    )
    return config_hash(dict(written_leaves(config)))


def _job(program: Kind, line: Sequence[str], path: Path, source: Mapping[str, str], on_ray: bool) -> Trial:
    """Return the command of a trial; on Ray it has a whole path, and runs in this command's directory."""
    directory = path.absolute() if on_ray else path
    named = [word for name, value in source.items() for word in (f"--{name.replace('_', '-')}", value)]
    keys = settings_of(program.value, directory, {})
    return Trial((program.value, *named, *line, *keys), directory, Path.cwd() if on_ray else None)


def _here(jobs: Sequence[Trial]) -> Iterator[str]:
    """Train trials one after another; yield the error of each, empty for none."""
    for at, job in enumerate(jobs, 1):
        typer.echo(f"trial {at} of {len(jobs)}: {job.directory}", err=True)
        yield attempt(job)


def _on_ray(jobs: Sequence[Trial], address: str | None, cpus: float, gpus: float) -> Iterator[str]:
    """Train trials as tasks of a Ray cluster; yield the error of each, empty for none."""
    from hone.cluster.ray.trials import run_tasks

    if not jobs:
        return
    for index, message in run_tasks(attempt, jobs, cpus=cpus, gpus=gpus, address=address):
        typer.echo(f"trial {jobs[index].directory} ended", err=True)
        yield message


def attempt(job: Trial) -> str:
    """Train a trial; return the error, empty for none."""
    try:
        run_trial(job)
    except HoneError as error:
        return f"{error.where}: {error.what}"
    return ""


def _show(result: SweepResult, as_json: bool) -> None:
    from hone.cli.runs import print_confidence

    if as_json:
        lead = result.lead and result.lead.record()
        print_json(vars(result) | {"trials": [vars(trial) for trial in result.trials], "lead": lead})
        return
    keys = list(dict.fromkeys(key for trial in result.trials for key in trial.values))
    table = new_table("trial", *(f"{key}>" for key in keys), f"{result.score or 'score'}>", "status")
    for trial in result.trials:
        cells = [trial.values.get(key, "") for key in keys]
        table.add_row(trial.directory.name, *cells, number(trial.score), trial.status)
    console = new_console()
    console.print(table)
    print_confidence(console, [result.lead] if result.lead else [])
