"""Episodes of several turns are trained: a game is learned, tools are called, and a resumed run repeats to the last bit."""

import json
from pathlib import Path

import pytest
from support import archives
from support.launch import hone
from support.world import curve, mean, metrics

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/agents", "hone/trainers")]


@pytest.fixture(scope="module")
def game(tmp_path_factory) -> Path:
    """Guess a number from 1 to 3 with two guesses, and a model that has seen games in which few listened."""
    folder = tmp_path_factory.mktemp("game")
    for number, arguments in enumerate(
        [
            ("data", "make", "environment:guess_the_number", "max_number=3", "guesses=2", "random_demonstrations=60",
             "--out", folder / "data", "--size", 256, "--val-size", 32),
            ("data", "tokenizer", "--files", folder / "data/train.parquet", "--out", folder / "tokenizer", "--vocab-size", 300,
             "--template", "chatml_tools"),
            ("init", "--arch", "qwen3", "--size", "200k", "--tokenizer", folder / "tokenizer", "--out", folder / "blank"),
            ("sft", f"model.path={folder}/blank", f"data.train_files={folder}/data/train.parquet", "data.max_length=96",
             "data.train_batch_size=32", "optim.lr=4e-3", "trainer.total_training_steps=40", "trainer.num_threads=1",
             "trainer.device=cpu", f"trainer.default_local_dir={folder}/sft"),
        ]
    ):  # fmt: skip
        ended = hone(*arguments, log=folder / f"make{number}.log")
        assert ended.code == 0, ended.output
    return folder


def command(game: Path, run: Path, *overrides: str) -> list[str]:
    return [
        *("train", "--preset=grpo", f"actor_rollout_ref.model.path={game}/sft/checkpoints/step_40/actor"),
        *(f"data.train_files={game}/data/train.parquet", "data.max_prompt_length=48", "data.max_response_length=48"),
        *(
            "data.train_batch_size=12",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=12",
        ),
        *("actor_rollout_ref.actor.optim.lr=7e-4", "actor_rollout_ref.rollout.multi_turn.enable=true"),
        *("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2", "preflight.allow=[R47]"),
        *("trainer.num_threads=1", "trainer.device=cpu", "trainer.val_before_train=false"),
        *(f"trainer.default_local_dir={run}", *overrides),
    ]


LOUDER = """
from hone.agents.environments import Environment, Step

class Louder(Environment):
    "Every turn earns the digit it says, out of 3."
    def __init__(self):
        self.turns = 0
    async def reset(self, seed):
        return [{"role": "user", "content": "I think of a number from 1 to 3."}]
    async def step(self, turn):
        self.turns += 1
        said = min(3, max([int(c) for c in turn.content if c.isdigit()], default=0)) / 3
        if self.turns == 2:
            return Step(reward=said, done=True, facts={"solved": float(said == 1)})
        return Step.says("higher", reward=said)
"""


@pytest.mark.long("hone/agents", "hone/algorithms", "hone/trainers/algorithm.py")
def test_a_game_is_learned(game: Path, run, tmp_path: Path):
    (tmp_path / "louder.py").write_text(LOUDER)
    made = run("data", "make", "environment:louder:Louder", "--out", tmp_path / "data", "--size", 24, "--val-size", 8)
    assert made.code == 0, made.output
    own = ("trainer.total_training_steps=14", "actor_rollout_ref.actor.recompute_old_log_probs=true")
    arguments = command(game, tmp_path / "run", *own, f"data.val_files={tmp_path}/data/val.parquet")
    arguments[3] = f"data.train_files={tmp_path}/data/train.parquet"
    ended = run(*arguments)
    assert ended.code == 0, ended.output
    scores = curve(tmp_path / "run")
    assert mean(scores[-3:]) > mean(scores[:3]) + 0.1, scores
    assert max(curve(tmp_path / "run", "actor/first_ratio_max_abs_log")) < 1e-4, "the trainer sees what was sampled"
    assert 0 < max(curve(tmp_path / "run", "training/rollout_log_probs_diff_max")) < 1e-4, "and so does the update"
    assert max(curve(tmp_path / "run", "num_turns/max")) == 4
    assert "val-core/environment/louder:Louder/reward/mean@1" in metrics(tmp_path / "run")[-1]
    records = archives.records(tmp_path / "run", 1)
    played = [record for record in records if record["episode"]["assistant_turns"] == 2]
    assert played and all(0 in record["response_mask"] for record in played)
    for record in played:
        assert (
            record["episode"]["messages"][1]["content"] == "higher"
            and "higher" not in record["text"].partition("\n")[0]
        )
        assert abs(record["score"] - sum(record["episode"]["turn_rewards"])) < 1e-6
        assert record["terms"]["solved"] in (0.0, 1.0)
    told = (tmp_path / "run/rollouts/step_1.txt").read_text()
    assert told.count("user: I think of a number") == 8 and "assistant, turn 1" in told and "ended: done" in told
    lengths = ("--max-prompt-length", 48, "--max-response-length", 48)
    evaluated = run("eval", tmp_path / "run", "--data", tmp_path / "data/val.parquet", *lengths, "--json")
    assert evaluated.code == 0, evaluated.output
    found = json.loads(evaluated.output[evaluated.output.index("{") :])
    last = metrics(tmp_path / "run")[-1]["val-core/environment/louder:Louder/reward/mean@1"]
    assert found["val-core/environment/louder:Louder/reward/mean@1"] == pytest.approx(last), "as the run validated it"
    assert found["num_turns/max"] == 4 and found["episode/end/done"] == 1
    bounded = run("eval", tmp_path / "run", "--data", tmp_path / "data/val.parquet", *lengths, "--json",
                  "multi_turn.max_assistant_turns=1")  # fmt: skip
    assert json.loads(bounded.output[bounded.output.index("{") :])["episode/end/assistant_turns"] == 1


@pytest.mark.long("hone/agents", "hone/trainers/algorithm.py")
@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("agent_grpo", ()),
        ("agent_ppo", ("critic.optim.lr=2e-3", "critic.optim.lr_warmup_steps=0", "trainer.total_training_steps=22")),
    ],
)
def test_agent_presets_learn_a_game(game: Path, run, tmp_path: Path, preset: str, more: tuple[str, ...]):
    (tmp_path / "louder.py").write_text(LOUDER)
    made = run("data", "make", "environment:louder:Louder", "--out", tmp_path / "data", "--size", 24, "--val-size", 8)
    assert made.code == 0, made.output
    warm = ("actor_rollout_ref.actor.optim.lr_warmup_steps=0", "trainer.total_training_steps=14", *more)
    arguments = command(game, tmp_path / "run", *warm)
    arguments[1], arguments[3] = f"--preset={preset}", f"data.train_files={tmp_path}/data/train.parquet"
    ended = run(*arguments)
    assert ended.code == 0, ended.output
    scores = curve(tmp_path / "run")
    assert mean(scores[-3:]) > mean(scores[:3]) + 0.1, scores
    assert "alert, step" not in ended.output


def test_a_recorded_game_is_forked_at_every_turn(game: Path, run, tmp_path: Path):
    ended = run(*command(game, tmp_path / "run", "trainer.total_training_steps=2", "trainer.rollout_dump_freq=1"))
    assert ended.code == 0, ended.output
    records = archives.records(tmp_path / "run", 2)
    record = next(record for record in records if record["episode"]["assistant_turns"] == 2)
    chosen = ("--step", 2, "--index", record["index"], "--samples", 4, "--json")
    forked = run("episode", "fork", tmp_path / "run", record["uid"], *chosen, "--png", tmp_path / "forks.png")
    assert forked.code == 0, forked.output
    result = json.loads(forked.output[forked.output.index("{") :])
    assert [len(fork["rewards"]) for fork in result["forks"]] == [4, 4, 1]
    assert result["score"] == result["forks"][-1]["rewards"][0] == record["score"]
    assert (tmp_path / "forks.png").stat().st_size > 1000
    missing = run("episode", "fork", tmp_path / "run", "nobody:1")
    assert missing.code == 2 and "hone runs samples" in missing.message


def test_a_resumed_run_repeats_to_the_last_bit(game: Path, run, tmp_path: Path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ("trainer.save_freq=2", "actor_rollout_ref.actor.optim.lr_scheduler_type=constant")
    assert run(*command(game, whole, "trainer.total_training_steps=4", *more)).code == 0
    assert run(*command(game, parts, "trainer.total_training_steps=2", *more)).code == 0
    ended = run(*command(game, parts, "trainer.total_training_steps=4", *more))
    assert ended.code == 0, ended.output
    assert metrics(whole) == metrics(parts)
    contracts = [json.loads((folder / "run.json").read_text())["agent_contract"] for folder in (whole, parts)]
    assert contracts[0] == contracts[1] and set(contracts[0]) == {"version", "chat_format", "tools", "results"}


def test_tools_are_called_and_a_broken_one_drops_its_group(game: Path, run, tmp_path: Path):
    """A loop that always calls the tool, whatever the model says: the way from the tool file to the metrics."""
    (tmp_path / "calling_loop.py").write_text(
        "from hone.agents.messages import ToolCall\n"
        "from hone.agents.tool_agent import ToolAgent\n"
        "class Calls(ToolAgent):\n"
        "    async def play(self, episode):\n"
        "        async with self.context.toolbox.session(episode, self.context.tokenizer) as tools:\n"
        "            await self.take_turn(episode, tools.schemas)\n"
        "            call = ToolCall('call_0', 'calculator', {'expression': '6*7'}, '', None)\n"
        "            episode.log.messages[-1]['tool_calls'] = [call.as_openai()]\n"
        "            results = await tools.answer([call])\n"
        "            if episode.sample.uid.endswith('3'):\n"
        "                raise OSError('no connection')\n"
        "            self.answer(episode, results, tools.schemas)\n"
        "            await self.take_turn(episode, tools.schemas)\n"
    )
    (tmp_path / "tools.yaml").write_text("tools: [{name: calculator}]\n")
    rows = [{"prompt": [{"role": "user", "content": f"What is {n}?"}], "data_source": "exact", "agent_name": "calling_loop:Calls",
             "reward_model": {"style": "rule", "ground_truth": str(n)}} for n in range(20)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = command(
        game,
        tmp_path / "run",
        "data.max_prompt_length=240",
        "data.max_response_length=100",
        "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=12",
        "actor_rollout_ref.rollout.agent.on_error=drop",
        "reward.max_no_verdict_rate=0.5",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/tools.yaml",
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=3",
        "data.shuffle=false",
    )
    arguments = [
        f"data.train_files={tmp_path}/rows.jsonl" if word.startswith("data.train_files") else word for word in arguments
    ]
    ended = run(*arguments)
    assert ended.code == 0, ended.output
    rows = metrics(tmp_path / "run")
    assert sum(row["training/no_verdict_groups"] for row in rows) == 2 and "no connection" in ended.output
    assert all(row["tool/success_rate"] == 1 and row["tool/calls/mean"] == 1 for row in rows)
    first = archives.records(tmp_path / "run", 1)
    trained = [record for record in first if record["error"] is None]
    assert [record["uid"] for record in trained[::2]] == [f"rows:{n}" for n in (0, 1, 2, 4, 5, 6)]
    assert {record["uid"] for record in first if record["error"] is not None} == {"rows:3"}
    assert all(record["episode"]["tool_calls"][0]["result"] == "42" for record in first)
