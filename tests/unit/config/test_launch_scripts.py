"""Launch scripts are followed as a shell would follow them: the shell itself is the oracle, its programs replaced by ones
that print what they are given."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.launch_scripts import ARGUMENTS, SCRIPTS
from support.patience import SOON

from hone.apps.verl.launch import launches, open_names, opened
from hone.apps.verl.script import follow

PROGRAMS = ("uv", "python3", "python", "torchrun", "ray", "srun", "docker", "scontrol", "sleep", "tee", "mkdir")
STUB = """{name}() {{ {{ printf '%s\\1' {name} "$@"; printf '\\n'; }} >&3; [ {name} != tee ] || cat > /dev/null; }}
"""  # tee reads to the end: who writes into its pipe under `set -x` would be killed otherwise


def printed_by_bash(
    script: str, folder: Path, environment: dict[str, str], arguments: tuple[str, ...] = ()
) -> list[list[str]]:
    """The commands that the script runs, as bash hands them their words."""
    stubs = "".join(STUB.format(name=name) for name in PROGRAMS)
    file = folder / "script.sh"
    file.write_text(f"exec 3>'{folder}/words'\n{stubs}{script}")
    subprocess.run(
        ["bash", str(file), *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        timeout=SOON,
        check=False,
    )
    lines = (folder / "words").read_text().split("\x01\n")
    return [line.split("\x01") for line in lines if line]


def with_values(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{oc\.env:(\w+)(,\w+)?\}", lambda m: values[m[1]], text)


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if "docker run" not in s.read_text()], ids=lambda path: path.stem
)
def test_words_are_those_of_bash(script: Path, tmp_path: Path) -> None:
    source = script.read_text()
    arguments = ARGUMENTS.get(script.stem, ())
    found, lost = launches(follow(source, arguments=list(arguments)).started)
    assert not lost
    (launch,) = found
    names = {name for argument in launch.settings for name in open_names(argument.text)}
    values = {name: name for name in names} | {"HOME": "/home/u", "SLURM_JOB_NUM_NODES": "SLURM_JOB_NUM_NODES"}
    commands = printed_by_bash(source, tmp_path, {**values, "PWD": str(tmp_path)}, arguments)
    wanted = next(words for words in commands if any("data.train_files=" in word for word in words))
    given = [word for word in wanted if re.match(r"[+~]*[a-z_]+(\.\S*)?=", word) and not word.startswith("--")]
    ours = [with_values(opened(argument.text), values) for argument in launch.settings]
    # the working directory is known to bash alone; a clock moves on between the two
    assert [word.replace(str(tmp_path), ".").replace("./.", ".") for word in given] == pytest.approx(ours) or [
        re.sub(r"\d\d-\d\d-\d\d|\d{4}$", "T", word.replace(str(tmp_path), ".")) for word in given
    ] == [re.sub(r"\d\d-\d\d-\d\d|\d{4}$", "T", word.replace("${oc.env:PWD,PWD}", ".")) for word in ours]


PIECES = st.sampled_from(
    ["a", "b c", "$x", "${y}", '"$x y"', "'$x'", "${z:-d}", "${u:-$x}", '"${z:-"q r"}"', "$((n * 2))", "$((n / 3 + 1))"]
    + [
        "\\$",
        '"${arr[@]}"',
        "${arr[0]}",
        "${#arr[@]}",
        "${x#p}",
        "${x%q}",
        "${y/ /_}",
        "${x^^}",
        "${x:1}",
        "${y:0:3}",
        '"${arr[@]:1}"',
        "=",
        ".",
        "$(echo $x)",
    ]
    + ['""', "$e", '"$e"', "${e:+set}", "${x:+set}", "${#x}", "`echo hi`", "a\\ b", "$'t'", "$((n > 3 ? 1 : 2))"]
)


@examples(60)
@given(words=st.lists(st.lists(PIECES, min_size=1, max_size=4), min_size=1, max_size=3))
def test_expansion_is_that_of_bash(words: list[list[str]]) -> None:
    line = " ".join("".join(pieces) for pieces in words)
    setup = "x=pxq; y='one two'; n=7; e=; arr=(i 'j k')\n"
    try:
        (started,) = follow(f"{setup}python3 w {line}\n").started
    except ValueError:
        started = None
    shell = subprocess.run(
        ["bash", "-c", f"{setup}printf '%s\\1' w {line}"],
        capture_output=True,
        text=True,
        env={},
        timeout=SOON,
        check=False,
    )
    if started is not None and any(open_names(argument.text) for argument in started.words):
        return  # pieces side by side gave a name that nothing sets: it stays open
    if shell.returncode == 0 and "? " not in line:
        assert started is not None
        assert [argument.text for argument in started.words[1:]] == shell.stdout.split("\x01")[:-1]


def started(source: str) -> list[list[str]]:
    return [[argument.text for argument in command.words] for command in follow(source).started]


@pytest.mark.parametrize(
    ("source", "commands"),
    [
        ("if [ 1 -eq 1 ]; then run a.b=1; else run a.b=2; fi", [["run", "a.b=1"]]),
        ("x=no; if [[ $x == yes || -z $x ]]; then run 1; elif [[ $x == n* ]]; then run 2; fi", [["run", "2"]]),
        ("[ -f /nowhere ] && run 1; run 2", [["run", "1"], ["run", "2"]]),
        ("false && run 1 || run 2", [["run", "2"]]),
        ("for i in 1 2; do run $i; done", [["run", "1"], ["run", "2"]]),
        ("case b in a) run 1;; b|c) run 2;; *) run 3;; esac", [["run", "2"]]),
        ("f() { run $1 $#; }; f x", [["run", "x", "1"]]),
        ("cat <<EOF\nrun $(rm -rf /) '\nEOF\nrun 2", [["run", "2"]]),
        ("A=(1 '2 3' # four\n 4)\nA+=(5); run \"${A[@]}\"", [["run", "1", "2 3", "4", "5"]]),
        (
            'C=\'run a b\'; $C; eval "$C c"; bash -c "$C d"',
            [["run", "a", "b"], ["run", "a", "b", "c"], ["run", "a", "b", "d"]],
        ),
        ("run a > log 2>&1 < in &", [["run", "a"]]),
        ("exit 0\nrun a", []),
        (
            "x=$(probe 2>/dev/null && echo npu || echo gpu); case $x in npu) run 1;; gpu | cuda) run 2;; esac",
            [["run", "2"]],
        ),
        ("x=$(probe | count || echo 0); run $x", [["run", "0"]]),
        (
            "if probe; then run 1; elif probe more; then run 2; else exit 1; fi",
            [["probe"], ["probe", "more"], ["run", "1"]],
        ),
        ('x=$(probe); if [ -n "$x" ]; then run 1; else exit 1; fi', [["run", "1"]]),
        ("case $(probe) in a) run 1;; *) exit 1;; esac; run 2", [["run", "2"]]),
        ("n=4; (( n % 2 != 0 )) && run 1; run 2", [["run", "2"]]),
        ("x=${x:-$(((1 + 2) * 3))}; run $x", [["run", "9"]]),
        ('E=(); run ${E[@]+"${E[@]}"} "${E[@]}" b', [["run", "b"]]),
        ("x=`echo a`b; run x`echo 1`y `# a comment` z", [["run", "x1y", "z"]]),
        ("x=$(cat <<'EOF'\na $y\nEOF\n); run \"$x\"", [["run", "a $y"]]),
        ("set -- a b; shift; run $1 $#", [["run", "b", "1"]]),
        ("f() { local x=$1; echo v-$x; }; run $(f 3)", [["run", "v-3"]]),
        ("! true && run 1; run 2", [["run", "2"]]),
        ("A=a; C=c; x=$A/b/$C/$A.d-$C; run $x", [["run", "a/b/c/a.d-c"]]),
        ("export A=1 B=2; unset A; run ${A:-none} $B", [["run", "none", "2"]]),
        ("while true; do run a; done\nrun b", [["run", "b"]]),
    ],
)
def test_commands(source: str, commands: list[list[str]]) -> None:
    assert started(source) == commands


@pytest.mark.parametrize("source", ["run 'a", 'run "a', "x=(1 2", "if true; then run", "run $(", "case x in"])
def test_what_is_no_script_is_said(source: str) -> None:
    assert follow(source).troubles


def test_nothing_is_executed(tmp_path: Path) -> None:
    follow(f"touch {tmp_path}/made; x=$(touch {tmp_path}/made); `touch {tmp_path}/made`; echo > {tmp_path}/made")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_no_shell_has_its_line_and_the_rest_is_followed() -> None:
    trace = follow("A=1\nrun $A\nx=(1 2\n")
    assert trace.troubles[0].line == 3
    assert [[argument.text for argument in command.words] for command in trace.started] == [["run", "1"]]


def test_a_script_that_computes_for_ever_is_given_up() -> None:
    loops = "".join(f"for x{depth} in {'a ' * 100}; do " for depth in range(4)) + ":" + "; done" * 4
    (trouble,) = follow(f"run 1\n{loops}\nrun 2").troubles
    assert trouble.line == 2


ROUNDS = "for i in a b c d e f g h i j k l m n o p q r s t u v w x y z 1 2 3 4 5 6 7 8 9; do {}; done\nrun 2"


@pytest.mark.parametrize(
    "line",
    ["X=$X$X", 'X="$X$X"', "X+=$X", 'A=("${A[@]}" "${A[@]}")', "X=${X//a/aaaaaaaa}", "N=$((N * N))", "N=$((N ** N ** N ** N))",
     "X=$(echo $X$X)", "X=${Y:-$X$X}", "X=$X$X; X=${X##*b}"],
)  # fmt: skip
def test_a_script_whose_values_grow_without_end_is_given_up(line: str) -> None:
    trace = follow(f"X=aa; N=3; A=(1 2)\nrun 1\n{ROUNDS.format(line)}")
    assert trace.troubles and {trouble.line for trouble in trace.troubles} == {3}
    assert [command.words[1].text for command in trace.started] == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "program", "command"),
    [
        ("uv run --extra a python3 -m verl.trainer.main_ppo a.b=1", "verl.trainer.main_ppo", "train"),
        ("torchrun --n=2 -m verl_lite.launch verl.trainer.sft_trainer data.x=1", "verl.trainer.sft_trainer", "sft"),
        ("$LAUNCHER data.x=1 model.path=m", "\ue000LAUNCHER\ue001", "sft"),
        ("$LAUNCHER data.x=1 critic.enable=false", "\ue000LAUNCHER\ue001", "train"),
    ],
)
def test_programs(line: str, program: str, command: str) -> None:
    ((launch,), lost) = launches(follow(line).started)
    assert (launch.program, launch.command, launch.strays, lost) == (program, command, (), [])


def test_a_function_that_calls_itself_ends() -> None:
    assert follow("f() { f; }; f").started == []


def test_arithmetic_without_an_answer_is_a_trouble() -> None:
    trace = follow("run $((2 + 3 * 4))\nrun $((1 / 0))")
    assert [argument.text for argument in trace.started[0].words] == ["run", "14"]
    assert [trouble.line for trouble in trace.troubles] == [2]
