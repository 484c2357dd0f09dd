"""Blocks of a model and its optimizer, shared by all trees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import block, choice, model_path, named, number, numbers, texts


@dataclass
class TiledMlpConfig:
    """MLPs computed in chunks of tokens."""

    enabled: bool = False
    """Compute the MLPs chunk by chunk, and again in the backward pass, so that their inner activations, the widest of a model,
    exist for one chunk at a time. For very long contexts; costs a third more MLP computation."""
    num_shards: int = number(4, low=1)
    """Chunks of the tokens of a micro-batch."""


@dataclass
class ModelConfig:
    """The model and its memory settings."""

    path: str | None = model_path()
    """Hugging Face model directory (config, tokenizer, safetensors), or a name of the hub, ORG/NAME[@REVISION], which is
    downloaded once. Required."""
    tokenizer_path: str | None = model_path()
    """Tokenizer directory, or a name of the hub; null means the model directory."""
    custom_chat_template: str | None = None
    """Chat template instead of the tokenizer's: Jinja text, the path of a file, or a name (chatml, chatml_tools, qwen3,
    function_gemma, harmony) for a vocabulary that has its tokens."""
    trust_remote_code: bool = False
    """Run Python code that ships inside the model directory. Only for models whose code you have read."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's config.json, for example {max_position_embeddings: 65536}."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time. The first key to try when memory is
    short; off by default because models that run on a laptop do not need it."""
    gradient_checkpointing_keeps: str = choice("nothing", "nothing", "attention")
    """With gradient checkpointing: what a layer keeps besides its input. nothing: all is recomputed. attention: the output of the
    attention operator is kept, the costliest part of long sequences; memory per token grows by the width of the heads. Gradients are
    the same, bit for bit. Hone's own attention on a CPU consists of several operators and is always recomputed."""
    enable_activation_offload: bool = False
    """Keep activations for the backward pass in the host's memory: less device memory, more time for copies. Best with
    gradient checkpointing, which leaves little to copy. No effect on a CPU."""
    compile_layers: str = choice("auto", "auto", "always", "never")
    """Compile each decoder layer with torch.compile, for any sequence length, where Hone has no fused layer for the architecture.
    auto: on CUDA. always: on a CPU too, which takes a minute at the start. A layer that cannot be compiled, such as one with
    experts, computes as usual, and a warning says why."""
    tiled_mlp: TiledMlpConfig = block(TiledMlpConfig)
    """MLPs computed in chunks of tokens."""
    lora_rank: int = number(0, low=0)
    """Rank of LoRA adapters; 0 trains all weights. With LoRA the reference policy is the model with the adapter it began with, or none."""
    lora_alpha: float = number(16, above=0)
    """LoRA scale; the adapter's output is multiplied by lora_alpha / lora_rank."""
    target_modules: Any = texts("all-linear", "module name")
    """Modules that get an adapter: "all-linear" or a list of module names."""
    lora_adapter_path: str | None = model_path()
    """PEFT adapter directory, or a name of the hub, to start from; null starts from a new adapter."""
    freeze_vision_tower: bool = False
    """Train a model that reads images without its vision tower, which then has no gradient, optimizer state or adapter. In Qwen-VL the
    layers that merge patches belong to it; the connector of SmolVLM and Idefics3 is trained."""
    quantization: str = choice("none", "none", "nf4", "int8")
    """Hold the matrices of the layers in 4 bits (nf4: 0.56 bytes a number instead of 4) or 8 (int8: 1.06), frozen under a LoRA adapter.
    Embeddings, norms and the output layer are not packed. Trainer and native engine compute with the same packed weights; for a dense
    model in one process. nf4 needs the extra quantization (bitsandbytes)."""


@dataclass
class SFTModelConfig(ModelConfig):
    """The model of supervised fine-tuning."""

    dropout: bool = False
    """Train with the dropout of the model's config.json (attention_dropout, resid_pdrop, ...) and of the adapter in lora_adapter_path
    (lora_dropout; a new adapter has none). false: every dropout is 0, as in all other programs, and so it is in the saved model."""


@dataclass
class OptimConfig:
    """The optimizer and its schedule. The schedule advances once per step (RL) or once per update (SFT)."""

    optimizer: str = named("AdamW", "optimizer", instead="optim.lr")
    """Optimizer: Muon, AdamW8bit, a class of torch.optim, or the import path of a custom one, my_module:MyOptimizer. It gets lr,
    weight_decay, betas and eps if its constructor has these arguments. Muon updates the matrices of the layers, AdamW everything
    else. AdamW8bit keeps AdamW's moments in 8 bits, a quarter of the memory, for a model in one process; it needs the extra
    optim8bit (torchao)."""
    override_optimizer_config: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer's constructor, by name, for example {momentum: 0.9}."""
    lr: float = number(1e-6, low=0)
    """Peak learning rate."""
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    """Parameters with settings of their own: a list of {params: REGEX, lr_mult: FACTOR, weight_decay: VALUE}. The first entry
    whose regular expression is found in a parameter's name applies: its learning rate is lr_mult x lr at every step, and
    weight_decay, where given, replaces weight_decay. An entry that applies to no trained parameter is an error."""
    lr_scheduler_type: str = choice("constant", "constant", "linear", "cosine", "wsd")
    """Shape after warm-up: constant; linear or cosine, which would reach min_lr_ratio x lr one step after
    the last; or wsd (warm-up-stable-decay): constant, then the same over the last steps."""
    lr_warmup_steps: int = -1
    """Linear warm-up in steps; negative means that lr_warmup_steps_ratio applies."""
    lr_warmup_steps_ratio: float = number(0.0, low=0, high=1)
    """Linear warm-up as a share of all steps, used when lr_warmup_steps is negative."""
    min_lr_ratio: float = number(0.0, low=0, high=1)
    """Learning rate to which linear, cosine and wsd fall, as a share of lr."""
    lr_wsd_decay_style: str = choice("cosine", "cosine", "linear", "minus_sqrt", "exponential")
    """Shape of the decay of wsd, from 1 to 0 over its share t: cosine, linear (1 - t), minus_sqrt (1 - sqrt(t)), or exponential
    (2^(1 - t) - 1)."""
    lr_wsd_decay_steps: int = -1
    """Steps of the decay of wsd; negative means that lr_wsd_decay_steps_ratio applies."""
    lr_wsd_decay_steps_ratio: float = number(0.1, low=0, high=1)
    """Decay of wsd as a share of the steps after warm-up, used when lr_wsd_decay_steps is negative."""
    weight_decay: float = number(0.01, low=0)
    """Decoupled weight decay, applied to matrices only (not to norms and biases)."""
    betas: list[float] = numbers([0.9, 0.999], low=0, high=1)
    """AdamW's two decay rates; used by optimizers with an argument betas."""
    eps: float = number(1e-8, above=0)
    """AdamW's epsilon; used by optimizers with an argument eps."""
    ema_decay: float | None = number(None, low=0, high=1)
    """Decay of an exponential moving average (EMA) of the trained weights after each update; null keeps none. The average is
    float32. Checkpoints have it as a model directory, actor_ema (critic_ema). Training, validation and rollouts use the trained
    weights."""
    clip_grad: float = number(1.0, above=0)
    """Largest gradient norm; larger gradients are scaled down to it."""
