"""Triage of failed episodes: what failed first in each, to which part that points, and one change."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from hone.apps.lab.compare import Run
from hone.apps.lab.samples import spread
from hone.errors import did_you_mean
from hone.insight.archive.read import require_archive
from hone.insight.detectors.base import LIMITS, TOO_HARD, Settings, setting
from hone.insight.records import turn_messages


class Bucket(StrEnum):
    """Part of a run that a failure points to, in the order in which to look."""

    RUNTIME = "runtime"
    """Tools, environments, scorers or the sandbox did not work."""
    DATA = "data"
    """Rows, prompts or demonstrations."""
    REWARD = "reward"
    """The score is not what the task means."""
    CONFIG = "config"
    """A limit or a format of the configuration."""


class Kind(StrEnum):
    """Kind of failure, with the part that it points to and its meaning; those that hide the others first.

    The order decides between failures of the same turn.
    """

    bucket: Bucket
    meaning: str

    def __new__(cls, name: str, bucket: Bucket, meaning: str) -> Kind:
        kind = str.__new__(cls, name)
        kind._value_, kind.bucket, kind.meaning = name, bucket, meaning
        return kind

    SCORER_DOWN = "scorer_down", Bucket.RUNTIME, "no verdict: the scorer, its service or the sandbox did not answer"
    EPISODE_ERROR = "episode_error", Bucket.RUNTIME, "the environment, the agent loop or the engine failed"
    TOOL_ERROR = "tool_error", Bucket.RUNTIME, "a tool raised an error"
    TOOL_TIMEOUT = "tool_timeout", Bucket.RUNTIME, "a tool took too long"
    TIME_LIMIT = "time_limit", Bucket.RUNTIME, "the episode ran out of time"
    SCORER_ERROR = "scorer_error", Bucket.REWARD, "no verdict: the reward function raised or returned no usable score"
    HACKED = "hacked", Bucket.REWARD, "a high reward for a wrong answer"
    RIGHT_REJECTED = "right_rejected", Bucket.REWARD, "the answer ends with the expected text, and the reward is low"
    NO_GROUND_TRUTH = "no_ground_truth", Bucket.DATA, "the row has no expected answer, others of its source have one"
    HALLUCINATED_TOOL = "hallucinated_tool", Bucket.DATA, "a call of a tool that does not exist"
    INVALID_ARGUMENTS = "invalid_arguments", Bucket.DATA, "arguments that do not fit the tool's schema"
    MALFORMED_CALL = "malformed_call", Bucket.CONFIG, "a call that cannot be read"
    REPEATED_CALL = "repeated_call", Bucket.CONFIG, "the same call again and again"
    TOO_MANY_CALLS = "too_many_calls", Bucket.CONFIG, "more calls than a limit allows"
    CUT = "cut", Bucket.CONFIG, "cut at the limit of tokens"
    TURN_LIMIT = "turn_limit", Bucket.CONFIG, "ended by a limit of turns"
    EMPTY = "empty", Bucket.CONFIG, "an answer without text"
    NO_TOOL_CALL = "no_tool_call", Bucket.DATA, "no call, and most right answers of the task have one"
    WRONG_FORMAT = "wrong_format", Bucket.DATA, "an answer in which the scorer finds none"
    WRONG_CONTENT = "wrong_content", Bucket.DATA, "the right form, and a wrong answer"


COLUMNS = (
    "step", "uid", "index", "part", "fate", "data_source", "text", "ground_truth", "stop_reason", "score", "terms",
    "extra", "error", "cause", "episode",
)  # fmt: skip
"""Columns of the archive that the rules read."""
REPEATS = 3
"""Times that the same call counts as a loop; two times count where the result was the same, too."""
PASSES = 0.5
"""Accuracy from which an answer is right."""
_BY_STATUS = {
    "malformed": Kind.MALFORMED_CALL,
    "unknown_tool": Kind.HALLUCINATED_TOOL,
    "invalid_arguments": Kind.INVALID_ARGUMENTS,
    "over_limit": Kind.TOO_MANY_CALLS,
    "timeout": Kind.TOOL_TIMEOUT,
    "error": Kind.TOOL_ERROR,
}
_BY_END = {
    "tokens": Kind.CUT,
    "context": Kind.CUT,
    "assistant_turns": Kind.TURN_LIMIT,
    "user_turns": Kind.TURN_LIMIT,
    "tool_calls": Kind.TOO_MANY_CALLS,
    "time": Kind.TIME_LIMIT,
    "aborted": Kind.EPISODE_ERROR,
    "error": Kind.EPISODE_ERROR,
}
_SHOWN = 300
"""Characters of a turn or an error that are shown."""


@dataclass(frozen=True)
class Failure:
    """First failure of one episode."""

    kind: Kind
    turn: int  # number of the failing turn, from 1
    turns: int  # of the episode
    evidence: str  # what shows it, with figures
    text: str  # of the turn, shortened
    task: str  # data source
    step: int
    uid: str
    index: int
    score: float | None  # None without a verdict
    # what the change depends on: the name of a tool, the reason of the end, the cause of a missing verdict
    detail: str = ""

    def record(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "bucket": self.kind.bucket.value} | {
            name: value for name, value in vars(self).items() if name != "kind"
        }


@dataclass(frozen=True)
class Bar:
    """Bounds of a failure where no accuracy is recorded, and of a reward that is too high where one is."""

    score: float  # rewards below it are failures
    paid: float = 1.0  # reward from which a wrong answer is paid like a right one
    expects: frozenset[str] = frozenset()  # data sources of which some row has an expected answer
    calls: frozenset[str] = frozenset()  # data sources of which most right answers called a tool


def accuracy(record: Mapping[str, Any]) -> float | None:
    """Return the accuracy that the scorer (`acc`) or the environment (`solved`) reports; None without one."""
    facts = (record["episode"] or {}).get("facts") or {}
    known = (record["terms"] or {}).get("acc", facts.get("solved"))
    return None if known is None else float(known)


def has_failed(record: Mapping[str, Any], bar: Bar) -> bool:
    """Return whether an episode failed: no verdict, a wrong answer, or, where accuracy is unknown, a low reward."""
    known = accuracy(record)
    if record["score"] is None or known is None:
        return record["score"] is None or record["score"] < bar.score
    return known < PASSES


def first_failure(record: Mapping[str, Any], bar: Bar) -> Failure:
    """Return what failed first in a failed episode.

    The earliest failing turn decides. Of the failures of one turn, the one that comes first in :class:`Kind` decides. A missing
    verdict of the scorer comes before all: without it nothing of the episode was judged.
    """
    episode = record["episode"] or {}
    texts = _texts(record)
    last = max(len(texts), 1)
    order = list(Kind)
    first = min(_failures(record, episode, last, bar), key=lambda each: (each[1], order.index(each[0])))
    kind, turn, evidence, detail = first
    return Failure(
        kind,
        max(turn, 1),
        last,
        _short(evidence),
        _short(texts[turn - 1] if 0 < turn <= len(texts) else record["text"]),
        record["data_source"] or "unknown",
        *(record["step"], record["uid"], record["index"], record["score"]),
        detail,
    )


def _failures(
    record: Mapping[str, Any], episode: Mapping[str, Any], last: int, bar: Bar
) -> Iterator[tuple[Kind, int, str, str]]:
    """Yield kind, turn, evidence and detail of everything that is wrong; turn 0 comes before all turns."""
    cause, error = record["cause"] or "", record["error"] or ""
    if record["score"] is None and cause != "episode":
        kind = Kind.SCORER_ERROR if cause in ("raised", "invalid", "declined") else Kind.SCORER_DOWN
        yield kind, 0, f"{cause or 'no verdict'}: {_last_line(error)}", cause
    for call in episode.get("tool_calls") or []:
        if (kind := _BY_STATUS.get(call["status"])) is not None:
            yield kind, call["turn"] + 1, f"{_call(call)}: {_last_line(call['result'])}", call["name"] or ""
    yield from _repeated(episode.get("tool_calls") or [])
    end = episode.get("end") or ("tokens" if record["stop_reason"] == "length" else "")
    end = end if end not in ("answer", "done") or record["stop_reason"] != "length" else "turn_tokens"
    if end == "turn_tokens" or (kind := _BY_END.get(end)) is not None:
        kind = Kind.CUT if end == "turn_tokens" else _BY_END[end]
        yield kind, last, f"ended by {end}" + (f": {_last_line(episode['error'])}" if episode.get("error") else ""), end
    if record["score"] is None:
        if error:
            yield Kind.EPISODE_ERROR, last, _last_line(error), "error"
        return
    yield from _judged(record, last, bar)


def _judged(record: Mapping[str, Any], last: int, bar: Bar) -> Iterator[tuple[Kind, int, str, str]]:
    """Yield what is wrong with an answer that has a verdict."""
    terms, known, score = record["terms"] or {}, accuracy(record), record["score"]
    shown = ", ".join(f"{name} {value:g}" for name, value in {"score": score, **terms}.items())
    missing = record["ground_truth"] in (None, "", [], {})
    if missing and (record["data_source"] or "unknown") in bar.expects:
        yield Kind.NO_GROUND_TRUTH, last, f"ground_truth is {json.dumps(record['ground_truth'])}; {shown}", ""
    if known is not None and known < PASSES and score >= bar.paid:
        yield Kind.HACKED, last, f"{shown}: the reward counts as right, the answer is wrong", ""
    pattern = None if missing else expected_pattern(record["ground_truth"])
    if pattern is not None and pattern.search(record["text"][-TAIL:]):
        yield Kind.RIGHT_REJECTED, last, f"expected {json.dumps(record['ground_truth'])}; {shown}", ""
    if not record["text"].strip():
        yield Kind.EMPTY, last, f"no text; {shown}", ""
    calls = (record["episode"] or {}).get("tool_calls")
    if not calls and (record["data_source"] or "unknown") in bar.calls:
        yield Kind.NO_TOOL_CALL, last, shown, ""
    if terms.get("format", 1.0) < PASSES:
        yield Kind.WRONG_FORMAT, last, shown, ""
    wanted = "" if missing else f"expected {_short(json.dumps(record['ground_truth'], ensure_ascii=False), 80)}; "
    yield Kind.WRONG_CONTENT, last, f"{wanted}{shown}", ""


def _repeated(calls: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Kind, int, str, str]]:
    """Yield the call that begins to repeat: the third equal one, or the second if its result was the same, too."""
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for call in calls:
        if call["arguments"] is None:
            continue
        same = seen.setdefault(json.dumps([call["name"], call["arguments"]], sort_keys=True), [])
        same.append(call)
        again = len(same) > 1 and same[-1]["result"] == same[-2]["result"]
        if again or len(same) >= REPEATS:
            times = sum(
                1 for other in calls if (other["name"], other["arguments"]) == (call["name"], call["arguments"])
            )
            yield Kind.REPEATED_CALL, call["turn"] + 1, f"{_call(call)} {times} times", call["name"] or ""
            return


def _texts(record: Mapping[str, Any]) -> list[str]:
    """Return the text of each turn, calls included."""
    if not record["episode"]:
        return [record["text"]]
    return [
        " ".join(
            part
            for part in (
                message["content"] if isinstance(message.get("content"), str) else "",
                *(
                    f"{call['function']['name']}({call['function']['arguments']})"
                    for call in message.get("tool_calls") or []
                ),
            )
            if part
        )
        for message in turn_messages(record["episode"])
    ]


def _call(call: Mapping[str, Any]) -> str:
    arguments = "" if call["arguments"] is None else json.dumps(call["arguments"], ensure_ascii=False)
    return f"{call['name'] or '?'}({_short(arguments, 80)})"


def _last_line(text: str) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _short(text: str, length: int = _SHOWN) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 4]} ..."


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


STEPS = 5
"""Newest steps that are read."""
PER_TASK = 50
"""Failed episodes of a task that are sorted."""
OFTEN = 0.2
"""Share of the failures from which a kind with another cause than a hard task decides the change."""
EXAMPLES = 3
"""Examples of a kind."""


@dataclass(frozen=True)
class Task:
    """Failures of one data source."""

    name: str  # data source
    episodes: int  # episodes of the steps that were read
    failed: int  # failed ones among them
    failures: list[Failure]  # what failed first, of the failed ones that were sorted
    hopeless: tuple[int, int]  # prompts of which every episode failed, and all prompts


@dataclass(frozen=True)
class Triage:
    run: str
    steps: list[int]  # steps that were read
    bar: Bar  # what counted as failed
    judged_by: str  # the same in words
    tasks: list[Task]  # tasks, the one with the most failures first
    change: str | None  # the proposed change; None without failures
    because: Kind | None  # kind that asks for it, None without failures

    @property
    def failures(self) -> list[Failure]:
        return [failure for task in self.tasks for failure in task.failures]

    def record(self) -> dict[str, Any]:
        kinds = Counter(failure.kind for failure in self.failures)
        buckets = Counter(failure.kind.bucket for failure in self.failures)
        return {
            "run": self.run,
            "steps": self.steps,
            "judged_by": self.judged_by,
            "episodes": sum(task.episodes for task in self.tasks),
            "failed": sum(task.failed for task in self.tasks),
            "sorted": len(self.failures),
            "buckets": {bucket.value: buckets[bucket] for bucket in Bucket if buckets[bucket]},
            "kinds": {kind.value: number for kind, number in kinds.most_common()},
            "change": self.change,
            "because": None if self.because is None else self.because.value,
            "tasks": [
                {
                    "name": task.name,
                    "episodes": task.episodes,
                    "failed": task.failed,
                    "prompts": task.hopeless[1],
                    "prompts_without_success": task.hopeless[0],
                    "failures": [failure.record() for failure in task.failures],
                }
                for task in self.tasks
            ],
        }


def triage(
    run: Run, *, folder: str = "rollouts", steps: int = STEPS, step: int | None = None, per_task: int = PER_TASK
) -> Triage:
    """Sort the failed episodes of a run's newest stored steps, or of one ``step``, in ``rollouts`` or ``validation``.

    Of more than ``per_task`` failed episodes of a task, some at even distances are sorted.
    """
    archive = require_archive(run.path / folder)
    read = archive.steps()[-steps:] if step is None else [step]
    whole: dict[tuple[int, str, int], dict[str, Any]] = {}
    for number in read:
        for record in archive.records(number, COLUMNS):  # of an episode in several parts the last one counts
            whole[(number, record["uid"], record["index"])] = record
    records = [record for record in whole.values() if record["fate"] != "too_old"]
    bar = _bar(records)
    tasks = [_task(name, records, bar, per_task) for name in sorted({_source(record) for record in records})]
    tasks.sort(key=lambda task: -task.failed)
    failures = [failure for task in tasks for failure in task.failures]
    decisive = _decisive(failures)
    known = sum(accuracy(record) is not None for record in records)
    judged_by = (
        f"accuracy below 0.5 ({known} of {len(records)} episodes report one), else a reward below {bar.score:.3g}"
        if known
        else f"a reward below {bar.score:.3g}, halfway between the lowest and the highest"
    )
    change = None
    if decisive is not None:
        chosen = [failure for failure in failures if failure.kind is decisive]
        without = sum(task.hopeless[0] for task in tasks), sum(task.hopeless[1] for task in tasks)
        change = change_for(decisive, chosen, run.config, _working_tools(records), without)
    return Triage(run.name, list(read), bar, f"no verdict, or {judged_by}", tasks, change, decisive)


def _bar(records: Sequence[dict[str, Any]]) -> Bar:
    scores = [record["score"] for record in records if record["score"] is not None] or [0.0]
    low, high = min(scores), max(scores)
    right = [record for record in records if record["score"] is not None and (accuracy(record) or 0.0) >= PASSES]
    expects = {_source(record) for record in records if record["ground_truth"] not in (None, "", [], {})}
    calling = Counter(_source(record) for record in right if (record["episode"] or {}).get("tool_calls"))
    of_source = Counter(_source(record) for record in right)
    bar = (low + high) / 2 if low < high else low if low > 0 else 1e-9  # equal rewards of at most 0: all failed
    return Bar(
        bar,
        (low + median(record["score"] for record in right)) / 2 if right else 1.0,
        frozenset(expects),
        frozenset(source for source, number in calling.items() if 2 * number > of_source[source]),
    )


def _task(name: str, records: Sequence[dict[str, Any]], bar: Bar, per_task: int) -> Task:
    mine = [record for record in records if _source(record) == name]
    failed = [record for record in mine if has_failed(record, bar)]
    episodes, failures = Counter(record["uid"] for record in mine), Counter(record["uid"] for record in failed)
    hopeless = sum(failures[uid] == number for uid, number in episodes.items())
    first = [first_failure(record, bar) for record in spread(failed, per_task)]
    return Task(name, len(mine), len(failed), first, (hopeless, len(episodes)))


def _decisive(failures: Sequence[Failure]) -> Kind | None:
    """Return the kind that decides the change: the most frequent, or, from a fifth on, one that a harder task does not explain."""
    if not failures:
        return None
    counts = Counter(failure.kind for failure in failures)
    others = {kind: number for kind, number in counts.items() if kind not in LEARNED}
    most = max(others, key=lambda kind: (others[kind], -list(Kind).index(kind)), default=Kind.WRONG_CONTENT)
    return most if others.get(most, 0) >= OFTEN * len(failures) else counts.most_common(1)[0][0]


def _working_tools(records: Sequence[dict[str, Any]]) -> list[str]:
    calls = (call for record in records for call in (record["episode"] or {}).get("tool_calls") or [])
    return sorted({call["name"] for call in calls if call["status"] not in ("unknown_tool", "malformed")})


def _source(record: dict[str, Any]) -> str:
    return record["data_source"] or "unknown"


def markdown(result: Triage) -> str:
    """Return the triage as a page of Markdown."""
    data = result.record()
    steps = f"{result.steps[0]}" if len(result.steps) == 1 else f"{result.steps[0]} to {result.steps[-1]}"
    lines = [
        f"# Failures of {result.run}",
        "",
        f"{data['failed']} of {data['episodes']} episodes of step {steps} failed ({result.judged_by}); {data['sorted']} were sorted.",
    ]
    if result.because is None:
        return "\n".join(lines) + "\n"
    counts = data["kinds"]
    lines += ["", "| Bucket | Kind | Episodes | Share | First failing turn | What |", "|---|---|---|---|---|---|"]
    for bucket in Bucket:
        for kind in (Kind(name) for name in counts if Kind(name).bucket is bucket):
            turns = [failure.turn for failure in result.failures if failure.kind is kind]
            where = f"{median(turns):g} (median)"
            share = len(turns) / data["sorted"]
            lines.append(f"| {bucket} | `{kind}` | {len(turns)} | {share:.0%} | {where} | {kind.meaning} |")
    lines += ["", f"**Change one thing:** {result.change}", "", f"Because `{result.because}` is {_share(result)}."]
    for task in result.tasks:
        lines += ["", f"## {task.name}", ""]
        lines.append(
            f"{task.failed} of {task.episodes} episodes failed; of {task.hopeless[1]} prompts {task.hopeless[0]} have no success."
        )
        kinds = Counter(failure.kind for failure in task.failures)
        for kind, number in kinds.most_common():
            lines += ["", f"`{kind}` ({kind.bucket}), {number}:", ""]
            lines += [_example(one) for one in [each for each in task.failures if each.kind is kind][:EXAMPLES]]
    return "\n".join(lines) + "\n"


def _share(result: Triage) -> str:
    number = sum(failure.kind is result.because for failure in result.failures)
    return f"{number} of {len(result.failures)} failures"


def _example(failure: Failure) -> str:
    place = f"step {failure.step}, uid {failure.uid}, episode {failure.index}, turn {failure.turn} of {failure.turns}"
    return f"- {place}: {failure.evidence}\n  > {failure.text or '(no text)'}"


TAIL = 240
"""Characters at the end of an answer in which the expected one is looked for."""
_LONG = 100
"""Most characters of an expected answer that is looked for."""


def expected_pattern(expected: Any) -> re.Pattern[str] | None:
    """Return the pattern of an expected answer as a word; None for one that cannot be looked for."""
    if isinstance(expected, Mapping):
        expected = next((expected[name] for name in ("answer", "target", "ground_truth") if name in expected), None)
    if isinstance(expected, list) and len(expected) == 1:
        expected = expected[0]
    if isinstance(expected, bool) or not isinstance(expected, (str, int, float)):
        return None
    text = str(expected).strip()
    if not text or len(text) > _LONG:
        return None
    return re.compile(rf"(?<![\w.,-]){re.escape(text)}(?![\w]|[.,]\d)")
