"""Runs with credit by turn: turns of played episodes are forked, and a critic of turns is trained."""

import json
from pathlib import Path

import pytest
from support.launch import hone
from support.tiny_runs import rl_words

from hone.apps.lab.replay.stored import load_step
from hone.apps.lab.replay.what_if import what_if
from hone.insight.archive.read import open_archive

pytestmark = pytest.mark.application(
    "hone/trainers/algorithm.py",
    "hone/apps/lab/forks.py",
    "hone/agents/forking.py",
)

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
AGENT = (
    f"{MULTI_TURN}.enable=true",
    f"{MULTI_TURN}.max_tokens_per_turn=8",
    f"{MULTI_TURN}.max_assistant_turns=2",
    f"{MULTI_TURN}.tool_config_path=tools.yaml",
    "data.max_prompt_length=400",
    "data.max_response_length=80",
)


def metrics(tiny: Path, run: Path, estimator: str, *words: str) -> list[dict]:
    chosen = f"algorithm.adv_estimator={estimator}"
    ended = hone(*rl_words(tiny, run, *AGENT, chosen, *words, rows="calls"), log=run.with_suffix(".log"), cwd=tiny)
    assert ended.code == 0, ended.output
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_turns_are_valued_by_forks(tiny: Path, tmp_path: Path) -> None:
    words = ("algorithm.forks.samples=2", "algorithm.forks.max_turns=5", "algorithm.forks.min_entropy=0.01")
    steps = metrics(tiny, tmp_path / "run", "turn_value_by_forks", *words)
    assert [(step["forks/turns"], step["forks/no_verdict_rate"]) for step in steps] == [(5, 0), (5, 0)]
    assert all(step["forks/continued_tokens"] > 10 and step["actor/grad_norm"] > 0 for step in steps)
    without = metrics(tiny, tmp_path / "without", "turn_value_by_forks", "algorithm.forks.max_turns=0")
    plain = metrics(tiny, tmp_path / "plain", "rloo", "actor_rollout_ref.actor.recompute_old_log_probs=true")
    assert without[0]["forks/turns"] == 0
    assert without[0]["actor/grad_norm"] == pytest.approx(plain[0]["actor/grad_norm"], rel=1e-4), (
        "without forks it is rloo"
    )
    assert steps[0]["actor/grad_norm"] != pytest.approx(plain[0]["actor/grad_norm"], rel=1e-3)


def test_a_critic_of_turns_learns(tiny: Path, tmp_path: Path) -> None:
    steps = metrics(tiny, tmp_path / "run", "turn_gae")
    assert all(step["critic/vf_loss"] > 0 and step["actor/grad_norm"] > 0 for step in steps)


LETTERS = '''
from hone.agents.environments.proposals import Proposals


class Letters(Proposals):
    """Any text is a problem; answers with an even number of characters are right."""

    answer = "ab"

    async def ask(self, seed):
        return "Write."

    async def pose(self, proposal):
        return f"Repeat: {len(proposal) % 7}"

    async def check(self, answer):
        return float(len(answer) % 2 == 0)

    def proposal(self, seed):
        return "text"
'''


def test_proposers_and_their_solvers_are_compared_with_their_own_kind(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(LETTERS)
    environment = {"name": "letters:Letters", "seed": 1, "options": {"attempts": 3}}
    row = {
        "prompt": [{"role": "user", "content": "Write."}],
        "agent_name": "proposer_solver",
        "data_source": "letters",
        "extra_info": {"environment": environment},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"data_source": "other"}) + "\n")
    run = tmp_path / "run"
    words = (
        f"data.train_files={tmp_path}/rows.jsonl",
        f"{MULTI_TURN}.enable=true",
        f"{MULTI_TURN}.max_assistant_turns=1",
        f"{MULTI_TURN}.max_tokens_per_turn=8",
        "data.max_response_length=40",
        "data.train_batch_size=2",
        "algorithm.adv_estimator=hierarchical_grpo",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "preflight.allow=[R47]",
        "trainer.save_freq=1",
    )
    ended = hone(*rl_words(tiny, run, *words), log=tmp_path / "log", cwd=tmp_path)
    assert ended.code == 0, ended.output
    for step in (1, 2):
        stored = load_step(run, step)
        assert what_if(stored, [], None).gap == 0, "the roles are in the archive"
        records = list(open_archive(run).records(step))
        earned = {(r["uid"], r["index"], r["part"]): sum(r["token_rewards"]) for r in records}
        assert len(earned) == 24 and {part for _, _, part in earned} == {0, 1, 2, 3}
        risen = 0
        for r in records:
            uid, index, part = r["uid"], r["index"], r["part"]
            solvers = [earned[uid, index, solver] for solver in range(3)]
            peers = solvers if part < 3 else [earned[uid, episode, 3] for episode in range(3)]
            worth = r["episode"]["turn_rewards"][3]
            assert worth == pytest.approx(1 - 2 * abs(sum(solvers) / 3 - 0.5))
            expected = earned[uid, index, part] - sum(peers) / 3
            learnt = [a for a, m in zip(r["advantages"], r["response_mask"], strict=True) if m]
            assert learnt == pytest.approx([expected] * len(learnt), abs=1e-6)
            risen += part < 3 and expected > 0
        assert risen > 0
