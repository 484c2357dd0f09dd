"""Task directories of Harbor in the sandbox: what the policy sees and can do, and what its reward is."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from support.agents import call, play, sample, setting
from support.messages import raises
from support.patience import SOON

from hone.agents.environments import make_environment
from hone.agents.environments.harbor import Harbor, read_task
from hone.agents.environments.machines import read_dockerfile, works
from hone.agents.messages import AssistantTurn, ToolCall
from hone.agents.tasks.environment import EnvironmentTask
from hone.data.episode_log import EpisodeEnd
from hone.errors import ConfigError, NoVerdict
from hone.rewards.sandbox.runner import available

pytestmark = pytest.mark.application("hone/agents/environments", "hone/rewards/sandbox")
SANDBOX = pytest.mark.skipif("bubblewrap" not in available()[0], reason="bubblewrap does not work here")
SOLUTION = "s=0; while read -r n; do s=$((s + n)); done < numbers.txt; echo $s > sum.txt"
TEST = """#!/bin/bash
if [ "$(cat sum.txt)" = "$(cat /tests/right)" ] && [ "$SIZE $EXPECTED" = "large 42" ]; then reward=1; else reward=0.0; fi
echo $reward > /logs/verifier/reward.txt
"""
FILES = {
    "instruction.md": "<!-- a canary -->\n\nWrite the sum of numbers.txt into sum.txt.\n",
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\nenv = { EXPECTED = "42" }\n'
    '[environment]\nallow_internet = false\nmemory = "1G"\n',
    "environment/Dockerfile": "FROM ubuntu:24.04\n# where\nWORKDIR /app\nENV \\\n  # how\n  SIZE=large\nCOPY data .\n",
    "environment/data/numbers.txt": "40\n2\n",
    "solution/solve.sh": f"#!/bin/bash\n{SOLUTION}\n",
    "tests/test.sh": TEST,
    "tests/right": "42\n",
}


def made(folder: Path, changes: dict[str, str | None] | None = None) -> Path:
    """A task that asks for a sum, with other texts of some files; None leaves one out."""
    for name, text in (FILES | (changes or {})).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def verified_by(folder: Path, lines: str, **limits: float) -> Path:
    """The task with another verifier."""
    toml = "".join(f"[{section}]\ntimeout_sec = {seconds}\n" for section, seconds in limits.items())
    return made(folder, {"tests/test.sh": f"#!/bin/bash\n{lines}\n", "task.toml": toml})


def turn(*commands: str) -> AssistantTurn:
    calls = [ToolCall(f"c{number}", "bash", {"command": text}, text) for number, text in enumerate(commands)]
    return AssistantTurn("" if commands else "I am done.", calls=tuple(calls))


def run(folder: Path, *commands: str, **options) -> tuple[list[str], float]:
    """Run each command in a turn of its own, and the verifier; returns the answers and the reward."""

    async def episode() -> tuple[list[str], float]:
        environment = Harbor(path=str(folder), **{"container": "none", **options})
        try:
            await environment.reset(1)
            steps = [await environment.step(turn(command)) for command in commands]
            last = await environment.step(turn())
        finally:
            await environment.close()
        assert last.done and last.facts == {"solved": float(last.reward >= 1), "commands": float(len(commands))}
        assert not any(step.done or step.reward for step in steps)
        return [str(step.messages[0]["content"]) for step in steps], last.reward

    before = set(Path(tempfile.gettempdir()).glob("hone-harbor-*"))
    try:
        return asyncio.run(episode())
    finally:
        assert set(Path(tempfile.gettempdir()).glob("hone-harbor-*")) <= before


# rewards -------------------------------------------------------------------------------------------------------------


@SANDBOX
def test_the_solution_earns_the_reward_and_another_answer_does_not(tmp_path):
    task = made(tmp_path / "sums")
    assert run(task, (task / "solution/solve.sh").read_text()) == (["[exit code 0]"], 1.0)
    assert run(task, "echo 41 > sum.txt") == (["[exit code 0]"], 0.0)
    assert run(task) == ([], 0.0)


@SANDBOX
def test_a_row_is_played_by_the_loop(tmp_path):
    for name, numbers in (("first", "40\n2\n"), ("second", "1\n2\n")):
        made(tmp_path / name, {"environment/data/numbers.txt": numbers, "instruction.md": f"The {name} sum.\n"})
    (tmp_path / "linked").symlink_to(tmp_path / "first")
    task = EnvironmentTask("harbor", {"path": str(tmp_path), "container": "none"})
    problems = [asyncio.run(task.problem(seed)) for seed in range(4)]
    assert [problem.question for problem in problems] == ["The first sum.\n", "The second sum.\n"] * 2
    rows = [
        sample(p.question, f"row{n}", p.tools or (), **p.extra, agent_name=p.agent_name) for n, p in enumerate(problems)
    ]
    played, _ = play(
        setting(tool_timeout=SOON), lambda name, turn: [call("bash", command=SOLUTION), "Done."][turn], rows[:2]
    )
    logs = [t.episode for t in played]
    assert [log and (log.end, log.turn_rewards) for log in logs] == [
        (EpisodeEnd.DONE, [0.0, 1.0]),
        (EpisodeEnd.DONE, [0.0, 0.0]),
    ]


@SANDBOX
@pytest.mark.parametrize(
    ("lines", "options", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt; exit 1", {}, 0.25),
        ("echo '{\"accuracy\": 0.5}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", {}, 0.5),
        ('echo \'{"speed": 3, "reward": -1}\' > /logs/verifier/reward.json', {}, -1.0),
        ('echo \'{"speed": 3, "reward": -1}\' > /logs/verifier/reward.json', {"reward": "speed"}, 3.0),
    ],
)
def test_the_reward_is_read_as_the_verifier_wrote_it(tmp_path, lines, options, reward):
    assert run(verified_by(tmp_path, lines), **options)[1] == reward


@SANDBOX
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("echo all tests passed", r"wrote no reward \(exit code 0\): all tests passed"),
        ("exit 3", r"wrote no reward \(exit code 3\)"),
        ("echo much > /logs/verifier/reward.txt", "no reward 'reward' in reward.txt"),
        ("> /logs/verifier/reward.txt", "no reward 'reward' in reward.txt"),
        ("echo nan > /logs/verifier/reward.txt", "not a finite number"),
        ('echo \'{"speed": 3, "style": 1}\' > /logs/verifier/reward.json', "no reward 'reward' in reward.json"),
        ("echo '{' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "in reward.json"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", "was stopped: timeout"),
    ],
)
def test_a_verifier_without_a_reward_gives_no_verdict(tmp_path, lines, why):
    with pytest.raises(NoVerdict, match=why):
        run(verified_by(tmp_path, lines, verifier=1.5 if "sleep" in lines else SOON))


@SANDBOX
def test_a_reward_that_the_policy_wrote_does_not_count(tmp_path):
    forge = "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt; ln -s /tmp /tests; echo 1 > /app/reward.json; ln -s /app/reward.json /logs/verifier/"
    with pytest.raises(NoVerdict, match="wrote no reward"):
        run(verified_by(tmp_path, "true"), forge)


# what the policy can do ----------------------------------------------------------------------------------------------


@SANDBOX
def test_files_stay_between_commands_and_a_shell_does_not(tmp_path):
    commands = [
        "pwd; echo $SIZE; ls; x=1; cd /; mkdir /tmp/a ~/b",
        "pwd; echo [$x]; ls -d /tmp/a /root/b",
        "ls -a /logs; false",
        "echo out; echo err >&2; exit 7",
    ]
    answers, _ = run(made(tmp_path), *commands)
    assert answers == [
        "/app\nlarge\nnumbers.txt\n[exit code 0]",
        "/app\n[]\n/root/b\n/tmp/a\n[exit code 0]",
        ".\n..\n[exit code 1]",
        "out\nerr\n[exit code 7]",
    ]


@SANDBOX
def test_the_policy_sees_neither_tests_nor_solution_nor_this_machine(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    task = made(tmp_path / "task", {"task.toml": FILES["task.toml"]})
    elsewhere = f"{secret} {task} {Path(__file__)} {sys.prefix}/bin /etc/passwd /home /proc/{os.getpid()}"
    look = f"ls -d /tests /solution {elsewhere}; awk 'BEGIN {{ print 6 * 7 }}'; env"
    os.environ["OF_THE_TRAINER"] = "x"
    try:
        (answer,), reward = run(task, look)
    finally:
        del os.environ["OF_THE_TRAINER"]
    refused, _, rest = answer.partition("\n42\n")
    assert refused.count("No such file or directory") == 9 and reward == 0.0
    assert "OF_THE_TRAINER" not in rest and "EXPECTED" not in rest, "nor the verifier's variables"
    network = "exec 3<>/dev/tcp/127.0.0.1/80; (echo x > /usr/x) || (echo x > /x) || echo neither"
    (answer,), _ = run(task, network)
    assert answer.endswith("neither\n[exit code 0]") and "tcp" in answer


@SANDBOX
def test_limits_are_said_and_the_episode_goes_on(tmp_path):
    loop, print_much = "sleep 60 & sleep 60", "seq 1 3000"
    answers, reward = run(made(tmp_path), loop, print_much, "yes", SOLUTION, seconds=1.5, max_output=100)
    assert answers[0] == "[stopped, with all that it started: timeout (limit of time: 2 s)]"
    assert answers[1].startswith("1\n2\n3\n") and answers[1].endswith("2999\n3000\n[exit code 0]")
    assert f"\n[{sum(len(str(n)) + 1 for n in range(1, 3001)) - 100} characters left out]\n" in answers[1]
    assert "stopped, with all that it started: output" in answers[2] and reward == 1.0


@SANDBOX
def test_commands_together_have_the_time_of_the_agent(tmp_path):
    task = verified_by(tmp_path, f"{SOLUTION}; cp sum.txt /logs/verifier/reward.txt", agent=1.0, verifier=SOON)

    async def episode():
        environment = Harbor(path=str(task), container="none")
        try:
            await environment.reset(0)
            first = await environment.step(turn("sleep 60", "echo too late"))
            return first, await environment.step(turn("echo too late"))
        finally:
            await environment.close()

    first, last = asyncio.run(episode())
    assert [m["tool_call_id"] for m in first.messages] == ["c0", "c1"] and not first.done
    assert "timeout (limit of time: 1 s)" in str(first.messages[0]["content"])
    assert first.messages[1]["content"] == "error: the time for commands is over"
    assert last.done and last.reward == 42.0 and last.facts["commands"] == 1.0


@SANDBOX
def test_calls_that_are_wrong_are_answered(tmp_path):
    async def episode():
        environment = Harbor(path=str(made(tmp_path)), container="none")
        await environment.reset(0)
        calls = (
            ToolCall("a", "python", {"command": "1"}, ""),
            ToolCall("b", "bash", {"command": 1}, ""),
            ToolCall("c", "bash", None, "{", "error: no JSON"),
            ToolCall("d", "bash", {"command": "echo \0"}, ""),
            ToolCall("e", "bash", {"command": "#" * 200_000}, ""),
            ToolCall("f", "bash", {"command": "echo '\ud800'"}, ""),
        )
        try:
            return (await environment.step(AssistantTurn("", calls=calls))).messages
        finally:
            await environment.close()

    texts = [str(message["content"]) for message in asyncio.run(episode())]
    assert texts[0] == texts[1] == "error: there is one function, bash, with the text 'command'"
    assert texts[2] == "error: no JSON" and "at most 100000 bytes" in texts[3] and texts[3] == texts[4]
    assert texts[5] == "?\n[exit code 0]"


@SANDBOX
def test_nothing_is_left_of_an_episode_that_is_closed_within_a_command(tmp_path):
    mark = f"{60 + os.getpid()}.5"

    def alive() -> list[int]:
        return [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]

    async def episode() -> float:
        environment = Harbor(path=str(made(tmp_path)), container="none", seconds=2.0)
        await environment.reset(0)
        step = asyncio.create_task(environment.step(turn(f"(setsid sleep {mark} &) ; sleep {mark}")))
        deadline = time.monotonic() + SOON
        while len(alive()) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert len(alive()) >= 2, "the command runs, and what it started"
        step.cancel()
        await environment.close()
        with pytest.raises(NoVerdict, match="over"):
            await environment.step(turn())
        return time.monotonic()

    before = set(Path(tempfile.gettempdir()).glob("hone-harbor-*"))
    asyncio.run(episode())
    assert not alive() and set(Path(tempfile.gettempdir()).glob("hone-harbor-*")) <= before
    assert threading.active_count() < 50


@SANDBOX
def test_space_on_disk_is_bounded(tmp_path):
    toml = '[environment]\nstorage = "8M"\nmemory_mb = 512\n'
    fill = "for i in $(seq 40); do head -c 2000000 /dev/urandom > $i; done; sleep 60"
    with pytest.raises(NoVerdict, match="was stopped: disk"):
        run(made(tmp_path, {"task.toml": toml}), fill)
    small = "head -c 6000000 /dev/urandom > a; rm a; head -c 9000000 /dev/urandom > b; rm b"
    assert run(made(tmp_path), small)[1] == 0.0


# containers ----------------------------------------------------------------------------------------------------------


def image_of_this_machine(root: Path) -> None:
    """The files of a container that has a shell: those programs of this machine, and what they load."""
    for name in ("bash", "sh", "cat", "ls", "rm", "mkdir", "chmod", "sleep", "tail", "yes"):
        program = os.path.realpath(shutil.which(name) or "")
        loaded = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for source, place in [(program, f"/bin/{name}"), *((path, path) for path in re.findall(r"/\S+", loaded))]:
            target = root / place.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(source), target)


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_a_container_plays_the_same_task(tmp_path, program):
    if not works(program):
        pytest.skip(f"{program} does not work here")
    dockerfile = "FROM scratch\nCOPY root /\nENV PATH=/bin SIZE=large\nWORKDIR /app\nCOPY data .\n"
    task = made(tmp_path / "task", {"environment/Dockerfile": dockerfile})
    image_of_this_machine(task / "environment" / "root")
    forge = "ln -s /app /logs; ln -s /bin /tests; echo 1 > reward.txt; (sleep 600 &); sleep 600"
    answers, reward = run(
        task,
        "pwd; ls; ls /tests /solution",
        forge,
        "ls",
        "yes",
        "false",
        SOLUTION,
        container=program,
        seconds=SOON / 10,
    )
    assert answers[0].startswith("/app\nnumbers.txt\n") and answers[0].count("No such file or directory") == 2
    assert "stopped, with all that it started: timeout" in answers[1]
    assert answers[2] == "numbers.txt\nreward.txt\n[exit code 0]", "files stay"
    assert "stopped, with all that it started: output" in answers[3] and answers[4] == "[exit code 1]"
    assert reward == 1.0
    assert run(task, "echo 41 > sum.txt", container=program)[1] == 0.0
    left = subprocess.run(
        [program, "ps", "--all", "--quiet", "--filter", "label=hone"], capture_output=True, check=True
    )
    assert not left.stdout
    (task / "tests/test.sh").write_text("#!/bin/bash\ntrue\n")
    with pytest.raises(NoVerdict, match="wrote no reward"):
        run(task, "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt", container=program)


# what a task says ----------------------------------------------------------------------------------------------------


def contents(folder: Path, dockerfile: str, **options: bool):
    made(folder, {"environment/Dockerfile": dockerfile, "environment/run it.sh": "#!/bin/bash\necho ran\n"})
    (folder / "environment" / "run it.sh").chmod(0o755)
    return read_dockerfile(read_task(folder), **{"ignore_build": False, **options})


@SANDBOX
def test_files_of_a_dockerfile_are_where_it_says(tmp_path):
    lines = """FROM debian:12
        WORKDIR /srv
        WORKDIR work
        COPY ["data", "x"]
        COPY data/numbers.txt "run it.sh" ./
        COPY data /opt/data/
        COPY ./data/numbers.txt /opt/renamed
        env A=1 B="two words"
        ENV C three  words
        EXPOSE 80
        CMD ["sh"]"""
    task = made(
        tmp_path,
        {
            "environment/run it.sh": "#!/bin/bash\necho ran\n",
            "environment/Dockerfile": lines.replace('        COPY ["data", "x"]\n', ""),
        },
    )
    (task / "environment/run it.sh").chmod(0o755)
    (answer,), _ = run(
        task, 'pwd; ls; "./run it.sh"; ls /opt /opt/data; cat /opt/renamed; echo "$A $B $C"; touch /opt/data/y'
    )
    assert answer == (
        "/srv/work\nnumbers.txt\nrun it.sh\nran\n/opt:\ndata\nrenamed\n\n/opt/data:\nnumbers.txt\n"
        "40\n2\n1 two words three  words\n[exit code 0]"
    )
    with raises(ConfigError, "COPY", "ignore_build", where=f"{tmp_path}/environment/Dockerfile:4"):
        contents(tmp_path, lines)


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("RUN apt-get install -y git", 2),
        ("ADD data /app", 2),
        ("USER nobody", 2),
        ("COPY --from=build /x /app/", 2),
        ("COPY *.txt /app/", 2),
        ("COPY data /usr/share/data", 2),
        ("COPY data /tests", 2),
        ("WORKDIR $HOME", 2),
        ("FROM python:3.13-slim", 2),
        ("RUN a \\\n  && b", 2),
        ("# nothing\n\nRUN a \\", 4),
    ],
)
def test_what_the_sandbox_cannot_build_is_refused_with_its_line(tmp_path, line, number):
    with raises(ConfigError, "docker", "ignore_build=true", where=f"{tmp_path}/environment/Dockerfile:{number}"):
        contents(tmp_path, f"FROM ubuntu\n{line}\n")
    read = contents(tmp_path, f"FROM ubuntu\n{line}\nWORKDIR /work\nCOPY data .\n", ignore_build=True)
    if not line.endswith("\\"):
        assert read.workdir == "/work" and read.copies == [(tmp_path / "environment/data", "/work")]


@pytest.mark.parametrize(
    "line",
    [
        "COPY ../tests /app/",
        "COPY data/../../solution /app/",
        "COPY data /app/../usr",
        "COPY nothing /app/",
        "WORKDIR /app/../..",
        "ENV =x",
        'ENV A="',
        "COPY <<EOF /app/x",
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path, line):
    for ignore in (False, True):
        with raises(ConfigError, where=f"{tmp_path}/environment/Dockerfile:2"):
            contents(tmp_path, f"FROM ubuntu\n{line}\n", ignore_build=ignore)
    with raises(ConfigError):
        contents(tmp_path, f"FROM ubuntu\n{line}\n")
    absolute = contents(tmp_path, "FROM ubuntu\nCOPY /data /app/\n")
    assert absolute.copies == [(tmp_path / "environment/data", "/app")], "as docker, below environment/"


@pytest.mark.parametrize("link", ["tests/more", "environment/data/more", "tests", "environment"])
def test_links_are_refused(tmp_path, link):
    task = made(tmp_path / "task")
    place = task / link
    if place.exists():
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.symlink_to("/etc")
    with raises(ConfigError, "link"):
        read_dockerfile(read_task(task), ignore_build=False)


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("[[steps]]\nname = 'a'\n", "steps"),
        ('schema_version = "2.0"\n', "schema_version"),
        ('[environment]\nos = "Windows"\n', "os"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.org"]\n', "network_mode"),
        ("[environment]\ngpus = 1\n", "gpus"),
        ('[environment.healthcheck]\ncommand = "true"\n', "healthcheck"),
        ('[verifier]\nenvironment_mode = "separate"\n', "environment_mode"),
        ('[verifier]\nenv = { KEY = "${OPENAI_API_KEY}" }\n', "OPENAI_API_KEY"),
        ("[environment.env]\n'A B' = 'x'\n", "A B"),
        ('[agent]\ntimeout_sec = "soon"\n', "soon"),
        ("[verifier]\ntimeout_sec = -1\n", "-1"),
        ('[environment]\nmemory = "2 APPLES"\n', "APPLES"),
        ("x = [", "cannot be read"),
    ],
)
def test_what_is_not_supported_of_a_task_is_named(tmp_path, toml, named):
    with raises(ConfigError, named):
        read_task(made(tmp_path, {"task.toml": toml}))


def test_a_path_without_tasks_and_wrong_options_are_refused(tmp_path):
    with raises(ConfigError, "task.toml", where="extra_info.environment.options.path"):
        make_environment("harbor", {"path": str(tmp_path)})
    for name in ("instruction.md", "tests/test.sh"):
        with raises(ConfigError, name):
            Harbor(path=str(made(tmp_path / name.replace("/", ""), {name: None})))
    task = str(made(tmp_path / "task"))
    for options in ({"seconds": 0}, {"max_output": 1}, {"container": "lxc"}, {"paths": task}):
        with raises(ConfigError, next(iter(options))):
            make_environment("harbor", {"path": task, **options})
    made(tmp_path / "task", {"environment/docker-compose.yaml": "services: {}"})
    with raises(ConfigError, "several containers"):
        Harbor(path=task, container="none")
