"""The one change that a kind of failure asks for, with the value that the run has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hone.apps.lab.triage.episodes import Failure
from hone.apps.lab.triage.kinds import Kind
from hone.errors import did_you_mean
from hone.insight.detectors.base import Settings
from hone.insight.detectors.reward_causes import LIMITS, TOO_HARD
from hone.insight.detectors.tuning import setting

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
_SANDBOX = "reward.sandbox"


def change_for(
    kind: Kind, failures: Sequence[Failure], settings: Settings, tools: Sequence[str], without_success: tuple[int, int]
) -> str:
    """Return the change for failures of a kind: ``key=value``, or the file to look at and what to do there.

    ``without_success`` are the prompts of which every episode failed, and all prompts.
    """
    detail = Counter(failure.detail for failure in failures).most_common(1)[0][0]
    if kind in _OF_CALLS:
        return _calls(kind, detail, settings, tools)
    if kind in (Kind.CUT, Kind.TURN_LIMIT, Kind.TIME_LIMIT, Kind.TOO_MANY_CALLS):
        return _limit(detail, settings)
    if kind is Kind.SCORER_DOWN:
        return _scorer_down(detail, settings)
    if kind in (Kind.SCORER_ERROR, Kind.RIGHT_REJECTED, Kind.HACKED):
        return f"{_scorer(settings)}: {_REWARD[kind]}"
    if kind is Kind.EPISODE_ERROR:
        return f"{_where_it_ran(settings)}: play one episode alone with the sample above and read its trace (`hone runs samples`)"
    files = setting(settings, "data.train_files", "data.train_files")
    if kind is Kind.NO_GROUND_TRUTH:
        return f"{files}: fill reward_model.ground_truth of these rows, or remove them (`hone data check`)"
    if kind is Kind.EMPTY:
        return "the chat template: see what the model is shown and where its turn ends (`hone data template`)"
    if kind is Kind.WRONG_FORMAT:
        return f"the prompts of {files}: ask for the form that the scorer reads, or choose another reward.scorer"
    hopeless, prompts = without_success
    if 2 * hopeless < prompts:
        return f"none yet: {prompts - hopeless} of {prompts} prompts have a success, which training learns from; sort again after more steps"
    return (
        f"demonstrations of calls first (hone sft), with {_described(settings)}"
        if kind is Kind.NO_TOOL_CALL
        else TOO_HARD.fix
    )


LEARNED = (Kind.WRONG_CONTENT, Kind.NO_TOOL_CALL)
"""Kinds that training corrects where some episodes of a prompt succeed."""
_OF_CALLS = {
    *(Kind.HALLUCINATED_TOOL, Kind.INVALID_ARGUMENTS, Kind.MALFORMED_CALL, Kind.REPEATED_CALL),
    *(Kind.TOOL_ERROR, Kind.TOOL_TIMEOUT),
}
_REWARD = {
    Kind.SCORER_ERROR: "repair the error above; `hone reward test` calls it with answers of your choice",
    Kind.RIGHT_REJECTED: "read how it finds the answer; the one above is right and gets too little (`hone reward test`)",
    Kind.HACKED: "bound what pays for the wrong answer above (reward.terms with clip), or switch reward.doctor.enable=true on",
}


def _calls(kind: Kind, name: str, settings: Settings, tools: Sequence[str]) -> str:
    described = _described(settings)
    if kind is Kind.HALLUCINATED_TOOL:
        meant = did_you_mean(name, tools).strip()
        known = f" ({meant})" if meant else f" (tools that answered: {', '.join(tools) or 'none'})"
        return f"{described} and the demonstrations: `{name}` is called, but not a tool{known}; use one name in both"
    if kind is Kind.INVALID_ARGUMENTS:
        return (
            f"{described}: describe the arguments of `{name}` with types and an example, as the demonstrations use them"
        )
    if kind is Kind.MALFORMED_CALL:
        form = setting(settings, f"{_MULTI_TURN}.format", "auto")
        return f"{_MULTI_TURN}.format (now {form}): compare with the calls of the prompt (`hone data template`)"
    if kind is Kind.REPEATED_CALL:
        return _lower(f"{_MULTI_TURN}.max_tool_calls", settings, 4)
    if kind is Kind.TOOL_TIMEOUT:
        key = f"{_MULTI_TURN}.tool_timeout"
        return f"{key}={2 * setting(settings, key, 30):g} (now {setting(settings, key, 30):g})"
    return f"{described}: run `{name}` alone with the arguments above"


def _described(settings: Settings) -> str:
    keys = (f"{_MULTI_TURN}.tool_config_path", f"{_MULTI_TURN}.function_tool_path")
    return next((str(settings[key]) for key in keys if settings.get(key)), "the tools of the rows")


def _limit(end: str, settings: Settings) -> str:
    if end == "over_limit" or end not in LIMITS:
        per_turn = f"{_MULTI_TURN}.max_tokens_per_turn"
        bound = settings.get(per_turn) is not None
        key = per_turn if bound else "data.max_response_length"
    else:
        key = LIMITS[end]
    return _double(key, settings)


def _double(key: str, settings: Settings) -> str:
    now = settings.get(key)
    return f"{key}={2 * now:g} (now {now:g})" if isinstance(now, int | float) else f"raise {key}"


def _lower(key: str, settings: Settings, to: int) -> str:
    now = settings.get(key)
    known = isinstance(now, int | float)
    return f"{key}={min(to, max(1, int(now) // 2)) if known else to} (now {f'{now:g}' if known else 'no limit'})"


def _scorer_down(cause: str, settings: Settings) -> str:
    keys = {"timeout": "reward.timeout", "memory": "reward.memory_mb", "sandbox": f"{_SANDBOX}.backend"}
    key = keys.get(cause)
    if key == "reward.timeout":
        return _double(key, settings)
    if key is not None:
        return f"{key} (now {settings.get(key)}): `hone doctor` shows what this machine offers"
    return f"{_scorer(settings)}: see whether its service answers; reward.max_retries is {setting(settings, 'reward.max_retries', 1)}"


def _scorer(settings: Mapping[str, Any]) -> str:
    path = settings.get("reward.custom_reward_function.path")
    if path:
        return f"{path}:{setting(settings, 'reward.custom_reward_function.name', 'compute_score')}"
    return f"reward.scorer (now {settings.get('reward.scorer') or 'the one of the data_source'})"


def _where_it_ran(settings: Settings) -> str:
    return str(
        settings.get("data.default_agent_loop") or settings.get(f"{_MULTI_TURN}.tool_config_path") or "the environment"
    )
