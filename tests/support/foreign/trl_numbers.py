"""What the losses of TRL's trainers compute: `trl_numbers.py FOLDER CASES RESULTS`, with its wheel unpacked in FOLDER.

A trainer's method gets an object in the trainer's place that has the settings of a case, and a model that has its log-probs.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import verl_numbers


def trainer(**settings: Any) -> MagicMock:
    """A trainer of one process that trains a model, with settings in itself and in its arguments."""
    me = MagicMock(args=SimpleNamespace(**{"use_bias_correction_kl": False, "delta": None, **settings}), **settings)
    me.accelerator = MagicMock(num_processes=1, device="cpu", sync_gradients=True)
    for gathers in ("reduce", "gather", "gather_for_metrics", "pad_across_processes"):
        setattr(me.accelerator, gathers, lambda value, **options: value)
    me._metrics = defaultdict(lambda: defaultdict(list))
    return me


def grpo(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    new, mask = tensors["log_probs"].requires_grad_(), tensors["response_mask"]
    settings = {
        "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "top_entropy_quantile": 1.0,
        "aux_loss_enabled": False, "off_policy_mask_threshold": None, "use_vllm": False, "loss_type": name, "max_completion_length": 11,
        "vllm_importance_sampling_correction": False, "current_gradient_accumulation_steps": 1, "steps_per_generation": 1,
        "_entropy_bonus_enabled": False,
    }  # fmt: skip
    me = trainer(**{**settings, **options})
    me.get_gamma_weights = GRPOTrainer.get_gamma_weights
    me.get_high_entropy_mask = lambda *values: GRPOTrainer.get_high_entropy_mask(me, *values)
    me._get_per_token_logps_and_entropies = lambda *values, **more: (new, tensors["entropies"], None)
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1), "prompt_mask": torch.ones(len(mask), 1), "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask, "advantages": tensors["advantages"], "old_per_token_logps": tensors["old_log_probs"],
        "ref_per_token_logps": tensors["ref_log_probs"], "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(me, None, inputs)
    return [loss.detach(), torch.autograd.grad(loss, new)[0]]


def model_of(log_probs: torch.Tensor) -> Any:
    """What a model with the fused head returns: log-probs of all tokens but the first, 0 outside the mask."""
    zeros = torch.zeros_like(log_probs)
    return lambda **inputs: SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def dpo(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from trl.trainer.dpo_trainer import DPOTrainer

    mask = tensors["response_mask"]
    new, ref = tensors["log_probs"].requires_grad_(), tensors["ref_log_probs"]
    settings = {
        "aux_loss_enabled": False, "ld_alpha": None, "precompute_ref_logps": False, "f_divergence_type": "reverse_kl",
        "loss_types": [name], "loss_weights": [1.0], "use_weighting": False, "label_smoothing": 0.0, "gradient_checkpointing_kwargs": None,
    }  # fmt: skip
    me = trainer(**{**settings, **options})
    me.ref_model = model_of(ref * mask)
    whole = torch.nn.functional.pad(mask, (1, 0))
    inputs = {
        "input_ids": torch.zeros_like(whole).long(),
        "attention_mask": torch.ones_like(whole),
        "completion_mask": whole.long(),
    }
    loss = DPOTrainer._compute_loss(me, model_of(new * mask), inputs, False)
    return [loss.detach(), torch.autograd.grad(loss, new)[0]]


def kto(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from trl.trainer.kto_trainer import KTOTrainer

    mask = tensors["response_mask"]
    new, ref = tensors["log_probs"].requires_grad_(), tensors["ref_log_probs"]
    me = trainer(aux_loss_enabled=False, precompute_ref_logps=False, calculate_KL=True, loss_type=name, gradient_checkpointing_kwargs=None,
                 _total_train_tokens=0, _tp_size=1, **options)  # fmt: skip
    me.ref_model = model_of(ref * mask)
    of_policy = torch.full((len(mask),), options["kl"], dtype=torch.float64)
    me._compute_kl_logps = lambda model, batch: of_policy if model is not me.ref_model else torch.zeros_like(of_policy)
    whole = torch.nn.functional.pad(mask, (1, 0))
    inputs = {"input_ids": torch.zeros_like(whole).long(), "attention_mask": torch.ones_like(whole), "completion_mask": whole.long(),
              "label": tensors["labels"]}  # fmt: skip
    loss = KTOTrainer._compute_loss(me, model_of(new * mask), inputs, False)
    return [loss.detach(), torch.autograd.grad(loss, new)[0]]


if __name__ == "__main__":
    verl_numbers.main(*sys.argv[1:], functions=globals(), unused=("datasets", "pandas"))
