"""Runs with speculative decoding: the numbers of a run are those without it, also when it is resumed."""

import json
from pathlib import Path

import pytest
from support.archives import records
from support.launch import hone
from support.tiny_runs import rl_words

pytestmark = pytest.mark.application(
    "hone/generation/native/speculative",
)

BLOCK = "actor_rollout_ref.rollout.speculative"
VARIES = (
    "timing",
    "perf/",
    "memory",
    "overhead",
    "rollout_corr",
    "log_probs_diff",
    "rollout_probs_diff",
    "rollout/d",
    "rollout/acc",
)
"""Parts of the names of metrics of time and memory, of the gap to the rounding of the engine, and of the drafts themselves."""


def trained(tiny: Path, run: Path, *words: str) -> list[dict]:
    """Metrics of each step; with few tokens to sample from, n-grams occur again."""
    words = ("data.max_response_length=24", "actor_rollout_ref.rollout.top_k=2", *words)
    ended = hone(*rl_words(tiny, run, *words), log=run.with_suffix(".log"), cwd=tiny)
    assert ended.code == 0, ended.output
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    run = tmp_path_factory.mktemp("plain") / "run"
    return run, trained(tiny, run)


def check_same(run: Path, steps: list[dict], plain: tuple[Path, list[dict]]) -> None:
    """Check that tokens and metrics are those of the plain run."""
    assert len(steps) == len(plain[1]) == 2
    for number, (step, expected) in enumerate(zip(steps, plain[1], strict=True), 1):
        responses = [[row["response_ids"] for row in records(folder, number)] for folder in (run, plain[0])]
        assert responses[0] == responses[1]
        names = {name for name in expected if not any(part in name for part in VARIES)}
        assert len(names) > 30 and {name: step[name] for name in names} == {name: expected[name] for name in names}
        assert step["training/rollout_log_probs_diff_max"] < 1e-5
        assert 0 < step["rollout/accepted_tokens"] <= step["rollout/drafted_tokens"]
        share = step["rollout/accepted_tokens"] / step["rollout/drafted_tokens"]
        assert step["rollout/draft_acceptance"] == pytest.approx(share)
        assert "rollout/drafted_tokens" not in expected


def test_ngrams_leave_the_numbers_of_a_run_as_they_are(tiny, tmp_path, plain):
    words = (f"{BLOCK}.method=ngram", f"{BLOCK}.prompt_lookup_min=1")
    check_same(tmp_path / "run", trained(tiny, tmp_path / "run", *words), plain)


def test_a_trained_draft_model_does_too_and_a_resumed_run(tiny, tmp_path, plain):
    """The resumed run drafts with the weights of the draft model's files, so that only its drafts differ."""
    words = (f"{BLOCK}.method=draft_model", f"{BLOCK}.model={tiny}/model", f"{BLOCK}.draft_lr=1e-3")
    trained(tiny, tmp_path / "run", *words, "trainer.save_freq=1", "trainer.total_training_steps=1")
    steps = trained(tiny, tmp_path / "run", *words, "trainer.save_freq=1")
    check_same(tmp_path / "run", steps, plain)
    assert steps[0]["rollout/draft_acceptance"] > 0.9  # the draft model is the policy before its first update
