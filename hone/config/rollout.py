"""The block ``actor_rollout_ref.rollout``: how responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.config.agents import AgentConfig, MultiTurnConfig
from hone.config.engines import EngineConfig
from hone.config.fields import block, choice, named, number


@dataclass
class ValKwargsConfig:
    """Sampling for validation."""

    n: int = number(1, low=1)
    """Responses a validation prompt."""
    temperature: float = number(0.0, low=0)
    """0 is greedy; n > 1 needs a positive temperature."""
    top_k: int = number(-1, low=-1)
    """Sample among the top_k likeliest tokens; -1 means all."""
    top_p: float = number(1.0, above=0, high=1)
    """Sample among the likeliest tokens that hold this much probability."""


@dataclass
class RolloutConfig(EngineConfig):
    """How responses are generated."""

    name: str = named("native", "generation engine")
    """Engine: native (continuous batching on the trainer's own weights), hf (plain transformers generate, the slow golden path),
    vllm, sglang or trtllm (servers in environments of their own, see docs/engines.md)."""
    n: int = number(1, low=1)
    """Responses a prompt: the group size. Group estimators such as grpo need at least 2."""
    temperature: float = number(1.0, low=0)
    """Sampling temperature; the trainer's log-probs use the same one."""
    top_k: int = number(-1, low=-1)
    """Sample among the top_k likeliest tokens; -1 means all (recommended for training)."""
    top_p: float = number(1.0, above=0, high=1)
    """Nucleus sampling; 1 means all (recommended for training)."""
    min_p: float = number(0.0, low=0, high=1)
    """Drop tokens less likely than min_p x the likeliest; 0 drops none."""
    repetition_penalty: float = number(1.0, above=0)
    """Divide the scores of tokens already seen; 1 changes nothing."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response (kept in it), besides the end-of-sequence tokens."""
    ignore_eos: bool = False
    """Sample on to max_response_length whatever the tokens say; for benchmarks."""
    max_num_seqs: int = number(256, low=1)
    """Most sequences decoded at once."""
    max_cache_tokens: int | None = number(None, low=1)
    """Capacity of the key-value cache in tokens; null means enough for max_num_seqs sequences of full length."""
    dtype: str = choice("auto", "auto", "float32", "bfloat16")
    """Compute dtype of generation; auto means the actor's."""
    multi_turn: MultiTurnConfig = block(MultiTurnConfig)
    """Episodes of several turns."""
    agent: AgentConfig = block(AgentConfig)
    """How episodes are played."""
    val_kwargs: ValKwargsConfig = block(ValKwargsConfig)
    """Sampling for validation."""
