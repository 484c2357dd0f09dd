"""`hone reward test`: rewards that are sound, and rewards that would harm a run."""

import json

import pytest
from support.messages import check_message, mentioned, raises
from typer.testing import CliRunner

from hone.apps.lab.rewards.bench_report import histogram, text_histogram
from hone.cli.reward import app
from hone.data.prompts import scored_rows
from hone.errors import HoneError
from hone.rewards.probes import golden, ordinary, solve, traps

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):\n"


def run(*words):
    return CliRunner().invoke(app, ["test", *map(str, words)], catch_exceptions=False)


@pytest.fixture
def data(tmp_path):
    rows = [
        {
            "prompt": f"{n} + 1 = ?",
            "data_source": "gsm8k",
            "reward_model": {"ground_truth": str(n + 1)},
            "solution": f"#### {n + 1}",
        }
        for n in range(6)
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def reward(tmp_path):
    def write(body):
        (tmp_path / "own.py").write_text(f"{HEAD}{body}\n")
        return f"{tmp_path}/own.py:compute_score"

    return write


def test_a_built_in_scorer(data, tmp_path):
    shown = run("--data", data, "--rows", 4, "--show", 1, "--png", tmp_path / "h.png", "--output", tmp_path / "o.jsonl")
    assert shown.exit_code == 0 and " R" not in shown.output
    assert "golden (best form)" in shown.output and "ms per call" in shown.output and "####" in shown.output
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    kinds = {record["kind"] for record in records}
    assert kinds == {"golden", "wrong", "garbage", "empty", "truncated", "adversarial", "wrong type"}
    right = [r for r in records if r["form"] == "#### x" and r["kind"] == "golden"]
    assert [r["score"] for r in right] == [1.0] * 4 and all(r["terms"]["acc"] == 1.0 for r in right)


BROKEN = {
    "always the same": ("    return 0.5", "R49", "the reward is 0.5 for all"),
    "the wrong way round": ("    return float(ground_truth not in solution_str)", "R49", "garbage"),
    "pays for nothing": ("    return 1.0 if not solution_str else float(solution_str == ground_truth)", "R49", "garbage"),
    "pays for length": ("    return len(solution_str) / 1000", "R49", "garbage"),
    "text": ("    return 'good'", "R51", "finite number"),
    "no number": ("    return float('nan')", "R51", "finite number"),
    "forgets to return": ("    score = float(ground_truth in solution_str)", "R51", "finite number"),
    "a dict without a score": ("    return {'reward': 1.0}", "R51", "finite number"),
    "raises on most text": ("    return float(solution_str == ground_truth) if float(solution_str) else 0", "R52", "calls"),
    "kills its process": ("    import os; os._exit(1)", "R52", "calls"),
    "never ends": ("    while 'lorem' not in solution_str: pass", "R52", "call"),
    "cannot be loaded": ("    return 1.0\nimport no_such_module", "E-reward", "no_such_module"),
    "other arguments": ("    return 1.0\ndef compute_score(text): return 1.0", "E-reward", "data_source"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rewards_are_caught(data, reward, name):
    body, code, mention = BROKEN[name]
    try:
        result = run("--data", data, "--reward", reward(body), "--rows", 3, "--timeout", 1, "--json")
    except HoneError as error:  # the program prints it, and ends with 2
        check_message(error, mention, code=code)
        return
    found = json.loads(result.stdout)["findings"]
    assert any(entry["code"] == code and mentioned(mention, entry["what"]) for entry in found), found
    assert result.exit_code == 2 or name == "pays for length"  # it may be what is wanted: a warning


def test_the_list_of_scorers():
    every = CliRunner().invoke(app, ["list", "--json"], catch_exceptions=False)
    scorers = {entry["name"]: entry for entry in json.loads(every.stdout)}
    assert scorers["gsm8k"]["options"] == {"method": "strict", "format_score": 0.0, "score": 1.0}
    assert scorers["code"]["runs"] != scorers["math"]["runs"] and "services" not in scorers["code"]["options"]
    assert scorers["math"]["runs"] == "in worker processes" and "searchR1_*" in scorers["search_em"]["data_sources"]
    shown = CliRunner().invoke(app, ["list"], catch_exceptions=False).output
    assert "reasoning_gym" in shown and "options: method='strict'" in shown
    one = CliRunner().invoke(app, ["list", "code"], catch_exceptions=False).output
    assert "assert_case" in one and "codecontests" in one
    with raises(HoneError, "'coed'", "code"):
        CliRunner().invoke(app, ["list", "coed"], catch_exceptions=False)


def test_json_and_arguments(data, reward):
    own = reward("    return float(ground_truth == solution_str.strip().split(' ')[-1]) + bonus")
    result = run("--data", data, "--reward", own, "--set", "bonus=0.5", "--rows", 3, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    kinds = {row["kind"]: row for row in report["kinds"]}
    assert kinds["golden (best form)"]["min"] == 1.5 and kinds["empty"]["max"] == 0.5
    assert report["forms"]["as it is"] == 1.5 and report["rows"] == 3 and report["seconds_per_call"] > 0
    with raises(HoneError, "'bonus'", "--set name=value"):
        run("--data", data, "--reward", own, "--set", "bonus")


@pytest.mark.parametrize(
    ("body", "code", "mention"),
    [
        ("    return 0.0", "R49", "0"),
        ("    return float(ground_truth not in solution_str)", "R49", "3 of 3 rows"),
        ("    return float(solution_str)", "R52", "calls"),
        ("    return 'good'", "R51", "finite number"),
    ],
)
def test_harmful_rewards_end_with_2(data, reward, body, code, mention):
    result = run("--data", data, "--reward", reward(body), "--rows", 3, "--json")
    assert result.exit_code == 2
    found = [(finding["code"], finding["what"]) for finding in json.loads(result.stdout)["findings"]]
    assert any(code == its and mentioned(mention, what) for its, what in found), found


def test_rewarded_and_hanging_adversarial_answers(data, reward):
    pays = reward("    return float(ground_truth in solution_str)")
    result = run("--data", data, "--reward", pays, "--rows", 2, "--json")
    assert result.exit_code == 0, "a warning"
    findings = json.loads(result.stdout)["findings"]
    assert any(found["code"] == "R49" and "every number up to 200" in found["what"] for found in findings)
    hangs = reward(
        "    import re\n    re.match(r'(a|aa)+$', 'a' * 60 + 'b') if 'nest' or len(solution_str) > 9000 else 0\n    return 0.0"
    )
    result = run("--data", data, "--reward", hangs, "--rows", 2, "--timeout", 0.5, "--json")
    assert result.exit_code == 2 and json.loads(result.stdout)["stopped"]


def test_right_answers_of_all_kinds_of_ground_truth(tmp_path):
    truths = ["42", 42, ["a", "b"], '{"target": 24, "numbers": [4, 6, 1]}', {"answer": "blue"}, None]
    file = tmp_path / "t.jsonl"
    file.write_text(
        "".join(json.dumps({"data_source": "x", "reward_model": {"ground_truth": t}}) + "\n" for t in truths)
    )
    rows = scored_rows(file, reward_fn_key="data_source", limit=6)
    plain = [[text for form, text in golden(row) if form == "as it is"] for row in rows]
    assert plain[:3] == [["42"], ["42"], ["a", "b"]] and plain[4:] == [["blue"], []]
    assert eval(plain[3][0]) == 24
    assert [probe.kind for probe in ordinary(rows, 5)] == ["garbage", "empty"]
    assert len(list(traps(rows[0]))) == 12
    assert solve([1, 1], 5) is None and solve(list(range(7)), 5) is None


def test_rows_of_all_data_sources_are_taken_in_turn(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"data_source": "a" if n < 50 else "b"}) + "\n" for n in range(60)))
    assert [row.sample.data_source for row in scored_rows(file, reward_fn_key="data_source", limit=5)] == list("ababa")


def test_histograms():
    assert histogram([]) == [] and histogram([2.0, 2.0]) == [(2.0, 2.0, 2)]
    cells = histogram([0.0, 0.05, 0.5, 1.0])
    assert [count for *_, count in cells] == [2, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert [line.split()[-1] for line in text_histogram([0.0, 0.05, 1.0])] == ["2", *"00000000", "1"]


EPISODE_REWARDS = {
    "reads calls": ('    calls = extra_info["episode"]["tool_calls"]\n    right = solution_str.strip().endswith(ground_truth)\n    return float(right) - 0.1 * len(calls)', True),
    "pays what a tool says": ('    shown = " ".join(call["result"] for call in extra_info["episode"]["tool_calls"])\n    return float(ground_truth in solution_str.split() or ground_truth in shown.split())', False),
}  # fmt: skip


@pytest.mark.parametrize("name", EPISODE_REWARDS)
def test_rewards_that_read_the_episode_are_tried_on_episodes(data, reward, tmp_path, name):
    body, sound = EPISODE_REWARDS[name]
    shown = run("--data", data, "--rows", 3, "--reward", reward(body), "--output", tmp_path / "o.jsonl", "--json")
    assert shown.exit_code == 0, shown.output
    findings = json.loads(shown.output)["findings"]
    paid = [f for f in findings if f["code"] == "R49" and "injected text" in f["what"]]
    assert bool(paid) == (not sound), findings
    records = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    bad = {record["form"]: record["score"] for record in records if record["kind"] == "episode"}
    assert set(bad) == {"failed tool", "loop", "calls that do not fit", "cut", "nothing said", "injected text"}
    if sound:
        assert bad["loop"] == pytest.approx(0.4) and bad["injected text"] < 0


LAST_TURNS = {
    "reads all turns": ("    return float(solution_str.strip() == ground_truth)", True),
    "reads the last answer": ("    return float(extra_info['last_answer'] == ground_truth)", False),
    "takes the last answer": ("    return 0\ndef compute_score(data_source, solution_str, ground_truth, extra_info, last_answer):\n    return float(last_answer == ground_truth)", False),
    "TRL, last message": ("    return 0\ndef compute_score(completions, ground_truth, completion_ids, **columns):\n    return [float(c[-1]['content'] == t and len(i) > 0) for c, t, i in zip(completions, ground_truth, completion_ids)]", False),
    "TRL, first message": ("    return 0\ndef compute_score(completions, ground_truth, **columns):\n    return [float(c[0]['content'] == t) for c, t in zip(completions, ground_truth)]", True),
}  # fmt: skip


@pytest.mark.parametrize("name", LAST_TURNS)
def test_right_answers_after_tool_calls_are_tried(tmp_path, reward, name):
    body, stops = LAST_TURNS[name]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n} + 1 = ?"}],
            "agent_name": "tool_agent",
            "reward_model": {"ground_truth": str(n + 1)},
        }
        for n in range(3)
    ]
    (tmp_path / "agents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = run("--data", tmp_path / "agents.jsonl", "--reward", reward(body), "--json")
    what = [found["what"] for found in json.loads(shown.stdout)["findings"] if found["severity"] == "error"]
    assert shown.exit_code == (2 if stops else 0), shown.stdout
    if name == "reads all turns":
        assert len(what) == 1 and "after a tool call scores like garbage" in what[0] and "3 of 3 rows" in what[0]


def test_right_answers_after_thoughts_are_tried(data, reward):
    own = reward("    return float(solution_str.strip() == ground_truth)")
    shown = run("--data", data, "--reward", own, "--rows", 3, "--json")
    found = [f for f in json.loads(shown.stdout)["findings"] if "after a thought scores like garbage" in f["what"]]
    assert shown.exit_code == 0 and len(found) == 1 and found[0]["severity"] != "error"  # no policy is known here
