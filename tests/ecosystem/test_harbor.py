"""Tasks in Harbor's format, read and scored as the package harbor does; it needs Python 3.12. Also the tasks that it ships."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.environments import foreign_python
from support.messages import raises
from support.patience import LONG

from hone.agents.environments.harbor import IGNORED, KEYS, Harbor, read_task
from hone.agents.environments.machines import LEAST_MB, HarborTask
from hone.agents.messages import AssistantTurn, ToolCall
from hone.errors import ConfigError, NoVerdict
from hone.rewards.sandbox.runner import available

pytestmark = pytest.mark.long("hone/agents/environments", "hone/rewards/sandbox")
SANDBOX = pytest.mark.skipif("bubblewrap" not in available()[0], reason="bubblewrap does not work here")
SCRIPT = Path(__file__).parents[1] / "support" / "foreign" / "harbor_tasks.py"
TOMLS = [
    "",
    'schema_version = "1.4"\nartifacts = []\n[task]\nname = "a/b"\n[metadata]\nx = 1\n[verifier]\ntimeout_sec = 900\n'
    "[agent]\ntimeout_sec = 60.5\n[environment]\ncpus = 2\nmemory_mb = 4096\nstorage_mb = 10240\ngpus = 0\nmcp_servers = []\n"
    "allow_internet = true\n[verifier.env]\nA = '1'\n[environment.env]\nB = '$x'\n[solution.env]\n",
    'version = "1.0"\n[environment]\nbuild_timeout_sec = 1\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\nos = "Linux"\n',
    '[environment]\ndocker_image = "a/b:c"\nworkdir = "/work"\nnetwork_mode = "no-network"\nallow_internet = true\nmemory = "2.5g"\n',
    '[environment]\nnetwork_mode = "public"\nallow_internet = false\n[verifier]\nenvironment_mode = "shared"\n',
]
REWARDS = [
    {"reward.txt": "0.25\n"},
    {"reward.txt": " 1e-1 "},
    {"reward.txt": ""},
    {"reward.txt": "yes"},
    {"reward.txt": "inf"},
    {"reward.json": '{"reward": 0.5, "speed": 3}', "reward.txt": "1"},
    {"reward.json": '{"accuracy": -2}'},
    {"reward.json": "{", "reward.txt": "1"},
    {"reward.json": '{"reward": NaN}'},
    {"reward.json": '{"reward": "1"}'},
    {"reward.json": ""},
    {},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task for each of TOMLS."""
    top = tmp_path_factory.mktemp("harbor")
    for number, toml in enumerate(TOMLS):
        files = {
            "task.toml": toml,
            "tests/test.sh": "#!/bin/bash\n",
            "environment/Dockerfile": "FROM ubuntu\nWORKDIR /app\n",
        }
        for name, text in {**files, "instruction.md": "# Canary 5f\n<!-- CANARY -->\n\n\n # Do it\n\ncanary\n"}.items():
            path = top / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return top


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Any]:
    """What the package reads of these tasks and of REWARDS; see support/foreign/harbor_tasks.py."""
    python = foreign_python("harbor", "harbor==0.26.0", version="3.12")
    given = {"tasks": [str(folder / str(n)) for n in range(len(TOMLS))], "rewards": REWARDS, "task": str(folder / "0")}
    done = subprocess.run([python, str(SCRIPT)], input=json.dumps(given), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_tasks_are_read_as_the_package_reads_them(folder, theirs):
    for number, their in enumerate(theirs["tasks"]):
        ours: HarborTask = read_task(folder / str(number))
        assert isinstance(their, dict), their
        their["agent_seconds"] = their["agent_seconds"] or math.inf
        their |= {"cpus": their["cpus"] or 1} | {key: their[key] or LEAST_MB for key in ("memory_mb", "storage_mb")}
        assert {key: getattr(ours, key) for key in their} == their
    assert read_task(folder / "0").instruction == " # Do it\n\ncanary\n"


def test_all_keys_are_those_of_the_package(theirs):
    older = {"version", "memory", "storage"}
    for section, keys in KEYS.items():
        assert keys - older <= set(theirs["fields"][section])
    assert set(theirs["fields"]["task.toml"]) - KEYS["task.toml"] - IGNORED == {"steps", "multi_step_reward_strategy"}


def play(task: Path, *commands: str, **options: Any) -> float:
    async def episode() -> float:
        environment = Harbor(path=str(task), container="none", **options)
        try:
            await environment.reset(0)
            for command in commands:
                await environment.step(AssistantTurn("", calls=(ToolCall("a", "bash", {"command": command}, command),)))
            return (await environment.step(AssistantTurn("Done."))).reward
        finally:
            await environment.close()

    return asyncio.run(episode())


@SANDBOX
def test_rewards_are_those_of_the_package(folder, theirs, tmp_path):
    verdicts = []
    for number, files in enumerate(REWARDS):
        task = shutil.copytree(folder / "0", tmp_path / str(number))
        for name, text in files.items():
            (task / "tests" / name).write_text(text)
        (task / "tests" / "test.sh").write_text("#!/bin/sh\ncp /tests/reward.* /logs/verifier\n")
        try:
            verdicts.append(play(task))
        except NoVerdict as none:
            verdicts.append(str(none))
    expected = [
        their if isinstance(their, str) else their.get("reward", next(iter(their.values())))
        for their in theirs["rewards"]
    ]
    for files, ours, their in zip(REWARDS, verdicts, expected, strict=True):
        assert isinstance(ours, str) == isinstance(their, str), (files, ours, their)
        assert isinstance(ours, str) or ours == their
    assert sum(isinstance(one, float) for one in verdicts) == 4


@pytest.fixture
def shipped(theirs, tmp_path):
    """Copies a task that the package ships, with files that its program would add."""

    def copy(name: str, **files: str) -> Path:
        task = shutil.copytree(Path(theirs["templates"], name), tmp_path / "task")
        for file, text in {"instruction.md": "Do it.", **files}.items():
            (task / file).write_text(text)
        return task

    return copy


@SANDBOX
def test_a_new_task_has_no_reward_before_it_is_written(shipped):
    task = shipped("cli/template-task")
    with pytest.raises(NoVerdict, match="wrote no reward"):
        play(task)
    shutil.copy(task / "pytest-tests" / "test.sh", task / "tests" / "test.sh")
    assert play(task) == 0.0, "the sandbox has no pytest on its path"


@SANDBOX
def test_the_template_of_an_adapter_needs_its_image(shipped):
    task = shipped("cli/template-adapter/task-template")
    with raises(ConfigError, "python:3.13-slim", where=f"{task}/environment/Dockerfile:1"):
        Harbor(path=str(task), container="none")
    assert play(task, ignore_build=True) == 1.0


@SANDBOX
def test_a_verifier_that_the_package_ships_scores_right_and_wrong_answers(shipped):
    criteria = {"tests/criteria.json": json.dumps(["typos", "tests_pass"])}
    task = shipped("analyze/check-task-template", **criteria)
    with raises(ConfigError, "python:3.13-slim"):
        Harbor(path=str(task), container="none")
    right = {name: {"outcome": "pass", "explanation": "read"} for name in ("typos", "tests_pass")}
    write = "cat > check-result.json <<'END'\n{}\nEND"
    assert play(task, write.replace("{}", json.dumps(right)), ignore_build=True) == 1.0
    wrong = right | {"typos": {"outcome": "perhaps", "explanation": "read"}}
    assert play(task, write.replace("{}", json.dumps(wrong)), ignore_build=True) == 0.0
    assert play(task, "ls /tests > check-result.json", ignore_build=True) == 0.0
