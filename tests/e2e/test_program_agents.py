"""A run whose episodes are played by an agent that only knows a base URL."""

from pathlib import Path

import pytest
from support.world import World, curve, rl_command

AGENT = '''
from openai import AsyncOpenAI


async def play(row, *, base_url, api_key, model):
    """Asks, and asks again; the reward is the share of right digits of the second answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = list(row["messages"])
        for _ in range(2):
            reply = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "again"}]
    want = str(row["ground_truth"])
    return {"reward": sum(a == b for a, b in zip(reply.content.strip(), want)) / len(want)}
'''


@pytest.mark.slow
@pytest.mark.application("hone/agents", "hone/trainers")
def test_grpo_trains_on_the_exact_tokens_of_an_agent_s_calls(world: World, run, tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    directory = tmp_path / "run"
    ended = run(
        *rl_command(world, directory, "grpo", "data.train_batch_size=6", "trainer.total_training_steps=3"),
        "trainer.save_freq=0",
        "trainer.val_before_train=false",
        "actor_rollout_ref.actor.recompute_old_log_probs=true",
        "data.max_response_length=48",
        "actor_rollout_ref.actor.optim.lr=2e-3",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=8",
        "actor_rollout_ref.rollout.agent.program.function=my_agent:play",
        timeout=240,
    )
    assert ended.code == 0, ended.output
    assert max(curve(directory, "training/rollout_log_probs_diff_max")) < 1e-4, (
        "the tokens trained on are those sampled"
    )
    assert max(curve(directory, "actor/first_ratio_max_abs_log")) < 1e-5
    assert max(curve(directory, "critic/rewards/max")) > 0 and all(
        norm > 0 for norm in curve(directory, "actor/grad_norm")
    )
