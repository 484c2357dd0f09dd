"""`hone algorithms`: what it lists, shows and recommends."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from support.messages import mentioned
from typer.testing import CliRunner

from hone.algorithms import advantage_estimators, policy_losses
from hone.apps.explain.catalogue import KINDS, Situation, find, methods, recommend
from hone.apps.explain.catalogue.methods import description
from hone.apps.explain.catalogue.pages import batch_of_four, example, token_push
from hone.apps.explain.catalogue.recommend import REWARDS, size_text
from hone.cli.explain import app
from hone.config import RLConfig, load_config
from hone.errors import ConfigError, HoneError


def invoke(*arguments: str, answers: str = "") -> str:
    result = CliRunner().invoke(app, list(arguments), input=answers, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


# -------------------------------------------------------------------------------------------------------- list and show


def test_list_names_every_method() -> None:
    out = invoke("list")
    assert all(f"  {method.name} " in out for method in methods())
    rows = json.loads(invoke("list", "--json"))
    assert [(row["kind"], row["name"]) for row in rows] == [(method.kind, method.name) for method in methods()]
    assert {row["kind"] for row in rows} == set(KINDS)
    losses = json.loads(invoke("list", "--kind", "loss", "--json"))
    assert {row["name"] for row in losses} == {policy_losses.get(name).name for name in policy_losses}


def test_show_tells_formula_paper_needs_knobs_cost_and_numbers() -> None:
    out = invoke("show", "grpo_vectorized")
    for part in (
        "grpo  (advantage estimator",
        "arXiv:2402.03300",
        "group_ids",
        "norm_adv_by_std_in_grpo=true",
        "1.5, 1.5",
    ):
        assert part in out, part
    (gae,) = json.loads(invoke("show", "gae", "--json"))
    assert gae["cost"]["trained"] == ["policy", "critic"] and "values" in gae["cost"]["forward"]
    assert gae["needs"][0]["argument"] == "values" and "ppo" in gae["presets"]
    assert {"algorithm.gamma", "algorithm.lam"} == {knob["key"] for knob in gae["knobs"]}


def test_a_name_of_two_kinds_shows_both_and_kind_picks_one() -> None:
    assert [row["kind"] for row in json.loads(invoke("show", "gpg", "--json"))] == ["estimator", "loss"]
    assert [row["kind"] for row in json.loads(invoke("show", "gpg", "--kind", "loss", "--json"))] == ["loss"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "gropo"], "'gropo'.*grpo"),
        (["show", "vanilla", "--kind", "estimator"], "'vanilla'"),
        (["list", "--kind", "los"], "'los'.*loss"),
        (["recommend", "--model-size", "big", "--reward", "model", "--memory", "1"], "big"),
        (["recommend", "--model-size", "1b", "--reward", "ruled", "--memory", "1"], "'ruled'"),
        (["recommend", "--model-size", "1b", "--reward", "model", "--memory", "0"], "--memory: 0"),
        (["recommend", "--model-size", "1b", "--reward", "model"], "--memory: "),
        (["recommend", "--reward", "model"], "--model-size, --memory.*--model-size 7b --memory 80"),
    ],
)
def test_mistakes_have_a_fix(arguments: list[str], message: str) -> None:
    with pytest.raises(HoneError, match=f"(?s){message}"):
        invoke(*arguments)


def test_every_method_has_a_full_description() -> None:
    for method in methods():
        assert method.formula and method.paper and method.description and method.select, method.name
        assert "Args:" not in method.description and ":func:" not in method.description, method.name
        assert all(knob.meaning for knob in method.knobs), method.name
        if method.kind not in ("correction", "block"):
            caption, rows = example(method) or ("", [])
            assert caption and len(rows) > 2 and len({len(row) for row in rows}) == 1, method.name


def test_marks_of_docstrings_become_those_of_pages() -> None:
    def function() -> None:
        """Use ``x`` as :func:`~hone.errors.did_you_mean` does.

        Args:
            x: nothing.
        """

    assert description(function) == "Use `x` as `did_you_mean` does."


def test_the_numbers_of_the_batch_of_four_by_hand() -> None:
    rewards, mask, inputs = batch_of_four()
    first = {
        name: [round(float(row[0]), 3) for row in advantage_estimators.get(name)(rewards, mask, **inputs)[0]]
        for name in ("grpo", "rloo", "opo", "grpo_passk", "maxrl", "remax")
    }
    # mean 1/4, standard deviation (n - 1) 1/2, two of the twelve tokens belong to the right answer
    assert first["grpo"] == [1.5, -0.5, -0.5, -0.5]
    assert first["rloo"] == [1.0, -0.333, -0.333, -0.333]
    assert first["opo"] == [0.833, -0.167, -0.167, -0.167]
    assert first["grpo_passk"] == [2.0, 0.0, 0.0, 0.0]
    assert first["maxrl"] == [3.0, -1.0, -1.0, -1.0]
    assert first["remax"] == [1.0, 0.0, 0.0, 0.0]


def test_the_push_of_ppo_by_hand() -> None:
    push = token_push(policy_losses.get("vanilla"), [1.0, 1.1, 1.5, 0.5, 4.0], [1.0, 1.0, 1.0, -1.0, -1.0])
    expected = torch.tensor(
        [1.0, 1.1, 0.0, 0.0, 0.0], dtype=torch.float64
    )  # clipped above 1.2, below 0.8, dual clip at 3
    torch.testing.assert_close(push, expected)


# ------------------------------------------------------------------------------------------------------------ recommend

GRID = [
    Situation(size, reward, memory, turns, length, grouped, moe)
    for size, reward, memory, (turns, length, grouped, moe) in itertools.product(
        (int(5e8), int(7e9)),
        REWARDS,
        (8, 80, 640),
        (
            (1, 1024, True, False),
            (1, 16384, True, False),
            (5, 1024, True, False),
            (1, 1024, False, False),
            (1, 1024, True, True),
        ),
    )
]


def test_every_recommendation_can_be_started() -> None:
    seen = set()
    for situation in GRID:
        chosen = recommend(situation)
        words = chosen.command.split()
        assert words[:1] == ["hone"] and words[1] in ("train", "prefer") and words[2] == "--preset"
        seen.add((words[1], words[3], tuple(words[4:])))
    assert len(seen) >= 10, "the situation makes a difference"
    for command, preset, settings in seen:
        load_config(_tree(command), list(settings), preset=preset)


def _tree(command: str) -> type:
    if command == "train":
        return RLConfig
    from hone.config.offline import PreferenceConfig

    return PreferenceConfig


def test_what_is_said_to_fit_fits_and_the_numbers_add_up() -> None:
    for situation in GRID:
        chosen = recommend(situation)
        assert chosen.needed_gb == pytest.approx(sum(model.gigabytes for model in chosen.models))
        assert chosen.fits == (chosen.needed_gb <= 0.8 * situation.memory_gb)
        assert f"{chosen.needed_gb:.3g} GB" in " ".join(chosen.reasons)


def test_memory_decides_between_a_reference_copy_none_and_adapters() -> None:
    sizes = {memory: recommend(Situation(int(1e9), "verifiable", memory)).method for memory in (30, 22, 8, 2)}
    assert sizes == {30: "grpo", 22: "dr_grpo", 8: "grpo_lora", 2: "grpo_lora"}
    small = recommend(Situation(int(1e9), "verifiable", 2))
    assert not small.fits and "up to 714M parameters" in " ".join(small.reasons)
    passed = " ".join(recommend(Situation(int(1e9), "verifiable", 22)).reasons)
    assert mentioned("needs 18 GB, more than 17.6 GB", passed) and "grpo" in passed


def test_the_situation_decides_the_family() -> None:
    def method(**changes: object) -> str:
        return recommend(
            Situation(**{"parameters": 10**8, "reward": "verifiable", "memory_gb": 80.0, **changes})
        ).method  # type: ignore[arg-type]

    assert method() == "grpo"
    assert method(moe=True) == "gspo"
    assert method(response_length=8192) == "dapo"
    assert method(grouped=False) == "reinforce_plus_plus"
    assert method(reward="model") == "ppo" and method(reward="dense") == "ppo"
    assert method(reward="preference") == "dpo" and method(reward="labels") == "kto"


def test_recommend_asks_for_what_is_missing() -> None:
    out = invoke("recommend", "--memory", "80", answers="7b\nverifiable\n")
    assert "grpo_lora\n\n- A rule checks" in out and "hone train --preset grpo_lora" in out
    given = json.loads(invoke("recommend", "--model-size", "7b", "--reward", "verifiable", "--memory", "80", "--json"))
    assert given["method"] == "grpo_lora" and given["fits"] and given["command"] in out


def test_turns_bring_advice_about_turns() -> None:
    advice = invoke("recommend", "--model-size", "1b", "--reward", "verifiable", "--memory", "80", "--turns", "6")
    assert "6 turns" in advice and "actor_rollout_ref.rollout.agent.default_agent_loop" in advice
    assert "single turns" not in advice and "--preset agent_" in advice


def test_sizes_as_people_write_them() -> None:
    assert [size_text(number) for number in (1.5e9, 7e6, 900e3, 12)] == ["1.5B", "7M", "900k", "12"]


def test_find_by_another_name() -> None:
    assert find("low_var_kl")[0].name == "k3"
    with pytest.raises(ConfigError):
        find("nothing")
