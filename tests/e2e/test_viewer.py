"""`hone view` in Chromium: every view, the keyboard, a live run, hostile text, a label, an exported file, and no request elsewhere."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.browser import browser, chromium, viewing
from support.image_models import BLUE, RED, drawn
from support.launch import hone
from support.patience import LONG
from support.viewer_runs import write_run

from hone.data.images import token_ids
from hone.insight.archive.read import open_archive
from hone.insight.archive.write import to_table, write_step
from hone.insight.run_directory import RunDirectory

pytest.importorskip("playwright")
pytestmark = [
    pytest.mark.long("hone/apps/lab/viewer"),
    pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium"),
]
HOSTILE = '<script>document.title="taken"</script><img src=x onerror=\'document.title="taken"\'>'
MILLISECONDS = LONG * 1000
WRITTEN = {"id": "c", "function": {"name": "", "arguments": HOSTILE}}
MALFORMED = {
    "assistant_turns": 1,
    "messages": [{"role": "assistant", "content": "", "tool_calls": [WRITTEN]}],
    "tool_calls": [{"name": "", "arguments": None, "status": "malformed", "turn": 0, "result": "error"}],
}
"""Episode of one call that is no JSON."""


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose last step also has a group of hostile texts."""
    path = write_run(tmp_path_factory.mktemp("view") / "demo", steps=5, groups=6, n=4, prompts=12, agents=0.4)
    archive = open_archive(path)
    last = list(archive.records(5))
    bad = [
        record
        | {
            "uid": HOSTILE,
            "index": number,
            "prompt": HOSTILE,
            "text": HOSTILE + str(number),
            "row": 99,
            "terms": {HOSTILE: 1.0},
            "episode": MALFORMED,
        }
        for number, record in enumerate(last[:2])
    ]
    write_step(path / "rollouts", 5, to_table([*bad, *last]))
    write_step(path / "validation", 5, to_table(last))
    return path


SEEN = "seen:0"
"""Group whose prompt shows two images, and whose tool shows one of them again and one that the run lost."""


@pytest.fixture(scope="module")
def with_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a group of images."""
    path = write_run(tmp_path_factory.mktemp("images") / "demo", steps=2, groups=2, n=2, prompts=2)
    archive, red, blue = open_archive(path), drawn(RED, (140, 120)), drawn(BLUE, (70, 60))
    RunDirectory(path).write_images([red, blue], path / "rollouts")
    lost = drawn((1, 2, 3))
    last = list(archive.records(2))
    place = {"type": "image"}
    answers = []
    for index, record in enumerate(last[:2]):
        ids = [*token_ids(red.key, 6), *record["prompt_ids"], *token_ids(blue.key, 2), record["prompt_ids"][0]]
        shown = [*token_ids(red.key, 6), *token_ids(lost.key, 2)]
        empty = {name: None for name, value in record.items() if isinstance(value, list) and name != "terms"}
        tool = [
            {"type": "text", "text": "the page:"},
            {**place, "key": f"{red.key:011x}"},
            {**place, "key": f"{lost.key:011x}"},
        ]
        said = {"role": "assistant", "content": "I look."}
        episode = {
            "messages": [said, {"role": "tool", "content": tool}, {**said, "content": "red"}],
            "assistant_turns": 2,
            "tool_calls": [],
        }
        answers.append(
            record
            | empty
            | {
                "uid": SEEN,
                "index": index,
                "prompt": "<image>Compare it with <image>, please.",
                "messages": [{"role": "user", "content": [place, {"type": "text", "text": "Compare it with "}, place]}],
                "prompt_ids": ids,
                "response_ids": [*record["response_ids"], *shown],
                "response_mask": [*record["response_mask"], *[0] * len(shown)],
                "episode": episode,
            }
        )
    write_step(path / "rollouts", 2, to_table([*answers, *last]))
    return path


@pytest.fixture(scope="module")
def address(run_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with viewing(run_path, log=tmp_path_factory.mktemp("log") / "log", seconds=LONG) as url:
        yield url


class Page:
    """A page of the viewer that collects errors and requests to other machines."""

    def __init__(self, context: Any, address: str) -> None:
        self.base = address.split("/?")[0]
        self.page = context.new_page()
        self.page.set_default_timeout(MILLISECONDS)
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on(
            "request",
            lambda request: None if request.url.startswith((self.base, "data:")) else self.foreign.append(request.url),
        )
        self.page.goto(address)
        self.page.wait_for_selector(".nav")

    def show(self, path: str, selector: str) -> Any:
        self.page.goto(f"{self.base}/#/demo/{path}")
        self.page.wait_for_selector(selector)
        return self.page

    def until(self, condition: str) -> None:
        deadline = time.monotonic() + LONG
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            time.sleep(0.02)


@pytest.fixture(params=["light", "dark"])
def viewer(request: pytest.FixtureRequest, address: str) -> Iterator[Page]:
    with browser(color_scheme=request.param) as context:
        page = Page(context, address)
        assert page.page.evaluate("document.documentElement.dataset.theme") == request.param
        yield page
        assert (page.errors, page.foreign) == ([], [])


def test_every_view_is_drawn(viewer: Page) -> None:
    page = viewer.show("run", ".charts canvas")
    assert page.locator(".chart").count() >= 8
    for tab, selector in (
        ("time", ".meter"),
        ("ledger", ".table td"),
        ("flow", "img[alt='data flow of a training step']"),
        ("config", ".table .chip"),
        ("environment", ".columns td"),
    ):
        viewer.show(f"run?tab={tab}", selector)
    viewer.show("run?tab=flow", "img[alt='data flow of a training step']")
    viewer.until("document.querySelector('.pad img').naturalWidth === 1010")
    page = viewer.show("groups?q=step%3D4", ".answer")
    assert page.locator(".answer").count() == 4
    page = viewer.show("tokens/4/train:6/0/0", ".tokens [data-token]")
    page.hover('[data-token="3"]')
    page.wait_for_selector(".chain li")
    coloured = page.evaluate("[...document.querySelectorAll('[data-token]')].filter((t) => t.style.background).length")
    page.keyboard.press("2")
    page.wait_for_url("**by=log_ratio")
    assert coloured > 0
    viewer.show("episode/4/train:6/0/0", ".turn")
    viewer.show("prompts", ".item .spark")
    page = viewer.show("questions", ".question .num")
    assert page.locator(".question").count() == 11
    viewer.show("answers?q=is:equal", ".item")
    viewer.show("compare?q_a=step%3D1&q_b=step%3D3", ".table")
    viewer.show("rescore", ".message")


def test_the_keyboard_is_enough(viewer: Page) -> None:
    page = viewer.show("groups", ".answer")
    first = page.locator(".prompt .facts").inner_text()
    page.keyboard.press("j")
    page.keyboard.press("j")
    viewer.until("document.querySelector('.item[aria-selected=true]')?.ariaPosInSet === '3'")
    viewer.until(f"![undefined, {first!r}].includes(document.querySelector('.prompt .facts')?.innerText)")
    page.keyboard.press("l")
    viewer.until("[...document.querySelectorAll('.answer')].findIndex((a) => a.ariaCurrent === 'true') === 1")
    page.keyboard.press("t")
    page.wait_for_selector(".tokens")
    page.keyboard.press("u")
    page.wait_for_selector(".list")
    page.keyboard.press("/")
    page.keyboard.type("step=2 score<0.5")
    viewer.until("document.querySelector('.bar.foot .count')?.dataset.query === 'step=2 score<0.5'")
    assert {cell.inner_text() for cell in page.locator(".item > .num.faint").all()} == {"2"}
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.wait_for_selector("[role=dialog]")
    page.keyboard.press("Escape")
    viewer.until("!document.querySelector('[role=dialog]')")
    page.keyboard.press("g")
    page.keyboard.press("p")
    page.wait_for_selector(".item .spark")


def test_hostile_text_stays_text(viewer: Page) -> None:
    page = viewer.show("groups", ".answer")
    page.wait_for_selector(".item .strip")
    assert HOSTILE in page.locator(".prompt .text").inner_text()
    assert page.locator(".answer script, .answer img, .prompt img, .list img").count() == 0
    page.keyboard.press("t")
    page.wait_for_selector(".tokens")
    page.keyboard.press("e")
    page.wait_for_selector(".call")
    assert page.locator(".call .text .neg").inner_text() == HOSTILE  # the malformed call, as it was written
    assert page.title() == "Hone"


PAGES = (
    ("run", ".charts canvas"),
    ("run?tab=time", ".meter"),
    ("run?tab=ledger", ".table td"),
    ("run?tab=config", ".table .chip"),
    ("run?tab=environment", ".columns td"),
    ("groups", ".answer"),
    ("group/4/train:6", ".answer"),
    ("tokens/4/train:6/0/0", ".tokens [data-token]"),
    ("episode/4/train:6/0/0", ".turn"),
    ("answers?q=toolerrors>0", ".answer"),
    ("prompts", ".item"),
    ("prompt/agents/6", ".answer"),
    ("questions", ".question .num"),
    ("compare?q_a=step%3D1&q_b=step%3D3", ".table"),
    ("rescore", ".message"),
)
FAULTS = """() => {
  const box = (element) => element.getBoundingClientRect();
  const all = (selector) => [...document.querySelectorAll(selector)].filter((element) => box(element).height);
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const outside = (element) => box(element).width === 0 || box(element).left < 0 || box(element).right > innerWidth;
  const near = (one) => one.closest('.item, .answer, .card, tr, .row');
  const chips = all('.chip');
  const faults = {
    wide: [document.documentElement, ...all('.top, main, .bar, .scroll, .answers, .prompt')].filter((one) => one.scrollWidth > one.clientWidth),
    outside: all('.top button, .top .search, .nav a').filter(outside),
    thin: all('.item .two-lines, .item > .ellipsis, .input').filter((one) => box(one).width < 90),
    meeting: chips.filter((chip, place) => [...chips.slice(place + 1), ...all('.item > .num, .item > .strip')].some((other) => near(chip) === near(other) && meet(box(chip), box(other)))),
  };
  const names = new Set([...document.querySelectorAll('.nav a')].map((one) => getComputedStyle(one).fontSize));
  return { ...Object.fromEntries(Object.entries(faults).map(([name, found]) => [name, found.map((one) => one.outerHTML.slice(0, 200))])), names: [...names] };
}"""


@pytest.mark.parametrize("width", [390, 768, 1024, 1440])
def test_every_view_fits_its_window(viewer: Page, width: int, tmp_path: Path) -> None:
    viewer.page.set_viewport_size({"width": width, "height": 844})
    for path, selector in PAGES:
        page = viewer.show(path, selector)
        page.screenshot(path=tmp_path / f"{path.partition('?')[0].replace('/', '_')}.png")
        assert page.evaluate(FAULTS) == {"wide": [], "outside": [], "thin": [], "meeting": [], "names": ["13px"]}, path
        assert page.locator(".top .segments button:visible").count() == 2  # training, validation


def test_constant_curves_have_an_axis_of_their_size(viewer: Page) -> None:
    ends = viewer.page.evaluate("import('/charts.js').then((charts) => [charts.bounds(0, 0), charts.bounds(16, 16)])")
    assert ends == [[0, 1], [8, 24]]


def test_several_runs_are_listed_first(run_path: Path, with_images: Path, tmp_path: Path) -> None:
    with viewing(run_path, with_images, log=tmp_path / "log", seconds=LONG) as url, browser() as context:
        page = Page(context, url)
        page.page.wait_for_url("**/runs")
        page.page.wait_for_selector("tbody tr")
        assert page.page.locator("tbody tr").count() == 2
        page.page.click("tbody tr:nth-child(2) a")
        page.page.wait_for_selector(".charts canvas")
        assert (page.errors, page.foreign) == ([], [])


def drawn_widths(page: Any, count: int) -> list[int]:
    """Widths of the pictures, once they are loaded."""
    widths, deadline = [], time.monotonic() + LONG
    while (len(widths) != count or 0 in widths) and time.monotonic() < deadline:
        widths = page.evaluate("[...document.querySelectorAll('img.picture')].map((one) => one.naturalWidth)")
        time.sleep(0.05)
    return widths


def check_images(show: Any) -> None:
    """The images of a group are where they belong in its views; one without a file stays a mark."""
    page = show("group/2/seen%3A0", ".answer")
    assert drawn_widths(page, 2) == [140, 70]
    assert page.evaluate("document.querySelector('.prompt .text').innerText").strip() == "Compare it with , please."
    page = show("tokens/2/seen%3A0/0/0", ".tokens [data-token]")
    assert drawn_widths(page, 3) == [140, 70, 140]
    assert page.locator(".tokens [data-token] img.picture").count() == 1
    page = show("episode/2/seen%3A0/0/0", ".turn")
    assert drawn_widths(page, 3) == [140, 70, 140]
    assert "the page:<image>" in page.locator(".turn.tool .text").inner_text()


def test_images_stand_in_the_text(with_images: Path, tmp_path: Path) -> None:
    with viewing(with_images, log=tmp_path / "log", seconds=LONG) as url, browser() as context:
        page = Page(context, url)
        check_images(page.show)
        assert page.foreign == []
        assert all("404" in error for error in page.errors)  # of the image that the run lost
        answer = context.request.get(f"{page.base}/api/image?name=..%2F..%2Frun.json")
        assert (answer.status, "error" in answer.json()) == (404, True)
    file = tmp_path / "demo.html"
    ended = hone("view", with_images, "--export", file, log=tmp_path / "export.log", cwd=tmp_path, timeout=LONG)
    assert ended.code == 0
    with browser() as context:
        page = context.new_page()

        def show(path: str, selector: str) -> Any:
            page.goto(f"{file.as_uri()}#/demo/{path}")
            page.wait_for_selector(selector)
            return page

        check_images(show)


def test_a_label_is_written_and_found(viewer: Page, run_path: Path) -> None:
    page = viewer.show("tokens/3/train:0/1/0", ".inspector")
    page.click("text=look again")
    page.wait_for_selector(".inspector .chip.accent")
    assert (run_path / "labels.jsonl").read_text().count('"label": "look again"') >= 1
    page = viewer.show('answers?q=label:"look again"', ".item")
    assert page.locator(".item").count() == 1


def test_a_new_step_of_a_live_run_appears(tmp_path: Path) -> None:
    path = write_run(tmp_path / "demo", steps=2, groups=2, n=2, finished=False)
    with viewing(path, log=tmp_path / "log", seconds=LONG) as url, browser() as context:
        page = Page(context, url)
        page.show("groups", ".item .strip")
        table = open_archive(path).table(1)
        step = pa.array([3] * len(table), pa.int32())
        write_step(path / "rollouts", 3, table.set_column(0, table.schema.field("step"), step))
        page.until("document.querySelector('.item .num')?.textContent === '3'")
        assert (page.errors, page.foreign) == ([], [])


def test_an_exported_file_works_without_a_server(run_path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_path, tmp_path / "copied" / "demo")
    file = tmp_path / "demo.html"
    ended = hone(
        "view", copy, "--export", file, "--filter", "step=4", log=tmp_path / "export.log", cwd=tmp_path, timeout=LONG
    )
    assert ended.code == 0
    with browser() as context:
        page = context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(("file:", "data:")) else problems.append(request.url),
        )
        page.goto(file.as_uri())
        page.wait_for_selector(".charts canvas")
        page.keyboard.press("g")
        page.keyboard.press("g")
        page.wait_for_selector(".answer")
        assert page.locator(".item").count() == 6
        page.keyboard.press("t")
        page.wait_for_selector(".tokens [data-token]")
        assert problems == []
