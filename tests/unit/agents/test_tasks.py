"""Tasks whose problems are episodes: demonstrations agree with what the tools say, and guesses do without them."""

import asyncio
import itertools
import json
import re

import pytest
from support.messages import raises

from hone.agents.tasks.search_qa import TOWNS
from hone.agents.tools.lookup import Lookup
from hone.agents.tools.search import Search
from hone.data.tasks.make import make_task, write_task
from hone.errors import ConfigError
from hone.rewards.scorers.matching import search_em_score


def first(name, count, *options, seed=1):
    return list(itertools.islice(make_task(name, list(options)).problems(seed), count))


def calls_of(problem):
    return [call["function"] for message in problem.answer for call in message.get("tool_calls", ())]


def test_numbers_of_the_calculator_task_stay_within_their_bounds():
    options = ("min_number=10", "max_number=12", "operators=+", "operations=2", "guesses=50")
    problems = first("calculator", 200, *options)
    numbers = {int(number) for problem in problems for number in problem.extra["expression"].split("+")}
    assert numbers == {10, 11, 12}
    for problem in problems:
        assert int(problem.ground_truth) == sum(map(int, problem.extra["expression"].split("+")))
        right = problem.answer[-1]["content"] == f"#### {problem.ground_truth}"
        assert right != problem.extra["guessed"], "a guess repeats the sum, an answer is what the tool said"
    for wrong in ("min_number=12", "min_number=-1"):
        with raises(ConfigError, wrong, "0..11"):
            make_task("calculator", [wrong, "max_number=12"])


@pytest.mark.parametrize(
    ("name", "options"), [("arithmetic", ["operations=2", "operators=+-*", "slips=50"]), ("calculator", ["guesses=50"])]
)
def test_phrasings_word_the_same_problems_otherwise(name, options):
    """What is drawn stays as with one wording, so that the wording alone differs between two files."""
    plain, worded = first(name, 400, *options), first(name, 400, *options, "phrasings=6")
    assert {problem.extra["phrasing"] for problem in worded} == set(range(6))
    assert "phrasing" not in plain[0].extra
    for one, other in zip(plain, worded, strict=True):
        assert (one.ground_truth, one.solution, one.answer) == (other.ground_truth, other.solution, other.answer)
        assert re.findall(r"\d+", one.question) == re.findall(r"\d+", other.question)
        assert (one.question == other.question) == (other.extra["phrasing"] == 0)
    assert {problem.extra["phrasing"] for problem in first(name, 100, "phrasings=2")} == {0, 1}
    with raises(ConfigError, "phrasings=7", "phrasings=6"):
        make_task(name, ["phrasings=7"])


def test_guesses_of_multi_hop_look_nothing_up_and_the_others_follow_the_table():
    problems = first("multi_hop", 300, "guesses=70", "hops=3")
    guessed = [problem for problem in problems if problem.extra["guessed"]]
    assert 0.6 < len(guessed) / 300 < 0.8
    for problem in problems:
        *_, last = problem.answer
        if problem.extra["guessed"]:
            assert len(problem.answer) == 1 and last["content"].partition(" #### ")[2] in TOWNS
            continue
        tool, facts = Lookup(), problem.extra["tools_kwargs"]["lookup"]["create_kwargs"]
        state = asyncio.run(tool.create(**facts))
        said = [asyncio.run(tool.execute(state, json.loads(call["arguments"]))) for call in calls_of(problem)]
        assert said == [message["content"] for message in problem.answer if message["role"] == "tool"]
        assert len(said) == 3 and last["content"] == f"#### {said[-1]}" == f"#### {problem.ground_truth}"
    assert not any(problem.extra["guessed"] for problem in first("multi_hop", 20))


def test_answers_of_search_qa_are_in_the_search_results(tmp_path):
    task = make_task("search_qa", ["people=40", "k=2", "guesses=50"])
    write_task(task, tmp_path, size=60, val_size=20, seed=3)
    tool = Search(str(tmp_path / "documents.jsonl"), k=2)
    guessed = 0
    for problem in itertools.islice(task.problems(5), 120):
        said = problem.answer[-1]["content"]
        if problem.extra["guessed"]:
            guessed += 1
            assert len(problem.answer) == 1
            continue
        (call,) = calls_of(problem)
        found = asyncio.run(tool.execute(None, json.loads(call["arguments"])))
        assert found == problem.answer[1]["content"] and problem.ground_truth in found.splitlines()[0]
        assert search_em_score("search_em", said, problem.ground_truth)["score"] == 1.0
    assert 40 < guessed < 80
    again = make_task("search_qa", ["people=40"])
    assert again.files() == task.files(), "the world does not depend on the seed"


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [("search_qa", "people=1", "2..400"), ("search_qa", "k=0", "k=0"), ("search_qa", "guesses=101", "0..100"),
     ("multi_hop", "guesses=-1", "0..100"), ("programs", "steps=1", "steps=1"), ("programs", "slips=101", "0..100")],
)  # fmt: skip
def test_mistakes(name, option, message):
    with raises(ConfigError, option, message):
        make_task(name, [option])
