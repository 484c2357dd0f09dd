"""The block ``actor_rollout_ref.rollout``: generation of responses."""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.config.agents import AgentConfig, MultiTurnConfig
from hone.config.engines import EngineConfig
from hone.config.fields import block, choice, model_path, named, number


@dataclass
class ValKwargsConfig:
    """Sampling for validation."""

    n: int = number(1, low=1)
    """Responses per validation prompt."""
    temperature: float = number(0.0, low=0)
    """Sampling temperature; 0 is greedy, and n > 1 needs a positive one."""
    top_k: int = number(-1, low=-1)
    """Sample from the top_k most likely tokens; -1 means all."""
    top_p: float = number(1.0, above=0, high=1)
    """Sample from the most likely tokens with this total probability."""


@dataclass
class ConstraintConfig:
    """Constraint on the text of every response, in training and validation (constrained decoding)."""

    kind: str | None = choice(None, "json_schema", "json_object", "regex", "choice", "grammar")
    """Kind of constraint; null means none: json_schema (JSON that follows a schema), json_object (any JSON object), regex (text that
    the whole expression matches), choice (one string of a JSON list), grammar (a grammar in llguidance's dialect of Lark, or in GBNF).
    Needs the package llguidance (the extra `constraints`) and the engine native, hf or vllm."""
    text: str | None = None
    """The schema, expression, list or grammar."""
    file: str | None = None
    """File with the same, in place of `text`."""


@dataclass
class SpeculativeConfig:
    """Speculative decoding: drafted tokens that the policy verifies, several in one forward pass. It changes no token's distribution.

    Engines native, whose tokens stay the same, and vllm (only ngram). See docs/engines.md.
    """

    method: str | None = choice(None, "ngram", "draft_model")
    """Source of the drafts; null means none: ngram (what followed the last tokens where they occurred before in prompt or response),
    draft_model (a small model of the same tokenizer, at `model`)."""
    num_speculative_tokens: int = number(4, low=1)
    """Most drafted tokens of a response in one forward pass."""
    prompt_lookup_min: int = number(2, low=1)
    """ngram: tokens of the shortest n-gram that is looked up."""
    prompt_lookup_max: int = number(4, low=1)
    """ngram: tokens of the longest one, which is tried first."""
    model: str | None = model_path()
    """draft_model: directory of the draft model, or a name of the hub."""
    draft_lr: float = number(0.0, low=0)
    """draft_model, native engine: learning rate at which it is trained between steps on the tokens that the policy sampled; 0 keeps it
    as it is. Its trained weights are not saved: a resumed run starts from `model` again, which changes no token."""
    disable_by_batch_size: int | None = number(None, low=1)
    """native engine: number of running responses above which nothing is drafted; null means no limit. Many responses fill the
    device without drafts, the last long ones of a step do not."""


@dataclass
class RolloutConfig(EngineConfig):
    """Generation of responses."""

    name: str = named("native", "generation engine")
    """Engine: native (continuous batching on the trainer's weights), hf (transformers generate, the slow reference implementation),
    vllm, sglang or trtllm (servers in separate environments, see docs/engines.md)."""
    n: int = number(1, low=1)
    """Responses per prompt: the group size. Group estimators such as grpo need at least 2."""
    temperature: float = number(1.0, low=0)
    """Sampling temperature; the trainer's log-probs use the same one."""
    top_k: int = number(-1, low=-1)
    """Sample from the top_k most likely tokens; -1 means all (recommended for training)."""
    top_p: float = number(1.0, above=0, high=1)
    """Nucleus sampling; 1 means all (recommended for training)."""
    min_p: float = number(0.0, low=0, high=1)
    """Drop tokens less likely than min_p x the most likely one; 0 drops none."""
    keep_support: bool | None = None
    """Keep the ids that top_k, top_p and min_p left for each sampled token, and renormalise the trainer's log-probs over them, so that
    truncated sampling gives no bias; at most 1024 tokens then stay. null: wherever the engine reports them (native and hf) and
    repetition_penalty is 1."""
    repetition_penalty: float = number(1.0, above=0)
    """Divisor of the scores of tokens that already occurred; 1 means no penalty."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response (and are kept in it), besides the end-of-sequence tokens."""
    ignore_eos: bool = False
    """Sample up to max_response_length even after an end-of-sequence token; for benchmarks."""
    constraint: ConstraintConfig = block(ConstraintConfig)
    """Constraint on the text of every response."""
    speculative: SpeculativeConfig = block(SpeculativeConfig)
    """Speculative decoding."""
    max_num_seqs: int = number(256, low=1)
    """Most sequences decoded at once."""
    max_cache_tokens: int | None = number(None, low=1)
    """Capacity of the KV cache in tokens; null means enough for max_num_seqs sequences of full length."""
    dtype: str = choice("auto", "auto", "float32", "bfloat16", "float16")
    """Compute dtype of generation; auto means the actor's."""
    multi_turn: MultiTurnConfig = block(MultiTurnConfig)
    """Multi-turn episodes."""
    agent: AgentConfig = block(AgentConfig)
    """Agent loops."""
    val_kwargs: ValKwargsConfig = block(ValKwargsConfig)
    """Sampling for validation."""
