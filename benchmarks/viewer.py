"""Time the viewer in Chromium on a run of 100,000 answers: load, filters, text search, and a step that a live run adds.

    python benchmarks/viewer.py [--rows 100000] [--keep FOLDER]

It needs playwright and a Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.browser import browser, viewing  # noqa: E402  # pyright: ignore[reportMissingImports]
from support.viewer_runs import write_run  # noqa: E402  # pyright: ignore[reportMissingImports]

from hone.insight.archive.read import open_archive  # noqa: E402
from hone.insight.archive.write import write_step  # noqa: E402

PER_STEP, ORIGINALS = 1000, 4
FILTERS = ("score<0.5", "score<0.5 tokens>60", "stop:length", "is:equal", '"Let me check that again"')


def large_run(folder: Path, rows: int) -> Path:
    """Write a run of many answers: some original steps, and copies of them under other steps with other scores."""
    groups, n = PER_STEP // 8, 8
    write_run(folder, steps=ORIGINALS, groups=groups, n=n, prompts=4 * groups)
    archive = open_archive(folder)
    originals = [archive.table(step) for step in range(1, ORIGINALS + 1)]
    for step in range(ORIGINALS + 1, rows // PER_STEP + 1):
        write_step(folder / "rollouts", step, as_step(originals[step % ORIGINALS], step))
    return folder


def as_step(table: pa.Table, step: int) -> pa.Table:
    """Return the rows of a step under another number, their scores moved by a little."""
    scores = table["score"].to_numpy() + np.random.default_rng(step).normal(0, 0.01, len(table)).round(3)
    table = table.set_column(0, table.schema.field("step"), pa.array([step] * len(table), pa.int32()))
    place = table.schema.get_field_index("score")
    return table.set_column(place, table.schema.field("score"), pa.array(scores, pa.float64()))


def measure(folder: Path, log: Path) -> dict[str, float]:
    """Return seconds by what was done in the browser."""
    steps = open_archive(folder).steps()
    seconds: dict[str, float] = {}
    with viewing(folder, log=log) as address, browser() as context:
        page = context.new_page()
        foreign: list[str] = []
        page.on("request", lambda request: foreign.append(request.url) if "127.0.0.1" not in request.url else None)
        started = time.perf_counter()
        page.goto(address)
        page.goto(address.split("/?")[0] + f"/#/{folder.name}/groups")
        page.wait_for_selector(".item .strip")
        page.wait_for_selector(".answer")
        seconds["load: list of groups and one group"] = time.perf_counter() - started
        until(page, "!document.querySelector('.nav .foot').textContent.includes('indexing')")
        seconds["index complete, in the background"] = time.perf_counter() - started
        for query in FILTERS:
            seconds[f"filter {query}"] = filtered(page, query)
            filtered(page, "")
        started = time.perf_counter()
        page.goto(address.split("/?")[0] + f"/#/{folder.name}/questions")
        page.wait_for_selector(".question")
        seconds["questions"] = time.perf_counter() - started
        page.goto(address.split("/?")[0] + f"/#/{folder.name}/groups")
        page.wait_for_selector(".item .strip")
        new = steps[-1] + 1
        table = as_step(open_archive(folder).table(1), new)
        started = time.perf_counter()
        write_step(folder / "rollouts", new, table)
        until(page, f"document.querySelector('.item .num')?.textContent === '{new}'")
        seconds["live update: a new step is listed"] = time.perf_counter() - started
    print(f"requests to other machines: {len(foreign)}")
    return seconds


def until(page: Any, condition: str, seconds: float = 120.0) -> None:
    """Wait for a condition; the page's policy forbids to evaluate it within the page's own code."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(0.02)


def filtered(page: Any, query: str) -> float:
    """Set the filter in one event, and return the seconds until the list has changed."""
    script = """async ([query]) => {
      const input = document.querySelector('.search input');
      const count = document.querySelector('.bar.foot .count');
      const started = performance.now();
      Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(input, query);
      input.dispatchEvent(new Event('input', { bubbles: true }));
      while (count.dataset.query !== query && performance.now() - started < 20000) await new Promise((done) => requestAnimationFrame(done));
      return (performance.now() - started) / 1000;
    }"""
    return page.evaluate(script, [query])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="folder for the run, made if absent and kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary) / "large"
        if not (folder / "run.json").exists():
            large_run(folder, options.rows)
        for name, seconds in measure(folder, Path(temporary) / "log").items():
            print(f"{name:44} {seconds:7.2f} s")


if __name__ == "__main__":
    main()
