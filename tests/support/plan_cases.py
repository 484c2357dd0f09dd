"""Two steps of GRPO as the roles of a run make them, in a process that tells the most memory that it held meanwhile."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import RowGroups
from hone.cluster.roles import PolicyWorker, ReferenceWorker
from hone.config import RLConfig, load_config
from hone.config.parallel import Layout
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.generation.native.engine import NativeEngine
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.models.kernels.cpu.memory import MemoryUse, trim_memory
from hone.models.loading import load_policy
from hone.training.layout import build_meshes

VOCABULARY, PROMPT, RESPONSE, SAMPLES = 300, 16, 96, 4


def save_plan_model(path: Path, **shape: int) -> Path:
    """A model directory with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True)).save_pretrained(path)
    return path


def plan_config(model: Path, prompts: int, *overrides: str) -> RLConfig:
    """The run: one update a step over all its sequences, which are as long as they may be, and a reference."""
    return load_config(
        RLConfig,
        [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_batch_size={prompts}",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={RESPONSE}",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.recompute_old_log_probs=true",
            "algorithm.adv_estimator=grpo",
            "trainer.save_freq=0",
            "trainer.device=cpu",
            *overrides,
        ],
    )


def hold(warm_up: RLConfig, config: RLConfig) -> dict[str, float] | None:
    """Play two steps of ``config`` on every rank of its layout and return what this rank held, in GiB; None on a rank without
    a part in it. Before, the same with ``warm_up``: what libraries keep from their first use is no memory of the run.
    """
    world = config.trainer.n_gpus_per_node
    if dist.get_rank() >= world:
        return None
    _two_steps(warm_up)
    _let_go()
    use = MemoryUse()
    _two_steps(config)
    held = use()
    _let_go()
    return held


def _let_go() -> None:
    """Give back what is not used, and forget the most that was (Linux: clear_refs 5)."""
    gc.collect()
    trim_memory()
    Path("/proc/self/clear_refs").write_text("5")


def _two_steps(config: RLConfig) -> None:
    world = config.trainer.n_gpus_per_node
    layout = Layout.plan(world, config.actor_rollout_ref.actor)
    meshes = build_meshes(layout, "cpu") if world > 1 else None
    rank = dist.get_rank() if world > 1 else 0
    context = WorkerContext(config, torch.device("cpu"), rank, layout, meshes)
    context.roles["actor"] = actor = PolicyWorker(context)
    model = actor.engine.shared_module()
    if meshes is not None:  # as hone.cluster.rollout has it
        model = load_policy(config.actor_rollout_ref.model, device=context.device, seed=1, trainable=False)
    rollout, data = config.actor_rollout_ref.rollout, config.data
    engine = NativeEngine(
        model,
        None,  # type: ignore[arg-type]  # decodes for stop strings only
        device=context.device,
        dtype="float32",
        max_num_seqs=rollout.max_num_seqs,
        max_cache_tokens=None,
        max_model_len=data.max_prompt_length + data.max_response_length,
        shares_weights=meshes is None,
    )
    reference = ReferenceWorker(context)
    for step in range(2):
        trim_memory()
        played = _played(asyncio.run(_generate(engine, config, layout.dp_rank(rank), world)), config, layout, rank)
        batch = played.updated(actor.log_probs(played, with_entropy=True).rename({"log_probs": "old_log_probs"}))
        batch = batch.updated(reference.log_probs(batch))
        trim_memory()
        noise = torch.randn(len(batch.ragged("response_ids").values), generator=torch.Generator().manual_seed(step))
        batch = batch.with_columns(advantages=batch.ragged("response_ids").with_values(noise))
        answer = actor.update(batch, RowGroups([list(range(len(batch)))]), step)
        assert all(update.applied for update in answer.meta["update"].results)
        trim_memory()
        weights = actor.engine.export_weights("merged") if meshes is not None else []
        asyncio.run(engine.load_weights(weights, step + 1))


async def _generate(engine: NativeEngine, config: RLConfig, part: int, world: int) -> list[list[int]]:
    """Responses to this process's part of the sequences."""
    count = config.data.train_batch_size * SAMPLES // world
    sampling = SamplingParams(max_tokens=RESPONSE, ignore_eos=True)
    requests = [GenerationRequest(f"{part}-{row}", _prompt(row // SAMPLES), sampling, seed=row) for row in range(count)]
    return [completion.token_ids async for completion in engine.generate(requests)]


def _prompt(number: int) -> list[int]:
    return [(7 * number + place) % VOCABULARY for place in range(PROMPT)]


def _played(own: list[list[int]], config: RLConfig, layout: Layout, rank: int) -> Batch:
    """The rows that this rank trains on: those of its data-parallel shard, the same on all ranks that share it."""
    rows = config.data.train_batch_size * SAMPLES // layout.dp_size
    responses = [own[row % len(own)] for row in range(rows)]
    first = layout.dp_rank(rank) * rows
    mask = Ragged.from_rows([[1] * RESPONSE] * rows, torch.int64)
    if layout.tensor > 1:
        responses = [[(row + 5 * place) % VOCABULARY for place in range(RESPONSE)] for row in range(rows)]
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([_prompt((first + row) // SAMPLES) for row in range(rows)], torch.int64),
            "response_ids": Ragged.from_rows(responses, torch.int64),
            "response_mask": mask,
            "uid": [f"p{(first + row) // SAMPLES}" for row in range(rows)],
        }
    )
