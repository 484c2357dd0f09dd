"""The pages do what they say: their commands run, their Python runs, their links, keys and paths exist.

A fenced block of a page is one of

- ``bash``: its commands run, in order, in a directory of the page's own, with smaller sizes (:func:`shortened`), Ray without its
  dashboard; keys and arithmetic of a training are checked as printed before;
- ``bash`` under ``<!-- not run by tests: reason -->``: left out, for the reason given;
- ``bash`` under ``<!-- tests add to hone train: key=value ... -->``: what a run of two steps with a model that has learnt nothing needs
  besides, for example a reward that such answers can have more or less of;
- ``python``: runs in the same directory, at its place among the commands; with a file name behind ``python`` (or
  ``yaml``) it is that file, written before what follows;
- ``text``: something to look at.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.forked_python import Forks
from support.patience import LONG

ROOT = Path(__file__).resolve().parents[3]
GENERATED = ("config.md", "metrics.md", "papers.md")
TRANSLATED = re.compile(r"\.[a-z]{2}\.md$")  # their code is that of the English pages: test_translations.py
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/algorithms/*.md"),
        *ROOT.glob("docs/handbook/*.md"),
        *ROOT.glob("docs/learn/*.md"),
        *ROOT.glob("examples/README.md"),
        *ROOT.glob("examples/*/README.md"),
    )
    if not TRANSLATED.search(path.name)
)
WRITTEN = [page for page in PAGES if Path(page).name not in GENERATED]
PACKAGED = re.compile(f"({'|'.join(path.parent.name for path in ROOT.glob('hone/*/__init__.py'))})/[\\w./]+\\.py")
"""A module as pages name it without ``hone/``."""
FENCE = re.compile(
    r"(?:^<!-- not run by tests: (?P<reason>[^\n]+) -->\n)?(?:^<!-- tests add to hone train: (?P<added>[^\n]+) -->\n)?"
    r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    file: str
    body: str
    reason: str | None
    line: int
    added: tuple[str, ...] = ()


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text(page)):
        language, _, file = match["info"].partition(" ")
        line = text(page).count("\n", 0, match.start()) + 1
        added = tuple(shlex.split(match["added"] or ""))
        found.append(Block(language, file.strip(), match["body"], match["reason"], line, added))
    return found


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", text(page))


def commands(body: str) -> Iterator[str]:
    """The commands of a bash block, one a line; a backslash continues a line, and comments are left out."""
    for line in re.sub(r"\\\n\s*", "", body).splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield line


def is_course(page: str) -> bool:
    """Whether tests/learn plays the commands of a page, with what the reader has to add."""
    return page.startswith("docs/learn/") and page != "docs/learn/index.md"


def runs_something(page: str) -> bool:
    return not is_course(page) and any(
        block.reason is None and (block.language == "python" or block.language == "bash") for block in blocks(page)
    )


# ------------------------------------------------------------------------------------------------------- shortened runs

TRAIN = {
    "data.train_batch_size": "4",
    "data.val_max_samples": "4",
    "data.max_response_length": "8",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
    "actor_rollout_ref.rollout.n": "2",
    "trainer.total_training_steps": "2",
    "trainer.num_threads": "1",
    "trainer.device": "cpu",
}
SFT = {
    "data.train_batch_size": "4",
    "data.val_max_samples": "4",
    "trainer.total_training_steps": "2",
    "trainer.num_threads": "1",
    "trainer.device": "cpu",
}
TRAINS = {"train": "actor_rollout_ref.actor.optim", "sft": "optim", "prefer": "optim", "reward-model": "optim"}
"""Commands that train, and where the keys of their optimizer are."""
OPTIONS = {
    ("data", "make"): {"--size": "24", "--val-size": "8"},
    ("init",): {"--size": "200k"},
    ("eval",): {"--max-samples": "4", "--max-response-length": "8"},
    ("generate",): {"--max-tokens": "8"},
}


def shortened(words: list[str]) -> list[str]:
    """The words of a `hone` command with less to do: few rows, few tokens, two steps (a few more where steps are named).

    What is as small already stays. A run with fewer steps than printed has no warm-up, which may be longer.
    """
    if words[0] in ("twins", "sweep"):
        settings = [f"{key}={value}" for key, value in TRAIN.items()]
        fewer = ["--max-pairs", "1"] * (words[0] == "twins")
        return [*words, *settings, f"{TRAINS['train']}.lr_warmup_steps=0", *fewer]
    if words[0] in TRAINS:
        settings = dict(TRAIN if words[0] == "train" else SFT)
        if words[0] in ("prefer", "reward-model"):
            settings["data.train_batch_size"] = "2"  # the pairs of a shortened run
        given = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
        if steps := given.get("trainer.total_training_steps"):
            settings["trainer.total_training_steps"] = str(2 + int(steps) // 200)
        small = {key for key, value in given.items() if value.isdecimal() and int(value) <= int(settings.get(key, 0))}
        settings = {key: value for key, value in settings.items() if key not in small}
        if "trainer.total_training_steps" in settings:
            settings[f"{TRAINS[words[0]]}.lr_warmup_steps"] = "0"
        kept = [word for word in words if word.partition("=")[0] not in settings]
        return [*kept, *(f"{key}={value}" for key, value in settings.items())]
    for command, options in OPTIONS.items():
        if tuple(words[: len(command)]) == command:
            kept = list(words)
            for option, value in options.items():
                if option in kept:
                    del kept[kept.index(option) : kept.index(option) + 2]
                kept += [option, value]
            return kept
    return words


def run_command(
    line: str, folder: Path, number: int, exported: dict[str, str], added: tuple[str, ...], bin: Path
) -> None:
    """Run one line; ``export NAME=value`` holds for the lines that follow on the page, ``added`` goes to `hone train`, and
    what a shell starts is looked for in ``bin`` first.
    """
    from support.launch import Command, set_environment

    words = shlex.split(line, comments=True)
    if words[0] == "export":
        exported.update(word.split("=", 1) for word in words[1:])
        return
    if words[0] == "hone":
        setting = functools.partial(set_environment, exported)
        if words[1] in TRAINS:
            printed = [word for word in words[1:] if word not in ("--dry-run", "--pilot")]
            checking = ["config", "check", "--keys-only", "--of", *printed]
            checked = Command(checking, folder / f".check{number}", folder, prepare=setting).wait()
            assert checked.code == 0, f"{line}\n{checked.output}"
        short = [*shortened(words[1:]), *(added if words[1] == "train" else ())]
        ended = Command(short, folder / f".log{number}", folder, prepare=setting).wait()
        assert ended.code == 0, f"{line}\nas: hone {shlex.join(short)}\n{ended.output}"
        return
    path = os.pathsep.join(map(str, (bin, Path(sys.executable).parent, os.environ["PATH"])))
    environment = {**os.environ, **exported, "PATH": path}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line.replace(*NO_DASHBOARD)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"


@pytest.mark.long("hone/cli", "docs")
@pytest.mark.parametrize("page", [page for page in WRITTEN if runs_something(page)])
def test_commands_of_the_page_run(page: str, tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    try:
        run_page(page, tmp_path, {**forks.ray_workers, **RAY}, forks.bin)
    finally:
        end_servers(tmp_path)


def end_servers(folder: Path) -> None:
    """End what a page left running: servers whose process ids it wrote to files, as it tells its reader to end them."""
    for file in folder.glob("*.pid"):
        process = int(file.read_text())
        with contextlib.suppress(OSError):  # it has ended already, as the page says
            if Path(f"/proc/{process}/cwd").resolve() == folder.resolve():
                os.kill(process, signal.SIGTERM)


ARITHMETIC = "arithmetic max_number=10"
REWARDS = {
    "README.md:right:right": (ARITHMETIC, 0),
    "docs/api.md:by_response:by_response": (ARITHMETIC, 0),
    "docs/api.md:by_lists:by_lists": (ARITHMETIC, 0),
    "docs/coming-from-trl.md:right:right": (ARITHMETIC, 0),
    "docs/coming-from-trl.md:brief:brief": (ARITHMETIC, 0),
    "docs/rewards.md:brief.py:compute_score": (ARITHMETIC, 0),
    "docs/rewards.md:turns.py:compute_score": ("calculator", 0),
    "docs/rewards.md:thrifty.py:compute_score": ("calculator", 0),
    "docs/rewards.md:honest.py:compute_score": (ARITHMETIC, 0),
    "docs/preferences.md:brief.py:compute_score": (ARITHMETIC, 0),
    "docs/troubleshooting.md:strict.py:compute_score": (ARITHMETIC, 2),  # the mistake that the page shows
    "examples/long_book/reward.py:compute_score": ("book demonstrations=whole", 0),
    "examples/real_model/sums.py:compute_score": (ARITHMETIC, 0),
}
"""Task for each reward function of pages and examples, and the exit code of `hone reward test`."""


def rewards_shown() -> dict[str, str]:
    """The modules of the reward functions of pages and examples, by page and function, or by file."""
    shown = {}
    for page in WRITTEN:
        for block in () if is_course(page) else blocks(page):
            if block.language == "python" and re.search(
                r"\((data_source|completions|solution_str, ground_truth), ", block.body
            ):
                nodes = ast.parse(block.body).body
                kept = [
                    node
                    for node in nodes
                    if isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom | ast.Assign) and not trains(node)
                ]
                names = [node.name for node in kept if isinstance(node, ast.FunctionDef) and is_reward(node)]
                for name in names:
                    shown[f"{page}:{block.file or name}:{name}"] = "\n".join(map(ast.unparse, kept))
    for path in ROOT.glob("examples/*/*.py"):
        if path.parent.name != "rewards" and "def compute_score" in (source := path.read_text(encoding="utf-8")):
            shown[f"{path.relative_to(ROOT).as_posix()}:compute_score"] = source
    return shown


def trains(node: ast.stmt) -> bool:
    """Whether a statement of a page calls Hone."""
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("hone.")


def is_reward(function: ast.FunctionDef) -> bool:
    """Whether a function has one of the signatures of a reward, and is not registered as a scorer by a decorator."""
    first = [argument.arg for argument in function.args.args[:2]]
    named = first[:1] in (["data_source"], ["completions"]) or first == ["solution_str", "ground_truth"]
    return named and not function.decorator_list


@pytest.mark.slow
@pytest.mark.application("docs", "examples", "README.md", "hone/rewards", "hone/data/answers.py")
@pytest.mark.parametrize("name", sorted(rewards_shown()))
def test_rewards_of_pages_and_examples_pass_their_test(name: str, tmp_path: Path) -> None:
    from support.launch import Command

    task, code = REWARDS[name]
    (tmp_path / "reward.py").write_text(rewards_shown()[name], encoding="utf-8")
    made = Command(
        ["data", "make", *task.split(), "--out", "data", "--size", "1", "--val-size", "8"], tmp_path / ".make", tmp_path
    )
    assert made.wait().code == 0
    words = ["reward", "test", "--data", "data/val.parquet", "--reward", f"reward.py:{name.rpartition(':')[2]}"]
    ended = Command(words, tmp_path / ".test", tmp_path).wait()
    assert ended.code == code, ended.output


def examples_with_data() -> list[str]:
    """Examples whose page makes its data and a model, and trains by reinforcement, with no reward model that must be trained first."""
    bodies = {page: "".join(block.body for block in blocks(page) if block.language == "bash") for page in WRITTEN}
    parts = ("hone data make", "hone init", "hone train")
    whole = [page for page, body in bodies.items() if all(part in body for part in parts)]
    return [page for page in whole if page.startswith("examples/") and "hone reward-model" not in bodies[page]]


@pytest.mark.slow
@pytest.mark.application("examples", "hone/preflight", "hone/config", "hone/data")
@pytest.mark.parametrize("page", examples_with_data())
def test_settings_of_examples_pass_every_check(page: str, tmp_path: Path, forks: Forks) -> None:
    """The model is the one that the example begins with: what imitation makes of it does not concern the checks."""
    from support.launch import Command

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = [line for block in blocks(page) if block.language == "bash" for line in commands(block.body)]
    untrained = next(
        words[words.index("--out") + 1] for line in lines if "hone init" in line for words in [line.split()]
    )
    checked = 0
    for number, line in enumerate(lines):
        words = shlex.split(line, comments=True)
        if words[:2] == ["hone", "data"] and words[2] != "pairs":
            made = Command(words[1:], tmp_path / f".data{number}", tmp_path).wait()  # with all rows, which batches need
            assert made.code == 0, made.output
        elif words[0] == "python" or words[:2] == ["hone", "init"]:
            run_command(line, tmp_path, number, {}, (), forks.bin)
        elif words[:2] == ["hone", "train"]:
            short = [word for word in words[2:] if not word.startswith("actor_rollout_ref.model.path=")]
            short += [f"actor_rollout_ref.model.path={untrained}", "trainer.device=cpu"]
            ended = Command(["config", "check", *short], tmp_path / f".check{number}", tmp_path).wait()
            assert ended.code == 0, ended.output
            checked += 1
    assert checked


NO_DASHBOARD = ("ray start --head", "ray start --head --include-dashboard=false")
"""What a page leaves on, and no command of a page looks at: it takes seconds to start."""
RAY = {
    "RAY_worker_niceness": "0",  # workers of a busy machine would starve
    "RAY_enable_worker_prestart": "0",  # what no command of a page needs is not started
    "RAY_prestart_worker_first_driver": "0",
}


def run_page(page: str, tmp_path: Path, exported: dict[str, str], bin: Path) -> None:
    """Run the blocks of a page in order, with these environment variables and those that the page exports."""
    from support.launch import Command, run_source

    number = 0
    for block in blocks(page):
        if block.reason is not None:
            continue
        if block.file:
            (tmp_path / block.file).write_text(block.body, encoding="utf-8")
        elif block.language == "python":
            ended = Command([block.body], tmp_path / ".python", tmp_path, run=run_source).wait()
            assert ended.code == 0, f"{page}:{block.line}\n{ended.output}"
        elif block.language == "bash":
            for line in commands(block.body):
                number += 1
                run_command(line, tmp_path, number, exported, block.added, bin)
    assert number or not any(block.language == "bash" and block.reason is None for block in blocks(page))


def test_shortening_replaces_what_the_page_says() -> None:
    words = ["train", "data.train_batch_size=64", "trainer.total_training_steps=400", "trainer.seed=1"]
    short = shortened(words)
    assert "data.train_batch_size=4" in short and "data.train_batch_size=64" not in short
    assert "trainer.total_training_steps=4" in short and "trainer.seed=1" in short
    assert "actor_rollout_ref.actor.optim.lr_warmup_steps=0" in short
    small = shortened(["sft", "data.train_batch_size=3", "trainer.total_training_steps=2"])
    assert small[1:3] == ["data.train_batch_size=3", "trainer.total_training_steps=2"]
    assert "warmup" not in " ".join(small)
    assert shortened(["data", "make", "x", "--size", "9", "--out", "d"]) == [
        *("data", "make", "x", "--out", "d", "--size", "24", "--val-size", "8")
    ]
    twins = shortened(["twins", "a.yaml", "b.yaml"])
    assert twins[:3] == ["twins", "a.yaml", "b.yaml"] and twins[-2:] == ["--max-pairs", "1"]
    assert "trainer.total_training_steps=2" in twins
    assert shortened(["runs", "list"]) == ["runs", "list"]


# ------------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("page", WRITTEN)
def test_every_block_is_of_a_known_kind(page: str) -> None:
    assert text(page).count("\n```") == 2 * len(blocks(page)), "a fence is not closed, or indented"
    for block in blocks(page):
        assert block.language in ("bash", "python", "yaml", "text"), f"{page}:{block.line}: ```{block.language}"
        assert block.language != "yaml" or block.file, f"{page}:{block.line}: nothing reads this yaml"
        if block.language == "python":
            compile(block.body, f"{page}:{block.line}", "exec")
    assert text(page).count("not run by tests") == sum(block.reason is not None for block in blocks(page))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings], (
                target
            )


def code_words(page: str) -> Iterator[str]:
    """What stands between backticks in the text, in pieces without spaces."""
    for span in re.findall(r"`([^`\n]+)`", prose(page)):
        yield from span.split()


@pytest.mark.parametrize("page", WRITTEN)
def test_keys_named_in_the_text_exist(page: str) -> None:
    from hone.config import TREES, RLConfig, documentation
    from hone.config.keys import blocks as key_blocks
    from hone.config.load import full_key

    trees = tuple(TREES.values())
    known = {key.path for tree in trees for key in documentation(tree)} | {
        name for t in trees for name in key_blocks(t)
    }
    open_ended = {key.path for tree in trees for key in documentation(tree) if isinstance(key.default, dict)}
    tops = {name.partition(".")[0] for name in known}
    for word in code_words(page):
        written = word.partition("=")[0].rstrip(",.;:")
        key = written if written in known else full_key(written, RLConfig)
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and key.partition(".")[0] in tops and not key.endswith(".py"):
            assert key in known or key.rpartition(".")[0] in open_ended, f"{page}: there is no key {key}"


@pytest.mark.parametrize("page", WRITTEN)
def test_files_of_the_project_named_in_the_text_exist(page: str) -> None:
    for word in code_words(page):
        name = word.rstrip(",.;:")
        if re.fullmatch(r"(hone|tests|docs|examples|scripts|benchmarks)/[\w./-]+", name):
            assert (ROOT / name).exists(), f"{page}: there is no {name}"
        if PACKAGED.fullmatch(name):
            assert (ROOT / "hone" / name).exists(), f"{page}: there is no hone/{name}"


def test_the_architecture_names_files_and_folders_that_exist() -> None:
    """That page names them in short: from their package on, or by the file alone."""
    packages = {path.parent.name for path in ROOT.glob("hone/*/__init__.py")}
    files = {path.name for part in ("hone", "tests") for path in ROOT.glob(f"{part}/**/*.py")}
    words = {word.rstrip(",.;:") for word in code_words("docs/architecture.md")}
    folders = {word for word in words if re.fullmatch(r"\w+(/\w+)+", word) and word.split("/")[0] in packages}
    untrue = {word for word in folders if not list(ROOT.glob(f"hone/{word}*"))}
    assert not untrue | {
        word for word in words if re.fullmatch(r"(\w+/)*\w+\.py", word) and word.rpartition("/")[2] not in files
    }


LONGEST_PATHS = (6, 15, 5, 18, 20)
"""Files that may have to be opened to follow a key, a reward, old log-probs, weights, an episode."""


def test_the_five_paths_of_the_architecture_are_as_short_as_they_say() -> None:
    paths = re.findall(
        r"^\*\*.* (\d+) files\..*\n\n\|.*\n\|.*\n((?:\|.*\n)+)", text("docs/architecture.md"), re.MULTILINE
    )
    assert len(paths) == len(LONGEST_PATHS)
    for (said, table), most in zip(paths, LONGEST_PATHS, strict=True):
        files = re.findall(r"^\| `([\w/]+\.py)` \|", table, re.MULTILINE)
        assert len(files) == len(set(files)) == len(table.splitlines()) == int(said) <= most
        assert all((ROOT / "hone" / file).is_file() for file in files)


@pytest.mark.parametrize("page", WRITTEN)
def test_commands_named_in_the_text_exist(page: str) -> None:
    from hone.cli.main import COMMANDS

    for name in re.findall(r"`hone ([a-z][a-z-]*)", prose(page)):
        assert name in COMMANDS, f"{page}: hone {name}"


def test_the_index_says_where_everything_is() -> None:
    linked = {f"docs/{link}" for link in re.findall(r"\]\(([^)\s#]+)\)", text("docs/index.md"))}
    everything = {page for page in PAGES if re.fullmatch(r"docs/[^/]+", page)} - {"docs/index.md"}
    assert everything | {"docs/algorithms/README.md"} <= linked and "docs/index.md" in text("README.md")
