"""Every entry of `hone algorithms list` has a command, and it runs."""

import json
import re
from pathlib import Path

import pytest
from support.launch import hone
from support.tiny_runs import make_model, make_tiny_runs, offline_words, rl_words

from hone.apps.explain.catalogue import Method, methods

pytestmark = pytest.mark.long("hone/algorithms", "hone/apps/explain/catalogue")

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
CALLS = (
    *(f"{MULTI_TURN}.enable=true", f"{MULTI_TURN}.max_tokens_per_turn=8", f"{MULTI_TURN}.max_assistant_turns=2"),
    *(f"{MULTI_TURN}.tool_config_path=tools.yaml", "data.max_prompt_length=400", "data.max_response_length=80"),
)
EXTRA: dict[str, tuple[str, ...]] = {
    "gdpo": ("algorithm.gdpo_reward_keys=[score]",),
    "turn_value_by_forks": CALLS,
    "overlong_buffer": ("reward.overlong_buffer.len=2",),
    "bypass_mode": ("algorithm.rollout_correction.bypass_mode=true",),
    "kl_controller": ("algorithm.kl_ctrl.horizon=100",),
}
"""Keys that a method needs on these data: reward terms, episodes of several turns, short answers."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_runs(folder)
    make_model(folder / "teacher", layers=1)
    answers = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    labelled = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(answers)
    ]
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    return folder


@pytest.mark.parametrize("method", methods(), ids=lambda method: f"{method.kind}-{method.name}")
def test_the_command_runs(tiny: Path, tmp_path: Path, method: Method) -> None:
    _, program, *words = method.command.split()
    words = [word.replace("TEACHER", f"{tiny}/teacher") for word in words]
    assert all(re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=\S+", word) for word in words)
    words = ["trainer.total_training_steps=1", *words, *EXTRA.get(method.name, ())]
    if program == "train":
        command = rl_words(tiny, tmp_path / "run", *words, rows="calls" if CALLS[0] in words else "prompts")
    else:
        rows = [f"data.train_files={tiny}/labels.jsonl"] if method.name == "kto" else []
        command = offline_words(program, tiny, tmp_path / "run", *words, *rows)
    ended = hone(*command, log=tmp_path / "log", cwd=tiny)
    assert ended.code == 0, ended.output
    (step,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert step.get("training/global_step", step["step"]) == 1
