"""For all tests: hypothesis judges results, not how long an example took on a busy machine; Ray's workers are forks; long tests come first."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer.main
import typer.testing
from hypothesis import settings
from support.budget import unlisted
from support.choice import ABOUT, chosen, is_about, left_out, paths_of
from support.cpu import cpu_seconds
from support.examples import examples

if TYPE_CHECKING:
    from support.forked_python import Forks

for package in ("benchmarks/gpu_simulation", "scripts/pages"):
    # these two alone: with their folders on the path, a script there would hide a user's file of the same name
    folder = Path(__file__).parents[1] / package
    spec = importlib.util.spec_from_file_location(folder.name, folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[folder.name])

typer.testing._get_command = functools.cache(typer.main.get_command)  # it takes as long as a short command

settings.register_profile("unhurried", examples())
settings.load_profile("unhurried")

BEGAN = time.monotonic()
SECONDS: dict[str, float] = {}
"""Of each test so far."""
CPU: dict[str, list[float]] = {}
"""Of each phase of a test that runs."""
FAST: dict[str, float] = {}
"""Seconds of processor of the fast tests themselves, without their fixtures."""
MEASURED = pytest.StashKey[float]()
LONG = (
    *("test_lost_runs", "test_plan_memory", "test_preferences", "test_docs", "test_cluster_templates"),
    *("test_lost_replicas", "test_ray_runtime", "test_lifecycle_repeat", "engine_conformance"),
)
"""Modules with tests that take long, the longest first; the last needs no world, which another process may be making meanwhile."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="K/N: a part of the tests that name what they are about")
    parser.addoption(
        "--changed", help="file with a changed path a line: choose tests that are about them, see support/choice.py"
    )
    parser.addoption(
        "--minutes", type=float, default=0.0, help="after which no further such test begins; 0 for no limit"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tokenized datasets and trusted runs of the tests are kept apart from the user's."""
    folder = tempfile.TemporaryDirectory(prefix="hone-cache-")
    os.environ["HONE_CACHE"] = os.environ["XDG_STATE_HOME"] = folder.name
    config.add_cleanup(folder.cleanup)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note in the report the seconds of processor that this phase of the test took."""
    outcome = yield
    now = cpu_seconds()
    outcome.get_result().cpu = now - item.config.stash.get(MEASURED, now)
    item.config.stash[MEASURED] = now


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the seconds of a test with its fixtures, and write them when it has ended: processor, then clock."""
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0.0) + report.duration
    CPU[report.nodeid] = [*CPU.get(report.nodeid, []), getattr(report, "cpu", 0.0)]
    if report.when == "call" and not {"slow", *ABOUT} & report.keywords.keys():
        FAST[report.nodeid] = getattr(report, "cpu", 0.0)
    if report.when == "teardown" and "PYTEST_XDIST_WORKER" not in os.environ:
        seconds = f"{' '.join(f'{each:.2f}' for each in CPU.pop(report.nodeid))}\t{SECONDS.pop(report.nodeid):.2f}"
        if path := os.environ.get("HONE_TEST_SECONDS"):
            with Path(path).open("a") as file:
                file.write(f"{seconds}\t{report.nodeid}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the fast tests that take long without a reason in tests/slow_tests.toml."""
    if lines := unlisted(FAST):
        terminalreporter.section("fast tests over a second of processor that tests/slow_tests.toml does not list")
        terminalreporter.write("".join(f"{line}\n" for line in lines))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test to choose: importing all of them takes as long as a hundred tests."""
    if collection_path.suffix != ".py":
        return None
    return left_out(collection_path, config.getoption("markexpr"), _changed(config), config.getoption("--part")) or None


def pytest_collection_finish() -> None:
    """What is there now stays: garbage collections need not look at a million objects again and again."""
    gc.collect()
    gc.freeze()


def _changed(config: pytest.Config) -> list[str] | None:
    file = config.getoption("--changed")
    return None if file is None else Path(file).read_text().split()


@pytest.hookimpl(trylast=True)  # after the choice by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test process begins with long tests: what they take from each other at the end is short."""
    paths, part = _changed(config), config.getoption("--part")
    items[:] = [item for item in items if chosen(item, paths, part)]
    if paths:  # what is about the change comes first, in case the minutes end
        items.sort(key=lambda item: not is_about(item, paths))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long: dict[str, list[pytest.Item]] = {name: [] for name in LONG}
    short: list[pytest.Item] = []
    for item in items:
        long.get(item.path.stem, short).append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for number, module in enumerate(long.values()):
        shares[number % processes] += module
    size = -(-len(items) // processes)  # pytest-xdist deals equal numbers of tests, in this order
    for share in shares:
        missing = max(0, size - len(share))
        share += short[:missing]
        del short[:missing]
    items[:] = [item for share in shares for item in share] + short


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that names what it is about once the minutes of this run are over."""
    minutes = item.config.getoption("--minutes")
    if minutes and time.monotonic() - BEGAN > 60 * minutes and paths_of(item) is not None:
        pytest.skip(f"the {minutes:g} minutes of this run are over")


@pytest.fixture(autouse=True)
def no_command_outlives_its_test() -> Iterator[None]:
    launch = sys.modules.get("support.launch")
    began = len(launch.RUNNING) if launch else 0
    yield
    if launch := sys.modules.get("support.launch"):
        launch.stop_all(began)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """See :class:`support.forked_python.Forks`."""
    from support.forked_python import forked_python

    with forked_python(tmp_path_factory.mktemp("forks")) as found:
        yield found


@pytest.fixture(scope="session")
def forked_ray_workers(forks: Forks) -> Iterator[dict[str, str]]:
    """The environment variables that make Ray's workers forks; the environment of this process has them already."""
    os.environ.update(forks.ray_workers)
    yield forks.ray_workers
    for name in forks.ray_workers:
        del os.environ[name]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, rows and files of :func:`support.tiny_runs.make_tiny_runs`, for the tests of one file."""
    from support.tiny_runs import make_tiny_runs

    return make_tiny_runs(tmp_path_factory.mktemp("tiny"))
