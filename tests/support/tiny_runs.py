"""Runs of every program in seconds: random models of 30,000 parameters, a few rows, two steps."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support.templates import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
REWARD = """
def tokens_with_e(solution_str, **row):
    return sum(letter in "aeiou" for letter in solution_str) / 10
"""
LOOP = """
from hone.agents.messages import ToolCall
from hone.agents.tool_agent import ToolAgent

class Calls(ToolAgent):
    "Takes a turn, calls the calculator, and takes a turn."
    async def play(self, episode):
        async with self.context.toolbox.session(episode, self.context.tokenizer) as tools:
            await self.take_turn(episode, tools.schemas)
            call = ToolCall("call_0", "calculator", {"expression": "6 * 7"}, "", None)
            episode.log.messages[-1]["tool_calls"] = [call.as_openai()]
            self.answer(episode, await tools.answer([call]), tools.schemas)
            await self.take_turn(episode, tools.schemas)
"""


def make_model(folder: Path, kind: str = "qwen3", layers: int = 2, family: str = "qwen2_5") -> Path:
    """Save a random model with the tokenizer and chat template of a family (Qwen 2.5); return its directory."""
    known = tokenizer(family)
    shape = SHAPE | (EXPERTS if kind.endswith("moe") else {}) | {"num_hidden_layers": layers}
    ends = {"eos_token_id": known.eos_token_id, "pad_token_id": known.pad_token_id}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=len(known), **shape, **ends))
    for parameter in model.parameters():  # larger than the usual 0.02, so that distributions are far from uniform
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    known.save_pretrained(folder)
    return folder


def make_tiny_runs(root: Path, **files: str) -> Path:
    """Write models, rows for every program, a reward and an agent with a tool, and Python files by their names; return the folder."""
    make_model(root / "model")
    make_model(root / "moe", "qwen3_moe")
    user = [[{"role": "user", "content": f"What is {number} + {number}?"}] for number in range(8)]
    said = [[{"role": "assistant", "content": text}] for text in ("It is sunny.", "Let me think of it.")]
    rows = {
        "prompts": [{"prompt": question, "data_source": "tiny"} for question in user],
        "calls": [{"prompt": question, "data_source": "tiny", "agent_name": "tiny_loop:Calls"} for question in user],
        "conversations": [{"messages": question + said[0]} for question in user],
        "pairs": [{"prompt": question, "chosen": said[0], "rejected": said[1]} for question in user],
    }
    for name, lines in rows.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "tiny_reward.py").write_text(REWARD)
    (root / "tiny_loop.py").write_text(LOOP)
    (root / "tools.yaml").write_text("tools: [{name: calculator}]\n")
    for name, text in files.items():
        (root / f"{name}.py").write_text(text)
    return root


def rl_words(root: Path, run: Path, *overrides: str, model: str = "model", rows: str = "prompts") -> list[str]:
    """`hone train`: two steps of four prompts, three answers each."""
    return [
        "train",
        f"actor_rollout_ref.model.path={root}/{model}",
        f"data.train_files={root}/{rows}.jsonl",
        "data.train_batch_size=4",
        "data.max_prompt_length=320",
        "data.max_response_length=12",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"custom_reward_function.path={root}/tiny_reward.py",
        "custom_reward_function.name=tokens_with_e",
        "actor_rollout_ref.actor.dtype=float32",
        "trainer.rollout_dump_freq=1",
        *_run(run),
        *overrides,
    ]


def offline_words(program: str, root: Path, run: Path, *overrides: str) -> list[str]:
    """`hone sft`, `hone prefer` or `hone reward-model`: two steps of four rows."""
    rows = "conversations" if program == "sft" else "pairs"
    return [
        program,
        f"model.path={root}/model",
        f"data.train_files={root}/{rows}.jsonl",
        "data.max_length=320",
        "data.train_batch_size=4",
        "dtype=float32",
        "optim.lr=1e-3",
        *_run(run),
        *overrides,
    ]


def _run(run: Path) -> list[str]:
    return [
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=2",
        "trainer.save_freq=0",
        "trainer.logger=[]",
        "trainer.num_threads=1",
        "trainer.watchdog_seconds=0",
    ]
