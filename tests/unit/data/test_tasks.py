"""Task makers: right answers, distinct problems, honest held-out sets, the same files for the same seed."""

import itertools
import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises

from hone.data.images import ImageData
from hone.data.tasks.make import make_task, write_task
from hone.data.tasks.shapes import COLOURS
from hone.errors import ConfigError, DataError, HoneError
from hone.extras import install_command

NO_OPTIONS: list[str] = []


def first(name, count=300, options=(), seed=1):
    return list(itertools.islice(make_task(name, list(options)).problems(seed), count))


def test_arithmetic_solutions_follow_from_the_text():
    for problem in first("arithmetic", 500, ["operations=3", "min_operations=1", "operators=+-*"]):
        numbers = list(map(int, re.findall(r"\d+", problem.question)))
        *lines, answer = problem.solution.split("\n")
        value = numbers[0]
        assert len(lines) == len(numbers) - 1 == problem.extra["operations"]
        for line, number in zip(lines, numbers[1:], strict=True):
            left, right = line.split("=")
            assert eval(left) == int(right) and left in (f"{value}+{number}", f"{value}-{number}", f"{value}*{number}")
            value = int(right)
            assert value >= 0
        assert answer == f"#### {value}" and problem.ground_truth == str(value)


def test_arithmetic_options_bound_the_numbers():
    numbers = [int(n) for p in first("arithmetic", 400, ["max_number=7"]) for n in re.findall(r"\d+", p.question)]
    assert min(numbers) == 1 and max(numbers) == 7
    assert {p.extra["operations"] for p in first("arithmetic", 100, ["operations=2"])} == {2}


def test_slips_change_the_worked_solution_and_never_the_answer():
    problems = list(first("arithmetic", 500, ["slips=60", "operations=2"]))
    assert 0.5 < sum(problem.extra["slip"] for problem in problems) / 500 < 0.7
    for problem in problems:
        *_, step, answer = problem.solution.split("\n")
        last_value = int(answer.removeprefix("#### "))
        off = (1 if "-" in step.partition("=")[0] else -1) * problem.extra["slip"]
        assert step.endswith(f"={last_value}")
        assert last_value == int(problem.ground_truth) + off


def test_arithmetic_has_plenty_of_problems():
    questions = {problem.question for problem in first("arithmetic", 60_000)}
    assert len(questions) > 55_000


@examples(40)
@given(st.integers(2, 5), st.integers(0, 99))
def test_programs_do_what_their_tests_want_unless_they_slip(steps, seed):
    slips = mistakes = 0
    for problem in first("programs", 40, [f"steps={steps}", "slips=50"], seed):
        tests, space = json.loads(problem.ground_truth), {}
        solution = problem.answer[0]["content"] if problem.extra["slip"] else problem.solution
        exec(solution.removeprefix("```python\n").removesuffix("\n```"), space)
        operations = re.findall(r"(add|subtract|multiply by) (\d+)", problem.question)
        assert len(operations) == steps
        for (x,), wanted in zip(tests["inputs"], tests["outputs"], strict=True):
            for word, number in operations:
                x = {"add": x + int(number), "subtract": x - int(number), "multiply by": x * int(number)}[word]
            assert x == wanted
        right = [space["f"](*given) for given in tests["inputs"]] == tests["outputs"]
        assert right or problem.extra["slip"]
        slips, mistakes = slips + problem.extra["slip"], mistakes + (not right)
    assert mistakes > 0.8 * slips > 0


@pytest.mark.parametrize(
    ("kind", "asked", "answer"), [("copy", "3814", "3814"), ("reverse", "3814", "4183"), ("sort", "3814", "1348")]
)
def test_digit_sequences(kind, asked, answer):
    problems = {p.question: p for p in first("digit_sequence", 40_000, [f"kind={kind}"])}
    assert problems[f"{kind} {asked}"].ground_truth == answer == problems[f"{kind} {asked}"].solution


def test_digit_sequences_count_within_their_alphabet():
    problems = {
        p.question: p.ground_truth for p in first("digit_sequence", 200, ["kind=count", "digits=3", "length=2"])
    }
    assert problems["count 02"] == "10" and len(problems) == 9


def _corners(problem):
    """Colour of each corner's shape, and its share of the square around it; None and 0 for an empty corner."""
    image = ImageData(problem.images[0]).open()
    half, background = image.width // 2, image.getpixel((image.width - 1, image.height - 1))
    for top, left in itertools.product((0, half), repeat=2):
        pixels = np.asarray(image)[top : top + half, left : left + half]
        drawn = (pixels != np.asarray(background)).any(-1)
        if not drawn.any():
            yield None, 0.0
            continue
        rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
        box = (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
        (colour,) = {tuple(pixel) for pixel in pixels[drawn].tolist()}
        yield {rgb: name for name, rgb in COLOURS.items()}[colour], drawn.sum() / box


def test_shapes_are_where_the_answers_say():
    filled = {"circle": (0.7, 0.85), "square": (1.0, 1.0), "triangle": (0.45, 0.6)}
    corners = ("top left", "top right", "bottom left", "bottom right")
    for problem in first("shapes", 100, ["side=96"]):
        (corner,) = (number for number, name in enumerate(corners) if name in problem.question)
        colour, share = list(_corners(problem))[corner]
        expected, shape = problem.ground_truth.split()
        low, high = filled[shape]
        assert colour == expected and low <= share <= high
    for problem in first("shapes", 40, ["kind=count", "colours=2"]):
        counted = problem.question.removesuffix("?").split()[-1]
        assert problem.ground_truth == str(sum(colour == counted for colour, _ in _corners(problem)))


def test_descriptions_name_what_is_drawn():
    corners = ("top left", "top right", "bottom left", "bottom right")
    for drawn in (1, 3):
        for problem in first("shapes", 30, ["kind=describe", f"drawn={drawn}", "side=96"]):
            expected = {" ".join(words[2:]): words[0] for words in map(str.split, problem.ground_truth.split(", "))}
            colours = {corner: colour for corner, (colour, _) in zip(corners, _corners(problem), strict=True) if colour}
            assert colours == expected and len(expected) == drawn


def test_rows_of_shapes_have_their_image(tmp_path):
    train, _ = write_task(make_task("shapes", ["kind=colour"]), tmp_path, size=6, val_size=2, seed=1)
    rows = pq.read_table(train).to_pylist()
    assert all(len(row["images"]) == str(row["messages"]).count("<image>") == 1 for row in rows)
    assert {row["messages"][1]["content"] for row in rows} <= {"red", "green", "blue"}


def test_countdown_solutions_reach_the_target_with_every_number_once():
    for problem in first("countdown", 500):
        truth = json.loads(problem.ground_truth)
        *lines, last = problem.solution.split("\n")
        expression = re.fullmatch(r"<answer>(.*)</answer>", last)[1]
        assert eval(expression) == truth["target"]
        assert sorted(map(int, re.findall(r"\d+", expression))) == sorted(truth["numbers"])
        assert len(lines) == len(truth["numbers"]) - 1
        assert all(eval(line.split("=")[0]) == int(line.split("=")[1]) for line in lines)
        assert 1 <= truth["target"] <= 100 and f"make {truth['target']}." in problem.question


@pytest.mark.parametrize("dataset", ["gsm_symbolic", "graph_color", "chain_sum", "rubiks_cube"])
def test_reasoning_gym_entries_are_accepted_by_their_own_verifier_after_the_way_through_a_file(dataset, tmp_path):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    write_task(make_task(f"reasoning_gym:{dataset}", NO_OPTIONS), tmp_path, size=4, val_size=2, seed=1)
    verifier = reasoning_gym.create_dataset(dataset, size=1, seed=0)
    for row in pq.read_table(tmp_path / "train.parquet").to_pylist():
        answer = re.fullmatch(r"<answer>(.*)</answer>", row["messages"][1]["content"], re.DOTALL)[1]
        entry = json.loads(row["reward_model"]["ground_truth"])
        assert row["data_source"] == f"reasoning_gym/{dataset}"
        assert verifier.score_answer(answer, entry) == 1.0 and verifier.score_answer("nonsense", entry) < 1.0


def test_reasoning_gym_options_and_refusals():
    pytest.importorskip("reasoning_gym")
    terms = [
        p.question.count("+") + p.question.count("-") for p in first("reasoning_gym:chain_sum", 20, ["max_terms=2"])
    ]
    assert max(terms) == 1
    for name, options, mentions in (
        ("reasoning_gym:gsm_symbolik", [], ("Did you mean gsm_symbolic",)),
        ("reasoning_gym", [], ("hone data make reasoning_gym:gsm_symbolic",)),
        ("reasoning_gym:chain_sum", ["max_term=2"], ("'max_term'", "max_terms")),
        ("reasoning_gym:chain_sum", ["max_terms"], ("'max_terms'", "key=value")),
        ("reasoning_gym:chain_sum", ["max_terms=0"], ("max_terms=0",)),
    ):
        with raises(ConfigError, *mentions):
            make_task(name, options)
    with raises(DataError, "'arc_agi'", "JSON"):
        first("reasoning_gym:arc_agi", 1)


def test_reasoning_gym_missing_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with raises(HoneError, install_command("tasks")):
        make_task("reasoning_gym:chain_sum", NO_OPTIONS)


def rows(path):
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("name", ["arithmetic", "digit_sequence", "countdown"])
def test_files_serve_rl_and_sft_and_hold_no_problem_twice(name, tmp_path):
    train, val = write_task(make_task(name, NO_OPTIONS), tmp_path, size=200, val_size=50, seed=3)
    assert (train.name, val.name) == ("train.parquet", "val.parquet")
    questions = [row["prompt"][0]["content"] for path in (train, val) for row in rows(path)]
    assert len(questions) == len(set(questions)) == 250
    row = rows(val)[7]
    assert row["data_source"] == name and row["reward_model"]["style"] == "rule"
    assert row["prompt"] == row["messages"][:1] and row["messages"][1]["role"] == "assistant"
    assert row["extra_info"]["index"] == 7 and row["extra_info"]["split"] == "val"
    assert row["extra_info"]["answer"] == row["messages"][1]["content"]


def test_the_seed_decides_and_held_out_problems_do_not_depend_on_the_size(tmp_path):
    task = make_task("arithmetic", NO_OPTIONS)
    for folder, size, seed in (("a", 100, 1), ("b", 100, 1), ("c", 200, 1), ("d", 100, 2)):
        write_task(task, tmp_path / folder, size=size, val_size=20, seed=seed)
    a, b, c, d = (tmp_path / folder for folder in "abcd")
    assert (a / "train.parquet").read_bytes() == (b / "train.parquet").read_bytes()
    assert rows(a / "val.parquet") == rows(c / "val.parquet")
    assert rows(a / "train.parquet") == rows(c / "train.parquet")[:100]
    assert rows(a / "val.parquet") != rows(d / "val.parquet")


def test_sizes_and_folders_are_checked(tmp_path):
    small = make_task("digit_sequence", ["length=1"])
    with raises(DataError, 12, 10, "--size", "--val-size"):
        write_task(small, tmp_path, size=10, val_size=2, seed=1)
    write_task(small, tmp_path, size=8, val_size=2, seed=1)  # all of them
    with raises(DataError, "--size 0", "--val-size 2"):
        write_task(small, tmp_path, size=0, val_size=2, seed=1)
    (tmp_path / "file").write_text("")
    with raises(DataError, "--out", where=str(tmp_path / "file")):
        write_task(small, tmp_path / "file", size=5, val_size=2, seed=1)


@pytest.mark.parametrize(
    ("name", "options", "mentions"),
    [
        ("arithmetik", [], ("'arithmetik'", "Did you mean arithmetic")),
        ("arithmetic", ["max_numbr=3"], ("'max_numbr'", "Did you mean max_number")),
        ("arithmetic", ["max_number"], ("'max_number'", "key=value")),
        ("arithmetic", ["max_number=x"], ("max_number=x", "a whole number")),
        ("arithmetic", ["max_number=3", "max_number=4"], ("'max_number'", "once")),
        ("arithmetic", ["max_number=1"], ("max_number=1", "2..1000000")),
        ("arithmetic", ["operations=0"], ("operations=0", "1..8")),
        ("arithmetic", ["min_operations=2"], ("min_operations=2", "0..1")),
        ("arithmetic", ["operators=%"], ("operators=%", "+-*")),
        ("digit_sequence", ["kind=copi"], ("Did you mean copy",)),
        ("digit_sequence", ["length=0"], ("length=0", "1..64")),
        ("digit_sequence", ["digits=11"], ("digits=11", "2..10")),
        ("countdown", ["max_numbers=2"], ("min_numbers=3", "max_numbers=2")),
        ("countdown", ["max_target=5"], ("max_target=5", "max_number=20")),
        ("countdown", ["max_number=1"], ("max_number=1", 2)),
    ],
)
def test_bad_options_are_refused(name, options, mentions):
    with raises(ConfigError, *mentions):
        make_task(name, options)
