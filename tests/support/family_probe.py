"""What Hone does with a small random model of any family of Transformers: trains it, or refuses it with a reason."""

from __future__ import annotations

import inspect
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.families import DELTA, SIZES
from support.templates import tokenizer
from support.tiny_runs import make_tiny_runs, offline_words, rl_words
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typer.testing import CliRunner

from hone.cli.main import app
from hone.errors import ConfigError, ModelError

KINDS = tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)))
"""Every ``model_type`` of the installed Transformers that has a causal language model."""
SMALL: dict[str, Any] = {
    **SIZES, "d_model": 32, "n_embd": 32, "embedding_size": 32, "word_embed_proj_dim": 32, "ffn_hidden_size": 48, "n_inner": 48,
    "ffn_dim": 48, "d_ff": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "num_layers": 2, "n_layer": 2, "n_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_kv_heads": 2, "n_positions": 512, "n_ctx": 512, "max_position_embeddings": 512,
    "rotary_dim": 4, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "moe_top_k": 2, "top_k_experts": 2, "moe_topk": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16, "n_shared_experts": 1,
    "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_expert_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_head_dim": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_d_ssm": 64,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "shared_intermediate_size": 32, "linear_head_dim": 8,
    "linear_num_heads": 4, "sliding_window": 8, "attention_chunk_size": 8, "hidden_size_per_layer_input": 8,
    "global_head_dim": 8, "num_global_key_value_heads": 2, "model_dim": 32,
}  # fmt: skip
"""Small values of the settings that configurations have under one name or another."""
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"num_key_value_heads": 2},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": [48, 48], "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "norm_topk_prob": True},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 2, "num_layers": 2},
    "mamba2": {"head_dim": 16, "num_heads": 4, "expand": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "olmo_hybrid": DELTA,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "n_mamba_heads": 2},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), {**DELTA, "norm_topk_prob": True}),
}  # fmt: skip
"""Settings that must agree with one another."""


@dataclass
class Verdict:
    """What became of a family: ``trains``, ``refused`` (one message), ``fails`` (anything else), or ``untried``."""

    kind: str
    verdict: str
    why: str = ""
    gap: float | None = None
    """Largest difference of log-probs between engine and trainer over two GRPO steps in float32."""
    adapter: str = ""
    """Whether `hone sft` trains a LoRA adapter: "yes", or why not."""


def small_config(kind: str, vocabulary: int) -> Any:
    """Return the configuration of a model of some ten thousand weights."""
    usual = AutoConfig.for_model(kind)
    others = set(usual.sub_configs) - {"attn_config", "ffn_config"}
    if getattr(usual, "is_encoder_decoder", False) or usual.get_text_config() is not usual or others:
        raise ValueError("not a language model of text alone")
    taken = {**inspect.signature(type(usual)).parameters, **vars(usual), **usual.attribute_map}
    fixed = {
        name for name, value in inspect.getmembers(type(usual)) if isinstance(value, property) and value.fset is None
    }
    settings = {name: value for name, value in SMALL.items() if (name in taken or name in SIZES) and name not in fixed}
    if "kv_lora_rank" in taken:  # latent attention gives each head its own keys
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        settings.pop("head_dim", None)  # that of its rotary part
    ends = {
        name: vocabulary
        for name in ("vocab_size", "vocab_size_per_layer_input")
        if name in taken or name == "vocab_size"
    }
    ends |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(kind, **{**settings, **OWN.get(kind, {}), **ends})


def make(kind: str, folder: Path) -> None:
    """Write a small random model of a family, with a tokenizer."""
    known = tokenizer("qwen2_5")
    settings = small_config(kind, len(known))
    settings.eos_token_id, settings.pad_token_id = known.eos_token_id, known.pad_token_id
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    if (size := sum(value.numel() for value in model.parameters())) > 20_000_000:
        raise ValueError(f"{size:,} weights: a setting of its size is not known")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    known.save_pretrained(folder)


def _not_computed(folder: Path) -> str | None:
    """Return why Transformers itself cannot compute a model: then a failure of Hone says nothing."""
    try:
        with torch.no_grad():
            AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.arange(3, 13)[None])
    except Exception as error:  # noqa: BLE001 - as in `probe`
        return _line(error)
    return None


def probe(kind: str) -> Verdict:
    """Train a small model of a family by GRPO and by SFT with an adapter, generate, and export."""
    with tempfile.TemporaryDirectory() as scratch:
        root = make_tiny_runs(Path(scratch))
        try:
            make(kind, root / kind)
        except Exception as error:  # noqa: BLE001 - each family has its own rules for what a configuration may be
            return Verdict(kind, "untried", _line(error))
        run = root / "run"
        why = _ended(rl_words(root, run, "trainer.save_freq=2", model=kind))
        if why is not None:
            unable = _not_computed(root / kind) if why[0] == "fails" else None
            return Verdict(kind, *(("untried", unable) if unable else why))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        gaps = [
            row["training/rollout_log_probs_diff_max"] for row in rows if "training/rollout_log_probs_diff_max" in row
        ]
        adapter = _ended(offline_words("sft", root, root / "sft", f"model.path={root / kind}", "model.lora_rank=4"))
        for words in (
            ["generate", str(run), "What is 2 + 2?", "--max-tokens", "4"],
            ["export", str(run), "--out", str(root / "out")],
        ):
            if (why := _ended(words)) is not None:
                return Verdict(kind, why[0], f"hone {words[0]}: {why[1]}", max(gaps, default=None))
        return Verdict(kind, "trains", "", max(gaps, default=None), "yes" if adapter is None else ": ".join(adapter))


def _ended(words: list[str]) -> tuple[str, str] | None:
    """Run a command; return verdict and reason unless it ended well."""
    result = CliRunner().invoke(app, words)
    if result.exit_code == 0:
        return None
    if isinstance(result.exception, ConfigError | ModelError):
        return "refused", " ".join(result.exception.what.split())
    if isinstance(result.exception, SystemExit):  # a check before the run
        found = [line for line in result.output.splitlines() if line[:1] == "R" and line[1:3].isdigit()]
        return ("refused", found[0]) if found else ("fails", _line(result.exception))
    return "fails", _line(result.exception)


def _line(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def as_json(verdicts: list[dict[str, Any]]) -> str:
    """Return verdicts as JSON, a line a family."""
    return "[\n" + ",\n".join(map(json.dumps, verdicts)) + "\n]\n"
