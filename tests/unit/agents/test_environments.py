"""Environments, simulated users and the tasks made of them, played through the loops; with the real packages."""

import asyncio
import json

import pytest
from support.agents import play, sample, setting
from support.messages import raises

from hone.agents import tasks
from hone.agents.environments import make_environment
from hone.agents.environments.planning import Planning
from hone.agents.interactions.loading import load_interactions
from hone.agents.messages import AssistantTurn
from hone.data.episode_log import EpisodeEnd
from hone.data.tasks.make import make_task
from hone.errors import ConfigError, DataError

assert tasks.__all__


def of_task(name: str, *options: str, number: int = 0, seed: int = 1):
    """The row of a task's problem."""
    problems = make_task(name, list(options)).problems(seed)
    problem = [next(problems) for _ in range(number + 1)][-1]
    row = sample(problem.question, **json.loads(json.dumps(problem.extra)), agent_name=problem.agent_name)
    return row, problem


def test_guess_the_number_answers_until_it_is_found():
    row, problem = of_task("environment:guess_the_number", "max_number=8", "guesses=4")
    said = [m["content"] for m in problem.answer or [] if m["role"] == "assistant"]
    (t,), engine = play(setting(), lambda name, turn: said[turn], [row])
    assert t.episode is not None and t.episode.end is EpisodeEnd.DONE
    assert t.episode.facts == {"solved": 1.0, "guesses": float(len(said))}
    assert t.episode.turn_rewards == [0.0] * (len(said) - 1) + [1.0] and t.episode.reward == 0.0
    replies = [m["content"] for m in t.episode.messages if m["role"] == "user"]
    assert replies == [m["content"] for m in problem.answer or [] if m["role"] == "user"]
    assert t.episode.user_turns == len(said) - 1 and set(replies) <= {"higher", "lower"}


def test_guesses_and_user_turns_are_bounded():
    row, _ = of_task("environment:guess_the_number", "max_number=16", "guesses=3")
    (t,), _ = play(setting(), lambda name, turn: "99", [row])
    assert t.episode is not None and t.episode.facts["solved"] == 0 and t.episode.assistant_turns == 3
    assert "say a number from 1 to 16" in t.episode.messages[1]["content"]
    (t,), _ = play(setting(max_user_turns=1), lambda name, turn: "99", [row])
    assert t.episode is not None and (t.episode.end, t.episode.assistant_turns) == (EpisodeEnd.USER_TURNS, 2)


def test_a_row_that_its_environment_does_not_show_is_refused():
    row, _ = of_task("environment:guess_the_number", "max_number=8")
    row.extra_info["environment"]["options"]["max_number"] = 9
    with raises(DataError, "row", "make environment:NAME", where="extra_info.environment"):
        play(setting(), lambda name, turn: "1", [row])


def test_a_failed_plan_is_answered_with_its_first_wrong_step():
    for number in range(10):
        row, problem = of_task("environment:planning", "things=2", "places=4", number=number)
        good = (problem.answer or [])[0]["content"]
        said = ["go home\ntake moon", good]
        (t,), _ = play(setting(), lambda name, turn, said=said: said[turn], [row])
        assert t.episode is not None and t.episode.facts["solved"] == 1 and t.episode.turn_rewards == [0.0, 1.0]
        assert "step 2 (take moon): there is no moon" in t.episode.messages[1]["content"]


@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        ("fly home", "step 1 (fly home)"),
        ("go moon", "there is no place moon"),
        ("drop {thing}", "you do not carry"),
        ("take {thing}", "is not at home"),
        ("", "is not at home"),
    ],
)
def test_plans_that_cannot_be_carried_out(plan: str, wrong: str):
    async def one():
        environment = Planning(places=2, things=1)
        for seed in range(20):  # one that begins at home
            await environment.reset(seed)
            if environment.begin.at == "home":
                break
        thing = next(iter(environment.begin.things))
        return await environment.step(AssistantTurn(plan.format(thing=thing)))

    step = asyncio.run(one())
    assert not step.done and wrong in step.messages[0]["content"] and step.facts["solved"] == 0


def test_multi_hop_rows_bring_their_own_table():
    from hone.agents.tools.lookup import Lookup

    row, problem = of_task("multi_hop", "hops=3", "people=5")
    turns = [m for m in problem.answer or [] if m["role"] == "assistant"]
    from support.agents import call

    def script(name: str, turn: int) -> str:
        calls = turns[turn].get("tool_calls")
        return call("lookup", **json.loads(calls[0]["function"]["arguments"])) if calls else turns[turn]["content"]

    (t,), _ = play(setting([Lookup()]), script, [row])
    assert t.episode is not None and [c.status.value for c in t.episode.calls] == ["ok"] * 3
    assert t.text.endswith(f"#### {problem.ground_truth}") and t.episode.calls[-1].result == problem.ground_truth


def test_gymnasium_frozen_lake():
    pytest.importorskip("gymnasium")
    options = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "kwargs": {"is_slippery": False}}
    environment = make_environment("gymnasium", options)

    async def walk():
        shown = await environment.reset(3)
        steps = [
            await environment.step(AssistantTurn(f"I go {way}."))
            for way in ("sideways", "down", "down", "right", "right", "down", "right")
        ]
        await environment.close()
        return shown, steps

    shown, steps = asyncio.run(walk())
    assert "[S]FFF" in shown[0]["content"] and "one of: left, down, right, up" in shown[0]["content"]
    assert steps[0].facts["invalid_action"] == 1 and "[F]HFH" in steps[1].messages[0]["content"]
    assert steps[-1].done and steps[-1].reward == 1.0 and steps[-1].facts["solved"] == 1
    with raises(ConfigError, "NoSuch-v0", where="extra_info.environment.options"):
        make_environment("gymnasium", {"id": "NoSuch-v0"})
    with raises(ConfigError, "Pendulum-v1", "Discrete", "Text"):
        make_environment("gymnasium", {"id": "Pendulum-v1"})


def test_reasoning_gym_with_tries():
    pytest.importorskip("reasoning_gym")
    environment = make_environment("reasoning_gym", {"dataset": "basic_arithmetic", "tries": 2})

    async def answer():
        shown = await environment.reset(5)
        right = environment.entry["answer"]  # type: ignore[attr-defined]
        return shown, [await environment.step(AssistantTurn(text)) for text in ("no", f"<answer>{right}</answer>")]

    shown, (first, second) = asyncio.run(answer())
    assert shown[0]["content"] and not first.done and "Try again" in first.messages[0]["content"]
    assert second.done and second.reward == 1.0 and second.facts["solved"] == 1


def test_a_teacher_lets_the_model_try_again(tmp_path):
    path = tmp_path / "users.yaml"
    path.write_text("interaction:\n  - name: teacher\n    config: {tries: 3, wrong: Look again.}\n")
    made = setting(agent={"default_agent_loop": "interaction"})
    made.interactions = load_interactions(str(path))
    said = ["#### 41", "#### 42"]
    (t,), _ = play(made, lambda name, turn: said[turn], [sample()])
    assert t.episode is not None and t.episode.turn_rewards == [0.0, 0.5] and t.episode.facts == {"solved": 1.0}
    assert [m["role"] for m in t.episode.messages] == ["assistant", "user", "assistant"]
    assert t.episode.messages[1]["content"] == "Look again."
    row = sample(interaction_kwargs={"name": "stranger"})
    with raises(DataError, "stranger", "teacher", code="R48", where="extra_info.interaction_kwargs.name"):
        play(made, lambda name, turn: "x", [row])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("interaction: []", "users.yaml"),
        ("interaction:\n  - name: techer", "techer"),
        ("interaction:\n  - name: teacher\n    config: {trys: 2}", "trys"),
        ("interaction:\n  - name: teacher\n  - name: teacher", "user 2"),
    ],
)
def test_interaction_files_that_cannot_be_used(tmp_path, text, words):
    path = tmp_path / "users.yaml"
    path.write_text(text)
    with raises(ConfigError, words):
        load_interactions(str(path))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("guess_the_nmber", {}, "guess_the_nmber"),
        ("guess_the_number", {"max": 3}, "max"),
        ("guess_the_number", {"guesses": 0}, "guesses=0"),
        ("json:loads", {}, "hone.agents.environments.Environment"),
    ],
)
def test_environments_that_cannot_be_made(name, options, words):
    with raises(ConfigError, words):
        make_environment(name, options)
